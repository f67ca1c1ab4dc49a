"""The largest memory of one device while a model is built and loaded.

Live arrays are counted whenever a function that makes or places variables returns: a
weight counts that is whole on one device for a moment, but no temporary in a program.

    python benchmarks/loading_memory.py --devices 8
"""

import argparse
import contextlib
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Generator, Iterable
from pathlib import Path
from types import FrameType
from typing import Any

import replicax as rx

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--devices", type=int, default=4)
parser.add_argument("--width", type=int, default=512, help="of the layers")


_PLACING = ("variables.py", "keras/src/backend/jax/core.py", "device_put.py")


def bytes_by_place(arrays: Iterable[Any]) -> dict[tuple[int, int], int]:
    """Bytes of each shard, by the number of its device and its address there."""
    return {
        (shard.device.id, shard.data.unsafe_buffer_pointer()): shard.data.nbytes
        for array in arrays
        for shard in array.addressable_shards
    }


@contextlib.contextmanager
def peaks() -> Generator[Counter[int]]:
    """The largest bytes on each device while open, without arrays from before."""
    import jax

    before = jax.live_arrays()  # Kept: no new array gets the address of one of them.
    ids, places = {id(array) for array in before}, bytes_by_place(before)
    largest = Counter[int]()

    def sample(frame: FrameType, event: str, _: object) -> None:
        if event == "return" and frame.f_code.co_filename.endswith(_PLACING):
            new = (array for array in jax.live_arrays() if id(array) not in ids)
            held = Counter[int]()
            for place, size in bytes_by_place(new).items():
                if place not in places:
                    held[place[0]] += size
            for device, size in held.items():
                largest[device] = max(largest[device], size)

    sys.setprofile(sample)
    try:
        yield largest
    finally:
        sys.setprofile(None)


def model_of(width: int) -> Any:
    """A compiled model with Adam's state; an embedding has most of its weights."""
    import keras

    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((None,), dtype="int32")])
    model.add(keras.layers.Embedding(20 * width, width))
    for _ in range(4):
        model.add(keras.layers.Dense(width, "relu"))
    model.compile(keras.optimizers.Adam(), "mse")
    model.optimizer.build(model.trainable_variables)
    return model


def save(model: Any, folder: Path) -> None:
    """Write the files that `WAYS` load."""
    model.save(folder / "model.keras")
    model.save_weights(folder / "model.weights.h5")


def with_weights(width: int, folder: Path) -> Any:
    """A model whose weights are loaded."""
    model = model_of(width)
    model.load_weights(folder / "model.weights.h5")
    return model


def loaded(_: int, folder: Path) -> Any:
    """A model that is loaded with its optimizer."""
    import keras

    return keras.models.load_model(folder / "model.keras")


WAYS: dict[str, Callable[[int, Path], Any]] = {
    "built": lambda width, _: model_of(width),
    "`load_weights`": with_weights,
    "`load_model`": loaded,
}
"""How a model gets its values."""


def main(devices: int, width: int) -> None:
    """Print a row for each strategy and way."""
    rx.set_logical_devices(devices)
    strategies = {
        "one device": lambda: rx.OneDeviceStrategy("cpu:0"),
        "`FullyShardedStrategy`": rx.FullyShardedStrategy,
        "`ModelParallelStrategy`": rx.ModelParallelStrategy,
    }
    print("| strategy | model | device 0 | another device | its variables |")
    print("|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        save(model_of(width), Path(folder))
        for strategy, make in strategies.items():
            for way, load in WAYS.items():
                with make().scope(), peaks() as largest:
                    model = load(width, Path(folder))
                variables = [*model.weights, *model.optimizer.variables]
                shards = [v.value.addressable_shards[0].data.nbytes for v in variables]
                others = max((largest[i] for i in range(1, devices)), default=0)
                columns = [
                    f"{x / 1e6:.1f} MB" for x in (largest[0], others, sum(shards))
                ]
                print("|", " | ".join([strategy, way, *columns]), "|", flush=True)
                del model, variables


if __name__ == "__main__":
    main(**vars(parser.parse_args()))
