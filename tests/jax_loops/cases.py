"""Steps as JAX users write them, each for one device and for replicas.

A case's step computes with `replicas`: on one device its methods return their argument,
in `strategy.run` they are replicax'. So one device runs plain JAX, Flax and Optax.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
import optax

import replicax as rx

# The last of the batches has 5 rows, which neither 2 nor 4 replicas divide: they are
# on fewer replicas. Cases that say `even` have the other two.
BATCH = 8
_RNG = np.random.default_rng(0)
X = _RNG.normal(size=(21, 6)).astype("float32")
Y = _RNG.integers(0, 3, 21).astype("int32")

STRATEGIES: dict[str, Callable[[], rx.Strategy]] = {
    "one": lambda: rx.OneDeviceStrategy("cpu:0"),
    "mirrored": lambda: rx.MirroredStrategy(["cpu:0", "cpu:1"]),
    "virtual": lambda: rx.MirroredStrategy(["cpu:0", "cpu:1"], replicas_per_device=2),
    "divided": lambda: rx.MirroredStrategy(["cpu:0", "cpu:1"], shard_update=True),
    "sharded": lambda: rx.FullyShardedStrategy([f"cpu:{i}" for i in range(4)]),
    "central": lambda: rx.CentralStorageStrategy(["cpu:0", "cpu:1"], "cpu:2"),
}
ALL = tuple(STRATEGIES)
SEVERAL = ALL[1:]
"""The strategies with several replicas."""


class Replicas(Protocol):
    """The operations over replicas that steps call."""

    def mean(self, tree: Any) -> Any:
        """The mean over the replicas."""

    def sum(self, tree: Any) -> Any:
        """The sum over the replicas."""

    def gather(self, x: Any) -> Any:
        """The rows of all replicas."""

    def own_rows(self, x: Any, num: int) -> Any:
        """This replica's `num` rows of the rows of all."""

    def axis_names(self) -> tuple[str, ...]:
        """For JAX's collectives."""
        ...

    def own_key(self, key: Any) -> Any:
        """A random key of this replica."""

    def per_replica(self, tree: Any) -> Any:
        """State that differs between replicas; called outside a step."""

    def distributed(self, tx: Any, op: str = "mean") -> Any:
        """An optimizer that combines gradients."""


class OneDevice:
    """Plain JAX."""

    num = 1

    def mean(self, tree: Any) -> Any:
        return tree

    sum = gather = per_replica = own_key = mean

    def own_rows(self, x: Any, num: int) -> Any:
        return x[:num]

    def axis_names(self) -> tuple[str, ...]:
        return ()

    def distributed(self, tx: Any, op: str = "mean") -> Any:
        return tx


