"""What serves the primitives of JAX that are slow, and the registration with JAX."""

import contextlib
import contextvars
import functools
import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
from jax import lax
from jax.interpreters import ad, mlir

from replicax.cpu_lowerings import contractions, pooling, sums
from replicax.cpu_lowerings.choice import Form, choose, spatial_windows
from replicax.cpu_lowerings.forms import (
    by_groups,
    by_outputs,
    by_patches,
    by_sums,
    by_taps,
    without_zeros,
)

__all__ = ["Mode", "install", "using"]

Mode = Literal["replicax", "xla"]
_SWITCH = "REPLICAX_CPU_LOWERINGS"

_log = logging.getLogger("replicax")
_mode: contextvars.ContextVar[Mode | None] = contextvars.ContextVar(
    "cpu_lowerings", default=None
)


def install() -> None:
    """Lowers convolutions for CPUs to matrix products, where that is faster.

    And gradients of max pooling to elementwise operations, contractions over several
    leading dimensions to a product of two matrices, long sums of gradients to arrays in
    memory. Done on import. Programs for GPUs and TPUs are left alone, and so are those
    compiled before. A second call changes nothing. `REPLICAX_CPU_LOWERINGS=xla` in the
    environment leaves all of them to XLA; it is read whenever one is lowered. Versions
    of JAX that do not say how they lower them keep theirs, which is logged.

    Raises:
        ValueError: If `REPLICAX_CPU_LOWERINGS` has a mode that does not exist.

    Example:
        >>> install()
        >>> jax.jit(lambda x: lax.conv(x, x, (1, 1), "VALID"))(jnp.ones((1, 1, 2, 2)))
        Array([[[[4.]]]], dtype=float32)
    """
    wanted = _current_mode() == "replicax"
    unknown = []
    for primitive, (name, serve) in _SERVED.items():
        rule = _rule_of_jax(primitive)
        if rule is None:
            unknown.append(name)
        elif not isinstance(rule, functools.partial) or rule.func is not _lower:
            mlir.register_lowering(
                primitive,
                functools.partial(_lower, rule, serve),
                platform="cpu",
                # Those of equal types are otherwise lowered once, without operands.
                cacheable=serve is not _serve_sum,
            )
    if unknown and wanted:
        _log.info(
            "JAX %s does not say how it lowers %s for CPUs: all of them are left to "
            "XLA, as with %s=xla.",
            jax.__version__,
            " and ".join(unknown),
            _SWITCH,
        )


@contextlib.contextmanager
def using(mode: Mode) -> Iterator[None]:
    """Who lowers convolutions in this context, in this thread, for CPUs.

    And all else that `install` names. It comes before the environment. A function that
    JAX compiled already keeps its program: compile another `jax.jit` of it, or call
    `jax.clear_caches()`.

    Args:
        mode: `"replicax"`, where that is faster, or `"xla"`.

    Raises:
        ValueError: If there is no such mode.

    Example:
        >>> with using("xla"):
        ...     program = jax.jit(jnp.sin).lower(1.0)
    """
    token = _mode.set(_known(mode, "using()"))
    try:
        yield
    finally:
        _mode.reset(token)


def _known(mode: str, where: str) -> Mode:
    if mode not in get_args(Mode):
        raise ValueError(
            f"{where} has {mode!r}: no such mode; use one of {list(get_args(Mode))}"
        )
    return mode  # pyright: ignore[reportReturnType]


def _current_mode() -> Mode:
    return _mode.get() or _known(os.environ.get(_SWITCH) or "replicax", _SWITCH)


def _rule_of_jax(primitive: Any = lax.conv_general_dilated_p) -> Any:
    """The rule that JAX lowers a primitive for CPUs by; None: it does not say.

    The only private names: JAX has a function to register rules but none to look them
    up. `jax.interpreters.mlir` has these tables since 0.3; seen in 0.10.2.
    """
    table = getattr(mlir, "_platform_specific_lowerings", None)
    if table is None:
        return None
    entry = table["cpu"].get(primitive)
    if entry is None:
        entry = (getattr(mlir, "_lowerings", None) or {}).get(primitive)
    return getattr(entry, "rule", entry)


def _lower(
    rule_of_jax: Any,
    serve: "_Serve",
    ctx: mlir.LoweringRuleContext,
    *operands: Any,
    **params: Any,
) -> Any:
    """The lowering rule: ours where `serve` has something, JAX's elsewhere."""
    ours = None
    wanted = _current_mode() == "replicax"
    if wanted and _is_static(ctx) and not _is_sharded_explicitly(ctx, params):
        ours = serve(ctx, operands, params)
    if ours is None:
        return rule_of_jax(ctx, *operands, **params)
    rule: Any = mlir.lower_fun(ours, multiple_results=False)
    return rule(ctx, *operands)


def _is_static(ctx: mlir.LoweringRuleContext) -> bool:
    """Whether all shapes are numbers: `jax.export` has some with symbols."""
    avals: list[Any] = [*ctx.avals_in, *ctx.avals_out]
    return all(isinstance(n, int) for x in avals for n in getattr(x, "shape", ()))


