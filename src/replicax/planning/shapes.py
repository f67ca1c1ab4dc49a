"""Shapes as XLA's text writes them, such as `(f32[8,4]{1,0:T(8,128)S(1)}, s32[])`."""

import math
import re

__all__ = ["arrays", "elements", "num_bytes", "on_chip_bytes", "split_shape"]

_ARRAY = re.compile(
    r"\b(pred|token|opaque|(?:bf|[sufc])\d+\w*)\[([\d,]*)\](\{[^}]*\})?"
)
_BITS = re.compile(r"^[a-z]+?(\d+)")


def arrays(shape: str) -> list[tuple[str, tuple[int, ...]]]:
    """Element type and dimensions of each array in a shape.

    Example:
        >>> from replicax.planning.shapes import arrays
        >>> arrays("(f32[8,4]{1,0}, s32[])")
        [('f32', (8, 4)), ('s32', ())]
    """
    return [(dtype, _dims(dims)) for dtype, dims, _ in _ARRAY.findall(shape)]


def num_bytes(shape: str) -> int:
    """Bytes of all arrays in a shape, without padding.

    Example:
        >>> from replicax.planning.shapes import num_bytes
        >>> num_bytes("(bf16[8,4]{1,0}, s4[3], pred[])")
        67
    """
    return sum(
        _array_bytes(dtype, _dims(dims)) for dtype, dims, _ in _ARRAY.findall(shape)
    )


def on_chip_bytes(shape: str) -> int:
    """Of `num_bytes`, what lies in memory on the chip: a layout says `S(1)`."""
    return sum(
        _array_bytes(dtype, _dims(dims))
        for dtype, dims, layout in _ARRAY.findall(shape)
        if "S(1)" in layout
    )


def elements(shape: str) -> list[str]:
    """The elements of a tuple shape, of which some may be tuples; else the shape.

    Example:
        >>> from replicax.planning.shapes import elements
        >>> elements("((f32[2]{0}, f32[]), u32[])")
        ['(f32[2]{0}, f32[])', 'u32[]']
    """
    if not shape.startswith("("):
        return [shape]
    parts, depth, start = [], 0, 1
    for i, character in enumerate(shape):
        depth += (character in "([{") - (character in ")]}")
        if (character == "," and depth == 1) or not depth:
            parts.append(shape[start:i].strip())
            start = i + 1
    return parts


def split_shape(text: str) -> tuple[str, str]:
    """The shape that `text` begins with, and what follows it."""
    if not text.startswith("("):
        shape, _, rest = text.partition(" ")
        return shape, rest.lstrip()
    depth = 0
    for i, character in enumerate(text):
        depth += (character == "(") - (character == ")")
        if not depth:
            return text[: i + 1], text[i + 1 :].lstrip()
    return text, ""


def _dims(text: str) -> tuple[int, ...]:
    return tuple(int(n) for n in text.split(",") if n)


def _array_bytes(dtype: str, dims: tuple[int, ...]) -> int:
    if dtype in ("token", "opaque"):
        return 0
    match = _BITS.match(dtype)
    bits = int(match[1]) if match else 8  # `pred` takes a byte.
    return math.ceil(bits * math.prod(dims) / 8)
