"""Makes the Kubernetes manifest of a training cluster, as plain data and as YAML.

The tasks of each role are the pods of one indexed job of a `JobSet`. Kubernetes writes
the pod's index into `TF_CONFIG`, so the container needs no access to Kubernetes' API.
Kubernetes itself refuses invalid names, numbers and quantities when a manifest is
applied.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from replicax._util.types import JSON
from replicax.cluster.failure import ATTEMPT, is_retryable

__all__ = ["TrainingJob", "jobset", "to_yaml"]

_Document = dict[str, JSON]

_INDEX_VARIABLE = "JOB_COMPLETION_INDEX"
_SET_BY_MANIFESTS = ("TF_CONFIG", _INDEX_VARIABLE, ATTEMPT)
_INDEX_PATH = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
_ATTEMPT_PATH = "metadata.annotations['jobset.sigs.k8s.io/restart-attempt']"

# Kubernetes allows exit codes from 1 to 255 here.
_PERMANENT_CODES = [code for code in range(1, 256) if not is_retryable(code)]


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingJob:
    """A training script and its cluster on Kubernetes.

    Attributes:
        image: The container image with the script and its dependencies.
        command: The command of each container, word by word.
        name: The job's name, a prefix of the names of pods and hosts.
        namespace: The namespace of the job; None: `kubectl`'s default.
        gpus_per_worker: GPUs of each chief, worker and evaluator.
        cpus: CPU cores of each container as a Kubernetes quantity, such as `"4"` or
            `"500m"`.
        memory: Memory of each container, such as `"8Gi"`.
        grace_seconds: The time between SIGTERM and SIGKILL.
        checkpoint_claim: A persistent volume claim that every pod mounts.
        checkpoint_path: The mount point of that claim.

    Raises:
        ValueError: If there is no worker, or if `env` has a variable that the manifest
            sets.

    Example:
        >>> job = TrainingJob(image="img", command=("python", "t.py"), num_workers=2)
        >>> job.roles
        {'worker': 2}
    """

    image: str
    command: Sequence[str]
    num_workers: int
    name: str = "train"
    namespace: str | None = None
    chief: bool = False
    num_ps: int = 0
    evaluator: bool = False
    gpus_per_worker: int = 0
    cpus: str | None = None
    memory: str | None = None
    port: int = 2222
    max_restarts: int = 3
    grace_seconds: int = 60
    checkpoint_claim: str | None = None
    checkpoint_path: str = "/ckpt"
    env: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.num_workers < 1:
            raise ValueError(
                f"manifest: num_workers must be at least 1; got {self.num_workers}."
            )
        for name in set(_SET_BY_MANIFESTS).intersection(self.env):
            raise ValueError(
                f"manifest: {name} is set by the manifest itself; leave it out of the "
                "env."
            )

    @property
    def roles(self) -> dict[str, int]:
        """Number of tasks of each role that has any."""
        sizes = {
            "chief": int(self.chief),
            "worker": self.num_workers,
            "ps": self.num_ps,
            "evaluator": int(self.evaluator),
        }
        return {role: size for role, size in sizes.items() if size}

    def host(self, role: str, index: int) -> str:
        """The host name of a task's pod in a JobSet."""
        return f"{self.name}-{role}-0-{index}"


def jobset(job: TrainingJob) -> _Document:
    """Make the job's `JobSet` of `jobset.x-k8s.io/v1alpha2`.

    Kubernetes restarts all tasks together when a task exits with a retryable code or a
    pod is evicted. A permanent exit code ends the job.

    Example:
        >>> job = TrainingJob(image="img", command=("python", "t.py"), num_workers=2)
        >>> [part["name"] for part in jobset(job)["spec"]["replicatedJobs"]]
        ['worker']
    """
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": _metadata(job),
        "spec": {
            "network": {
                "enableDNSHostnames": True,
                # Tasks look each other up while they start, before they are ready.
                "publishNotReadyAddresses": True,
                "subdomain": job.name,
            },
            "successPolicy": {
                "operator": "All",
                # Parameter servers run until Kubernetes ends them.
                "targetReplicatedJobs": [role for role in job.roles if role != "ps"],
            },
            "failurePolicy": {
                "maxRestarts": job.max_restarts,
                # New tasks reuse the old host names, so the old pods must be gone.
                "restartStrategy": "BlockingRecreate",
                "rules": [
                    {
                        "name": "permanentExitCode",
                        "action": "FailJobSet",
                        "onJobFailureReasons": ["PodFailurePolicy"],
                    }
                ],
            },
            "replicatedJobs": [_replicated_job(job, role) for role in job.roles],
        },
    }


def _metadata(job: TrainingJob) -> _Document:
    namespace: _Document = {"namespace": job.namespace} if job.namespace else {}
    return {"name": job.name, **namespace}


def _replicated_job(job: TrainingJob, role: str) -> _Document:
    env = [
        # Before TF_CONFIG, which refers to it: Kubernetes expands only references to
        # earlier variables, and would append this variable itself at the end.
        _from_pod(_INDEX_VARIABLE, _INDEX_PATH),
        {"name": "TF_CONFIG", "value": _tf_config(job, role)},
        _from_pod(ATTEMPT, _ATTEMPT_PATH),
    ]
    pod = _pod_spec(job, role, env)
    return {
        "name": role,
        "replicas": 1,
        "template": {
            "spec": {
                "parallelism": job.roles[role],
                "completions": job.roles[role],
                "completionMode": "Indexed",
                # No pod is replaced alone: its peers would wait for the old one.
                "backoffLimit": 0,
                "podFailurePolicy": {"rules": _pod_failure_rules(role)},
                "template": {"spec": {"restartPolicy": "Never", **pod}},
            }
        },
    }


