"""Who is compared in which layout."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

__all__ = ["LAYOUTS", "Entry", "Environment", "Layout", "cases_of", "entries_of"]

Environment = Literal["here", "tensorflow", "torch"]
Layout = Literal["one", "logical", "processes", "gpu"]

LAYOUTS: dict[Layout, str] = {
    "one": "one device with all cores",
    "logical": "two logical devices in one process",
    "processes": "two processes of one core each",
    "gpu": "one GPU",
}


@dataclass(frozen=True)
class Entry:
    """One line of a table: a library, its way of training and where it runs.

    Attributes:
        name: What tables call it.
        script: Its script in the folder `peers`.
        environment: The Python that runs it.
        loop: "custom", "fit", or "fit32", which is `steps_per_execution=32`; so with
            other numbers.
        processes: Number of processes, each on a core of its own if there are several.
        devices: Logical devices of each process.
        cores: Cores of each process; None: all.
        keras: Major version of Keras, for TensorFlow.
        shard_update: Whether replicax' replicas divide the optimizer's update.
        tuned: Whether replicax may change malloc and threads of the process.
        accelerated: Whether it is trained as one does on a GPU, and on one.
    """

    name: str
    script: str
    environment: Environment
    loop: str = "custom"
    processes: int = 1
    devices: int = 1
    cores: int | None = None
    keras: int = 3
    shard_update: bool = False
    tuned: bool = False
    accelerated: bool = False


_JAX = Entry("bare JAX", "jax_peer.py", "here")
_RUN = Entry("replicax run", "replicax_peer.py", "here")
_FIT = Entry("replicax fit", "replicax_peer.py", "here", loop="fit")
_TUNED = replace(_FIT, name=f"{_FIT.name}, tuned", tuned=True)
_KERAS = Entry("Keras fit", "keras_peer.py", "here", loop="fit")
_TF_FIT = Entry("TF fit, tf_keras", "tf_peer.py", "tensorflow", loop="fit", keras=2)
_TF_RUN = Entry("TF run, tf_keras", "tf_peer.py", "tensorflow", keras=2)
_TF_FIT3 = Entry("TF fit, Keras 3", "tf_peer.py", "tensorflow", loop="fit")
_TORCH = Entry("torch", "torch_peer.py", "torch")


def _with_steps(entry: Entry, count: int) -> Entry:
    return replace(entry, name=f"{entry.name}, {count} steps", loop=f"fit{count}")


def cases_of(layout: Layout) -> str:
    """The letters of the cases that a layout has."""
    return "gh" if layout == "gpu" else "abcdefij"


def entries_of(case: str, layout: Layout) -> Sequence[Entry]:
    """What is compared, the reference first.

    Args:
        case: The case's letter.
        layout: The layout.
    """
    if layout == "one":
        entries = [_JAX, _RUN, _FIT, _TUNED, _KERAS, _TF_FIT, _TF_FIT3, _TORCH]
        if case == "f":
            entries += [_with_steps(entry, 32) for entry in (_JAX, _FIT, _KERAS)]
        return entries
    if layout == "gpu":
        entries = [_JAX, _RUN, _FIT, _with_steps(_FIT, 8), _KERAS, _TORCH]
        return [replace(entry, accelerated=True) for entry in entries]
    if layout == "logical":
        keras = replace(_KERAS, name="Keras DataParallel fit")
        several = [_JAX, _RUN, _FIT, _TUNED, keras, _TF_FIT, _TF_RUN, _TF_FIT3]
        if case in "ae":
            name = f"{_FIT.name}, shard_update"
            several.append(replace(_FIT, name=name, shard_update=True))
        return [replace(entry, devices=2) for entry in several]
    ddp = replace(_TORCH, name="torch DDP")
    several = [_JAX, _RUN, _FIT, _TUNED, ddp, _TF_FIT, _TF_RUN]
    return [replace(entry, processes=2, cores=1) for entry in several]
