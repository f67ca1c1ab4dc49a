"""Compile real training steps for TPU slices that are not here; prints JSON.

Run in a process of its own, `python -m tests.tpu.compile_step PROGRAM TOPOLOGY...`:
libtpu may be loaded once at a time on a machine unless it is told otherwise, reads its
environment when it is loaded, and logs to standard error.
"""

import dataclasses
import itertools
import json
import math
import os
import re
import sys
import time
from collections.abc import Callable
from typing import Any

ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",
    "KERAS_BACKEND": "jax",
    # Without it a second process is refused: there is a lock file on the machine.
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    # Or libtpu looks for them on the network, and complains.
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-8",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_WORKER_ID": "0",
    "TPU_LOG_DIR": "disabled",
}

if __name__ == "__main__":
    os.environ.update(ENVIRONMENT)

import jax  # noqa: E402
import keras  # noqa: E402
import numpy as np  # noqa: E402
from jax.experimental import mesh_utils, topologies  # noqa: E402
from jax.sharding import Mesh, NamedSharding, PartitionSpec  # noqa: E402

import replicax as rx  # noqa: E402
from replicax.cluster.tpu_system import topology_of  # noqa: E402
from replicax.strategies.dry_run import dry_running  # noqa: E402
from replicax.strategies.strategy import Strategy  # noqa: E402

PER_REPLICA = 16

_COLLECTIVE = re.compile(
    r"= (?P<type>.*?) (?P<kind>all-reduce|all-gather|all-to-all|reduce-scatter"
    r"|collective-permute|collective-broadcast)(?:-start)?\("
)
_ARRAY = re.compile(r"\b(?P<dtype>pred|[a-z]+\d+)\[(?P<shape>[\d,]*)\]")


class Compiled(Exception):
    """The program that would have run next is compiled."""

    def __init__(self, compiled: Any, program: Any) -> None:
        self.compiled = compiled
        self.variables = program.variables


class DescribedDevices:
    """Gives strategies the devices of a slice, and compiles their first program."""

    def __init__(self, devices: list[Any]) -> None:
        self.devices = sorted(devices, key=lambda d: (d.process_index, d.id))
        here = Mesh(np.array(jax.devices("cpu")[:1]), ("replica",))
        self.home = NamedSharding(here, PartitionSpec())

    def call(self, group: Any, program: Any, values: Any, arrays: Any) -> Any:
        lowered = program.lower(_described(program.inputs), _described(arrays))
        raise Compiled(lowered.compile(), program)


def _described(arrays: Any) -> list[Any]:
    return [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in arrays]


def mlp() -> Any:
    return keras.Sequential(
        [
            keras.Input((784,)),
            keras.layers.Dense(256, activation="relu"),
            keras.layers.Dropout(0.2),
            keras.layers.Dense(10),
        ]
    )


def cnn() -> Any:
    return keras.Sequential(
        [
            keras.Input((28, 28, 1)),
            keras.layers.Conv2D(32, 3, strides=2, activation="relu"),
            keras.layers.BatchNormalization(),
            keras.layers.Flatten(),
            keras.layers.Dense(10),
        ]
    )


def mobilenet() -> Any:
    return keras.applications.MobileNetV2(weights=None, classifier_activation=None)


def fit_step(make_model: Callable[[], Any]) -> Callable[[Strategy], None]:
    """The step of `fit` with Adam and a metric."""

    def run(strategy: Strategy) -> None:
        with strategy.scope():
            model = make_model()
            loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
            model.compile("adam", loss, metrics=["accuracy"])
        size = PER_REPLICA * strategy.num_replicas_in_sync
        x = np.zeros((size, *model.input_shape[1:]), "float32")
        model.fit(x, np.zeros(size, "int32"), batch_size=size, verbose=0)

    return run


def loop_step(strategy: Strategy) -> None:
    """The step of a custom loop with a tape and SGD."""
    with strategy.scope():
        model = mlp()
        optimizer = keras.optimizers.SGD(0.1)
        optimizer.build(model.trainable_variables)
    num = strategy.num_replicas_in_sync

    def step(x: Any, y: Any) -> Any:
        with rx.GradientTape() as tape:
            logits = model(x, training=True)
            losses = keras.losses.sparse_categorical_crossentropy(y, logits, True)
            loss = rx.compute_average_loss(
                losses, global_batch_size=PER_REPLICA * strategy.num_replicas_in_sync
            )
        grads = tape.gradient(loss, model.trainable_variables)
        optimizer.apply(grads, model.trainable_variables)
        return loss

    x = rx.PerReplica(np.zeros((num, PER_REPLICA, 784), "float32"))
    y = rx.PerReplica(np.zeros((num, PER_REPLICA), "int32"))
    strategy.run(step, (x, y))