def _pod_failure_rules(container: str) -> list[_Document]:
    # The first matching rule applies, so an evicted pod never counts as a permanent
    # failure, whatever its exit code.
    return [
        {
            "action": "Count",
            "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}],
        },
        {
            "action": "FailJob",
            "onExitCodes": {
                "containerName": container,
                "operator": "In",
                "values": _PERMANENT_CODES,
            },
        },
    ]


def _from_pod(name: str, field_path: str) -> _Document:
    return {"name": name, "valueFrom": {"fieldRef": {"fieldPath": field_path}}}


def _tf_config(job: TrainingJob, role: str) -> str:
    # As in TensorFlow, the evaluator is not part of the training cluster.
    cluster = {
        name: [f"{job.host(name, i)}.{job.name}:{job.port}" for i in range(size)]
        for name, size in job.roles.items()
        if name != "evaluator"
    }
    reference = f"$({_INDEX_VARIABLE})"
    config = {"cluster": cluster, "task": {"type": role, "index": reference}}
    # Unquoted: Kubernetes replaces the reference by the index, and JSON needs a number.
    return json.dumps(config, indent=2).replace(f'"{reference}"', reference)


def _pod_spec(job: TrainingJob, role: str, env: list[_Document]) -> _Document:
    mounts: list[_Document] = [{"name": "shared-memory", "mountPath": "/dev/shm"}]
    # The default /dev/shm of 64 MiB is too small for NCCL and loader processes.
    volumes: list[_Document] = [
        {"name": "shared-memory", "emptyDir": {"medium": "Memory"}}
    ]
    if job.checkpoint_claim:
        mounts.append({"name": "checkpoints", "mountPath": job.checkpoint_path})
        claim = {"claimName": job.checkpoint_claim}
        volumes.append({"name": "checkpoints", "persistentVolumeClaim": claim})
    resources = _resources(job, role)
    variables = {"PYTHONUNBUFFERED": "1", **job.env}
    return {
        "terminationGracePeriodSeconds": job.grace_seconds,
        # Otherwise the script is process 1, and the kernel drops an unhandled SIGTERM.
        "shareProcessNamespace": True,
        "containers": [
            {
                "name": role,
                "image": job.image,
                "command": [_literal(word) for word in job.command],
                "env": [
                    *env,
                    *({"name": k, "value": _literal(v)} for k, v in variables.items()),
                ],
                "ports": [{"name": "replicax", "containerPort": job.port}],
                **({"resources": resources} if resources else {}),
                "volumeMounts": mounts,
            }
        ],
        "volumes": volumes,
    }


def _literal(text: str) -> str:
    """Escape `$`, which would start a reference to a variable."""
    return text.replace("$", "$$")


def _resources(job: TrainingJob, role: str) -> _Document:
    gpus = 0 if role == "ps" else job.gpus_per_worker
    amounts: dict[str, _Document] = {
        "requests": {"cpu": job.cpus, "memory": job.memory},
        "limits": {"memory": job.memory, "nvidia.com/gpu": gpus},
    }
    needs = {kind: {k: v for k, v in x.items() if v} for kind, x in amounts.items()}
    return {kind: amount for kind, amount in needs.items() if amount}


# YAML parsers disagree on numbers and booleans: `1e3` and `y` are text for PyYAML, but
# not for Kubernetes. Only words that every parser reads as text stay unquoted.
_PLAIN = re.compile(r"[A-Za-z/](?:[-\w./:]*[-\w./])?", re.ASCII)
_NOT_PLAIN = frozenset(["y", "n", "yes", "no", "on", "off", "true", "false", "null"])


def to_yaml(document: Mapping[str, JSON]) -> str:
    """Serialize a document as YAML, in the order of its keys.

    Example:
        >>> print(to_yaml({"kind": "JobSet", "value": "1e-3", "codes": [1, 2]}), end="")
        kind: JobSet
        value: "1e-3"
        codes: [1, 2]
    """
    import yaml

    class Dumper(yaml.SafeDumper):
        def ignore_aliases(self, data: object) -> bool:
            return True

    def text(dumper: yaml.SafeDumper, value: str) -> yaml.ScalarNode:
        style = "|" if "\n" in value else '"'  # The dumper quotes control characters.
        if _PLAIN.fullmatch(value) and value.lower() not in _NOT_PLAIN:
            style = None
        return dumper.represent_scalar("tag:yaml.org,2002:str", value, style=style)

    def sequence(dumper: yaml.SafeDumper, value: list[object]) -> yaml.SequenceNode:
        is_numeric = bool(value) and all(isinstance(item, int) for item in value)
        return dumper.represent_sequence(
            "tag:yaml.org,2002:seq", value, flow_style=is_numeric
        )

    Dumper.add_representer(str, text)
    Dumper.add_representer(list, sequence)
    return yaml.dump(
        dict(document),
        Dumper=Dumper,
        sort_keys=False,
        allow_unicode=True,
        default_flow_style=False,
        width=88,
    )
