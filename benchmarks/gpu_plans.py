"""Plans for NVIDIA GPUs that need not be here, and steps measured where there is one.

Writes the plans as text and the figure of docs/gpus.md. Plans run nothing. They need
the CUDA compiler; each takes minutes:

    pip install 'replicax[plan,plan-cuda]'
    JAX_PLATFORMS=cpu python benchmarks/gpu_plans.py plan resnet50:h100:8
    JAX_PLATFORMS=cpu python benchmarks/gpu_plans.py plan \
        resnet50:h100:16x8 mobilenet:h100:16x8 large-transformer:h100:16x8
    JAX_PLATFORMS=cpu python benchmarks/gpu_plans.py draw

On a machine with a card the same steps are timed, in `fit`:

    python benchmarks/gpu_plans.py measure resnet50 mobilenet large-transformer

The models are those of `gpu_schedules.py`, each with Adam, in mixed precision, under
MirroredStrategy. `float32-mobilenet-16:v100:4` is MobileNetV2 in float32, 16 images on
each card. Plans and times go to `results/gpu_plans/`.
"""

import argparse
import io
import json
import os
import re
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("KERAS_BACKEND", "jax")

import jax
import keras
import numpy as np
from rich.console import Console

import replicax as rx
from gpu_schedules import MODELS, Case

RESULTS = Path(__file__).parent / "results" / "gpu_plans"
FIGURE = Path(__file__).parents[1] / "docs" / "figures" / "gpu_scaling.png"
DRAWN = {
    "resnet50": "ResNet-50, 64 images a card",
    "mobilenet": "MobileNetV2, 64 images a card",
    "large-transformer": "Transformer, 12 x 1024, 16 texts a card",
}
_NAME = re.compile(
    r"(?P<float32>float32-)?(?P<model>[a-z]+[\w-]*?)(?:-(?P<rows>\d+))?$"
)


def plan(program: str) -> None:
    """Plan `MODEL:CLUSTER`, and write what `replicax plan` prints, and its JSON."""
    name, _, topology = program.partition(":")
    strategy = rx.MirroredStrategy()
    case, rows = _compiled(name, strategy)
    *hosts, cards = (int(n) for n in topology.split(":")[1].split("x"))
    num = cards * (hosts[0] if hosts else 1)
    batch = [
        jax.ShapeDtypeStruct((num * rows, *shape), dtype)
        for (_, *shape), dtype in (case.x, case.y)
    ]
    found = rx.plan(strategy, case.model, batch, topology=topology)
    RESULTS.mkdir(parents=True, exist_ok=True)
    file = RESULTS / f"{name}_{topology.replace(':', '_')}"
    found.write_json(file.with_suffix(".json"))
    console = Console(width=100, record=True, file=io.StringIO())
    found.show(console)
    text = "\n".join(x.rstrip() for x in console.export_text().splitlines()) + "\n"
    file.with_suffix(".txt").write_text(text, encoding="utf-8")
    print(f"{program}\n{text}", flush=True)


def measure(name: str, rounds: int = 5, steps: int = 40) -> None:
    """Time the steps of a model in `fit` on the cards here; add them to measured.json.

    A round is two epochs, one of `steps` steps more than the other: the difference has
    neither beginning nor end. All steps have the same batch, from the host.
    """
    strategy = rx.MirroredStrategy()
    case, rows = _compiled(name, strategy)
    rng = np.random.default_rng(0)
    (_, *x_shape), x_dtype = case.x
    (_, *y_shape), y_dtype = case.y
    num = rows * strategy.num_replicas_in_sync
    x = rng.integers(0, 255, (num, *x_shape)).astype(x_dtype)
    y = rng.integers(0, case.model.output_shape[-1], (num, *y_shape)).astype(y_dtype)

    def batches(count: int) -> Iterator[Any]:
        for _ in range(count):
            yield x, y

    def seconds(count: int) -> float:
        begin = time.perf_counter()
        case.model.fit(batches(count), steps_per_epoch=count, verbose=0)
        return time.perf_counter() - begin

    seconds(10)
    found = [(seconds(steps + 10) - seconds(10)) / steps for _ in range(rounds)]
    card = jax.devices("gpu")[0]
    stats = card.memory_stats() or {}
    file = RESULTS / "measured.json"
    known = json.loads(file.read_text()) if file.exists() else {}
    known[name] = {
        "card": card.device_kind,
        "cards": strategy.num_replicas_in_sync,
        "jax": jax.__version__,
        "seconds": [round(value, 6) for value in found],
        "peak_bytes": stats.get("peak_bytes_in_use"),
    }
    RESULTS.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(known, indent=1) + "\n", encoding="utf-8")
    print(f"{name}: {1e3 * statistics.median(found):.2f} ms a step", flush=True)


