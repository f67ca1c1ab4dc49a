"""Detects this machine's TPU slice as a cluster, without starting JAX's devices."""

import dataclasses
import os
import re
import urllib.error
import urllib.request
from collections.abc import Mapping
from pathlib import Path

import jax

from replicax._private.jax import has_devices, is_tpu_vm, skip_platform
from replicax._util.listing import listed
from replicax._util.stand_ins import stand_in_devices
from replicax.cluster.config import TaskConfig
from replicax.cluster.resolvers import KnownCluster
from replicax.cluster.spec import ClusterSpec
from replicax.errors import ClusterConfigError

__all__ = [
    "VARIABLES",
    "TPUClusterResolver",
    "TpuSlice",
    "checked_tpu_resolver",
    "detect_slice",
    "instance_attribute",
    "skip_libtpu_without_chips",
]

VARIABLES = (
    "TPU_NAME",
    "TPU_WORKER_HOSTNAMES",
    "TPU_PROCESS_ADDRESSES",
    "TPU_WORKER_ID",
    "MEGASCALE_NUM_SLICES",
    "MEGASCALE_SLICE_ID",
    "MEGASCALE_COORDINATOR_ADDRESS",
)
"""Environment variables that describe a TPU slice; JAX reads most of them too."""

_TPU_PREFIXES = ("TPU_", "CLOUD_TPU_", "MEGASCALE_")
_LIBTPU_VARIABLES = ("TPU_LIBRARY_PATH", "TPU_SKIP_MDS_QUERY")
"""Variables that the imports of libtpu and JAX set, also without TPUs."""
_THIS_MACHINE = (None, "", "local")
_QUERY_SECONDS = 3.0
_PORT = 8482  # JAX's default for the coordination service on TPUs.
_TPU_ENV_ENTRY = re.compile(r"^\s*([A-Z_]+)\s*:\s*'?([^'\n]*)'?\s*$", re.MULTILINE)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class TpuSlice:
    """The hosts of a TPU slice, and the index of this machine among them."""

    # "host:port" of each process of this slice, in JAX's order; empty: a single host.
    addresses: tuple[str, ...] = ()
    index: int = 0
    num_slices: int = 1  # Slices that train together.
    name: str = ""  # Of the TPU; empty: unknown.

    @property
    def num_hosts(self) -> int:
        """Number of hosts of all slices."""
        return max(1, len(self.addresses)) * self.num_slices


class TPUClusterResolver(KnownCluster):
    """A resolver of the cluster of this machine's TPU slice.

    A script runs on the TPU VM itself, on each host of a slice. The constructor reads
    the environment (`TPU_WORKER_HOSTNAMES`, `TPU_WORKER_ID`, ... as on GKE) or, on a
    Google Cloud TPU VM, the metadata server. It starts no device, so it does not check
    for TPU chips; `rx.tpu.experimental.initialize_tpu_system` and `rx.TPUStrategy` do.
    (TF: `tf.distribute.cluster_resolver.TPUClusterResolver`.)

    Args:
        tpu: None, `""` or `"local"`: the TPU of this machine. None requires a TPU here,
            for scripts that fall back on GPUs after a `ValueError`. `"local"` trains in
            this process alone, even if a launcher has started processes on several
            single-host slices. A name must be that of this machine's TPU.
        zone: Not used; for TensorFlow's signature.
        project: Not used; for TensorFlow's signature.

    Attributes:
        num_hosts: Number of processes that train together, one for each host of all
            slices.
        num_slices: Number of slices.

    Raises:
        ClusterConfigError: If `tpu` is another machine's, or None on a machine without
            TPUs; if the slice's description is malformed; if the metadata server does
            not answer within seconds.

    Example:
        >>> import os
        >>> from unittest import mock
        >>> gke = {"TPU_WORKER_HOSTNAMES": "h0,h1", "TPU_WORKER_ID": "1"}
        >>> with mock.patch.dict(os.environ, gke):
        ...     resolver = TPUClusterResolver()
        >>> resolver
        TPUClusterResolver(ClusterSpec({'worker': ['h0:8482', 'h1:8482']}), worker:1)
    """

    def __init__(
        self,
        tpu: str | None = None,
        zone: str | None = None,
        project: str | None = None,
    ) -> None:
        del zone, project
        has_tpu = _has_sign_of_tpu(os.environ) or stand_in_devices() is not None
        if tpu is None and not has_tpu:
            raise ClusterConfigError(
                "TPUClusterResolver: there is no TPU on this machine, and nothing in "
                "the environment names one. Use rx.MirroredStrategy() for GPUs and "
                "CPUs, or run the script on the TPU VM."
            )
        slice_ = detect_slice(os.environ, is_tpu_vm=is_tpu_vm())
        cluster = ClusterSpec({"worker": slice_.addresses} if slice_.addresses else {})
        super().__init__(TaskConfig(cluster, "worker", slice_.index), "grpc")
        self.is_local = tpu == "local"
        self.num_hosts = slice_.num_hosts
        self.num_slices = slice_.num_slices
        if tpu not in (*_THIS_MACHINE, slice_.name):
            hint = f", whose TPU is called {slice_.name!r}" if slice_.name else ""
            raise ClusterConfigError(
                f"TPUClusterResolver: tpu={tpu!r} is not this machine{hint}. A TPU "
                "cannot be reached over the network here: JAX runs on the TPU VM "
                "itself. Copy the script to the TPU VM, start it there, on each host "
                "of a slice at once, and leave tpu out: TPUClusterResolver()."
            )


