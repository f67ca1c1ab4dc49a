"""Layout maps as rules, and what they refuse."""

from typing import Any

import keras
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

from replicax.strategies import layout_maps
from replicax.strategies.layout_maps import largest_axis, rule


def of(layout_map: Any, num: int = 2) -> Any:
    return rule(layout_map, num, "Strategy")


@pytest.mark.parametrize(
    ("path", "shape", "spec"),
    [
        ("sequential/dense/kernel", (8, 16), P(None, "model")),
        ("dense_3/kernel", (8, 16), P(None, "model")),
        ("model/block/dense_3/bias", (16,), P("model")),
        ("model/conv2d/kernel", (3, 3, 4, 8), P()),
        ("model/multi_head_attention/query/kernel", (8, 4, 2), P(None, "model", None)),
        ("model/multi_head_attention_1/key/bias", (4, 2), P("model", None)),
        ("attention_output/kernel", (4, 2, 8), P("model", None, None)),
        ("model/attention_output/bias", (8,), P()),
        ("model/embedding_2/embeddings", (100, 16), P(None, "model")),
        ("token_and_position_embedding/embeddings", (100, 16), P(None, "model")),
        ("model/layer_normalization/gamma", (8,), P()),
    ],
)
def test_transformer(path: str, shape: tuple[int, ...], spec: P) -> None:
    assert of(layout_maps.TRANSFORMER)(path, shape) == spec


def test_maps_match_what_keras_names() -> None:
    shape = (None, 4, 8)
    embedding, dense = keras.layers.Embedding(10, 8), keras.layers.Dense(6)
    embedding.build()
    dense.build(shape)
    attentions = [
        keras.layers.MultiHeadAttention(num_heads=2, key_dim=4),
        keras.layers.GroupQueryAttention(4, 4, 2),
    ]
    for layer in attentions:
        layer.build(shape, shape)
    weights = [v for x in [embedding, dense, *attentions] for v in x.weights]
    assert len(weights) == 1 + 2 + 2 * 8
    made = of(layout_maps.TRANSFORMER)
    whole = {v.path for v in weights if made(v.path, tuple(v.shape)) == P()}
    assert {path.rsplit("/", 2)[-2] for path in whole} == {"attention_output"}
    assert all(path.endswith("/bias") for path in whole)


def test_a_map_of_keras() -> None:
    devices = ["cpu:0", "cpu:1"]
    mesh = keras.distribution.DeviceMesh((1, 2), ["batch", "model"], devices)
    given = keras.distribution.LayoutMap(mesh)
    given["dense.*kernel"] = (None, "model")
    given["dense.*bias"] = keras.distribution.TensorLayout(["model"], mesh)
    made = of(given)
    # As Keras has it, an expression has to match the whole path.
    assert made("dense/kernel", (4, 8)) == P(None, "model")
    assert made("dense/bias", (8,)) == P("model")
    assert made("model/dense/bias", (8,)) == P()


def test_exact_path_comes_first() -> None:
    made = of({"dense/kernel": ("model", None), ".*kernel": (None, "model")})
    assert made("dense/kernel", (4, 8)) == P("model", None)
    assert made("dense_1/kernel", (4, 8)) == P(None, "model")


def test_a_slot_of_other_rank_is_whole() -> None:
    assert of(layout_maps.DENSE)("dense/kernel", (8,)) == P()


@pytest.mark.parametrize("names", [("batch",), ("replica", "model"), (0,)], ids=str)
def test_other_axes_are_refused(names: Any) -> None:
    with pytest.raises(ValueError, match=r"Strategy: layout_map\['w'\] is .*'model'"):
        of({"w": names})


@pytest.mark.parametrize("given", [3, "dense", [("w", ("model",))]], ids=repr)
def test_other_types_are_refused(given: Any) -> None:
    with pytest.raises(TypeError, match=r"layout_map must be a keras\.distribution"):
        of(given)


def test_two_matches_are_refused() -> None:
    made = of({".*kernel": (None, "model"), "dense.*": (None, "model")})
    with pytest.raises(ValueError, match=r"'dense/kernel' matches several .*'dense"):
        made("dense/kernel", (4, 8))


def test_indivisible_dimensions_are_refused() -> None:
    made = of(layout_maps.DENSE, 4)
    with pytest.raises(
        ValueError, match=r"dimension 1 of 'dense/kernel' \(4, 10\) over 4 devices"
    ):
        made("dense/kernel", (4, 10))


@pytest.mark.parametrize(
    ("shape", "spec"),
    [
        ((64, 64), P(None, "model")),  # The last of equal ones.
        ((128, 64), P("model", None)),
        ((129, 64), P(None, "model")),
        ((1024,), P("model")),
        ((1022,), P()),
        ((), P()),
    ],
    ids=str,
)
def test_largest_axis(shape: tuple[int, ...], spec: P) -> None:
    assert largest_axis(shape, 2) == spec
    assert of(None)("anything", shape) == spec
    assert largest_axis(shape, 1) == P()


@given(
    shape=st.lists(st.integers(1, 200), max_size=4).map(tuple),
    num=st.integers(1, 8),
)
def test_largest_axis_divides(shape: tuple[int, ...], num: int) -> None:
    for size, name in zip(shape, largest_axis(shape, num), strict=False):
        assert name is None or size % num == 0
