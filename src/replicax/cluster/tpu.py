"""The cluster that a TPU slice is."""

import os

from replicax.cluster.resolvers import ClusterResolver
from replicax.cluster.spec import ClusterSpec
from replicax.cluster.tpu_slice import detect_slice, on_tpu_vm
from replicax.errors import ClusterConfigError

__all__ = ["TPUClusterResolver"]

_HERE = (None, "", "local")


class TPUClusterResolver(ClusterResolver):
    """The TPU of this machine, and the other hosts of its slice.

    A script runs on the TPU VM itself, on each host of a slice. What the environment
    says (`TPU_WORKER_HOSTNAMES`, `TPU_WORKER_ID`, ... as on GKE) or, on a Google Cloud
    TPU VM, the metadata server is read once, here. No device is started; whether there
    are TPU chips shows in `rx.tpu.experimental.initialize_tpu_system` and
    `rx.TPUStrategy`. (TF: `tf.distribute.cluster_resolver.TPUClusterResolver`.)

    Args:
        tpu: None, `""` or `"local"`: the TPU of this machine. A name or an address is
            accepted if it is this machine's own.
        zone: For TensorFlow's signature; not used.
        project: Likewise.

    Attributes:
        num_hosts: Number of processes that train together, one to a host, those of
            other slices too.
        num_slices: Number of slices.

    Raises:
        ClusterConfigError: If `tpu` is another machine's; if the slice's description is
            malformed; if the metadata server does not answer within seconds.

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
        if tpu is not None and not isinstance(tpu, str):
            raise TypeError(
                f"TPUClusterResolver: tpu is a string or None; got {tpu!r}. Leave it "
                "out for the TPU of this machine."
            )
        self._slice = detect_slice(os.environ, is_tpu_vm=on_tpu_vm())
        self.task_type = "worker"
        self.task_id = self._slice.index
        self.rpc_layer = "grpc"
        self.num_hosts = self._slice.num_hosts
        self.num_slices = self._slice.num_slices
        if tpu not in _HERE and not self._is_own(tpu or ""):
            raise ClusterConfigError(
                f"TPUClusterResolver: tpu={tpu!r} is not this machine"
                f"{self._own_names()}. A TPU cannot be reached over the network here: "
                "JAX runs on the TPU VM itself. Copy the script to the TPU VM, start "
                "it there, on each host of a slice at once, and leave tpu out: "
                "TPUClusterResolver()."
            )

    def cluster_spec(self) -> ClusterSpec:
        """The hosts of this slice as workers; empty for a single machine."""
        hosts = list(self._slice.addresses)
        return ClusterSpec({"worker": hosts} if hosts else {})

    def _is_own(self, tpu: str) -> bool:
        host = tpu.removeprefix("grpc://").partition(":")[0]
        index = self._slice.index
        own = self._slice.addresses[index : index + 1]
        return tpu == self._slice.name or host in {a.partition(":")[0] for a in own}

    def _own_names(self) -> str:
        if self._slice.name:
            return f", whose TPU is called {self._slice.name!r}"
        return "" if "TPU_NAME" in os.environ else " (TPU_NAME is not set)"
