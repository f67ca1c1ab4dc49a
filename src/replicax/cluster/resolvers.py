"""Cluster resolvers: determine a process' cluster, and its task in it."""

import os
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Mapping

from replicax.cluster.config import TaskConfig, tf_config
from replicax.cluster.spec import ClusterSpec

__all__ = [
    "ClusterResolver",
    "KnownCluster",
    "SimpleClusterResolver",
    "TFConfigClusterResolver",
    "default_resolver",
]


class ClusterResolver(ABC):
    """Base class of resolvers, which determine a process' cluster and its task.

    A subclass must define `cluster_spec`. (TF:
    `tf.distribute.cluster_resolver.ClusterResolver`.)

    Attributes:
        task_type: The job of this process, such as `"worker"`; None if unknown.
        task_id: The index of this process within its job, from zero, or None.
        rpc_layer: Prefix of the addresses that `master` returns, such as `"grpc"`.
        environment: Name of the launcher; may be empty.

    Example:
        >>> import replicax as rx
        >>> class TwoHosts(rx.cluster_resolver.ClusterResolver):
        ...     task_type = "worker"
        ...     task_id = 1  # Such as from a variable of a scheduler.
        ...     def cluster_spec(self):
        ...         return rx.ClusterSpec({"worker": ["a:2222", "b:2222"]})
        >>> TwoHosts().master()
        'b:2222'
    """

    task_type: str | None = None
    task_id: int | None = None
    rpc_layer: str | None = None
    environment: str = ""

    @abstractmethod
    def cluster_spec(self) -> ClusterSpec:
        """Return the jobs of the cluster and their tasks' addresses."""

    def master(
        self,
        task_type: str | None = None,
        task_id: int | None = None,
        rpc_layer: str | None = None,
    ) -> str:
        """Return the address of a task.

        Args:
            task_type: The task's job; None for this process'.
            task_id: The task's index; None for this process'.
            rpc_layer: Prefix of the address, as in `"grpc://host:2222"`.

        Returns:
            The address; empty on a single machine and for an unlisted job.
        """
        job = self.task_type if task_type is None else task_type
        index = self.task_id if task_id is None else task_id
        cluster = self.cluster_spec()
        if job is None or index is None or job not in cluster.jobs:
            return ""
        return _with_prefix(
            cluster.task_address(job, index), rpc_layer or self.rpc_layer
        )

    def num_accelerators(
        self,
        task_type: str | None = None,
        task_id: int | None = None,
        config_proto: None = None,
    ) -> dict[str, int]:
        """Count the accelerators of this process, such as `{"GPU": 2}`.

        This starts JAX's devices: in a cluster of several processes create the strategy
        first.

        Args:
            task_type: This process' job or None; for TensorFlow's signature.
            task_id: This process' index or None; for TensorFlow's signature.
            config_proto: None; for TensorFlow's signature.

        Raises:
            ValueError: For another process, whose devices are unknown here.
        """
        del config_proto
        is_other_job = (task_type or self.task_type) != self.task_type
        if is_other_job or task_id not in (None, self.task_id):
            raise ValueError(
                f"{type(self).__name__}.num_accelerators: only the devices of this "
                f"process, {self._task_name()}, are known here; got "
                f"task_type={task_type!r}, task_id={task_id!r}. Leave both out."
            )
        return self._accelerators()

    def _accelerators(self) -> dict[str, int]:
        import jax

        platforms = (device.platform.upper() for device in jax.local_devices())
        return dict(Counter(p for p in platforms if p != "CPU"))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.cluster_spec()!r}, {self._task_name()})"

    def _task_name(self) -> str | None:
        return TaskConfig(ClusterSpec({}), self.task_type, self.task_id).name


class KnownCluster(ClusterResolver):
    """Base class of resolvers that read their cluster once, in the constructor."""

    def __init__(
        self, config: TaskConfig, rpc_layer: str | None, environment: str = ""
    ) -> None:
        self._cluster = config.cluster
        self.task_type = config.task_type
        self.task_id = config.task_id
        self.rpc_layer = rpc_layer
        self.environment = environment

    def cluster_spec(self) -> ClusterSpec:
        """Return the cluster."""
        return self._cluster