def _is_sharded_explicitly(ctx: mlir.LoweringRuleContext, params: dict) -> bool:
    """Whether types say how the arrays are sharded: the forms' reshapes would not.

    In a replica function they name a mesh, and no axis of it.
    """
    avals: list[Any] = [*ctx.avals_in, *ctx.avals_out]
    shardings = [aval.sharding for aval in avals]
    if params.get("out_sharding") is not None:
        shardings.append(params["out_sharding"])
    return any(axis is not None for sharding in shardings for axis in sharding.spec)


def _serve_convolution(
    ctx: mlir.LoweringRuleContext, operands: Sequence[Any], params: dict[str, Any]
) -> Callable[..., jax.Array] | None:
    lhs, rhs = ctx.avals_in
    out: Any = ctx.avals_out[0]
    form = choose(lhs, rhs, out, params)
    if form is None:
        return None
    return functools.partial(_convolve, form=form, dtype=out.dtype, params=params)


def _serve_pooling(
    ctx: mlir.LoweringRuleContext, operands: Sequence[Any], params: dict[str, Any]
) -> Callable[..., jax.Array] | None:
    source, operand = ctx.avals_in
    if not pooling.is_served(source, operand, params):
        return None
    return functools.partial(pooling.gradient, params=params)


def _is_divided_by_xla(ctx: mlir.LoweringRuleContext) -> bool:
    """Whether XLA divides arrays among devices, by dimensions that it should see.

    In a replica function it does not, but under `ModelParallel` within each replica.
    """
    context: Any = ctx.module_context.axis_context
    if not hasattr(context, "mesh"):
        return getattr(context, "num_devices", 1) > 1
    return context.mesh.size > 1 and not context.manual_axes.issuperset(
        context.mesh.axis_names
    )


def _serve_contraction(
    ctx: mlir.LoweringRuleContext, operands: Sequence[Any], params: dict[str, Any]
) -> Callable[..., jax.Array] | None:
    if _is_divided_by_xla(ctx) or not contractions.is_served(params):
        return None
    return functools.partial(contractions.contract, params=params)


def _serve_sum(
    ctx: mlir.LoweringRuleContext, operands: Sequence[Any], params: dict[str, Any]
) -> Callable[..., jax.Array] | None:
    out = ctx.avals_out[0]
    if _is_divided_by_xla(ctx) or not sums.is_served(out, operands):
        return None
    return sums.written_sum


def _convolve(
    lhs: jax.Array, rhs: jax.Array, *, form: Form, dtype: Any, params: dict[str, Any]
) -> jax.Array:
    """What `lax.conv_general_dilated_p` computes, by the form that `choose` names."""
    lhs_spec, rhs_spec, out_spec = params["dimension_numbers"]
    of_batch, precision = params["batch_group_count"], params["precision"]
    windows = spatial_windows(lhs, rhs, params)
    # As in XLA, products of halves are summed in float32.
    wide = jnp.promote_types(lhs.dtype, jnp.float32)
    lhs, rhs = lhs.astype(wide), rhs.astype(wide)
    if form in ("outputs", "sums"):
        x = jnp.transpose(lhs, (lhs_spec[1], *lhs_spec[2:], lhs_spec[0]))
        kernel = jnp.transpose(rhs, (rhs_spec[1], *rhs_spec[2:], rhs_spec[0]))
        if form == "sums":
            y = by_sums(x, kernel, windows)
        else:
            y = by_outputs(x, kernel, windows, of_batch, precision)
        order = (*out_spec[2:], *out_spec[:2])
    else:
        x = jnp.transpose(lhs, (lhs_spec[0], *lhs_spec[2:], lhs_spec[1]))
        if form == "taps":
            # JAX has reversed it for the gradient by the input: XLA drops both.
            kernel = lax.rev(rhs, rhs_spec[2:])
            kernel = jnp.transpose(kernel, (*rhs_spec[2:], rhs_spec[0], rhs_spec[1]))
            y = by_taps(x, kernel, windows, precision)
        else:
            kernel = jnp.transpose(rhs, (*rhs_spec[2:], rhs_spec[1], rhs_spec[0]))
            if of_batch > 1:
                x = _groups_of_features(x, of_batch)
            y = without_zeros(
                by_groups if form == "groups" else by_patches,
                x,
                kernel,
                windows,
                params["feature_group_count"] * of_batch,
                precision,
            )
        order = (out_spec[0], *out_spec[2:], out_spec[1])
    back = sorted(range(len(order)), key=order.__getitem__)
    return jnp.transpose(y, back).astype(dtype)


def _groups_of_features(x: jax.Array, groups: int) -> jax.Array:
    """`[groups * n, *space, m]` as `[n, *space, groups * m]`: the same convolution."""
    x = x.reshape(groups, -1, *x.shape[1:])
    x = jnp.moveaxis(x, 0, -2)
    return x.reshape(*x.shape[:-2], -1)


_Serve = Callable[
    [mlir.LoweringRuleContext, Sequence[Any], dict[str, Any]],
    Callable[..., jax.Array] | None,
]
# Each primitive with its name for people, and what computes it, None where XLA does.
_SERVED: Mapping[Any, tuple[str, _Serve]] = {
    lax.conv_general_dilated_p: ("convolutions", _serve_convolution),
    lax.select_and_scatter_add_p: ("gradients of max pooling", _serve_pooling),
    lax.dot_general_p: ("contractions", _serve_contraction),
    ad.add_jaxvals_p: ("sums of gradients", _serve_sum),
}
