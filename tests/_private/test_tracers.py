"""The attributes of JAX's tracers that replicax reads."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from replicax._private.jax import (
    batch_of,
    constant_of,
    equation_of,
    frames_of,
    is_batched,
    literal_of,
)


def test_equations_and_constants_of_tracers() -> None:
    seen: dict[str, Any] = {}

    def fn(x: Any) -> Any:
        table = np.arange(3.0)
        y = x + table
        z = y * 2.0
        seen["argument"] = equation_of(x), constant_of(x), literal_of(x)
        equation = equation_of(z)
        assert equation is not None
        seen["name"] = equation.primitive.name
        seen["input"] = equation.in_tracers[0] is y
        seen["literal"] = literal_of(equation.in_tracers[1])
        added = equation_of(y)
        assert added is not None
        seen["constant"] = [constant_of(a) for a in added.in_tracers][1]
        frames = [(file, name) for file, _, name in frames_of(equation)]
        seen["frame"] = (__file__, fn.__qualname__) in frames
        return z

    jax.make_jaxpr(fn)(jnp.ones(3))
    np.testing.assert_array_equal(seen.pop("constant"), np.arange(3.0))
    assert seen == {
        "argument": (None, None, None),
        "name": "mul",
        "input": True,
        "literal": 2.0,
        "frame": True,
    }


def test_batched_tracers_know_their_arrays() -> None:
    x = jnp.ones((4, 2))

    def fn(row: Any, other: Any) -> Any:
        assert batch_of(row)[1] == 1
        assert batch_of(row)[0].shape == (4, 2)
        assert batch_of(other) == (other, None)
        return row * other

    jax.vmap(fn, in_axes=(1, None))(x, 2.0)


def test_values_under_vmap() -> None:
    seen: list[bool] = []

    def fn(x: Any, w: Any) -> Any:
        total = jax.lax.psum(x, "i")
        seen[:] = map(is_batched, (x, x + w, w, total, total * w, 1.0))
        return x

    jax.vmap(fn, (0, None), axis_name="i")(jnp.ones(3), 2.0)
    assert seen == [True, True, False, False, False, False]
