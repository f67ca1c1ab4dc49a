"""What XLA's schedule for GPUs does with gradients: how much of their way is hidden.

Compiles training steps for NVIDIA GPUs that need not be here, ours and one written by
hand in JAX, and reads the schedules. A collective is hidden where a matrix product or a
convolution lies between its start and the point at which its result is waited for.
Nothing is run. Needs the CUDA compiler:

    pip install 'replicax[plan-cuda]'
    JAX_PLATFORMS=cpu python benchmarks/gpu_schedules.py transformer:mirrored
    JAX_PLATFORMS=cpu python benchmarks/gpu_schedules.py --topology h100:2x8 \
        resnet50:mirrored resnet50:hand-written

Each argument is a model and a step: `mirrored`, `sharded-update`, `fully-sharded` or
`hand-written`. A model of convolutions compiles for minutes.
"""

import argparse
import os
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

os.environ.setdefault("KERAS_BACKEND", "jax")

import jax
import keras
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.stages import Lowered

import replicax as rx
from replicax.planning.capture import attention_of, capture_fit, compile_lowered
from replicax.planning.hlo import parse
from replicax.planning.schedule import (
    Done,
    Kernel,
    Part,
    Start,
    WhileLoop,
    read_schedule,
)
from replicax.planning.topology import DeviceTopology, find_topology

_NO_GRADIENTS = 2**10  # Smaller sums are losses and metrics.


class Case(NamedTuple):
    """A model with its loss, and what a replica gets in a step."""

    model: keras.Model
    x: tuple[tuple[int, ...], str]
    y: tuple[tuple[int, ...], str]


class Travel(NamedTuple):
    """A collective in the schedule: its kind, bytes, and what lies meanwhile."""

    kind: str
    bytes: int
    kernels: int
    products: int


def mlp() -> Case:
    """Few large layers."""
    hidden = [keras.layers.Dense(2048, activation="relu") for _ in range(2)]
    model = keras.Sequential([keras.Input((784,)), *hidden, keras.layers.Dense(10)])
    return Case(model, ((64, 784), "float32"), ((64,), "int32"))