PROGRAMS: dict[str, Callable[[Strategy], None]] = {
    "mlp-fit": fit_step(mlp),
    "mlp-loop": loop_step,
    "cnn-fit": fit_step(cnn),
    "mobilenet-fit": fit_step(mobilenet),
}


def compiled_for(devices: list[Any], run: Callable[[Strategy], None]) -> Compiled:
    """The first program that `run` gives to a TPUStrategy on these devices."""
    try:
        with dry_running(DescribedDevices(devices)):
            run(rx.TPUStrategy())
    except Compiled as compiled:
        return compiled
    raise AssertionError("no program was run")


def num_bytes(dtype: str, shape: str) -> int:
    bits = 8 if dtype == "pred" else int(re.sub(r"\D+", "", dtype.split("e")[0]))
    return math.prod(int(n) for n in shape.split(",") if n) * bits // 8


def collectives(text: str) -> list[dict[str, Any]]:
    """The collectives of a compiled program's text, with the bytes of their results."""
    found = []
    for match in _COLLECTIVE.finditer(text):
        arrays = _ARRAY.findall(match["type"])
        sizes = [num_bytes(*array) for array in arrays]
        found.append({"kind": match["kind"], "bytes": sum(sizes)})
    return found


def bring_up(topology: str) -> dict[str, Any]:
    """What the lines of scripts for TPUs say while a plan is made for a slice."""
    with dry_running(DescribedDevices(described_devices(topology))):
        resolver = rx.cluster_resolver.TPUClusterResolver(tpu="")
        rx.config.experimental_connect_to_cluster(resolver)
        system = rx.tpu.experimental.initialize_tpu_system(resolver)
        strategy = rx.TPUStrategy(resolver)
    return {
        "system": dataclasses.asdict(system),
        "num_replicas": strategy.num_replicas_in_sync,
    }


def described_devices(topology: str) -> list[Any]:
    described = topologies.get_topology_desc(platform="tpu", topology_name=topology)
    return list(described.devices)


def orders(topology: str) -> dict[str, Any]:
    """How the compiler sums over all devices, for two orders of them in the mesh."""
    devices = described_devices(topology)
    num = len(devices)
    by_host = sorted(devices, key=lambda d: (d.process_index, d.id))
    by_coordinates = list(mesh_utils.create_device_mesh((num,), devices=devices))
    algorithms, runs = [], []
    for order in (by_host, by_coordinates):
        hosts = [d.process_index for d in order]
        runs.append(1 + sum(a != b for a, b in itertools.pairwise(hosts)))
        total = jax.shard_map(
            lambda x: jax.lax.psum(x, "replica"),
            mesh=Mesh(np.array(order), ("replica",)),
            in_specs=PartitionSpec("replica"),
            out_specs=PartitionSpec(),
        )
        rows = jax.ShapeDtypeStruct((num, 1 << 20), "float32")
        text = jax.jit(total).lower(rows).compile().as_text()
        algorithms.append(re.findall(r'"emitter":"\w*","strategy":"\w*"', text))
    return {
        "num_hosts": len({d.process_index for d in devices}),
        "runs_of_one_host": runs,
        "algorithms": algorithms,
    }


def facts(name: str, topology: str) -> dict[str, Any]:
    devices = described_devices(topology)
    begin = time.monotonic()
    result = compiled_for(devices, PROGRAMS[name])
    seconds = time.monotonic() - begin
    memory = result.compiled.memory_analysis()
    system = topology_of(devices)
    weights = [v for v in result.variables if v.trainable]
    averaged = [
        v for v in result.variables if not v.trainable and v.aggregation == "mean"
    ]
    return {
        "program": name,
        "topology": topology,
        "device_kind": system.device_kind,
        "mesh_shape": system.mesh_shape,
        "num_devices": system.num_devices,
        "num_hosts": system.num_hosts,
        "seconds": round(seconds, 2),
        "weight_bytes": sum(4 * math.prod(v.shape) for v in weights),
        "averaged_bytes": sum(4 * math.prod(v.shape) for v in averaged),
        "collectives": collectives(result.compiled.as_text()),
        "argument_bytes": memory.argument_size_in_bytes,
        "output_bytes": memory.output_size_in_bytes,
        "alias_bytes": memory.alias_size_in_bytes,
        "temp_bytes": memory.temp_size_in_bytes,
        "flops": (result.compiled.cost_analysis() or {}).get("flops"),
    }


if __name__ == "__main__":
    program = sys.argv[1]
    for topology in sys.argv[2:]:
        match program:
            case "bring-up":
                found = bring_up(topology)
            case "orders":
                found = orders(topology)
            case _:
                found = facts(program, topology)
        print(json.dumps(found), flush=True)
