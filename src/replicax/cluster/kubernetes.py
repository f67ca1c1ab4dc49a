"""Cluster resolver of a Kubernetes Job or JobSet."""

import os
import re

from replicax.cluster.config import TaskConfig
from replicax.cluster.resolvers import KnownCluster
from replicax.cluster.spec import ClusterSpec
from replicax.errors import ClusterConfigError

__all__ = ["KubernetesClusterResolver"]


class KubernetesClusterResolver(KnownCluster):
    """The cluster of the pods of this Indexed Job, by their DNS names.

    All pods are workers. For a cluster with parameter servers, let `replicax manifest`
    write `TF_CONFIG`. The resolver reads the pod's environment only. Unlike
    TensorFlow's resolver of this name, it needs neither the Kubernetes API nor
    permissions to use it.

    - `JOB_COMPLETION_INDEX`: Kubernetes sets it in the pods of an Indexed Job.
    - In a Job of a JobSet: `JOBSET_NAME` and `JOBSET_REPLICATED_JOB_NAME`, set in the
      manifest by `fieldRef` from the annotations `jobset.sigs.k8s.io/jobset-name` and
      `.../replicatedjob-name`. Pods are `<jobset>-<job>-0-<index>.<service>`.
    - In a Job without a JobSet: `HOSTNAME`, which contains the Job's name. Pods
      are `<job>-<index>.<service>`.

    Args:
        num_workers: The number of pods, the Job's `completions`.
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
        num_workers: int,
        *,
        service: str | None = None,
        job_name: str | None = None,
        port: int = 2222,
        rpc_layer: str | None = None,
    ) -> None:
        index = _index()
        if index >= num_workers:
            raise _error(
                f"JOB_COMPLETION_INDEX is {index}, but num_workers is {num_workers}; "
                "num_workers must be the Job's 'completions'"
            )
        job_name = job_name or _own_name(index)
        service = service or os.environ.get("JOBSET_NAME")
        if not service:
            raise _error(
                "the pods' headless service is unknown; pass service=, the value of "
                "'subdomain' in the pod template"
            )
        addresses = [f"{job_name}-{i}.{service}:{port}" for i in range(num_workers)]
        config = TaskConfig(ClusterSpec({"worker": addresses}), "worker", index)
        super().__init__(config, rpc_layer)


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
        return f"{jobset}-{_replicated_job()}-0"
    host = os.environ.get("HOSTNAME", "")
    if not host.endswith(f"-{index}"):
        raise _error(
            f"HOSTNAME is {repr(host) if host else 'not set'}; expected the Job's name "
            f"and '-{index}'. Pass job_name="
        )
    return host.removesuffix(f"-{index}")


def _replicated_job() -> str:
    if os.environ.get("JOBSET_JOB_INDEX", "0") != "0":
        raise _error(
            f"JOBSET_JOB_INDEX is {os.environ['JOBSET_JOB_INDEX']!r}; expected '0': "
            "each replicated job must have one Job, replicas: 1"
        )
    name = os.environ.get("JOBSET_REPLICATED_JOB_NAME")
    if not name:
        raise _error(
            "JOBSET_REPLICATED_JOB_NAME is not set; add it to the container's env by "
            "fieldRef from metadata.annotations["
            "'jobset.sigs.k8s.io/replicatedjob-name']"
        )
    return name


def _error(problem: str) -> ClusterConfigError:
    return ClusterConfigError(f"KubernetesClusterResolver: {problem}.", problem)
