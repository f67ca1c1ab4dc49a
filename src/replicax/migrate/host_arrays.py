"""Rules for calls that compute arrays in input pipelines, on NumPy arrays."""

import libcst as cst

from replicax.migrate.arrays import identity, pad, resize
from replicax.migrate.rules import CallSite, Rule, bound, by_row
from replicax.migrate.script import Expression, Unported
from replicax.migrate.tables import HOST_OPERATORS, NAMES
from replicax.migrate.tree import find, is_name, keyword, text_of, with_args

__all__ = ["HOST_RANDOM", "HOST_RULES"]


def _cast_on_host(site: CallSite) -> Expression:
    value, dtype = site.required(0, "x"), site.required(1, "dtype")
    is_number = isinstance(value, (cst.Integer, cst.Float))
    text = "np.array({x}, {dtype})" if is_number else "{x}.astype({dtype})"
    return site.make(text, x=value, dtype=dtype)


def _constant_on_host(site: CallSite) -> Expression:
    value = site.required(0, "value")
    made = by_row(site, HOST_OPERATORS[site.path])
    kinds = {type(part) for part in find(value, cst.Float, cst.Integer)}
    if len(made.args) > 1 or not kinds:
        return made
    # TensorFlow's dtypes of Python's numbers.
    dtype = site.script.string("float32" if cst.Float in kinds else "int32")
    return made.with_changes(args=[cst.Arg(value), cst.Arg(dtype)])


def _one_hot_on_host(site: CallSite) -> Expression:
    depth = site.ported(1, "depth")
    if depth is None or len(site.updated.args) != 2:
        raise Unported("tf.one_hot with more than indices and depth: port it by hand")
    text = 'np.eye({depth}, dtype="float32")[{indices}]'
    return site.make(text, depth=depth, indices=site.required(0, "indices"))


def _random_image(site: CallSite) -> Expression:
    made = by_row(site, HOST_OPERATORS[site.path])
    generator = keyword("rng", _generator(site))
    return with_args(made, [*made.args, generator])


def _generator(site: CallSite) -> cst.Name:
    return cst.Name(site.script.generators.get(site.node, "rng"))


_OF_UNIFORM = ("shape", "minval", "maxval", "dtype", "seed", "name")
_OF_NORMAL = ("shape", "mean", "stddev", "dtype", "seed", "name")


def _drawn(site: CallSite) -> Expression:
    """Port a draw to `rng.uniform(low, high, shape)`, `rng.normal`, `rng.integers`."""
    is_uniform = "uniform" in site.path
    names = _OF_UNIFORM if is_uniform else _OF_NORMAL
    given = {k: arg.value for k, arg in bound(site.updated.args, names).items()}
    given = {k: value for k, value in given.items() if not is_name(value, "None")}
    method = "uniform" if is_uniform else "normal"
    if is_uniform and _draws_integers(site):
        method = "integers"
    for name in ("shape", "maxval") if method == "integers" else ("shape",):
        if name not in given:
            raise Unported(f"tf.{site.path}: its argument {name!r} was not found")
    return site.make(
        f"{{rng}}.{method}({{a}}, {{b}}, {{shape}}).astype({{dtype}})",
        rng=_generator(site),
        a=given.get(names[1], cst.Integer("0")),
        b=given.get(names[2], cst.Integer("1")),
        shape=given["shape"],
        dtype=given.get("dtype", site.script.string("float32")),
    )


def _draws_integers(site: CallSite) -> bool:
    """Whether `tf.random.uniform` draws integers; refuses a dtype out of sight."""
    script = site.script
    given = bound(site.node.args, _OF_UNIFORM).get("dtype")
    if given is None or is_name(given.value, "None"):
        return False
    value = script.flow.resolved(given.value)
    name = script.names.path(value) or script.names.imported(value) or ""
    dtype = text_of(value) or name.rpartition(".")[2]  # Of `tf.int32`, `np.int32`.
    if dtype not in NAMES["dtypes"]:
        raise Unported(
            f"tf.{site.path}: its dtype is not in sight; pass one such as tf.int32"
        )
    return "int" in dtype


_RANDOM_IMAGES = tuple(
    path
    for path, operator in HOST_OPERATORS.items()
    if operator.target.startswith("rx.input.images.random_")
)
_NUMBERS = ("random.uniform", "random_uniform", "random.normal", "random_normal")
HOST_RANDOM = (*_RANDOM_IMAGES, *_NUMBERS)
"""Paths of functions that draw random numbers, and get the example's generator."""

HOST_RULES: dict[str, Rule] = {
    **dict.fromkeys(_RANDOM_IMAGES, _random_image),
    **dict.fromkeys(_NUMBERS, _drawn),
    "cast": _cast_on_host,
    "one_hot": _one_hot_on_host,
    "constant": _constant_on_host,
    "convert_to_tensor": _constant_on_host,
    "identity": identity,
    "image.resize": resize,
    "pad": pad,
}
"""Rules for input pipelines, by the path of the function."""
