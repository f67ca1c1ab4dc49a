"""Cluster resolver of a Kubernetes Job or JobSet."""

import os
import re
from collections.abc import Mapping

from replicax.cluster.config import JOBS, TaskConfig
from replicax.cluster.resolvers import KnownCluster
from replicax.cluster.spec import ClusterSpec
from replicax.errors import ClusterConfigError

__all__ = ["KubernetesClusterResolver"]

_JOBSET = ("JOBSET_NAME", "jobset-name")
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
    - In a Job without a JobSet: `HOSTNAME`, which contains the Job's name. Pods
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
        ClusterConfigError: If a variable or an argument is missing or wrong.

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
        if (num_workers is None) == (jobs is None):
            raise _error(
                f"expected either num_workers or jobs; got num_workers={num_workers}, "
                f"jobs={jobs}"
            )
        counts = {"worker": num_workers or 0} if jobs is None else dict(jobs)
        if any(job not in JOBS or n < 1 for job, n in counts.items()) or not counts:
            raise _error(
                f"each job must be one of {', '.join(JOBS)} and have 1 pod or more; "
                f"got {counts}"
            )
        index = _index()
        if jobs is None:
            own, names = "worker", {"worker": job_name or _own_name(index)}
        else:
            own, jobset = _exposed(*_REPLICATED_JOB), _exposed(*_JOBSET)
            names = {job: f"{jobset}-{job}-0" for job in counts}
        if own not in counts:
            raise _error(
                f"JOBSET_REPLICATED_JOB_NAME is {own!r}; expected one of jobs={counts}"
            )
        if index >= counts[own]:
            raise _error(
                f"JOB_COMPLETION_INDEX is {index}, but there are {counts[own]} pods of "
                f"job {own!r}; that number must be the Job's 'completions'"
            )
        service = service or os.environ.get("JOBSET_NAME")
        if not service:
            raise _error(
                "the pods' headless service is unknown; pass service=, the value of "
                "'subdomain' in the pod template"
            )
        cluster = {
            job: [f"{names[job]}-{i}.{service}:{port}" for i in range(count)]
            for job, count in counts.items()
        }
        super().__init__(TaskConfig(ClusterSpec(cluster), own, index), rpc_layer)


def _index() -> int:
    text = os.environ.get("JOB_COMPLETION_INDEX", "")
    if re.fullmatch(r"[0-9]{1,9}", text):
        return int(text)
    raise _error(
        f"JOB_COMPLETION_INDEX is {repr(text) if text else 'not set'}; expected this "
        "pod's index. Set completionMode: Indexed in the Job"
    )


def _own_name(index: int) -> str:
    """Read the name of this pod's Job."""
    if jobset := os.environ.get("JOBSET_NAME"):
        return f"{jobset}-{_exposed(*_REPLICATED_JOB)}-0"
    host = os.environ.get("HOSTNAME", "")
    if not host.endswith(f"-{index}"):
        raise _error(
            f"HOSTNAME is {repr(host) if host else 'not set'}; expected the Job's name "
            f"and '-{index}'. Pass job_name="
        )
    return host.removesuffix(f"-{index}")


def _exposed(name: str, annotation: str) -> str:
    """Read a variable that the manifest sets from an annotation."""
    if os.environ.get("JOBSET_JOB_INDEX", "0") != "0":
        raise _error(
            f"JOBSET_JOB_INDEX is {os.environ['JOBSET_JOB_INDEX']!r}; expected '0': "
            "each replicated job must have one Job, replicas: 1"
        )
    if not os.environ.get(name):
        raise _error(
            f"{name} is not set; add it to the container's env by fieldRef from "
            f"metadata.annotations['jobset.sigs.k8s.io/{annotation}']"
        )
    return os.environ[name]


def _error(problem: str) -> ClusterConfigError:
    return ClusterConfigError(f"KubernetesClusterResolver: {problem}.", problem)
