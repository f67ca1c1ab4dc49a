"""The description of a training job for Kubernetes.

Kubernetes itself refuses invalid names, numbers and quantities when a manifest is
applied.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from replicax.cluster.failure import ATTEMPT

__all__ = ["TrainingJob"]

_SET_BY_MANIFESTS = ("TF_CONFIG", "JOB_COMPLETION_INDEX", ATTEMPT)


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
