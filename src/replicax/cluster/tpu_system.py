"""Joins the hosts of a TPU slice, and starts its chips."""

import dataclasses
import glob
import importlib.metadata
import logging
import os
from collections import Counter
from collections.abc import Sequence
from typing import Any

import jax

from replicax._private.jax import is_tpu_vm
from replicax._util.stand_ins import stand_in_devices
from replicax.cluster.detection import detect
from replicax.cluster.environments.base import IncompleteError
from replicax.cluster.joining import join, join_running
from replicax.cluster.resolvers import ClusterResolver
from replicax.cluster.spec import ClusterSpec
from replicax.cluster.timeouts import Timeouts, checked_timeouts
from replicax.cluster.tpu_slice import (
    VARIABLES,
    TPUClusterResolver,
    checked_tpu_resolver,
)
from replicax.cluster.workers import Workers
from replicax.errors import ClusterConfigError, DeviceError

__all__ = [
    "Topology",
    "experimental_connect_to_cluster",
    "join_slice",
    "topology_of",
    "tpu_devices",
]

_logger = logging.getLogger("replicax")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Topology:
    """The chips, devices and hosts of a TPU system.

    (TF: `tf.tpu.experimental.Topology`.)

    Attributes:
        device_kind: JAX's name of the chips, such as `"TPU v5 lite"`.
        num_chips: Number of chips.
        num_devices: Number of JAX devices, one replica each: one or two on a chip.
        num_hosts: Number of host machines.
        num_slices: Number of slices.
        mesh_shape: Chips in the three dimensions of one slice's interconnect, and
            devices on a chip.

    Example:
        >>> import replicax as rx
        >>> topology = rx.tpu.experimental.Topology(
        ...     device_kind="TPU v5 lite",
        ...     num_chips=8,
        ...     num_devices=8,
        ...     num_hosts=2,
        ...     num_slices=1,
        ...     mesh_shape=(2, 4, 1, 1),
        ... )
        >>> topology.num_tasks, topology.num_tpus_per_task
        (2, 4)
    """

    device_kind: str
    num_chips: int
    num_devices: int
    num_hosts: int
    num_slices: int
    mesh_shape: tuple[int, int, int, int]

    @property
    def num_chips_per_host(self) -> int:
        """Number of chips of one host."""
        return self.num_chips // self.num_hosts

    @property
    def num_tasks(self) -> int:
        """TensorFlow's name of `num_hosts`."""
        return self.num_hosts

    @property
    def num_tpus_per_task(self) -> int:
        """Number of devices of one host, under TensorFlow's name."""
        return self.num_devices // self.num_hosts


