"""Losses that the rows of one replica make otherwise than all rows draw a warning."""

import contextlib
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import pytest
from keras import ops

import replicax as rx

X = np.random.default_rng(0).normal(size=(10, 3)).astype("float32")
Y = (X.sum(1, keepdims=True) > 0.3).astype("float32")


def all_of(op: str, value: Any) -> Any:
    context = rx.get_replica_context()  # False without a strategy.
    return context.all_reduce(op, value) if context else value


def of_positive(y: Any, y_pred: Any) -> Any:
    return ops.sum(y * ops.square(y - y_pred)) / ops.sum(y)


def of_positive_of_all(y: Any, y_pred: Any) -> Any:
    return ops.sum(y * ops.square(y - y_pred)) / all_of("mean", ops.sum(y))


def bounded(y: Any, y_pred: Any) -> Any:
    count = ops.maximum(ops.sum(ops.cast(y > 0, "float32"), axis=0), 1.0)
    return ops.sum(y * ops.square(y - y_pred) / count)


def of_rows(y: Any, y_pred: Any) -> Any:
    return y / (1e-3 + ops.sum(y)) * ops.square(y - y_pred)


def without_division_by_zero(y: Any, y_pred: Any) -> Any:
    return ops.divide_no_nan(ops.sum(y * y_pred), ops.sum(y))


def weighted(y: Any, y_pred: Any) -> Any:
    return ops.average(ops.square(y - y_pred), weights=y + 0.1)


class Detector(keras.Sequential):
    """Divides the weights of a sum by the number of positive examples."""

    op = ""

    def compute_loss(
        self, x: Any = None, y: Any = None, y_pred: Any = None, *_: Any, **__: Any
    ) -> Any:
        count = all_of(self.op, ops.sum(y)) if self.op else ops.sum(y)
        loss = keras.losses.MeanSquaredError(reduction="sum")
        return loss(y, y_pred, sample_weight=y / ops.maximum(count, 1.0))


class Corrected(Detector):
    op = "sum"


class Own(keras.Sequential):
    def compute_loss(
        self, x: Any = None, y: Any = None, y_pred: Any = None, *_: Any, **__: Any
    ) -> Any:
        return ops.sum(ops.abs(y - y_pred)) / ops.sum(1.0 + y)


class WithTape(keras.Sequential):
    def train_step(self, data: Any) -> Any:
        x, y = data
        with rx.GradientTape() as tape:
            loss = ops.sum(ops.abs(y - self(x))) / ops.sum(1.0 + y)
        variables = self.trainable_variables
        self.optimizer.apply(tape.gradient(loss, variables), variables)
        return {"loss": loss}


class WithFunction(keras.Sequential):
    def train_step(self, data: Any) -> Any:
        def loss_fn(x: Any, y: Any) -> Any:
            return ops.sum(ops.abs(y - self(x))) / ops.sum(1.0 + y)

        variables = self.trainable_variables
        loss, grads = rx.value_and_grad(loss_fn, variables)(*data)
        self.optimizer.apply(grads, variables)
        return {"loss": loss}


def trained(
    strategy: rx.Strategy | None,
    loss: Any = "mse",
    kind: type[keras.Sequential] = keras.Sequential,
    units: int = 1,
    layers: Sequence[keras.layers.Layer] = (),
) -> Any:
    keras.utils.set_random_seed(0)
    with strategy.scope() if strategy else contextlib.nullcontext():
        model = kind([keras.Input((3,)), keras.layers.Dense(units), *layers])
        model.compile(keras.optimizers.SGD(0.1), loss)
    model.fit(X, Y, batch_size=4, shuffle=False, verbose=0)
    return model.get_weights()


DIVIDED = [of_positive, bounded, of_rows, without_division_by_zero, weighted]


@pytest.mark.parametrize("loss", DIVIDED)
def test_losses_of_own_sums(strategy_of: Any, loss: Callable[..., Any]) -> None:
    with pytest.warns(UserWarning, match="^fit: the loss of model .* divided by"):
        trained(strategy_of(2), loss)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trained(strategy_of(1), loss)


OWN = [(Detector, "sum"), (Own, "mean"), (WithTape, "mean"), (WithFunction, "mean")]


@pytest.mark.parametrize(("kind", "op"), OWN)
def test_losses_that_a_model_computes(strategy_of: Any, kind: Any, op: str) -> None:
    with pytest.warns(UserWarning, match=rf"is divided by .*all_reduce\('{op}', "):
        trained(strategy_of(2), kind=kind)


class Masked(keras.Sequential):
    """Has unmasked rows only where the sum of the inputs is positive."""

    def compute_mask(self, inputs: Any, previous_mask: Any = None) -> Any:
        return ops.sum(inputs, axis=-1) > 0


EXACT = {
    "as the warning says": {"loss": of_positive_of_all},
    "weights as the warning says": {"kind": Corrected},
    "mean squared error": {"loss": "mse"},
    "cosine": {"loss": "cosine_similarity"},
    "with a mask": {"kind": Masked},
    "of means": {"loss": lambda y, y_pred: ops.mean(ops.abs(y - y_pred))},
}


@pytest.mark.parametrize("case", EXACT)
def test_others_are_not_warned_of(
    strategy_of: Any, assert_same: Any, case: str
) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        weights = trained(strategy_of(2), **EXACT[case])
    assert_same(weights, trained(None, **EXACT[case]))