class SimpleClusterResolver(KnownCluster):
    """A resolver of a cluster that the script describes.

    (TF: `tf.distribute.cluster_resolver.SimpleClusterResolver`.)

    Args:
        cluster_spec: The jobs and their tasks.
        master: The result of `master()` without arguments.
        task_type: The job of this process.
        task_id: The index of this process within its job.
        environment: Name of the environment of the program; not used.
        num_accelerators: The number of accelerators of this process by kind, such as
            `{"GPU": 2}`; None: JAX counts them.
        rpc_layer: Prefix of the addresses that `master()` returns.

    Raises:
        TypeError: If `cluster_spec` is neither a ClusterSpec nor a dict for one.

    Example:
        >>> cluster = ClusterSpec({"worker": ["a:2222", "b:2222"]})
        >>> resolver = SimpleClusterResolver(cluster, task_type="worker", task_id=1)
        >>> resolver.master("worker", 0)
        'a:2222'
    """

    def __init__(
        self,
        cluster_spec: ClusterSpec,
        master: str = "",
        task_type: str | None = None,
        task_id: int | None = None,
        environment: str = "",
        num_accelerators: Mapping[str, int] | None = None,
        rpc_layer: str | None = None,
    ) -> None:
        config = TaskConfig(ClusterSpec(cluster_spec), task_type, task_id)
        super().__init__(config, rpc_layer, environment)
        self._master = master
        self._num_accelerators = num_accelerators

    def master(
        self,
        task_type: str | None = None,
        task_id: int | None = None,
        rpc_layer: str | None = None,
    ) -> str:
        """Return the address of a task; without a task the constructor's `master`."""
        if task_type is None or task_id is None:
            return _with_prefix(self._master, rpc_layer or self.rpc_layer)
        return super().master(task_type, task_id, rpc_layer)

    def _accelerators(self) -> dict[str, int]:
        if self._num_accelerators is None:
            return super()._accelerators()
        return dict(self._num_accelerators)


class TFConfigClusterResolver(KnownCluster):
    """A resolver of the cluster that the environment variable `TF_CONFIG` describes.

    The constructor reads the variable; later changes have no effect. If it is absent or
    blank, the cluster is empty: a single machine. (TF:
    `tf.distribute.cluster_resolver.TFConfigClusterResolver`.)

    Args:
        task_type: Overrides the variable's job of this process.
        task_id: Overrides the variable's index of this process.
        rpc_layer: Prefix of the addresses that `master()` returns.
        environment: Name of the environment of the program; not used.

    Raises:
        ClusterConfigError: If TF_CONFIG is malformed.

    Example:
        >>> import os
        >>> os.environ["TF_CONFIG"] = (
        ...     '{"cluster": {"worker": ["a:2222", "b:2222"]},'
        ...     ' "task": {"type": "worker", "index": 1}}'
        ... )
        >>> resolver = TFConfigClusterResolver()
        >>> del os.environ["TF_CONFIG"]
        >>> resolver
        TFConfigClusterResolver(ClusterSpec({'worker': ['a:2222', 'b:2222']}), worker:1)
    """

    def __init__(
        self,
        task_type: str | None = None,
        task_id: int | None = None,
        rpc_layer: str | None = None,
        environment: str | None = None,
    ) -> None:
        config = TaskConfig(ClusterSpec({}), task_type, task_id)
        if text := _tf_config_text():
            config = tf_config(text, task_type=task_type, task_id=task_id)
        super().__init__(config, rpc_layer, environment or "")

    def master(
        self,
        task_type: str | None = None,
        task_id: int | None = None,
        rpc_layer: str | None = None,
    ) -> str:
        """Return the address of a task; empty in a cluster of one task."""
        if sum(map(self._cluster.num_tasks, self._cluster.jobs)) == 1:
            return ""
        return super().master(task_type, task_id, rpc_layer)


def require_resolver(resolver: object, caller: str) -> None:
    """Raise a `TypeError` unless `resolver` is None or describes a cluster."""
    if resolver is not None and not callable(getattr(resolver, "cluster_spec", None)):
        raise TypeError(
            f"{caller}: cluster_resolver must be an "
            f"rx.cluster_resolver.ClusterResolver or None; got {resolver!r}. Leave it "
            "out to read the launcher's variables, or write for example "
            "rx.cluster_resolver.SimpleClusterResolver(rx.ClusterSpec({'worker': "
            "['host:2222']}), 'worker', 0)."
        )


def default_resolver() -> TFConfigClusterResolver | None:
    """Return the resolver of TF_CONFIG; None if the variable is absent or blank."""
    return TFConfigClusterResolver() if _tf_config_text() else None


def _tf_config_text() -> str:
    return os.environ.get("TF_CONFIG", "").strip()


def _with_prefix(address: str, rpc_layer: str | None) -> str:
    return f"{rpc_layer}://{address}" if rpc_layer and address else address
