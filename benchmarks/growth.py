"""How a step's host time, compile time and memory grow with the work.

Each point is a process of its own with tiny arrays, so that the host is what is
measured. `replicax` is `strategy.run` of a step that updates every variable; `jax.jit`
is the same step by hand, with donated variables. One axis grows while the others stay
at 10 variables, 1 replica, 1 output and 1 leaf.

    python benchmarks/growth.py --starts 3 --picture growth.png
"""

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

AXES: dict[str, list[int]] = {
    # XLA needs more than 14 minutes to compile 10,000, in `jax.jit` too.
    "variables": [10, 100, 1000, 3000],
    "replicas": [1, 2, 4, 8, 16, 32, 64],
    "outputs": [1, 10, 100, 1000],
    "leaves": [1, 10, 100, 1000],
    "steps_per_execution": [1, 10, 100],
}
SMALLEST = {"variables": 10, "replicas": 1, "outputs": 1, "leaves": 1}


def measure(library: str, axis: str, size: int, seconds: float) -> dict[str, float]:
    """One point, in this process: seconds of a step and of the first, and bytes."""
    sizes = SMALLEST | {axis: size}
    step = (
        _steps_of_fit(size) if axis == "steps_per_execution" else _step(library, sizes)
    )
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    begin = time.perf_counter()
    step()
    first = time.perf_counter() - begin
    for _ in range(3):
        step()
    times: list[float] = []
    end = time.perf_counter() + seconds
    while len(times) < 5 or time.perf_counter() < end:
        begin = time.perf_counter()
        step()
        times.append(time.perf_counter() - begin)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    per_call = size if axis == "steps_per_execution" else 1
    return {
        "step": statistics.median(times) / per_call,
        "first": first,
        "bytes": (peak - before) * 1024,
    }


def _step(library: str, sizes: dict[str, int]) -> Callable[[], object]:
    import replicax as rx

    replicas = sizes["replicas"]
    rx.set_logical_devices(replicas)
    import jax
    import jax.numpy as jnp
    import keras
    import numpy as np

    batch = {f"x{i}": np.ones((replicas, 4), "float32") for i in range(sizes["leaves"])}
    outputs = range(sizes["outputs"])

    def losses(values: list[Any], batch: dict[str, Any]) -> Any:
        total = sum(jnp.mean(x) for x in batch.values())
        return total * sum(jnp.sum(v) for v in values)

    if library == "replicax":
        strategy = rx.MirroredStrategy([f"cpu:{i}" for i in range(replicas)])
        with strategy.scope():
            variables = [
                keras.Variable(np.ones(4, "float32")) for _ in range(sizes["variables"])
            ]

        def replica_step(batch: dict[str, Any]) -> Any:
            def loss_fn() -> Any:
                return losses([v.value for v in variables], batch)

            loss, gradients = rx.value_and_grad(loss_fn, variables)()
            gradients = rx.get_replica_context().all_reduce("mean", gradients)
            for variable, gradient in zip(variables, gradients, strict=True):
                variable.assign(variable.value - 0.01 * gradient)
            return [loss + i for i in outputs]

        (distributed,) = strategy.experimental_distribute_dataset([batch])

        def run() -> object:
            out = strategy.run(replica_step, (distributed,))
            return jax.block_until_ready([v.value for v in variables[:1]]) and out

        return run

    mesh = jax.make_mesh((replicas,), ("replica",))
    rows = jax.NamedSharding(mesh, jax.P("replica"))
    whole = jax.NamedSharding(mesh, jax.P())
    placed = jax.device_put(batch, rows)
    state = jax.device_put(
        [np.ones(4, "float32") for _ in range(sizes["variables"])], whole
    )

    def bare_step(values: list[Any], batch: dict[str, Any]) -> Any:
        loss, gradients = jax.value_and_grad(losses)(values, batch)
        new = [v - 0.01 * g for v, g in zip(values, gradients, strict=True)]
        return new, [loss + i for i in outputs]

    jitted = jax.jit(bare_step, donate_argnums=0, out_shardings=(whole, whole))

    def call() -> object:
        nonlocal state
        state, out = jitted(state, placed)
        return jax.block_until_ready(state[:1]) and out

    return call