def checked_tpu_resolver(resolver: object, caller: str) -> TPUClusterResolver:
    """Check an argument of the public call `caller`; None: the slice of this machine.

    Raises:
        ClusterConfigError: For another resolver.
    """
    if resolver is None:
        return TPUClusterResolver(tpu="")
    if not isinstance(resolver, TPUClusterResolver):
        raise ClusterConfigError(
            f"{caller}: the resolver must be an rx.cluster_resolver.TPUClusterResolver;"
            f" got {resolver!r}. For other clusters use "
            "rx.MultiWorkerMirroredStrategy(resolver) or "
            "rx.ParameterServerStrategy(resolver), which connect by themselves."
        )
    return resolver


def skip_libtpu_without_chips(
    environ: Mapping[str, str], devices: str = "/dev"
) -> bool:
    """Keep JAX from loading an installed libtpu on a machine without TPUs.

    JAX would load it in every process to look for TPUs. libtpu then prints five lines
    of errors, and replaces the handler of SIGTERM. The call does nothing if there is a
    sign of a TPU, if `JAX_PLATFORMS` is set, or if JAX has started its devices. Returns
    whether JAX's TPU backend is off.
    """
    if has_devices() or jax.config.values.get("jax_platforms"):
        return False
    if _has_sign_of_tpu(environ, devices) or "JAX_FORCE_TPU_INIT" in environ:
        return False
    return skip_platform("tpu")


def _has_sign_of_tpu(environ: Mapping[str, str], devices: str = "/dev") -> bool:
    variables = {name for name in environ if name.startswith(_TPU_PREFIXES)}
    files = [*Path(devices).glob("accel*"), *Path(devices).glob("vfio/[0-9]*")]
    return is_tpu_vm() or bool(variables.difference(_LIBTPU_VARIABLES) or files)


