"""Detects this process' launcher and cluster; an error if two launchers disagree."""

import os
from typing import Any

import jax

from replicax._private.jax import distributed_state, is_tpu_vm
from replicax.cluster.addresses import parse_address
from replicax.cluster.config import TaskConfig
from replicax.cluster.environments import (
    cloud,
    mpi,
    ray_train,
    schedulers,
    variables,
)
from replicax.cluster.environments.base import (
    ALONE,
    ClusterEnvironment,
    IncompleteError,
    Membership,
)
from replicax.cluster.joining import running_cluster
from replicax.cluster.rendezvous import collect_addresses
from replicax.cluster.resolvers import (
    ClusterResolver,
    KnownCluster,
    SimpleClusterResolver,
    TFConfigClusterResolver,
)
from replicax.cluster.spec import ClusterSpec
from replicax.cluster.timeouts import Timeouts
from replicax.errors import ClusterConfigError

__all__ = ["ENVIRONMENTS", "RunningCluster", "detect", "local_devices", "resolve"]

ENVIRONMENTS: dict[str, ClusterEnvironment] = {
    environment.name: environment
    for environment in (
        variables.TFConfig(),
        variables.KerasDistribution(),
        ray_train.RayTrain(),
        variables.Torchrun(),
        mpi.OpenMPI(),
        mpi.ProcessManagement(),
        variables.JaxVariables(),
        variables.KubeflowTrainJob(),
        variables.KubeflowJaxJob(),
        schedulers.Slurm(),
        cloud.SageMaker(),
        cloud.VertexAI(),
        cloud.SkyPilot(),
        schedulers.JobSet(),
        schedulers.TPUSlice(),
        variables.InitializedJax(),
    )
}
"""All launchers by name, inner ones first: Slurm may start torchrun."""


class RunningCluster(KnownCluster):
    """The cluster that `jax.distributed` is connected to; addresses may be unknown."""

    def __init__(self, environment: str) -> None:
        cluster = running_cluster()
        own = cluster.workers[distributed_state().process_id]
        super().__init__(TaskConfig(cluster, own.job, own.task_id), None, environment)


def resolve(
    name: str | None, timeouts: Timeouts, caller: str
) -> tuple[ClusterResolver, Membership]:
    """Find this process' cluster; exchange addresses if the launcher lists none.

    `name` is a launcher's name, `"alone"`, or None to detect the launcher. Returns a
    resolver and the process' place among the launcher's processes. The resolver has no
    tasks if this process trains alone. Errors name the public call `caller`.

    Raises:
        ClusterConfigError: If variables are malformed or missing, or if two launchers
            disagree.
        ClusterError: If a process is missing at the start-up deadline.
        ValueError: For an unknown name.
    """
    if name == "alone":
        return SimpleClusterResolver(ClusterSpec({})), Membership()
    environment, place = detect(name, caller)
    if place.resolver is not None:
        return place.resolver, place
    if environment is None or place.count == 1:
        return TFConfigClusterResolver(), place
    if jax.distributed.is_initialized():
        return RunningCluster(environment.name), place
    address = environment.coordinator(place)
    try:
        parse_address(address)
    except ValueError as error:
        raise ClusterConfigError(
            f"{environment.name}: the address of process 0 is {address!r}: {error}; "
            f"got {environment.described()}. Correct the variables. {ALONE}"
        ) from error
    addresses = collect_addresses(
        environment.name, place.index or 0, place.count, address, timeouts.startup
    )
    resolver = environment.workers(place.index or 0, addresses).resolver
    assert resolver is not None
    return resolver, place


def detect(
    name: str | None, caller: str
) -> tuple[ClusterEnvironment | None, Membership]:
    """Detect the launcher; return None and a single process if there is none."""
    if name is not None:
        return _named(name, caller)
    complete, incomplete = _read_all()
    is_single = bool(complete) and complete[0][1].count == 1
    if errors := [e for e in incomplete if not complete or (is_single and e.count > 1)]:
        raise IncompleteError("\n".join(e.problem for e in errors))
    for other in complete[1:]:
        _check_agreement(complete[0], other, caller)
    return complete[0] if complete else (None, Membership())


def _read_all() -> tuple[
    list[tuple[ClusterEnvironment, Membership]], list[IncompleteError]
]:
    """Return complete launchers, and errors of incomplete ones before the first."""
    complete: list[tuple[ClusterEnvironment, Membership]] = []
    incomplete: list[IncompleteError] = []
    for environment in ENVIRONMENTS.values():
        try:
            if environment.detect():
                complete.append((environment, environment.membership()))
        except IncompleteError as error:
            if not complete:
                incomplete.append(error)
        except ClusterConfigError:
            if not complete:
                raise
    return complete, incomplete


def local_devices(place: Membership) -> list[int] | None:
    """Choose this process' GPU by its index on the machine; None: all visible GPUs."""
    if place.local is None or "JAX_LOCAL_DEVICE_IDS" in os.environ or is_tpu_vm():
        return None
    index, count = place.local
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    is_bound = visible is not None and len(visible.split(",")) < count
    return None if count == 1 or is_bound else [index]


def _named(name: Any, caller: str) -> tuple[ClusterEnvironment, Membership]:
    if name not in ENVIRONMENTS:
        raise ValueError(
            f"{caller}: cluster_resolver must be a resolver, 'alone' or the name of a "
            f"launcher ({', '.join(map(repr, ENVIRONMENTS))}); got {name!r}."
        )
    environment = ENVIRONMENTS[name]
    if not environment.detect():
        raise ClusterConfigError(
            f"{caller}: cluster_resolver is {name!r}, but there is no sign of this "
            f"launcher: {environment.described()}. Start the script with it. {ALONE}"
        )
    return environment, environment.membership()


def _check_agreement(
    chosen: tuple[ClusterEnvironment, Membership],
    other: tuple[ClusterEnvironment, Membership],
    caller: str,
) -> None:
    """Raise a `ClusterConfigError` if an outer launcher has started more processes.

    Fewer are allowed, such as one on each machine. `jax.distributed` must agree.
    """
    (inner, first), (outer, second) = chosen, other
    if outer.name == "jax.distributed":
        indices = {first.index, second.index} - {None}
        agrees = first.count == second.count and len(indices) == 1
    else:
        agrees = second.count <= max(first.count, first.num_tasks)
        agrees |= first.count > 1 and outer.name in inner.replaces
    if not agrees:
        raise ClusterConfigError(
            f"{caller}: two launchers contradict each other. {_claim(*chosen)}; "
            f"{_claim(*other)}. Unset the variables of one, or choose: "
            f"cluster_resolver={inner.name!r} or {outer.name!r}. {ALONE}"
        )


def _claim(environment: ClusterEnvironment, place: Membership) -> str:
    task = "no worker" if place.index is None else f"process {place.index}"
    return (
        f"{environment.name} says {task} of {place.count} ({environment.described()})"
    )
