"""A soak: long trainings, whose processes are killed, lose nothing and do not grow.

    python benchmarks/soak.py                      # an hour or less on a few cores
    python benchmarks/soak.py --steps-scale 0.05   # a few minutes

Three trainings of the digits data, each step of few milliseconds:

- `devices`: 20,000 steps on 8 logical devices of one process;
- `workers`: 5,000 steps on 2 workers in step, of which one is killed every 500;
- `servers`: 10,000 steps on 2 workers and 2 parameter servers, of which one is killed
  every 1,000.

The first two end with the weights of a run that nobody disturbed; what parameter
servers have applied and what they report as lost is what the workers made. No process
has more than 5 % more memory at its end than after its first steps, and the last one of
a task no more than the first that went on from a backup. It prints a table, and ends
with 1 if any of that does not hold.
"""

import argparse
import dataclasses
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

EPOCH_STEPS = 500
BATCH_SIZE = 32
DONE = re.compile(r"SOAK (\{.*\})")
WARM_UP = 0.1  # Of a process' steps, and at least so many:
WARM_UP_STEPS = 100
POLL_SECONDS = 0.2
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


@dataclasses.dataclass(frozen=True)
class Job:
    """A training.

    Attributes:
        steps: How many steps it has in all.
        kills: How often a process is killed, in equal distances.
        killed: Who is killed, in turn.
        options: Of `replicax run`; None: it is a single process.
    """

    steps: int
    kills: int = 0
    killed: tuple[str, ...] = ()
    options: tuple[str, ...] | None = None


JOBS = {
    "devices": Job(20_000),
    "workers": Job(5_000, 9, ("worker:1", "worker:0"), ("--workers", "2")),
    "servers": Job(
        10_000,
        9,
        ("ps:1", "worker:1", "ps:0", "worker:0"),
        ("--workers", "2", "--ps", "2"),
    ),
}


# What a task runs.