def detect_slice(
    environ: Mapping[str, str],
    *,
    is_tpu_vm: bool,
    timeout_seconds: float = _QUERY_SECONDS,
) -> TpuSlice:
    """Detect the slice of this machine, from the same sources as JAX.

    The sources are the environment, as on GKE, and Google Cloud's metadata server. The
    server is asked only on a machine with TPU chips, if the environment lists no hosts
    and does not set `TPU_SKIP_MDS_QUERY`.
    """

    def ask(attribute: str) -> str:
        try:
            return instance_attribute(attribute, timeout_seconds) or ""
        except OSError as error:
            raise ClusterConfigError(
                "TPUClusterResolver: this machine has TPU chips, but the metadata "
                f"server at {_metadata_server()}, asked for {attribute!r}, gave no "
                f"answer: {error}. Set TPU_SKIP_MDS_QUERY=1 if this is a single "
                "machine; for a slice set TPU_WORKER_HOSTNAMES and TPU_WORKER_ID on "
                "each host."
            ) from error

    variables = dict(environ)
    hosts = variables.get(
        "TPU_PROCESS_ADDRESSES", variables.get("TPU_WORKER_HOSTNAMES")
    )
    index = variables.get("TPU_WORKER_ID", "") if hosts is not None else ""
    if hosts is None and is_tpu_vm and "TPU_SKIP_MDS_QUERY" not in environ:
        index = ask("agent-worker-number")
        if index:
            hosts = ask("worker-network-endpoints")
            variables = dict(_TPU_ENV_ENTRY.findall(ask("tpu-env"))) | variables
            variables["TPU_NAME"] = variables.get("TPU_NAME") or ask("instance-id")
    port = _number(variables, "JAX_COORDINATOR_PORT", _PORT, 1, 65535)
    addresses = _addresses(hosts or "", port)
    return TpuSlice(
        addresses=addresses,
        index=_index(index, addresses),
        num_slices=_number(variables, "MEGASCALE_NUM_SLICES", 1, 1, 100_000),
        name=variables.get("TPU_NAME", ""),
    )


def _number(
    variables: Mapping[str, str], name: str, default: int, low: int, high: int
) -> int:
    """Read a number from `low` to `high`; return `default` if it is absent."""
    text = variables.get(name) or str(default)
    if text.isascii() and text.isdigit() and low <= int(text) <= high:
        return int(text)
    raise ClusterConfigError(
        f"TPUClusterResolver: {name} must be from {low} to {high}; got {text!r}. "
        "Set it as the TPU's provisioner does, or unset it."
    )


def _addresses(hosts: str, port: int) -> tuple[str, ...]:
    """The addresses of the processes on `"host1,host2"`; none for a single host.

    Ports in the list are libtpu's, so they are ignored. Processes of one host get
    consecutive ports.
    """
    names = [_host(entry) for entry in hosts.split(",")] if hosts else []
    if len(names) <= 1:
        return ()
    return tuple(
        f"{name}:{port + names[:i].count(name)}" for i, name in enumerate(names)
    )


def _host(entry: str) -> str:
    """Parse the host of `"host"`, `"host:port"` or `"name:id:ip"`."""
    parts = entry.strip().split(":")
    host = parts[2] if len(parts) == 3 else parts[0]
    if not host or len(parts) > 3:
        raise ClusterConfigError(
            "TPUClusterResolver: the list of the slice's hosts must look like "
            f"'host1,host2'; got the entry {entry!r}. Correct TPU_WORKER_HOSTNAMES, or "
            "TPU_PROCESS_ADDRESSES, which overrides it."
        )
    return host


def _index(text: str, addresses: tuple[str, ...]) -> int:
    if not addresses:
        return 0
    if text.isascii() and text.isdigit() and int(text) < len(addresses):
        return int(text)
    raise ClusterConfigError(
        f"TPUClusterResolver: the slice has {len(addresses)} hosts "
        f"({listed(addresses)}), so TPU_WORKER_ID must be from 0 to "
        f"{len(addresses) - 1}, different on each host; got {text!r}. Set it as the "
        "TPU's provisioner does."
    )


def _metadata_server() -> str:
    # An IP address, since a DNS lookup has no deadline. JAX reads the variable, too.
    return os.environ.get("GCE_METADATA_IP", "") or "169.254.169.254"


def instance_attribute(name: str, timeout_seconds: float) -> str | None:
    """Read an attribute of this machine, such as `"agent-worker-number"`.

    Returns None if it does not exist. Unlike JAX's client, it does not retry a missing
    attribute, and has a deadline for the connection and for each read.

    Raises:
        OSError: If the server does not answer in time, or answers with an error.
    """
    request = urllib.request.Request(
        f"http://{_metadata_server()}/computeMetadata/v1/instance/attributes/{name}",
        headers={"Metadata-Flavor": "Google"},
    )
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with direct.open(request, timeout=timeout_seconds) as response:
            return response.read().decode("utf-8", "replace")
    except urllib.error.HTTPError as error:
        error.close()
        if error.code == 404:
            return None
        raise
