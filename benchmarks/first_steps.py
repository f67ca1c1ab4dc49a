"""From `python train.py` to the end of the first step, beside the same script in Keras.

Each timing is a process of its own: imports, the model, `compile`, one step of `fit`.
Plain Keras, replicax without its compilation cache and replicax with a filled cache
take turns. Of two devices and more, plain Keras still trains on one: it is the script
that a user had before.

    python benchmarks/first_steps.py --cases acdef --devices 1 2 --starts 3
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

PEERS = Path(__file__).parent / "bench" / "peers"
ENTRIES = ("plain Keras", "replicax", "replicax, cached")


def train(case_key: str, devices: int, call: str) -> None:
    """The script of a user: one step of `fit`, or one batch of `predict`."""
    sys.path.insert(0, str(PEERS))
    if devices:
        import replicax as rx

        if devices > 1:
            rx.set_logical_devices(devices)
        strategy = rx.MirroredStrategy()
        strategy.scope().__enter__()
    import keras
    import keras_models
    from cases import CASES

    case = CASES[case_key]
    model = keras_models.build(keras, case)
    loss = keras_models.loss_of(keras, case)
    model.compile(keras_models.optimizer_of(keras, case), loss)
    x, y = (rows[: case.batch] for rows in case.data(case.batch))
    if call == "predict":
        model.predict(x, batch_size=case.batch, verbose=0)
    else:
        model.fit(x, y, batch_size=case.batch, verbose=0)


def seconds_of(entry: str, case: str, devices: int, call: str, cache: Path) -> float:
    """Start the script once; the seconds until it has ended its first step."""
    environment = {
        **os.environ,
        "KERAS_BACKEND": "jax",
        "JAX_PLATFORMS": "cpu",
        "REPLICAX_COMPILATION_CACHE": str(cache) if "cached" in entry else "off",
    }
    devices = 0 if entry == "plain Keras" else devices
    command = [sys.executable, __file__, "--child", case, str(devices), call]
    begin = time.perf_counter()
    subprocess.run(command, env=environment, check=True, timeout=600)
    return time.perf_counter() - begin


def main() -> None:
    """Print a table: medians of the starts, and ratios to plain Keras."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", default="acdef", help="their keys")
    parser.add_argument("--devices", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--calls", nargs="+", default=["fit", "predict"])
    parser.add_argument("--starts", type=int, default=3)
    options = parser.parse_args()
    print("| call | case | devices | plain Keras, s | replicax | cached |")
    print("|---|---|---|---|---|---|")
    for call in options.calls:
        for case in options.cases:
            for devices in options.devices:
                with tempfile.TemporaryDirectory() as folder:
                    cache = Path(folder)
                    seconds_of("replicax, cached", case, devices, call, cache)
                    rounds = [
                        [seconds_of(e, case, devices, call, cache) for e in ENTRIES]
                        for _ in range(options.starts)
                    ]
                plain, fresh, cached = zip(*rounds, strict=True)
                shown = [f"{statistics.median(plain):.1f}"]
                for times in (fresh, cached):
                    ratios = sorted(t / p for t, p in zip(times, plain, strict=True))
                    shown.append(
                        f"{statistics.median(times):.1f}, "
                        f"{statistics.median(ratios):.2f} x "
                        f"({ratios[0]:.2f} to {ratios[-1]:.2f})"
                    )
                print(f"| {call} | ({case}) | {devices} | {' | '.join(shown)} |")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        train(sys.argv[2], int(sys.argv[3]), sys.argv[4])
    else:
        main()
