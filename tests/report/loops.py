"""A custom loop that is reported, also on workers, which must not import conftest."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np

import replicax as rx
from replicax.report.runs import Fit, read_run

X = np.arange(21 * 4, dtype="float32").reshape(21, 4) / 84


def make_step(strategy: rx.Strategy, way: str, num_steps: int = 1) -> Any:
    """A step `(weights, batch) -> (weights, loss)`; with "nothing" it returns None."""

    def step(weights: Any, x: Any) -> Any:
        loss, gradient = jax.value_and_grad(lambda w: jnp.mean((x @ w - 1) ** 2))(
            weights
        )
        return weights - 0.1 * gradient, loss

    if way == "watch":
        jitted = strategy.watch(jax.jit(step, donate_argnums=0), num_steps=num_steps)
        return lambda w, batch: jitted(w, strategy.global_batch(batch))

    def replica_step(weights: Any, x: Any) -> Any:
        weights, loss = step(weights, x)
        context = rx.get_replica_context()
        return context.all_reduce("mean", weights), context.all_reduce("mean", loss)

    if way == "run":
        return lambda w, batch: strategy.run(replica_step, args=(w, batch), donate=(0,))
    with strategy.scope():
        total = keras.Variable(0.0, aggregation="sum")

    def assign(x: Any) -> None:
        total.assign_add(jnp.sum(x))

    def run(weights: Any, batch: Any) -> tuple[Any, float]:
        assert strategy.run(assign, args=(batch,)) is None
        return weights, 1.0

    return run


def train(
    strategy: rx.Strategy,
    page: Path,
    way: str,
    *,
    num_steps: int = 1,
    num_epochs: int = 2,
    **options: Any,
) -> list[float]:
    """Train and validate for some epochs; returns their losses."""
    step = make_step(strategy, way, num_steps)
    weights: Any = strategy.shard(jnp.zeros((4,)))
    dataset = strategy.experimental_distribute_dataset(X, batch_size=8)
    validation = strategy.experimental_distribute_dataset(X, batch_size=2)
    losses = []
    report = rx.callbacks.Report(page)
    with report.recording(strategy, **options):
        for _ in range(num_epochs):
            loss: Any = None
            for batch in dataset:
                weights, loss = step(weights, batch)
            for batch in validation:
                strategy.run(jnp.sum, args=(batch,))
            losses.append(float(loss))
            report.end_epoch({"loss": loss})
    return losses


def fits_of(page: Path) -> list[Fit]:
    run = read_run(page)
    assert not run.missing
    return run.chief.fits


def on_worker(page: str) -> list[float]:
    return train(rx.MultiWorkerMirroredStrategy(), Path(page), "watch")
