"""Workers that do not do the same in the same order end, and say where they parted."""

import time

import keras
import numpy as np
import pytest

import replicax as rx
from replicax.testing import Results, run

pytestmark = [pytest.mark.multiprocess, pytest.mark.timeout(150)]

LATEST_S = 12.0
"""A few seconds of ours, and what a loaded machine adds to them."""
ROWS = np.ones((16, 3), "float32")
TARGETS = np.ones((16, 1), "float32")


class Job:
    """What a worker of these tests has, compiled: only the order is left to differ."""

    def __init__(self) -> None:
        self.strategy = strategy = rx.MultiWorkerMirroredStrategy()
        self.is_wrong = strategy.task_id == 1
        with strategy.scope():
            self.total = keras.Variable(np.zeros(3, "float32"), name="total")
            self.model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
            self.model.compile("sgd", "mse", steps_per_execution=2)
        self.data = strategy.experimental_distribute_dataset(
            lambda: (ROWS for _ in range(5))
        )
        options = {"batch_size": 4, "verbose": 0}
        self.fit = lambda **more: self.model.fit(ROWS, TARGETS, **options, **more)
        self.evaluate = lambda: self.model.evaluate(ROWS, TARGETS, **options)
        self.predict = lambda: self.model.predict(ROWS, **options)

        def train_step(x):
            self.total.assign_add(rx.get_replica_context().all_reduce("sum", x))
            return x.sum()

        def other_step(x):
            self.total.assign_sub(rx.get_replica_context().all_reduce("sum", x))

        def local_step(x):
            number = rx.get_replica_context().replica_id_in_sync_group
            return x.sum() + number  # Equal values would need no other worker.

        self.steps = [train_step, other_step, local_step]
        for fn in self.steps:
            self.run(fn)
        self.loop()

    def run(self, fn, rows=ROWS[0]):
        return self.strategy.run(fn, (rows,))

    def sum_of(self, value):
        return float(self.strategy.reduce("sum", value, axis=None))

    def loop(self, skipped=None, last=None):
        """A loop over the data, of which a batch may be skipped, or the rest."""
        for number, batch in enumerate(self.data):
            if number != skipped:
                self.sum_of(self.run(self.steps[2], batch))
            if number == last:
                return


def another_program(job: Job) -> None:
    for step in range(10_000):
        job.run(job.steps[job.is_wrong and step == 20])
        time.sleep(0.01)


def a_skipped_batch(job: Job) -> None:
    job.loop(skipped=3 if job.is_wrong else None)
    job.loop()


def an_epoch_that_is_left(job: Job) -> None:
    job.loop(last=2 if job.is_wrong else None)
    job.loop()


def a_reduction_less(job: Job) -> None:
    for step in range(6):
        value = job.run(job.steps[2])
        if step != 3 or not job.is_wrong:
            job.sum_of(value)


def another_batch_method(job: Job) -> None:
    for method in (job.model.train_on_batch, job.model.test_on_batch):
        method(ROWS, TARGETS)
    for step in range(4):
        is_other = job.is_wrong and step == 2
        (job.model.test_on_batch if is_other else job.model.train_on_batch)(
            ROWS, TARGETS
        )


def a_save_less(job: Job, folder: str) -> None:
    manager = rx.CheckpointManager(rx.Checkpoint(model=job.model), folder)
    for step in range(4):
        job.run(job.steps[0])
        if step != 2 or not job.is_wrong:
            manager.save()
    np.asarray(job.total)


def a_step_more_that_nobody_needs(job: Job) -> None:
    for _ in range(6 if job.is_wrong else 5):
        job.run(job.steps[2])


def work(case, *args) -> None:
    job = Job()
    print(f"began at {time.time()}", flush=True)
    case(job, *args)


def failed(case, *args) -> Results:
    """Both workers end soon, for the same reason, and not to be started again."""
    results = run(
        work, num_workers=2, args=(case, *args), deadline_seconds=140, check=False
    )
    for result in results.values():
        assert result.exit_code == 1, result.output
        assert result.report is not None
        assert result.report.kind in ("order", "mismatch"), result.output
        began = float(result.output.partition("began at ")[2].split()[0])
        assert result.report.time - began < LATEST_S
    return results


@pytest.mark.slow
def test_another_program_and_its_step_are_named() -> None:
    for result in failed(another_program).values():
        assert (
            "the workers run different programs: at step 29, worker:0 is at run(Job."
            "__init__.<locals>.train_step (line "
        ) in result.output
        assert "and worker:1 is at run(Job.__init__.<locals>.other_step (line" in (
            result.output
        )
        assert "because of the exception above" not in result.output
        assert "Exit code 1 (permanent)" in result.output


def calls_that_differ() -> list[str]:
    job = Job()
    calls = {
        "fit or evaluate": (job.fit, job.evaluate),
        "evaluate or predict": (job.evaluate, job.predict),
        "epochs": (lambda: job.fit(epochs=2), lambda: job.fit(epochs=3)),
    }
    found = []
    for pair in calls.values():
        with pytest.raises(rx.ClusterMismatchError) as caught:
            pair[job.is_wrong]()
        found.append(str(caught.value))
    job.fit()  # The workers are together still.
    return found


@pytest.mark.slow
def test_calls_of_a_model_are_compared_before_its_data() -> None:
    for messages in run(
        calls_that_differ, num_workers=2, deadline_seconds=140
    ).returned.values():
        fit, evaluate, epochs = messages
        assert "worker:0 calls Sequential.fit(batch_size=4), while worker:1" in fit
        assert "worker:1 calls Sequential.evaluate(batch_size=4)" in fit
        assert "while worker:1 calls Sequential.predict(batch_size=4)" in evaluate
        assert "fit(batch_size=4, epochs=3). All workers must make the same" in epochs


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "words"),
    [
        (a_skipped_batch, ["at run(Job.", "at the next batch of DistributedDataset"]),
        (an_epoch_that_is_left, ["the next batch", "at DistributedDataset 1, epoch 3"]),
        (a_reduction_less, ["at reduce('SUM', axis=None)", "at run(Job.__init__"]),
        (another_batch_method, ["Sequential.train_step", "Sequential.test_step"]),
    ],
)
def test_the_operations_of_both_workers_are_named(case, words) -> None:
    for result in failed(case).values():
        assert "the workers run different programs: at step" in result.output
        for word in words:
            assert word in result.output


@pytest.mark.slow
def test_a_skipped_save_is_found(tmp_path) -> None:
    for result in failed(a_save_less, str(tmp_path)).values():
        assert "waits in replicax.checkpoint." in result.output
        assert "is at run(Job.__init__.<locals>.train_step" in result.output


@pytest.mark.slow
def test_an_extra_step_is_found() -> None:
    case = a_step_more_that_nobody_needs
    results = run(work, num_workers=2, args=(case,), deadline_seconds=140, check=False)
    # The worker whose script has ended keeps its own exit status.
    assert "worker:0 ended its script, but" in results["worker:0"].output
    other = results["worker:1"]
    assert other.exit_code == 1
    assert other.report is not None
    assert other.report.kind == "exited"
    assert "ended its script after step 13, while worker:1 is at step 14." in (
        other.output
    )
    assert other.output.count("run(Job.__init__.") == 2