class OnReplicas:
    """The operations of replicax."""

    def __init__(self, strategy: rx.Strategy) -> None:
        self._strategy = strategy

    def mean(self, tree: Any) -> Any:
        return rx.get_replica_context().all_reduce("mean", tree)

    def sum(self, tree: Any) -> Any:
        return rx.get_replica_context().all_reduce("sum", tree)

    def gather(self, x: Any) -> Any:
        return rx.get_replica_context().all_gather(x, 0, drop_copies=True)

    def own_rows(self, x: Any, num: int) -> Any:
        replica = rx.get_replica_context().replica_id_in_sync_group
        return jax.lax.dynamic_slice_in_dim(x, replica * num, num)

    def axis_names(self) -> tuple[str, ...]:
        return rx.get_replica_context().axis_names

    def own_key(self, key: Any) -> Any:
        replica = rx.get_replica_context().replica_id_in_sync_group
        return jax.random.fold_in(key, replica)

    def per_replica(self, tree: Any) -> Any:
        return self._strategy.per_replica(tree)

    def distributed(self, tx: Any, op: str = "mean") -> Any:
        return rx.distributed(tx, op)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """A line of the table.

    Attributes:
        step: `step(replicas, state, batch)` returns the new state and results. For
            objects that it changes in place it returns results.
        start: `start(replicas)` makes the first state.
        in_place: Whether the state consists of objects that the step changes.
        by_hand: `by_hand(num_replicas, state, batch)`, a step for one device, where
            several replicas compute something else than one device does.
        refused: The error and a word of its message, by the names of strategies.
        compared: The part of the last state that is compared.
        even: Whether to leave out the batch that does not divide.
        rtol: Sums of float32 in another order differ by 1e-6; steps of Adam by more,
            since they divide by small numbers.
        jit: Compiles the step for one device.
        donate: The argument `donate` of `run`.
    """

    step: Callable[..., Any]
    start: Callable[[Replicas], Any]
    in_place: bool = False
    by_hand: Callable[..., Any] | None = None
    refused: Mapping[tuple[str, ...], tuple[type[Exception], str]] = dataclasses.field(
        default_factory=dict
    )
    compared: Callable[[Any], Any] = lambda state: state
    even: bool = False
    rtol: float = 2e-5
    jit: Callable[[Any], Any] = jax.jit
    donate: tuple[int, ...] = ()

    def refusal(self, strategy: str) -> tuple[type[Exception], str] | None:
        """The expected error on a strategy; None: the case is supported."""
        refusals = [x for names, x in self.refused.items() if strategy in names]
        return refusals[0] if refusals else None

    def data(self) -> tuple[np.ndarray, np.ndarray]:
        num = 2 * BATCH if self.even else len(X)
        return X[:num], Y[:num]

    def expected(self, num_replicas: int) -> tuple[Any, list[Any]]:
        """The last state and the results of plain JAX."""
        replicas = OneDevice()
        state = self.start(replicas)

        def step(state: Any, batch: Any) -> Any:
            if self.by_hand is not None:
                return self.by_hand(num_replicas, state, batch)
            return self.step(replicas, state, batch)

        x, y = self.data()
        batches = [
            (x[i : i + BATCH], y[i : i + BATCH]) for i in range(0, len(x), BATCH)
        ]
        return self._loop(self.jit(step), state, batches)

    def actual(self, strategy: rx.Strategy) -> tuple[Any, list[Any]]:
        """The last state and the results of `strategy.run`."""
        replicas, users_step = OnReplicas(strategy), self.step
        with strategy.scope():
            state = self.start(replicas)

        def step(state: Any, batch: Any) -> Any:
            return users_step(replicas, state, batch)

        def run(state: Any, batch: Any) -> Any:
            return strategy.run(step, args=(state, batch), donate=self.donate)

        batches = strategy.experimental_distribute_dataset(
            self.data(), batch_size=BATCH
        )
        state, results = self._loop(run, state, batches)
        gathered = [strategy.gather(x, 0) if _differs(x) else x for x in results]
        return state, gathered

    def _loop(self, step: Any, state: Any, batches: Any) -> tuple[Any, list[Any]]:
        results = []
        for batch in batches:
            out = step(state, batch)
            if not self.in_place:
                state, out = out
            results.append(out)
        if self.in_place:
            from flax import nnx

            arrays = nnx.state(state, nnx.Not(nnx.RngState))
            return self.compared(nnx.to_pure_dict(arrays)), results
        return self.compared(state), results


def _differs(tree: Any) -> bool:
    leaves = jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, rx.PerReplica))
    return any(isinstance(x, rx.PerReplica) for x in leaves)


def numbers(x: Any) -> np.ndarray:
    """An array's numbers; a random key's data."""
    assert not isinstance(x, rx.PerReplica), "state differs between the replicas"
    is_key = isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
    return np.asarray(jax.random.key_data(x) if is_key else x)


def assert_equal(actual: Any, expected: Any, rtol: float) -> None:
    is_leaf = lambda x: isinstance(x, rx.PerReplica)  # noqa: E731
    (actual, tree), (expected, other) = (
        jax.tree.flatten(x, is_leaf=is_leaf) for x in (actual, expected)
    )
    assert tree == other
    for x, y in zip(actual, expected, strict=True):
        if not isinstance(y, jax.Array | np.ndarray | float | int):
            assert x == y
            continue
        x, y = numbers(x), numbers(y)
        assert x.dtype == y.dtype
        if np.issubdtype(y.dtype, np.integer) or y.dtype == bool:
            np.testing.assert_array_equal(x, y)
        else:
            x, y = x.astype("float32"), y.astype("float32")
            np.testing.assert_allclose(x, y, rtol=rtol, atol=rtol / 10)


# A linear model, and what most steps do with it.


def parameters(_: Replicas | None = None) -> dict[str, jax.Array]:
    rng = np.random.default_rng(1)
    return {
        "w": jnp.asarray(rng.normal(0, 0.3, (6, 3)), "float32"),
        "b": jnp.zeros(3),
    }


def losses_of(params: Any, batch: Any) -> jax.Array:
    x, y = batch
    logits = x @ params["w"] + params["b"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, y)


def loss_of(params: Any, batch: Any) -> jax.Array:
    return losses_of(params, batch).mean()


def descended(params: Any, grads: Any, rate: Any = 0.1) -> Any:
    return jax.tree.map(lambda p, g: p - rate * g, params, grads)


def parts_of(batch: Any, num: int) -> list[Any]:
    """The replicas' rows of a batch that divides."""
    parts = [np.array_split(np.arange(len(batch[1])), num)]
    return [jax.tree.map(lambda a, i=i: a[i], batch) for i in parts[0]]
