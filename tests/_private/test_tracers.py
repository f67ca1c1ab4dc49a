"""The attributes of JAX's tracers that replicax reads."""

from typing import Any

import jax
import jax.numpy as jnp

from replicax._private.jax import (
    equation_of,
    frames_of,
    is_batched,
)


def test_equations_of_tracers() -> None:
    seen: dict[str, Any] = {}

    def fn(x: Any) -> Any:
        y = x + 1.0
        z = y * 2.0
        seen["argument"] = equation_of(x)
        equation = equation_of(z)
        assert equation is not None
        seen["name"] = equation.primitive.name
        seen["input"] = equation.in_tracers[0] is y
        frames = [(file, name) for file, _, name in frames_of(equation)]
        seen["frame"] = (__file__, fn.__qualname__) in frames
        return z

    jax.make_jaxpr(fn)(jnp.ones(3))
    assert seen == {"argument": None, "name": "mul", "input": True, "frame": True}


def test_values_under_vmap() -> None:
    seen: list[bool] = []

    def fn(x: Any, w: Any) -> Any:
        total = jax.lax.psum(x, "i")
        seen[:] = map(is_batched, (x, x + w, w, total, total * w, 1.0))
        return x

    jax.vmap(fn, (0, None), axis_name="i")(jnp.ones(3), 2.0)
    assert seen == [True, True, False, False, False, False]
