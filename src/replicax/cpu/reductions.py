"""Faster reductions in backward passes on CPUs: contractions and sums of gradients.

The gradient of a `Dense` layer's weights over `[batch, steps, features]` is contracted
over two dimensions. To make that a matrix product, XLA transposes the gradient of the
output as it writes it, which is slow, and gets a product of two transposed arrays at 73
GFLOPS; a product of arrays in order has 206. `contract` merges the leading dimensions
instead, which moves no data. A step of the benchmark's transformer takes 570 ms with it
and 740 ms without (one core, JAX 0.10.2).

Along a residual stream the gradient of a layer's input is the gradient of its output
plus the layer's own. XLA rematerialises such a sum in every operation that reads it,
with all sums that it consists of: in a transformer of 6 layers the first sum read 85
arrays, and the work grows with the square of the depth. `written_sum` is a separate
computation, which XLA does not fuse into its readers. The same transformer takes 870 ms
with it and 1220 ms without, and compiles in 0.7 of the time.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.xla_metadata import set_xla_metadata

__all__ = ["contract", "contracts", "is_long_sum", "written_sum"]

# Operations that XLA fuses into the operation that reads them.
_MERGED = {
    f"stablehlo.{name}"
    for name in (
        "add",
        "convert",
        "divide",
        "maximum",
        "multiply",
        "negate",
        "reshape",
        "select",
        "subtract",
        "transpose",
    )
}
# In the transformer 2 to 16 are equally good. Normalisation's own gradient has up to 3
# with each residual sum: convolutional networks with short stages lose 5 % by writing
# at 2, and nothing at 8 or more.
_MOST_SUMS = 12
_MOST_VISITS = 256
# Elements; a smaller sum is cheap to rematerialise.
_SMALLEST = 2**14


def contracts(params: Mapping[str, Any]) -> bool:
    """Whether `contract` supports the `lax.dot_general_p` of these parameters."""
    (of_lhs, of_rhs), (batch, _) = params["dimension_numbers"]
    leading = tuple(range(len(of_lhs)))
    same = tuple(of_lhs) == tuple(of_rhs) == leading
    return same and len(leading) > 1 and not batch


def contract(lhs: jax.Array, rhs: jax.Array, *, params: Mapping[str, Any]) -> jax.Array:
    """Compute `lax.dot_general_p` as a product of two matrices.

    Of `lhs[*contracted, *rows]` and `rhs[*contracted, *columns]`: `[*rows, *columns]`.
    """
    num = len(params["dimension_numbers"][0][0])
    contracted, rows, columns = lhs.shape[:num], lhs.shape[num:], rhs.shape[num:]
    product = lax.dot_general(
        lhs.reshape(math.prod(contracted), math.prod(rows)),
        rhs.reshape(math.prod(contracted), math.prod(columns)),
        (((0,), (0,)), ((), ())),
        precision=params["precision"],
        preferred_element_type=params["preferred_element_type"],
    )
    return product.reshape(*rows, *columns)


def is_long_sum(out: Any, operands: Sequence[Any]) -> bool:
    """Whether a sum of two gradients is long enough to be stored, by its operands."""
    return (
        jnp.issubdtype(out.dtype, jnp.floating)
        and out.size >= _SMALLEST
        and _num_sums(operands) + 1 >= _MOST_SUMS
    )


def written_sum(x: jax.Array, y: jax.Array) -> jax.Array:
    """Compute `x + y` and store it, without fusion into its readers.

    Example:
        >>> float(written_sum(jnp.array(1.0), jnp.array(2.0)))
        3.0
    """
    with set_xla_metadata(inlineable="false"):
        return jax.jit(lax.add)(x, y)


def _num_sums(values: Sequence[Any]) -> int:
    """Count the sums that XLA would fuse into a reader of these MLIR values."""
    todo, seen, found = list(values), set(), 0
    while todo and len(seen) < _MOST_VISITS and found < _MOST_SUMS:
        operation = getattr(todo.pop().owner, "operation", None)
        # None: the value is an argument.
        if operation is None or operation in seen or operation.name not in _MERGED:
            continue
        seen.add(operation)
        found += operation.name == "stablehlo.add"
        todo.extend(operation.operands)
    return found