def _steps_of_fit(count: int) -> Callable[[], object]:
    """`fit` with `steps_per_execution`; a call makes `count` steps."""
    import keras
    import numpy as np

    import replicax as rx

    with rx.OneDeviceStrategy("cpu:0").scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse", steps_per_execution=count)
    x, y = np.ones((count * 8, 4), "float32"), np.ones((count * 8, 1), "float32")
    return lambda: model.fit(x, y, batch_size=8, verbose=0)


def point_of(library: str, axis: str, size: int, seconds: float) -> dict[str, float]:
    """The same in a process of its own."""
    command = [sys.executable, __file__, "--child", library, axis, str(size)]
    environment = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "KERAS_BACKEND": "jax",
        "REPLICAX_COMPILATION_CACHE": "off",
    }
    out = subprocess.run(
        [*command, str(seconds)],
        env=environment,
        check=True,
        capture_output=True,
        text=True,
        timeout=1200,
    )
    return json.loads(out.stdout.splitlines()[-1])


def draw(
    points: dict[str, dict[str, list[tuple[int, float, float, float]]]], to: Path
) -> None:
    """A column for each axis: host time, first step and memory of both libraries."""
    import matplotlib as mpl

    mpl.use("agg")
    from matplotlib import pyplot as plt

    from bench.plots import colour_of

    names = ("one step, ms", "first step, s", "memory, MB")
    _, panels = plt.subplots(
        len(names),
        len(points),
        figsize=(2.6 * len(points), 7),
        sharex="col",
        sharey="row",
    )
    for column, (axis, lines) in enumerate(points.items()):
        for library, line in lines.items():
            sizes = [point[0] for point in line]
            for row in range(len(names)):
                figures = [point[row + 1] for point in line]
                panels[row, column].plot(
                    sizes, figures, "o-", color=colour_of(library), label=library
                )
        panels[0, column].set_title(axis.replace("_", " "))
        for row in range(len(names)):
            panels[row, column].set_xscale("log")
            panels[row, column].set_yscale("log")
    for row, name in enumerate(names):
        panels[row, 0].set_ylabel(name)
    panels[0, 0].legend()
    plt.tight_layout()
    plt.savefig(to, dpi=110)


def main() -> None:
    """Print a table, and draw it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--axes", nargs="+", default=list(AXES), choices=list(AXES))
    parser.add_argument("--starts", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=1.0, help="of one timing")
    parser.add_argument("--largest", type=int, default=3000, help="size of an axis")
    parser.add_argument("--picture", type=Path)
    options = parser.parse_args()
    points: dict[str, dict[str, list[tuple[int, float, float, float]]]] = {}
    print("| axis | size | library | step, ms | first step, s | MB |")
    print("|---|---|---|---|---|---|")
    for axis in options.axes:
        is_fit = axis == "steps_per_execution"
        for size in (n for n in AXES[axis] if n <= options.largest):
            for library in ("replicax",) if is_fit else ("jax.jit", "replicax"):
                starts = [
                    point_of(library, axis, size, options.seconds)
                    for _ in range(options.starts)
                ]
                step, first, memory = (
                    statistics.median(start[key] for start in starts) * unit
                    for key, unit in (("step", 1e3), ("first", 1.0), ("bytes", 1e-6))
                )
                lines = points.setdefault(axis, {})
                lines.setdefault(library, []).append((size, step, first, memory))
                print(
                    f"| {axis} | {size} | {library} | {step:.3f} | {first:.2f} | "
                    f"{memory:.0f} |",
                    flush=True,
                )
    if options.picture:
        draw(points, options.picture)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        library, axis, size, seconds = sys.argv[2:]
        print(json.dumps(measure(library, axis, int(size), float(seconds))))
    else:
        main()
