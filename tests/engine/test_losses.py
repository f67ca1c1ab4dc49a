from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest
from tests.conftest import mirrored

from replicax.engine.losses import compute_average_loss, scale_regularization_loss


@pytest.fixture
def two_replicas():
    with mirrored(2).scope():
        yield


def test_one_replica_is_the_mean():
    assert float(compute_average_loss([1.0, 3.0])) == 2.0


@pytest.mark.usefixtures("two_replicas")
def test_replicas_add_up_to_the_mean_of_the_global_batch():
    parts = [compute_average_loss([1.0, 3.0]), compute_average_loss([5.0, 7.0])]
    assert [float(part) for part in parts] == [1.0, 3.0]


def test_number_of_replicas_may_be_given():
    assert float(compute_average_loss([1.0, 3.0], num_replicas=4)) == 0.5
    assert float(scale_regularization_loss(8.0, num_replicas=4)) == 2.0


def test_global_batch_size_may_be_given():
    assert float(compute_average_loss([1.0, 3.0], global_batch_size=8)) == 0.5
    assert float(compute_average_loss([1.0], None, np.int64(4))) == 0.25
    assert float(compute_average_loss([1.0], None, jnp.int32(4))) == 0.25


@pytest.mark.parametrize(
    ("loss", "weight", "expected"),
    [
        ([1.0, 3.0], [2.0, 0.0], 1.0),
        ([1.0, 3.0], 3.0, 6.0),
        ([1.0, 3.0], [[2.0], [0.0]], 1.0),  # As Keras' generators often shape them.
        ([[1.0, 1.0], [3.0, 5.0]], [0.0, 1.0], 4.0),
        ([[1.0, 1.0], [3.0, 5.0]], [[0.0], [1.0]], 4.0),
        ([[1.0, 1.0], [3.0, 5.0]], [[0.0, 1.0], [0.0, 1.0]], 3.0),
    ],
)
def test_sample_weights(loss, weight, expected):
    assert float(compute_average_loss(loss, sample_weight=weight)) == expected
    tf = pytest.importorskip("tensorflow")
    oracle = tf.nn.compute_average_loss(tf.constant(loss), tf.constant(weight))
    assert float(oracle) == expected


def test_gradient_and_compilation():
    def loss(w, x):
        return compute_average_loss((w * x) ** 2, global_batch_size=4)

    gradient = jax.jit(jax.grad(loss))(2.0, jnp.array([1.0, 3.0]))
    assert float(gradient) == 10.0  # 2 * w * (1 + 9) / 4


def test_traced_global_batch_size():
    count = jax.jit(lambda n: compute_average_loss([1.0, 3.0], None, n))
    assert float(count(8)) == 0.5
    masked = jax.jit(lambda n: compute_average_loss([0.0, 0.0], None, n))
    assert float(masked(0)) == 0.0
    with pytest.raises(TypeError, match=r"float32\[\], expected an integer"):
        count(8.0)


def test_keras_loss_without_reduction():
    y, logits = np.array([0, 1, 1]), np.random.default_rng(0).normal(size=(3, 2))
    make_loss: Any = keras.losses.SparseCategoricalCrossentropy
    mean = float(make_loss(from_logits=True)(y, logits))
    each = make_loss(from_logits=True, reduction=None)(y, logits)
    np.testing.assert_allclose(compute_average_loss(each), mean, rtol=1e-6)


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16, jnp.float32])
def test_dtype_is_kept_but_sums_do_not_overflow(dtype):
    loss = compute_average_loss(jnp.full(4096, 100.0, dtype))
    assert loss.dtype == dtype
    assert float(loss) == 100.0


def test_integers_become_float32():
    assert compute_average_loss([1, 2]).dtype == jnp.float32


def test_scalar_loss():
    with pytest.raises(ValueError, match=r"is a scalar.*reduction=None"):
        compute_average_loss(1.0)


@pytest.mark.parametrize("size", [0, -4])
def test_global_batch_size_must_be_positive(size):
    with pytest.raises(ValueError, match=f"global_batch_size={size}, expected >= 1"):
        compute_average_loss([1.0], global_batch_size=size)


def test_global_batch_size_must_be_an_integer():
    with pytest.raises(TypeError, match=r"global_batch_size=2\.5, expected an integer"):
        compute_average_loss([1.0], global_batch_size=2.5)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("weight", [[1.0, 2.0, 3.0], [[1.0, 2.0]], [[[1.0]]]])
def test_weights_that_do_not_fit(weight):
    with pytest.raises(ValueError, match=r"sample_weight of shape .* shape \(2,\)"):
        compute_average_loss([1.0, 3.0], sample_weight=weight)


@pytest.mark.parametrize("num_replicas", [0, -1])
def test_number_of_replicas_must_be_positive(num_replicas):
    for call in (compute_average_loss, scale_regularization_loss):
        with pytest.raises(ValueError, match=f"num_replicas={num_replicas}"):
            call([1.0], num_replicas=num_replicas)


@pytest.mark.usefixtures("two_replicas")
def test_regularization_is_divided_by_the_replicas():
    assert float(scale_regularization_loss([1.0, 3.0])) == 2.0
    assert float(scale_regularization_loss(jnp.ones((2, 2)))) == 2.0
    assert float(scale_regularization_loss([])) == 0.0


def test_regularization_losses_of_a_keras_model():
    layer = keras.layers.Dense(2, kernel_regularizer="l2")
    layer.build((None, 3))
    got = scale_regularization_loss(layer.losses, num_replicas=2)
    np.testing.assert_allclose(got, layer.losses[0] / 2, rtol=1e-6)
