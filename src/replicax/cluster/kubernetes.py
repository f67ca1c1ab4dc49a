"""Cluster resolver of a Kubernetes Job or JobSet."""

import os
import re
from collections.abc import Mapping

from replicax.cluster.config import JOBS, TaskConfig, list_problems
from replicax.cluster.resolvers import KnownCluster
from replicax.cluster.spec import ClusterSpec
from replicax.errors import ClusterConfigError

__all__ = ["KubernetesClusterResolver"]

_LABEL = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")
_REPLICATED_JOB = ("JOBSET_REPLICATED_JOB_NAME", "replicatedjob-name")


class KubernetesClusterResolver(KnownCluster):
    """The cluster of the pods of this Indexed Job or JobSet, by their DNS names.

    It reads the pod's environment only. Unlike TensorFlow's resolver of this name, it
    needs neither the Kubernetes API nor permissions to use it.

    - `JOB_COMPLETION_INDEX`: Kubernetes sets it in the pods of an Indexed Job.
    - In a JobSet with one Job for each replicated job: `JOBSET_NAME` and
      `JOBSET_REPLICATED_JOB_NAME`, set in the manifest by `fieldRef` from the
      annotations `jobset.sigs.k8s.io/jobset-name` and `.../replicatedjob-name`. Pods
      are `<jobset>-<replicated job>-0-<index>.<service>`.
    - In a Job without a JobSet: `HOSTNAME`, from which the Job's name is taken. Pods
      are `<job>-<index>.<service>`.

    Args:
        num_workers: The number of pods, the Job's `completions`; all are workers.
        jobs: For a JobSet, in place of `num_workers`: the number of pods of each
            replicated job, by name, `{"worker": 4, "ps": 1}`. These names become the
            cluster's jobs.
        service: The headless service, the pods' `subdomain`. None: the JobSet's name,
            which is JobSet's own default.
        job_name: The name of the Job; None: read from the environment.
        port: The port that all tasks listen on.
        rpc_layer: Prefix of the addresses that `master()` returns.

    Raises:
        ClusterConfigError: If variables or arguments are missing or wrong; the message
            lists them all.

    Example:
        >>> import os
        >>> from unittest import mock
        >>> pod = {"HOSTNAME": "train-1", "JOB_COMPLETION_INDEX": "1"}
        >>> with mock.patch.dict(os.environ, pod, clear=True):
        ...     resolver = KubernetesClusterResolver(2, service="pods")
        >>> resolver.cluster_spec()
        ClusterSpec({'worker': ['train-0.pods:2222', 'train-1.pods:2222']})
    """

    def __init__(
        self,
        num_workers: int | None = None,
        *,
        jobs: Mapping[str, int] | None = None,
        service: str | None = None,
        job_name: str | None = None,
        port: int = 2222,
        rpc_layer: str | None = None,
    ) -> None:
        problems: list[str] = []
        index = _index(problems)
        counts = _counts(num_workers, jobs, problems)
        names = _job_names(counts, jobs is not None, job_name, index, problems)
        service = service or os.environ.get("JOBSET_NAME")
        if not service:
            problems.append(
                "the pods' headless service is not known; pass service=, the value of "
                "'subdomain' in the pod template"
            )
        own = _own_job(counts, jobs is not None, problems)
        if index is not None and own is not None and index >= counts[own]:
            problems.append(
                f"JOB_COMPLETION_INDEX is {index}, but there are {counts[own]} pods of "
                f"job {own!r}; expected the Job's 'completions'"
            )
        longest = [f"{name}-{counts[job] - 1}" for job, name in names.items()]
        problems += [
            f"{label!r} is no DNS name of a pod or service; expected at most 63 lower "
            "case letters, digits and '-'"
            for label in (service or "", *longest)
            if label and not _LABEL.fullmatch(label)
        ]
        if problems:
            message = list_problems("KubernetesClusterResolver", problems)
            raise ClusterConfigError(message, problems)
        cluster = {
            job: [f"{name}-{i}.{service}:{port}" for i in range(counts[job])]
            for job, name in names.items()
        }
        super().__init__(TaskConfig(ClusterSpec(cluster), own, index), rpc_layer)


def _index(problems: list[str]) -> int | None:
    text = os.environ.get("JOB_COMPLETION_INDEX", "")
    if re.fullmatch(r"[0-9]{1,9}", text):
        return int(text)
    problems.append(
        f"JOB_COMPLETION_INDEX is {repr(text) if text else 'not set'}; expected this "
        "pod's index. Set completionMode: Indexed in the Job"
    )
    return None


def _counts(
    num_workers: int | None, jobs: Mapping[str, int] | None, problems: list[str]
) -> dict[str, int]:
    if (num_workers is None) == (jobs is None):
        problems.append(
            f"either num_workers or jobs is needed; got num_workers={num_workers}, "
            f"jobs={jobs}"
        )
        return {}
    counts = {"worker": num_workers or 0} if jobs is None else dict(jobs)
    if any(job not in JOBS or n < 1 for job, n in counts.items()) or not counts:
        problems.append(
            f"there must be pods of some of the jobs {', '.join(JOBS)}; got {counts}"
        )
        return {}
    return counts


def _job_names(
    counts: Mapping[str, int],
    by_role: bool,
    job_name: str | None,
    index: int | None,
    problems: list[str],
) -> dict[str, str]:
    if by_role:
        jobset = _exposed("JOBSET_NAME", "jobset-name", problems)
        return {job: f"{jobset}-{job}-0" for job in counts} if jobset else {}
    name = job_name or _own_name(index, problems)
    return dict.fromkeys(counts, name) if name else {}


def _own_name(index: int | None, problems: list[str]) -> str | None:
    if jobset := os.environ.get("JOBSET_NAME"):
        replicated = _exposed(*_REPLICATED_JOB, problems)
        return f"{jobset}-{replicated}-0" if replicated else None
    host = os.environ.get("HOSTNAME", "")
    if index is not None and host.endswith(f"-{index}"):
        return host.removesuffix(f"-{index}")
    if index is not None:
        problems.append(
            f"HOSTNAME is {repr(host) if host else 'not set'}; expected the Job's name "
            f"and '-{index}'. Pass job_name="
        )
    return None


def _own_job(
    counts: Mapping[str, int], by_role: bool, problems: list[str]
) -> str | None:
    if os.environ.get("JOBSET_JOB_INDEX", "0") != "0":
        problems.append(
            f"JOBSET_JOB_INDEX is {os.environ['JOBSET_JOB_INDEX']!r}; expected '0': "
            "one Job of several pods for each replicated job, replicas: 1"
        )
    if not by_role:
        return "worker" if counts else None
    own = _exposed(*_REPLICATED_JOB, problems)
    if own and counts and own not in counts:
        problems.append(
            f"JOBSET_REPLICATED_JOB_NAME is {own!r}; expected one of jobs={counts}"
        )
    return own if own in counts else None


def _exposed(name: str, annotation: str, problems: list[str]) -> str | None:
    """Read a variable that the manifest sets from an annotation."""
    if not os.environ.get(name):
        problems.append(
            f"{name} is not set; add it to the container's env by fieldRef from "
            f"metadata.annotations['jobset.sigs.k8s.io/{annotation}']"
        )
    return os.environ.get(name)
