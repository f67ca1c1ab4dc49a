"""The description of a training job for Kubernetes, validated by Kubernetes' rules."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from replicax.cluster.failure import ATTEMPT

__all__ = ["TrainingJob"]

_SET_BY_MANIFESTS = ("TF_CONFIG", "JOB_COMPLETION_INDEX", ATTEMPT)
_MAX_LABEL = 63
_MAX_SUBDOMAIN = 253
_LABEL = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
_NAMESPACE = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?")
_CLAIM = re.compile(rf"{_NAMESPACE.pattern}(\.{_NAMESPACE.pattern})*")
_QUANTITY = re.compile(r"([0-9]+(\.[0-9]+)?|\.[0-9]+)([KMGTPE]i|[mkMGTPE])?")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


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
        ValueError: If Kubernetes would reject one of these attributes.

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
        problems = [*_bad_words(self), *_bad_numbers(self), *_bad_names(self)]
        if problems:
            raise ValueError(f"manifest: {problems[0]}")

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


def _bad_words(job: TrainingJob) -> Iterator[str]:
    if not job.image or re.search(r"\s", job.image):
        yield (
            f"The image is empty or has a space; got {job.image!r}, expected for "
            "example 'registry/project/image:tag'."
        )
    if not job.command:
        yield "The command is empty; name the script to run."
    for name in job.env:
        if not _VARIABLE.fullmatch(name):
            yield (
                f"{name!r} cannot be an environment variable's name; use letters, "
                "digits and '_'."
            )
        elif name in _SET_BY_MANIFESTS:
            yield f"{name} is set by the manifest itself; leave it out of the env."
    for resource, value, example in (
        ("cpus", job.cpus, "4"),
        ("memory", job.memory, "8Gi"),
    ):
        match = _QUANTITY.fullmatch("1" if value is None else value)
        if match is None or float(match[1]) <= 0:
            yield (
                f"{resource} is no Kubernetes quantity above zero; got {value!r}, "
                f"expected for example {example!r}."
            )
    if not re.fullmatch(r"/[^:\s]+", job.checkpoint_path):
        yield (
            "The checkpoint path must be absolute, below '/' and without ':' or "
            f"spaces; got {job.checkpoint_path!r}, expected for example '/ckpt'."
        )


def _bad_numbers(job: TrainingJob) -> Iterator[str]:
    for name, least, most in (
        ("num_workers", 1, None),
        ("num_ps", 0, None),
        ("gpus_per_worker", 0, None),
        ("port", 1, 65535),
        ("max_restarts", 0, None),
        ("grace_seconds", 1, None),
    ):
        value = getattr(job, name)
        if value < least or (most is not None and value > most):
            bound = f"at least {least}" if most is None else f"from {least} to {most}"
            yield f"{name} must be {bound}; got {value}."


def _bad_names(job: TrainingJob) -> Iterator[str]:
    if not _LABEL.fullmatch(job.name):
        yield (
            "The name must be lower-case letters, digits and '-', begin with a letter "
            f"and not end with '-' (RFC 1035); got {job.name!r}, expected for example "
            "'train'."
        )
    # JobSet checks the length of a pod's name, which is its host name and a suffix.
    pods = [f"{job.host(role, size - 1)}-abcde" for role, size in job.roles.items()]
    longest = max(pods, key=len, default="")
    if (excess := len(longest) - _MAX_LABEL) > 0:
        yield (
            f"The name is too long by {excess}: a pod's name would be {longest!r}, "
            f"with more than {_MAX_LABEL} characters; got {job.name!r} with "
            f"{len(job.name)}. Choose a shorter name."
        )
    if job.namespace is not None and not _fits(job.namespace, _NAMESPACE, _MAX_LABEL):
        yield (
            "The namespace must be lower-case letters, digits and '-', at most "
            f"{_MAX_LABEL} of them (RFC 1123); got {job.namespace!r}."
        )
    claim = job.checkpoint_claim
    if claim is not None and not _fits(claim, _CLAIM, _MAX_SUBDOMAIN):
        yield (
            "The checkpoint claim must be the name of a persistent volume claim: "
            f"lower-case letters, digits, '-' and '.' (RFC 1123); got {claim!r}."
        )


def _fits(name: str, pattern: re.Pattern[str], max_length: int) -> bool:
    return len(name) <= max_length and pattern.fullmatch(name) is not None