def transformer(
    num_layers: int = 4, width: int = 256, length: int = 128, batch: int = 64
) -> Case:
    """A language model with 8192 tokens."""
    layers = keras.layers
    tokens = keras.Input((length,), dtype="int32")
    h = layers.Embedding(8192, width)(tokens)
    h = h + layers.Embedding(length, width)(np.arange(length, dtype="int32")[None])
    for _ in range(num_layers):
        a = layers.LayerNormalization()(h)
        heads = layers.MultiHeadAttention(width // 64, 64)
        h = h + heads(a, a, use_causal_mask=True)
        a = layers.LayerNormalization()(h)
        h = h + layers.Dense(width)(layers.Dense(4 * width, activation="gelu")(a))
    logits = layers.Dense(8192)(layers.LayerNormalization()(h))
    shape = ((batch, length), "int32")
    return Case(keras.Model(tokens, logits), shape, shape)


def large_transformer() -> Case:
    """The benchmarks' case h."""
    return transformer(num_layers=12, width=1024, length=512, batch=16)


def mobilenet() -> Case:
    """MobileNetV2."""
    return _of_images("MobileNetV2")


def resnet50() -> Case:
    """ResNet-50."""
    return _of_images("ResNet50")


def _of_images(name: str) -> Case:
    model = getattr(keras.applications, name)(weights=None)
    return Case(model, ((64, 224, 224, 3), "float32"), ((64,), "int32"))


MODELS = {
    "mlp": mlp,
    "transformer": transformer,
    "large-transformer": large_transformer,
    "mobilenet": mobilenet,
    "resnet50": resnet50,
}
STRATEGIES: dict[str, Callable[[], rx.Strategy]] = {
    "mirrored": rx.MirroredStrategy,
    "sharded-update": lambda: rx.MirroredStrategy(shard_update=True),
    "fully-sharded": rx.FullyShardedStrategy,
}


def lower(model: str, step: str, topology: DeviceTopology) -> Lowered:
    """The training step of a model, with Adam in mixed precision."""
    keras.utils.clear_session()
    keras.mixed_precision.set_global_policy("mixed_bfloat16")
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    if step not in STRATEGIES:
        return _by_hand(MODELS[model](), loss, topology)
    strategy = STRATEGIES[step]()
    with strategy.scope():
        case = MODELS[model]()
        case.model.compile(optimizer="adam", loss=loss)
    capture = capture_fit(
        strategy, case.model, _batch(case, len(topology.devices)), topology
    )
    assert capture.lowered is not None
    return capture.lowered


def _batch(case: Case, num: int, **where: Any) -> list[jax.ShapeDtypeStruct]:
    return [
        jax.ShapeDtypeStruct((num * shape[0], *shape[1:]), dtype, **where)
        for shape, dtype in (case.x, case.y)
    ]


def _by_hand(case: Case, loss_of: Any, topology: DeviceTopology) -> Lowered:
    model, optimizer = case.model, keras.optimizers.Adam()
    optimizer.build(model.trainable_variables)

    def step(weights: Any, state: Any, slots: Any, x: Any, y: Any) -> Any:
        def loss(weights: Any) -> Any:
            out, new = model.stateless_call(weights, state, x, training=True)
            return loss_of(y, out), new

        (value, new), grads = jax.value_and_grad(loss, has_aux=True)(weights)
        grads, new, value = lax.pmean((grads, new, value), "replica")
        weights, slots = optimizer.stateless_apply(slots, grads, weights)
        return value, weights, new, slots

    num = len(topology.devices)
    mesh = Mesh(np.array(topology.devices), ("replica",))
    whole, rows = PartitionSpec(), PartitionSpec("replica")
    spmd = jax.shard_map(
        step,
        mesh=mesh,
        in_specs=(whole, whole, whole, rows, rows),
        out_specs=whole,
        check_vma=False,
    )
    state = [
        [
            jax.ShapeDtypeStruct(v.shape, v.dtype, sharding=NamedSharding(mesh, whole))
            for v in variables
        ]
        for variables in (
            model.trainable_variables,
            model.non_trainable_variables,
            optimizer.variables,
        )
    ]
    jitted = jax.jit(spmd, donate_argnums=(0, 1, 2))
    arrays = _batch(case, num, sharding=NamedSharding(mesh, rows))
    with attention_of(topology):
        return jitted.lower(*state, *arrays)


def travels(text: str) -> list[Travel]:
    """The collectives of a compiled program, in order."""
    under_way: dict[str, Travel] = {}
    over: list[str] = []
    for part in _flat(read_schedule(text).parts):
        match part:
            case Start(name, collective):
                size = collective.bytes * collective.count
                under_way[name] = Travel(collective.kind, size, 0, 0)
            case Done(name):
                over.append(name)
            case Kernel():
                for name in under_way.keys() - set(over):
                    kind, size, kernels, products = under_way[name]
                    products += bool(part.products)
                    under_way[name] = Travel(kind, size, kernels + 1, products)
    return [t for t in under_way.values() if t.bytes > _NO_GRADIENTS]


def _flat(parts: tuple[Part, ...]) -> Iterator[Part]:
    for part in parts:
        if isinstance(part, WhileLoop):
            yield from _flat(part.parts)
        else:
            yield part


def hidden_share(found: list[Travel]) -> float:
    """The share of the bytes that travel while something is multiplied."""
    total = sum(t.bytes for t in found)
    return sum(t.bytes for t in found if t.products) / total if total else 0.0


def row(text: str) -> dict[str, str]:
    """A program as a row of the table."""
    found = travels(text)
    computations, entry = parse(text)
    copies = [i for i in computations[entry].values() if i.opcode == "copy"]
    kernels = sum(times for _, times in read_schedule(text).kernels())
    return {
        "collectives": ", ".join(
            f"{sum(t.kind == kind for t in found)} {kind}"
            for kind in sorted({t.kind for t in found})
        ),
        "MiB": f"{sum(t.bytes for t in found) / 2**20:.1f}",
        "hidden": f"{hidden_share(found):.1%}",
        "kernels": f"{kernels}",
        "copies": f"{len(copies)}",
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("programs", nargs="+", metavar="MODEL:STEP")
    parser.add_argument("--topology", default="h100:8")
    parser.add_argument("--each", action="store_true", help="show each collective")
    parser.add_argument("--save", help="folder for the compiled programs' texts")
    options = parser.parse_args()
    topology = find_topology(options.topology)
    header: list[str] = []
    for program in options.programs:
        model, _, step = program.partition(":")
        compiled = compile_lowered(lower(model, step, topology), topology.devices)
        text = compiled.as_text() or ""
        if options.save:
            with open(os.path.join(options.save, f"{program}.txt"), "w") as file:
                file.write(text)
        memory = compiled.memory_analysis()
        assert memory is not None  # XLA says it of GPUs.
        temporaries = memory.temp_size_in_bytes / 2**20
        cells = {
            "program": program,
            **row(text),
            "temporaries": f"{temporaries:.0f} MiB",
        }
        if not header:
            header = list(cells)
            print("|", " | ".join(header), "|")
            print("|" + "---|" * len(header))
        print("|", " | ".join(cells.values()), "|", flush=True)
        if options.each:
            for t in travels(text):
                print(
                    f"    {t.kind:14} {t.bytes / 2**20:8.3f} MiB: {t.kernels} kernels "
                    f"meanwhile, {t.products} of them products"
                )


if __name__ == "__main__":
    main()
