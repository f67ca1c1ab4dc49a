"""`strategy.watch`: a jitted step that is counted, compared and watched as in `run`."""

import threading
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import replicax as rx
import replicax.testing
from replicax.jax_loops import watched
from replicax.testing import Results

STEP_S = 4.0
LATEST_S = 12.0
ROWS = np.arange(8 * 128, dtype="float32").reshape(8, 128) / 1024


def make_step(scale: float = 0.1) -> Any:
    def train_step(weights: Any, x: Any) -> Any:
        def loss_of(weights: Any) -> Any:
            return jnp.mean(jnp.square(x @ weights - x))

        loss, gradient = jax.value_and_grad(loss_of)(weights)
        return weights - scale * gradient, loss

    return jax.jit(train_step, donate_argnums=0)


def on_one_device(num_steps: int) -> Any:
    weights, losses = jnp.zeros((128, 128)), []
    for _ in range(num_steps):
        weights, loss = make_step()(weights, ROWS)
        losses.append(loss)
    return weights, losses


def start(strategy: rx.Strategy) -> tuple[Any, Any]:
    """Weights and a batch on the mesh."""
    weights = strategy.init(jnp.zeros, (128, 128))
    data = strategy.experimental_distribute_dataset(ROWS, batch_size=8)
    (batch,) = map(strategy.global_batch, data)
    return weights, batch


def train(strategy: rx.Strategy, step: Any, num_steps: int) -> Any:
    (weights, batch), losses = start(strategy), []
    for _ in range(num_steps):
        weights, loss = step(weights, batch)
        losses.append(loss)
    return weights, losses


def test_it_is_the_jitted_function() -> None:
    strategy = rx.FullyShardedStrategy(["cpu:0", "cpu:1"])
    jitted = make_step()
    step = strategy.watch(jitted)
    assert step.__name__ == "train_step"
    weights, losses = train(strategy, step, 3)
    wanted, wanted_losses = on_one_device(3)
    np.testing.assert_allclose(weights, wanted, rtol=1e-5)
    np.testing.assert_allclose(losses, wanted_losses, rtol=1e-5)
    args = start(strategy)
    assert step.lower(*args).as_text() == jitted.lower(*args).as_text()


def test_what_is_refused() -> None:
    strategy = rx.MirroredStrategy(["cpu:0", "cpu:1"])
    with pytest.raises(TypeError, match=r"compiled by jax.jit; got <function.*Write"):
        strategy.watch(lambda x: x)
    with pytest.raises(ValueError, match="num_steps"):
        strategy.watch(make_step(), num_steps=0)
    step = strategy.watch(jax.jit(lambda x: x))
    with pytest.raises(rx.ContextError, match="inside a replica function"):
        strategy.run(lambda: step(1.0))
    for transformed in (jax.jit(step), jax.grad(step)):
        with pytest.raises(rx.ContextError, match=r"watch: .* JAX transformation"):
            transformed(1.0)
    with pytest.raises(ValueError, match="CentralStorageStrategy keeps variables"):
        rx.CentralStorageStrategy(["cpu:0"]).watch(make_step())


def test_transformations_are_recognised_in_the_first_call() -> None:
    watched._eager_trace_type.cache_clear()
    seen = []
    jax.jit(lambda: seen.append(watched.is_eager()))()
    jax.grad(lambda x: seen.append(watched.is_eager()) or x)(1.0)
    assert seen == [False, False]
    assert watched.is_eager()


def test_steps_of_several_threads() -> None:
    """Without one order of dispatch on all devices, collectives would hang."""
    strategy = rx.FullyShardedStrategy([f"cpu:{i}" for i in range(4)])
    states: dict[int, Any] = {}

    def work(number: int) -> None:
        states[number] = train(strategy, strategy.watch(make_step()), 20)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
        assert not thread.is_alive()
    wanted, wanted_losses = on_one_device(20)
    for weights, losses in states.values():
        np.testing.assert_allclose(weights, wanted, rtol=1e-5, atol=1e-7)
        np.testing.assert_allclose(losses, wanted_losses, rtol=1e-5)


