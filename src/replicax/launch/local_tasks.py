"""Names, ports, cores, GPUs, TF_CONFIG and token of a local cluster's tasks."""

import itertools
import json
import os
import random
import socket
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from replicax._util.gpus import CUDA_VISIBLE_DEVICES, visible_gpus
from replicax.cluster.config import JOBS
from replicax.ps.credentials import TOKEN, TOKEN_FILE, new_token

__all__ = [
    "check_tasks",
    "divide_cores",
    "divide_gpus",
    "free_ports",
    "ps_token",
    "task_names",
    "tf_configs",
]

_SINGLE = ("chief", "evaluator")
_FIRST_PORT = 15000
_EPHEMERAL_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
_FIRST_EPHEMERAL_PORT = 32768  # Linux' default, and below that of macOS.


def check_tasks(num_tasks: Mapping[str, int], caller: str) -> dict[str, int]:
    """Validate the number of tasks of each job; drop jobs without tasks.

    Raises:
        ValueError: For an unknown job, a wrong number of tasks, or no task. The message
            begins with `caller`, a public call.

    Example:
        >>> check_tasks({"ps": 1, "worker": 2, "chief": 0}, "run")
        {'worker': 2, 'ps': 1}
    """
    for job, count in num_tasks.items():
        if job not in JOBS:
            raise ValueError(
                f"{caller}: there is no job {job!r}; the jobs are {', '.join(JOBS)}."
            )
        if not isinstance(count, int) or isinstance(count, bool) or count < 0:
            raise ValueError(
                f"{caller}: the number of {job} tasks must be 0 or more; got {count!r}."
            )
        if job in _SINGLE and count > 1:
            raise ValueError(f"{caller}: a cluster has one {job} at most; got {count}.")
    if not any(num_tasks.values()):
        raise ValueError(f"{caller}: the cluster has no tasks; got {dict(num_tasks)}.")
    return {job: num_tasks[job] for job in JOBS if num_tasks.get(job)}


def task_names(num_tasks: Mapping[str, int]) -> list[str]:
    """List the tasks' names.

    Example:
        >>> task_names({"worker": 2, "evaluator": 1})
        ['worker:0', 'worker:1', 'evaluator:0']
    """
    return [f"{job}:{i}" for job, count in num_tasks.items() for i in range(count)]


def tf_configs(num_tasks: Mapping[str, int]) -> dict[str, str]:
    """Make a `TF_CONFIG` for each task, with free ports.

    The evaluator is a task, but not part of the cluster: no task connects to it.
    """
    members = {job: count for job, count in num_tasks.items() if job != "evaluator"}
    ports = iter(free_ports(sum(members.values())))
    cluster = {
        job: [f"localhost:{port}" for port in itertools.islice(ports, count)]
        for job, count in members.items()
    }
    return {
        f"{job}:{index}": json.dumps(
            {"cluster": cluster, "task": {"type": job, "index": index}}
        )
        for job, count in num_tasks.items()
        for index in range(count)
    }


def ps_token(
    num_tasks: Mapping[str, int], environment: Mapping[str, str]
) -> dict[str, str]:
    """Make the parameter servers' authentication token, unless one is set.

    Example:
        >>> ps_token({"worker": 2}, {})
        {}
        >>> list(ps_token({"worker": 2, "ps": 1}, {}))
        ['REPLICAX_PS_TOKEN']
        >>> ps_token({"worker": 2, "ps": 1}, {"REPLICAX_PS_TOKEN": "a-secret-of-mine"})
        {}
    """
    if not num_tasks.get("ps") or environment.get(TOKEN) or environment.get(TOKEN_FILE):
        return {}
    return {TOKEN: new_token()}


def free_ports(count: int) -> list[int]:
    """Find different free TCP ports.

    All are below the system's ephemeral ports, which an outgoing connection could take
    before the task does.

    Example:
        >>> len(set(free_ports(3)))
        3
    """
    ports: list[int] = []
    for port in _candidate_ports():
        if len(ports) == count:
            return ports
        if _is_free(port):
            ports.append(port)
    raise RuntimeError(
        f"This machine has {len(ports)} free TCP ports from {_FIRST_PORT} to the "
        f"first ephemeral port; {count} are needed."
    )


def _candidate_ports() -> Iterator[int]:
    try:
        end = int(_EPHEMERAL_RANGE.read_text().split()[0])
    except FileNotFoundError:  # Not on Linux.
        end = _FIRST_EPHEMERAL_PORT
    # At random, so that clusters that start together try different ports.
    candidates = range(_FIRST_PORT, max(end, _FIRST_PORT + 1000))
    yield from random.SystemRandom().sample(candidates, len(candidates))


def _is_free(port: int) -> bool:
    with socket.socket() as listener:
        try:
            listener.bind(("", port))
        except OSError:
            return False
    return True


def divide_cores(names: Sequence[str], per_task: int) -> dict[str, list[int]]:
    """Divide the cores of this process: `per_task` distinct cores for each task."""
    if not hasattr(os, "sched_getaffinity"):
        raise RuntimeError(
            "This system cannot pin processes to cores; Linux can. Leave the cores per "
            "worker out."
        )
    cores = sorted(os.sched_getaffinity(0))
    needed = len(names) * per_task
    if needed > len(cores):
        raise ValueError(
            f"{len(names)} workers with {per_task} cores each need {needed} cores; "
            f"this process may use {len(cores)}."
        )
    return {
        name: cores[i * per_task : (i + 1) * per_task] for i, name in enumerate(names)
    }


def divide_gpus(
    num_tasks: Mapping[str, int], environment: Mapping[str, str]
) -> dict[str, dict[str, str]]:
    """Divide the GPUs of this machine equally among the tasks that train.

    JAX reserves all GPUs that a process sees, and most of their memory. The evaluator
    gets the remaining GPUs, or the CPU.

    Returns:
        Variables by task. Empty if a single task trains, if `environment` selects other
        devices, or if there are more tasks than GPUs.
    """
    platforms = environment.get("JAX_PLATFORMS", "")
    if platforms and {"cuda", "gpu"}.isdisjoint(platforms.split(",")):
        return {}
    names = task_names({job: num_tasks.get(job, 0) for job in ("chief", "worker")})
    gpus = visible_gpus(environment)
    num = len(gpus) // max(1, len(names))
    if len(names) < 2 or not num:
        return {}
    gpus_of = {name: gpus[i * num : (i + 1) * num] for i, name in enumerate(names)}
    if rest := gpus[len(names) * num :]:
        gpus_of["evaluator:0"] = rest
    variables = {n: {CUDA_VISIBLE_DEVICES: ",".join(x)} for n, x in gpus_of.items()}
    return {"evaluator:0": {"JAX_PLATFORMS": "cpu"}} | variables