def train(name: str, steps: int, folder: Path) -> None:
    """Train as one task of a job, and say how it went."""
    import replicax as rx

    task = json.loads(os.environ.get("TF_CONFIG", "{}")).get("task", {})
    own = f"{task.get('type', 'worker')}:{task.get('index', 0)}"
    (folder / f"pid-{own}").write_text(str(os.getpid()))
    if name == "devices":
        rx.set_logical_devices(8)
    strategy: Any = {
        "devices": rx.MirroredStrategy,
        "undisturbed devices": lambda: rx.OneDeviceStrategy("cpu:0"),
        "workers": rx.MultiWorkerMirroredStrategy,
        "servers": lambda: rx.ParameterServerStrategy(
            snapshot_dir=str(folder / "snapshots"),
            snapshot_every_updates=50,  # At least one between two kills.
            timeouts=rx.Timeouts(heartbeat=10),
        ),
    }[name]()
    import keras
    from sklearn.datasets import load_digits

    quiet: Any = 0  # Keras declares it a text.

    class Progress(keras.callbacks.Callback):
        """Writes down how far this process is."""

        first = 0

        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            self.first = epoch * EPOCH_STEPS

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            if batch % 10 == 9:
                part = folder / f".steps-{own}"
                part.write_text(f"{os.getpid()} {self.first + batch + 1}")
                part.rename(folder / f"steps-{own}")

    x, y = load_digits(return_X_y=True)
    rows = np.arange(EPOCH_STEPS * BATCH_SIZE) % len(x)
    x, y = (x[rows] / 16).astype("float32"), y[rows].astype("int32")
    keras.utils.set_random_seed(1)
    with strategy.scope():
        model = keras.Sequential(
            [keras.Input((64,)), keras.layers.Dense(64, "relu"), keras.layers.Dense(10)]
        )
        model.compile(
            keras.optimizers.SGD(0.02, momentum=0.9),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        )
    callbacks: list[Any] = [Progress()]
    if name == "workers":
        callbacks.append(rx.BackupAndRestore(str(folder / "backups"), save_freq=50))
    model.fit(
        x,
        y,
        batch_size=BATCH_SIZE,
        epochs=-(-steps // EPOCH_STEPS),
        callbacks=callbacks,
        verbose=quiet,
    )
    (folder / "trained").touch()
    found: dict[str, Any] = {"iterations": int(model.optimizer.iterations)}
    if name == "servers":
        # All have left `fit`, and nothing is under way.
        found |= {
            "servers": [
                {key: status[key] for key in ("applied", "lost")}
                for connection in strategy.session.connections
                for status in [connection.call("store.status")]
            ],
        }
    # Workers in step predict together.
    accuracy = np.mean(model.predict(x[:1797], verbose=quiet).argmax(-1) == y[:1797])
    if own == "worker:0":
        np.savez(folder / "weights.npz", *model.get_weights())
        print("SOAK", json.dumps(found | {"accuracy": float(accuracy)}), flush=True)


# What watches and kills the tasks.


class Memory:
    """The resident memory of one task through its restarts, in MiB."""

    def __init__(self) -> None:
        self.lives: dict[int, list[tuple[int, float]]] = {}  # By process id.

    def read(self, pid: int, step: int) -> None:
        """Note a process' memory at a step of the job."""
        try:
            pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
        except (FileNotFoundError, ProcessLookupError, IndexError):
            return
        if pages:
            self.lives.setdefault(pid, []).append((step, pages * PAGE_BYTES / 2**20))

    def spans(self) -> list[tuple[float, float]]:
        """Each process' memory after its first steps, and at its end."""
        found = []
        for samples in self.lives.values():
            first, last = samples[0][0], samples[-1][0]
            warm = first + max(WARM_UP_STEPS, WARM_UP * (last - first))
            after = [size for step, size in samples if step >= warm]
            if len(after) >= 4:
                quarter = max(1, len(after) // 4)
                found.append((median(after[:quarter]), median(after[-quarter:])))
        return found


class Run:
    """A job that runs, as a process of its own with its tasks below it.

    Args:
        name: The job's.
        job: How long it is, and who is killed.
        folder: Where its tasks write.
    """

    def __init__(self, name: str, job: Job, folder: Path) -> None:
        self.memory: dict[str, Memory] = {}
        self.kills = 0
        self.output = ""
        self._job = job
        self._folder = folder
        folder.mkdir()
        command = [
            *(__file__, "--task", name, "--steps", str(job.steps)),
            *("--folder", str(folder)),
        ]
        if job.options is not None:
            main = "from replicax.cli import main; main()"
            restarts = ("--max-restarts", "1000", "--backoff-seconds", "0.1")
            command = ["-c", main, "run", *job.options, *restarts, *command]
        self._log = folder / "log"
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                [sys.executable, *command],
                stdout=log,
                stderr=subprocess.STDOUT,
                env={"JAX_PLATFORMS": "cpu"} | os.environ,
            )

    def finish(self) -> dict[str, Any]:
        """Go on to the end; what the tasks have found."""
        distance = self._job.steps / (self._job.kills + 1)
        victims = itertools.cycle(self._job.killed)
        seen: dict[int, int] = {}
        while self._process.poll() is None:
            time.sleep(POLL_SECONDS)
            step = self._look(seen)
            due = self.kills < self._job.kills and step >= (self.kills + 1) * distance
            if due and not (self._folder / "trained").exists():
                self.kills += self._kill(next(victims))
        self.output = self._log.read_text()
        found = DONE.search(self.output)
        if self._process.returncode or found is None:
            raise SystemExit(f"{self.output[-6000:]}\nThe job has failed; see above.")
        return json.loads(found[1])

    def _look(self, seen: dict[int, int]) -> int:
        """Read all tasks' memory; the step of the job."""
        for path in self._folder.glob("steps-*"):
            pid, step = map(int, path.read_text().split())
            seen[pid] = step
        step = max(seen.values(), default=0)
        if seen and not (self._folder / "trained").exists():
            tasks = {
                path.name.removeprefix("pid-"): int(path.read_text() or 0)
                for path in self._folder.glob("pid-*")
            }
            if self._job.options is not None:
                tasks["launcher"] = self._process.pid
            for name, pid in tasks.items():
                # One that was started again has not begun, and is still importing.
                if not name.startswith("worker") or pid in seen:
                    self.memory.setdefault(name, Memory()).read(pid, step)
        return step

    def _kill(self, name: str) -> bool:
        try:
            os.kill(int((self._folder / f"pid-{name}").read_text()), signal.SIGKILL)
        except ProcessLookupError:  # It has ended with another, and comes back.
            return False
        return True

    @property
    def weights(self) -> list[np.ndarray]:
        """At the end, those of worker 0."""
        with np.load(self._folder / "weights.npz") as file:
            return [file[name] for name in file.files]


def problems_of(
    name: str, run: Run, found: dict[str, Any], other: Run | None
) -> list[str]:
    """What was lost in a job, as sentences."""
    made = -(-run._job.steps // EPOCH_STEPS) * EPOCH_STEPS
    problems = []
    if found["accuracy"] < 0.97:
        problems.append(f"{name}: accuracy is {found['accuracy']:.3f}")
    if other is not None:
        if found["iterations"] != made:
            problems.append(f"{name}: {found['iterations']} updates of {made}")
        pairs = zip(run.weights, other.weights, strict=True)
        off = max(float(np.abs(a - b).max()) for a, b in pairs)
        print(f"{name}: weights differ by {off:.1e} from an undisturbed run")
        if not off < 1e-3:
            problems.append(f"{name}: weights are off by {off:.1e}")
        return problems
    print(f"{name}: {made} steps; {json.dumps(found)}")
    for server, counts in enumerate(found["servers"]):
        # A killed worker's last updates may be applied and not counted as made. An
        # update that a killed server did not answer may be lost and applied.
        missing = made - counts["applied"] - counts["lost"]
        # A killed worker gives up at most two batches.
        if not -counts["lost"] <= missing <= 2 * run.kills:
            problems.append(
                f"{name}: ps:{server} has applied {counts['applied']} and lost "
                f"{counts['lost']} of {made}, with {run.kills} kills"
            )
    if "as other workers did" in run.output:
        problems.append(f"{name}: some steps were trained on twice")
    return problems


def rows_of(name: str, run: Run, limit: float) -> tuple[list[str], list[str]]:
    """The table's rows of a job, and what has grown, as sentences."""
    rows, problems = [], []
    for task, memory in sorted(run.memory.items()):
        spans = memory.spans()
        if not spans:
            rows.append(f"| {name} | {task} | {len(memory.lives)} | | | | |")
            continue
        # One that was started again has read a backup or a snapshot, which takes its
        # memory once: from then on nothing grows.
        start, end = spans[min(1, len(spans) - 1)][0], spans[-1][1]
        within = max(after / before - 1 for before, after in spans)
        growth = end / start - 1
        rows.append(
            f"| {name} | {task} | {len(memory.lives)} | {start:.0f} | {end:.0f} | "
            f"{growth:+.1%} | {within:+.1%} |"
        )
        if max(growth, within) > limit:
            problems.append(
                f"{name}: {task} has grown by {max(growth, within):.1%}, and may by "
                f"{limit:.0%}"
            )
    return rows, problems


def soak(
    names: Sequence[str], scale: float, kills: int | None, limit: float, folder: Path
) -> list[str]:
    """Run jobs one after another; what does not hold, as sentences."""
    rows: list[str] = []
    problems: list[str] = []
    for name in names:
        job = JOBS[name]
        job = dataclasses.replace(
            job,
            steps=max(EPOCH_STEPS, round(job.steps * scale)),
            kills=(kills or max(1, round(job.kills * scale))) if job.kills else 0,
        )
        began = time.monotonic()
        other = None
        if name != "servers":
            task, options = ("undisturbed devices", None)
            if name == "workers":
                task, options = name, job.options
            quiet = dataclasses.replace(job, kills=0, options=options)
            other = Run(task, quiet, folder / f"undisturbed {name}")
            other.finish()
        run = Run(name, job, folder / name)
        found = run.finish()
        print(
            f"{name}: {job.steps} steps, {run.kills} kills, "
            f"{time.monotonic() - began:.0f} s"
        )
        if run.kills < job.kills:
            problems.append(f"{name}: only {run.kills} of {job.kills} kills took place")
        problems += problems_of(name, run, found, other)
        more, grown = rows_of(name, run, limit)
        rows += more
        problems += grown
    print(
        "\n| job | task | starts | MiB at the start | at the end | growth | "
        "in one process |"
    )
    print("|---|---|---|---|---|---|---|")
    print("\n".join(rows))
    return problems


def main() -> None:
    """Run as the command line says."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps-scale", type=float, default=1.0)
    parser.add_argument("--only", nargs="+", choices=JOBS, default=list(JOBS))
    parser.add_argument("--kills", type=int, help="in each job with several tasks")
    parser.add_argument("--growth-limit", type=float, default=0.05)
    parser.add_argument("--folder", type=Path, help="where to leave all files")
    parser.add_argument("--task", help=argparse.SUPPRESS)
    parser.add_argument("--steps", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.task is not None:
        train(options.task, options.steps, options.folder)
        return
    with tempfile.TemporaryDirectory(prefix="soak-") as scratch:
        folder = options.folder or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        problems = soak(
            options.only,
            options.steps_scale,
            options.kills,
            options.growth_limit,
            folder,
        )
    print("\n" + "\n".join(problems or ["Nothing was lost, and nothing grows."]))
    sys.exit(bool(problems))


if __name__ == "__main__":
    main()