class Model(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.dense = nnx.Linear(128, 1, rngs=rngs)


@nnx.jit
def nnx_step(model: Any, optimizer: Any, x: Any) -> Any:
    loss, grads = nnx.value_and_grad(lambda m: jnp.square(m.dense(x)).mean())(model)
    optimizer.update(model, grads)
    return loss


def nnx_losses(strategy: Any = None) -> Any:
    model = (
        Model(nnx.Rngs(0)) if strategy is None else strategy.init(Model, nnx.Rngs(0))
    )
    optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
    x, step = ROWS, nnx_step
    if strategy is not None:
        x, step = start(strategy)[1], strategy.watch(nnx_step)
    return [float(step(model, optimizer, x)) for _ in range(3)]


def equal_steps() -> dict[str, Any]:
    strategy = rx.FullyShardedStrategy()
    step = strategy.watch(make_step())
    weights, losses = train(strategy, step, 5)
    watch = strategy.workers.watch
    assert watch is not None
    results = {
        "losses": [float(x) for x in losses],
        "steps": watch.steps[strategy.workers.name],
    }
    # Another number of rows makes another program, which the workers compare once.
    step(weights, strategy.global_batch(rx.PerReplica(jnp.zeros((2, 1, 128)))))
    results["programs"] = len(step._operations)
    results["nnx"] = nnx_losses(strategy)
    other = strategy.watch(make_step(0.1 + strategy.workers.index))
    try:
        other(*start(strategy))
    except rx.ClusterMismatchError as error:
        results["error"] = str(error)
    return results


def test_workers_agree_on_a_program_once() -> None:
    returned = replicax.testing.run(equal_steps, num_workers=2).returned
    for results in returned.values():
        np.testing.assert_allclose(results["losses"], on_one_device(5)[1], rtol=1e-5)
        assert results["steps"] == 5
        assert results["programs"] == 2
        np.testing.assert_allclose(results["nnx"], nnx_losses(), rtol=1e-5)
        assert "differ in the program of watch(" in results["error"]


def with_trouble(trouble: str) -> None:
    """Make steps; worker 1 is late at the eleventh, or calls another step."""
    strategy = rx.MultiWorkerMirroredStrategy(timeouts=rx.Timeouts(step=STEP_S))
    weights, batch = start(strategy)
    jitted = (make_step(), jax.jit(lambda *args: make_step(0.2)(*args)))
    steps = [strategy.watch(step) for step in jitted]
    for step in steps:
        weights, _ = step(weights, batch)
    for number in range(10_000):
        is_other = number == 10 and strategy.task_id == 1
        if is_other and trouble == "blocked":
            read_next_batch()
        weights, _ = steps[is_other](weights, batch)
        time.sleep(0.01)


def read_next_batch() -> None:
    time.sleep(10 * LATEST_S)


def run_with(trouble: str) -> Results:
    return replicax.testing.run(
        with_trouble, num_workers=2, args=(trouble,), check=False
    )


@pytest.mark.multiprocess
def test_a_worker_that_misses_a_step_is_named() -> None:
    for result in run_with("blocked").values():
        report = result.report
        assert report is not None, result.output
        assert (report.kind, report.culprit) == ("stuck", "worker:1"), result.output
        assert result.exit_code == 138
        assert "did not go on after step 12" in result.output
        assert report.steps["worker:1"] == 12 < report.steps["worker:0"]


@pytest.mark.slow
@pytest.mark.multiprocess
def test_a_worker_that_calls_another_step_is_found() -> None:
    for result in run_with("another step").values():
        report = result.report
        assert report is not None, result.output
        assert report.kind == "order", result.output
        assert "at step 13, worker:0 is at watch(make_step.<loc" in report.message
        assert "worker:1 is at watch(with_trouble.<locals>.<lambda>" in report.message