def topology_of(devices: Sequence[Any]) -> Topology:
    """Compute the topology of TPU slices from all their devices, real or described."""
    slices = [getattr(d, "slice_index", None) or 0 for d in devices]
    # CPU devices that stand in for chips have no coordinates.
    coords = [getattr(d, "coords", None) or (d.id, 0, 0) for d in devices]
    chips = {(index, *xyz) for index, xyz in zip(slices, coords, strict=True)}
    x, y, z = (
        1 + max(chip[i] for chip in chips) - min(chip[i] for chip in chips)
        for i in (1, 2, 3)
    )
    return Topology(
        device_kind=devices[0].device_kind,
        num_chips=len(chips),
        num_devices=len(devices),
        num_hosts=len({d.process_index for d in devices}),
        num_slices=len(set(slices)),
        mesh_shape=(x, y, z, len(devices) // len(chips)),
    )


def join_slice(
    resolver: TPUClusterResolver, timeouts: Timeouts, caller: str
) -> Workers:
    """Join the slice's other hosts; on one host, join a running `jax.distributed` job.

    For several slices JAX detects the hosts. For one slice the resolver provides them:
    JAX would first ask the metadata server about slices, for up to minutes.
    """
    if stand_in_devices() is not None:
        return Workers()  # The stand-ins are the devices of all hosts.
    if resolver.num_hosts == 1 and not jax.distributed.is_initialized():
        return Workers()
    if resolver.num_hosts > 1 and not is_tpu_vm():
        raise DeviceError(
            f"{caller}: {resolver!r} has {resolver.num_hosts} hosts, but this machine "
            f"is not a TPU VM. {_search_report()}"
        )
    if resolver.num_slices > 1 or resolver.num_hosts == 1:
        return join_running(timeouts)
    cluster = resolver.cluster_spec()
    return join(cluster, resolver.task_id or 0, timeouts, "TPUClusterResolver")


def require_single(caller: str) -> None:
    """Raise a `ClusterConfigError` if a launcher has started more than this process."""
    try:
        environment, place = detect(None, caller)
    except IncompleteError as error:
        problem = error.problem
    else:
        if environment is None or place.count == 1:
            return
        problem = (
            f"{environment.name} has started {place.count} processes "
            f"({environment.described()})."
        )
    raise ClusterConfigError(
        f"{caller}: the TPU slice has one host, so each process would train alone, but "
        f"{problem} Use rx.MultiWorkerMirroredStrategy() for one training, or "
        "TPUClusterResolver('local') to train alone."
    )


def experimental_connect_to_cluster(
    cluster_spec_or_resolver: TPUClusterResolver | ClusterResolver | ClusterSpec,
    *,
    timeouts: Timeouts | None = None,
) -> None:
    """Join the other hosts of a TPU slice now; do nothing on a single host.

    Every host of the slice calls it, before JAX's devices are used. The call is
    optional: `rx.TPUStrategy` joins them too.
    (TF: `tf.config.experimental_connect_to_cluster`.)

    Args:
        cluster_spec_or_resolver: A `TPUClusterResolver`.
        timeouts: The deadlines; `rx.TPUStrategy` uses them, too.

    Raises:
        ClusterConfigError: For another resolver or cluster: its strategy joins it.
        DeviceError: If the environment describes a slice, but there are no chips here.
        ClusterError: If a host is missing at the start-up deadline.
        RuntimeError: On several hosts, if JAX has already started its devices.

    Example:
        >>> import replicax as rx
        >>> resolver = rx.cluster_resolver.TPUClusterResolver(tpu="")
        >>> rx.config.experimental_connect_to_cluster(resolver)
    """
    caller = "experimental_connect_to_cluster"
    resolver = checked_tpu_resolver(cluster_spec_or_resolver, caller)
    workers = join_slice(resolver, checked_timeouts(timeouts, caller), caller)
    if workers.count > 1:
        _logger.info("%s: joined %d hosts as %s", caller, workers.count, workers.name)


def tpu_devices(workers: Workers, caller: str) -> list[Any]:
    """Start JAX's devices, and return all TPU devices of the slice, host by host."""
    stand_ins = stand_in_devices()
    if stand_ins is not None:
        return sorted(stand_ins, key=lambda d: (d.process_index, d.id))
    try:
        devices = jax.devices()
    except RuntimeError as error:  # A platform of JAX does not start.
        raise DeviceError(
            f"{caller}: JAX could not start its devices: {error}. {_search_report()}"
        ) from error
    if any(d.platform != "tpu" for d in devices):
        counts = Counter(d.platform for d in devices)
        devices_here = ", ".join(f"{n} {name}" for name, n in counts.items())
        raise DeviceError(
            f"{caller}: there is no TPU here; JAX has {devices_here} "
            f"{'device' if len(devices) == 1 else 'devices'}. {_search_report()}"
        )
    hosts = {d.process_index for d in devices}
    if len(hosts) != workers.count:
        raise ClusterConfigError(
            f"{caller}: the TPU's chips belong to {len(hosts)} hosts, but "
            f"{workers.count} joined. Start the script on every host of the slice. Set "
            "TPU_WORKER_HOSTNAMES and TPU_WORKER_ID there, or unset TPU_SKIP_MDS_QUERY."
        )
    return sorted(devices, key=lambda d: (d.process_index, d.id))


def _search_report() -> str:
    """Describe where a TPU was looked for, and how to get one."""
    try:
        libtpu = importlib.metadata.version("libtpu")
    except importlib.metadata.PackageNotFoundError:
        libtpu = "not installed: pip install 'replicax[tpu]'"
    files = sorted(glob.glob("/dev/accel*") + glob.glob("/dev/vfio/[0-9]*"))
    values = {name: os.environ.get(name) for name in ("JAX_PLATFORMS", *VARIABLES)}
    present = [f"{name}={value!r}; " for name, value in values.items() if value]
    missing = [name for name, value in values.items() if not value]
    return (
        f"Looked for: libtpu ({libtpu}); chips "
        f"({', '.join(files) or 'no /dev/accel* or /dev/vfio/*'}); {''.join(present)}"
        f"{', '.join(missing)} (not set). JAX_PLATFORMS must include 'tpu' or be "
        "unset. Run the script on a TPU VM, on each host of a slice at once. To "
        "develop without one: rx.set_logical_devices(8) and rx.MirroredStrategy(), or "
        "`replicax plan --topology v5e:2x4 train.py`."
    )
