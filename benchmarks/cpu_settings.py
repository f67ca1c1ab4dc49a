"""What `REPLICAX_CPU=tuned` gains and costs, beside the default.

Each round starts one process per setting, in turns: `fit` of a case on two logical CPU
devices. The table has milliseconds a step and the peak of the process' memory.

    python benchmarks/cpu_settings.py --cases ab --rounds 7
"""

import argparse
import os
import resource
import statistics
import subprocess
import sys

SETTINGS = ("on", "tuned")
SECONDS = 5.0

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--cases", default="ab", help="keys of the benchmarks' cases")
parser.add_argument("--rounds", type=int, default=7)
parser.add_argument("--child", action="store_true", help="print one measurement")


def measure(key: str) -> None:
    """Print the milliseconds of a step, and the peak memory in MiB."""
    import replicax as rx

    rx.set_logical_devices(2)
    import keras

    from whole_batch_cost import CASES, fitter

    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    fit = fitter(CASES[key], rx.MirroredStrategy(["cpu:0", "cpu:1"]), loss)
    fit(steps := max(2, round(SECONDS / fit(3) / 2)))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
    print(fit(steps) * 1e3, peak)


def main(cases: str, rounds: int) -> None:
    """Print the table."""
    print("| case | REPLICAX_CPU | ms a step: min | median | peak MiB |")
    print("|---|---|---|---|---|", flush=True)
    for key in cases:
        command = [sys.executable, __file__, "--child", "--cases", key]
        rows: dict[str, list[tuple[float, ...]]] = {name: [] for name in SETTINGS}
        for index in range(rounds * len(SETTINGS)):
            name = SETTINGS[index % 2 ^ index // 2 % 2]  # on, tuned, tuned, on
            environ = {**os.environ, "REPLICAX_CPU": name}
            output = subprocess.check_output(command, env=environ, text=True)
            rows[name].append(tuple(map(float, output.split()[-2:])))
        for name, measured in rows.items():
            times, peaks = zip(*measured, strict=True)
            middle, peak = map(statistics.median, (times, peaks))
            print(f"| {key} | {name} | {min(times):.2f} | {middle:.2f} | {peak:.0f} |")


if __name__ == "__main__":
    options = parser.parse_args()
    measure(options.cases) if options.child else main(options.cases, options.rounds)