# Comparisons of rows.


def rows_and_places(z: Any) -> tuple[Any, Any]:
    """The rows of all replicas, and the places of a replica's own among them."""
    context = rx.get_replica_context()
    places = ops.arange(ops.shape(z)[0])
    if not context:
        return z, places
    first = context.replica_id_in_sync_group * ops.shape(z)[0]
    return context.all_gather(z, axis=0), places + first


def contrastive(logits: Any, places: Any) -> Any:
    return keras.losses.sparse_categorical_crossentropy(
        places, logits, from_logits=True
    )


def with_own_negatives(y: Any, z: Any) -> Any:
    z = ops.normalize(z + 1.0, axis=1)
    return contrastive(ops.matmul(z, ops.transpose(z)), ops.arange(ops.shape(z)[0]))


def with_all_negatives(y: Any, z: Any) -> Any:
    z = ops.normalize(z + 1.0, axis=1)
    others, places = rows_and_places(z)
    return contrastive(ops.matmul(z, ops.transpose(others)), places)


def of_two_views(y: Any, z: Any) -> Any:
    both = ops.concatenate([z, z * y], axis=0)
    pairs = ops.einsum("id,jd->ij", both, both)
    return ops.mean(ops.logsumexp(pairs, axis=1))


def of_distances(y: Any, z: Any) -> Any:
    apart = ops.sum(ops.square(z[:, None] - z[None, :]), axis=-1)
    return ops.mean(ops.exp(-apart))


def of_hardest(y: Any, z: Any) -> Any:
    errors = ops.sum(ops.square(z - y), axis=1)
    return ops.mean(ops.top_k(errors, 1)[0])


def of_risk_sets(y: Any, z: Any) -> Any:
    return ops.mean(ops.log(ops.cumsum(ops.exp(z), axis=0)) - z)


def of_median(y: Any, z: Any) -> Any:
    return ops.abs(ops.median(z, axis=0)) * ops.square(z - y)


def of_prototypes(y: Any, z: Any) -> Any:
    prototypes = ops.matmul(ops.transpose(ops.concatenate([y, 1 - y], axis=1)), z)
    return ops.logsumexp(ops.matmul(z, ops.transpose(prototypes)), axis=1)


class TwoTowers(keras.Sequential):
    def compute_loss(
        self, x: Any = None, y: Any = None, y_pred: Any = None, *_: Any, **__: Any
    ) -> Any:
        return ops.mean(with_own_negatives(y, y_pred))


COMPARED = {
    "negatives within the batch": {"loss": with_own_negatives},
    "two views": {"loss": of_two_views},
    "distances": {"loss": of_distances},
    "the hardest": {"loss": of_hardest},
    "sums of those before": {"loss": of_risk_sets},
    "median": {"loss": of_median},
    "prototypes": {"loss": of_prototypes},
    "in the model": {"kind": TwoTowers},
}


@pytest.mark.slow(but=["two views", "sums of those before", "in the model"])
@pytest.mark.parametrize("case", COMPARED)
def test_losses_that_compare_rows(strategy_of: Any, case: str) -> None:
    with pytest.warns(UserWarning, match=r"^fit: the loss of model .* compares the ro"):
        trained(strategy_of(2), **COMPARED[case])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trained(strategy_of(1), **COMPARED[case])


class Attention(keras.layers.Layer):
    """Its last operation is a product of values that are made of the rows."""

    def call(self, x: Any) -> Any:
        parts = ops.reshape(x, (-1, 2, 2))
        weights = ops.softmax(ops.einsum("bqd,bkd->bqk", parts, parts))
        return ops.reshape(ops.einsum("bqk,bkd->bqd", weights, parts), (-1, 4))


def of_features(y: Any, z: Any) -> Any:
    return ops.sum(ops.square(ops.einsum("bi,bj->bij", z, z) - 1.0), axis=(1, 2))


def of_lists(y: Any, z: Any) -> Any:
    apart = ops.expand_dims(z, 1) - ops.expand_dims(z, 2)
    return ops.sum(ops.relu(1.0 - apart), axis=(1, 2))


def sorted_within(y: Any, z: Any) -> Any:
    return ops.sum(ops.cumsum(ops.sort(z, axis=1), axis=1), axis=1)


def linear_in_rows(y: Any, z: Any) -> Any:
    return ops.mean(ops.square(ops.matmul(z, ops.ones((4, 2))) - y))


WITHIN = {
    "negatives of all replicas": {"loss": with_all_negatives},
    "pairs of features": {"loss": of_features},
    "pairs within a list": {"loss": of_lists},
    "order within a row": {"loss": sorted_within},
    "product with a constant": {"loss": linear_in_rows},
    "attention": {"loss": "mse", "layers": [Attention()]},
}


@pytest.mark.slow(but=["attention", "pairs of features", "product with a constant"])
@pytest.mark.parametrize("case", WITHIN)
def test_comparisons_within_a_row_are_not_warned_of(
    strategy_of: Any, assert_same: Any, case: str
) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        weights = trained(strategy_of(2), units=4, **WITHIN[case])
    assert_same(weights, trained(None, units=4, **WITHIN[case]))