def _compiled(name: str, strategy: rx.Strategy) -> tuple[Case, int]:
    """The model that `name` says, with Adam, and the rows of a card's batch."""
    match = _NAME.match(name)
    if match is None or match["model"] not in MODELS:
        raise SystemExit(f"There is no model {name!r}; there are {', '.join(MODELS)}.")
    keras.mixed_precision.set_global_policy(
        "float32" if match["float32"] else "mixed_bfloat16"
    )
    with strategy.scope():
        case = MODELS[match["model"]]()
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        case.model.compile(optimizer="adam", loss=loss)
    (rows, *_), _ = case.x
    return case, int(match["rows"] or rows)


def draw() -> None:
    """Draw step times on 1 to 1,024 cards, communication that nothing hides apart."""
    from matplotlib import pyplot

    files = {name: RESULTS / f"{name}_h100_16x8.json" for name in DRAWN}
    files = {name: file for name, file in files.items() if file.exists()}
    figure, axes = pyplot.subplots(
        2, len(files), figsize=(3.6 * len(files), 5.2), sharex=True, squeeze=False
    )
    for (top, bottom), (name, file) in zip(axes.T, files.items(), strict=True):
        values = json.loads(file.read_text())
        sizes = [s["num_devices"] for s in values["scaling"]]
        places = range(len(sizes))
        busy = 1e3 * values["time"]["busy"]
        exposed = [busy / s["efficiency"] - busy for s in values["scaling"]]
        top.bar(places, [busy] * len(sizes), color="#3f51b5", label="kernels")
        top.bar(
            places,
            exposed,
            bottom=busy,
            color="#ff8f00",
            label="communication that nothing hides",
        )
        top.set_ylim(0, 1.1 * (busy + max(exposed)))
        top.set_title(DRAWN[name], fontsize=10)
        efficiency = [100 * s["efficiency"] for s in values["scaling"]]
        bottom.plot(places, efficiency, "o-", color="#3f51b5", markersize=4)
        bottom.annotate(
            f"{efficiency[-1]:.0f} %",
            (places[-1], efficiency[-1]),
            textcoords="offset points",
            xytext=(0, 7),
            ha="center",
            fontsize=9,
        )
        bottom.set_ylim(0, 112)
        bottom.set_xticks(places, [f"{n:,}" for n in sizes], rotation=60, fontsize=8)
        bottom.set_xlabel("H100 cards, 8 on each host")
        for axis in (top, bottom):
            axis.spines[["top", "right"]].set_visible(False)
    axes[0, 0].set_ylabel("ms per step, predicted")
    axes[1, 0].set_ylabel("efficiency, %")
    handles, labels = axes[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="lower center", ncols=2, frameon=False)
    figure.tight_layout(rect=(0, 0.05, 1, 1))
    figure.savefig(FIGURE, dpi=150)
    print(FIGURE)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=["plan", "measure", "draw"])
    parser.add_argument("programs", nargs="*", metavar="MODEL[:CLUSTER]")
    options = parser.parse_args()
    if options.what == "draw":
        draw()
    for program in options.programs:
        keras.utils.clear_session()
        (measure if options.what == "measure" else plan)(program)


if __name__ == "__main__":
    main()
