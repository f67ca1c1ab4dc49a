"""Training steps of every strategy, compiled for NVIDIA GPUs that need not be here."""

import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import keras
import numpy as np
import pytest

import replicax as rx
from replicax.planning.capture import (
    Capture,
    capture_call,
    capture_fit,
    compile_lowered,
)
from replicax.planning.hlo import Instruction, arrays, calls, parse
from replicax.planning.hlo_summary import Collective, read_program
from replicax.planning.topology import find_topology
from replicax.strategies import dry_run
from replicax.strategies.strategy import Strategy

ROWS, SIDE, CHANNELS, CLASSES = 8, 8, 16, 32
TRAINERS = ("fit", "tape", "value_and_grad")

# Of a mixed-precision model, which have more than a MiB of gradients: several packs.
_FILTERS, _WIDTH = 64, 256

_TO_THE_HOST = ("infeed", "outfeed", "send", "recv", "copy-start")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Step:
    """What a compiled step is, and the bytes that it should be about, on one card.

    Attributes:
        aliased: Bytes of what the step updates in place.
        temporaries: Bytes that it needs beside its arguments.
        products: Type of the operands of each matrix product, and who makes it.
        convolutions: Likewise.
        to_the_host: Instructions that leave the card.
        types: Of all arrays.
        weights: Bytes of weights that replicas update as a whole.
        scattered: Bytes of those of which each replica updates a part, and ...
        scattered_elements: ... how many numbers they are.
        statistics: Bytes of moving statistics.
        state: Bytes of all that a step may change: weights, slots, statistics, ...
    """

    collectives: tuple[Collective, ...]
    aliased: int
    temporaries: int
    products: tuple[tuple[str, str], ...]
    convolutions: tuple[tuple[str, str], ...]
    to_the_host: tuple[str, ...]
    types: frozenset[str]
    weights: int
    scattered: int
    scattered_elements: int
    statistics: int
    state: int

    def sent(self, kind: str, groups: Sequence[Sequence[int]] | None = None) -> int:
        """Bytes of all collectives of a kind; `groups`: of those that have these."""
        return sum(
            c.count * c.bytes
            for c in self.collectives
            if c.kind == kind
            and (groups is None or {*c.groups} == {tuple(g) for g in groups})
        )


def make_model() -> keras.Model:
    layers = keras.layers
    return keras.Sequential(
        [
            keras.Input((SIDE, SIDE, CHANNELS)),
            layers.Conv2D(_FILTERS, 3, use_bias=False, padding="same"),
            layers.BatchNormalization(),
            layers.ReLU(),
            layers.Flatten(),
            layers.Dense(_WIDTH, activation="relu"),
            layers.Dropout(0.1),
            layers.Dense(CLASSES),
        ]
    )


def compiled_step(
    make_strategy: Callable[[], Strategy],
    trainer: str,
    topology: str,
    policy: str = "mixed_bfloat16",
) -> Step:
    """The step of `make_model` under a strategy, compiled for cards."""
    hardware = find_topology(topology)
    before = keras.mixed_precision.global_policy()
    keras.mixed_precision.set_global_policy(policy)
    try:
        strategy = make_strategy()
        with strategy.scope():
            model = make_model()
            loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
            model.compile("adam", loss, metrics=["accuracy"])
            model.optimizer.build(model.trainable_variables)
        with pytest.MonkeyPatch.context() as patch:
            # Plans refuse steps whose update is made elsewhere: here it is not planned.
            patch.setattr(dry_run, "refuse_dry_run", lambda name: None)
            with dry_run.dry_run_of(strategy, Capture(hardware)):
                group = strategy.group
                num = strategy.num_replicas_in_sync
            if trainer == "fit":
                x, y = _batch((num * ROWS,))
                capture = capture_fit(strategy, model, (x, y), hardware)
            else:
                x, y = map(rx.PerReplica, _batch((num, ROWS)))
                step = _replica_step(model, trainer)
                capture = capture_call(strategy, step, (x, y), {}, hardware)
    finally:
        keras.mixed_precision.set_global_policy(before)
    assert capture.lowered is not None
    compiled = compile_lowered(capture.lowered, hardware.devices)
    memory = compiled.memory_analysis()
    assert memory is not None
    text = compiled.as_text() or ""

    def on_a_card(variables: Iterable[keras.Variable]) -> int:
        return sum(_bytes(group.layout(v).shard_shape(v.shape), v) for v in variables)

    weights = model.trainable_variables
    scattered = [
        v for v in weights if group.layouts.dim_of_update(v) is not None
    ] * group.layouts.split_slots
    others = [v for v in weights if not any(v is s for s in scattered)]
    metrics = model.metrics_variables if trainer == "fit" else []
    state = [*model.variables, *model.optimizer.variables, *metrics]
    return Step(
        collectives=read_program(text).collectives,
        aliased=memory.alias_size_in_bytes,
        temporaries=memory.temp_size_in_bytes,
        **_work(text),
        weights=on_a_card(others),
        scattered=sum(_bytes(v.shape, v) for v in scattered),
        scattered_elements=sum(math.prod(v.shape) for v in scattered),
        statistics=on_a_card(v for v in model.variables if "moving_" in v.path),
        state=on_a_card({id(v): v for v in state}.values()),
    )


def _bytes(shape: Sequence[int], variable: keras.Variable) -> int:
    return math.prod(shape) * np.dtype(variable.dtype).itemsize


def _batch(rows: tuple[int, ...]) -> tuple[Any, Any]:
    return (
        jax.ShapeDtypeStruct((*rows, SIDE, SIDE, CHANNELS), "float32"),
        jax.ShapeDtypeStruct(rows, "int32"),
    )


def _replica_step(model: keras.Model, trainer: str) -> Callable[..., Any]:
    weights = model.trainable_variables

    def loss_of(x: Any, y: Any) -> Any:
        losses = keras.losses.sparse_categorical_crossentropy(
            y, model(x, training=True), from_logits=True
        )
        return rx.compute_average_loss(losses)

    def with_tape(x: Any, y: Any) -> Any:
        with rx.GradientTape() as tape:
            loss = loss_of(x, y)
        model.optimizer.apply(tape.gradient(loss, weights), weights)
        return loss

    def with_value_and_grad(x: Any, y: Any) -> Any:
        loss, grads = rx.value_and_grad(lambda: loss_of(x, y), weights)()
        model.optimizer.apply(grads, weights)
        return loss

    return with_tape if trainer == "tape" else with_value_and_grad


def _work(text: str) -> dict[str, Any]:
    """What a program multiplies and by what, and what of it leaves the card."""
    computations, entry = parse(text)
    products, convolutions, leaving = [], [], []
    types: set[str] = set()
    for call in calls(computations, entry):
        computation = computations[call.computation]
        caller = call.caller.attributes if call.caller is not None else ""
        for i in computation.values():
            types |= {dtype for dtype, _ in arrays(i.shape)}
            if i.opcode in _TO_THE_HOST or "S(5)" in i.shape:
                leaving.append(f"{i.opcode} {i.name}")
            if i.opcode == "custom-call" and "callback" in i.attributes:
                leaving.append(f"{i.opcode} {i.name}")
            operands = "+".join(_types_of(i, computation))
            if i.opcode == "dot":
                by = "triton" if '"kind":"__triton' in caller else "XLA"
                products.append((operands, by))
            elif "__cublas$" in i.attributes:
                products.append((operands, "cublas"))
            elif i.opcode == "convolution":
                convolutions.append((operands, "XLA"))
            elif "__cudnn$conv" in i.attributes:
                convolutions.append((operands, "cudnn"))
    return {
        "products": tuple(products),
        "convolutions": tuple(convolutions),
        "to_the_host": tuple(leaving),
        "types": frozenset(types),
    }


def _types_of(instruction: Instruction, computation: Any) -> list[str]:
    """Types of the two arrays that an instruction multiplies."""
    shapes = (computation[name].shape for name in instruction.operands[:2])
    return sorted({dtype for shape in shapes for dtype, _ in arrays(shape)})
