"""Lowering rules for primitives that XLA compiles to slow code on CPUs.

They apply to the operations in a replicax primitive, and JAX's rules to all others.
Times are of the benchmark's transformer, with JAX 0.10.2.
"""

import dataclasses
import functools
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.xla_metadata import set_xla_metadata
from jax.extend.core import ClosedJaxpr, Primitive, jaxpr_as_fun
from jax.interpreters import ad, mlir

from replicax._private.jax import allow_high_operations, lowering_rule_for_cpus
from replicax.cpu import pooling
from replicax.cpu.choice import Form, choose, num_strips, spatial_windows
from replicax.cpu.filter_gradients import by_outputs, by_strips, by_sums
from replicax.cpu.forms import by_groups, by_patches, by_taps, without_zeros
from replicax.cpu.settings import SWITCH, is_on
from replicax.cpu.windows import widened

__all__ = ["apply"]

_log = logging.getLogger("replicax")

# Operations that XLA fuses into the operations that read them.
_FUSED = {
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
# A sum is written to memory if XLA would fuse this many sums, itself included. 2 to 16
# are equally good for the transformer; nets with short stages are 5 % slower with 2.
_MOST_SUMS = 12
_MOST_VISITS = 256
# A gradient of weights with at least so many times as many rows as columns is computed
# transposed: Eigen is slow at tall products. On one core, 2048 rows of 1024 and of 256
# numbers take 16 ms, transposed 11; 256 rows of 2048 and of 10 take 1.8, and 0.16.
_LEAST_RATIO = 2
# Minimal elements of a written sum; XLA recomputes smaller sums at little cost.
_SMALLEST = 2**14


def apply(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a function so that its operations get faster lowerings on CPUs.

    Convolutions and contractions over several leading dimensions become matrix
    products, gradients of max pooling elementwise operations; long sums of gradients
    are stored as arrays. JAX's rules lower operations outside `fn`, and programs for
    GPUs and TPUs. `REPLICAX_CPU=off` in the environment leaves everything to XLA.

    Args:
        fn: A function to compile with `jax.jit`, without an outer `grad` or `vmap`.

    Raises:
        ValueError: In the trace, if `REPLICAX_CPU` has an unknown value.

    Example:
        >>> convolve = apply(lambda x: lax.conv(x, x, (1, 1), "VALID"))
        >>> jax.jit(convolve)(jnp.ones((1, 1, 2, 2)))
        Array([[[[4.]]]], dtype=float32)
    """

    @functools.wraps(fn)
    def call(*args: Any, **kwargs: Any) -> Any:
        if not is_on():
            return fn(*args, **kwargs)
        jaxpr, out = jax.make_jaxpr(fn, return_shape=True)(*args, **kwargs)
        flat = _replicax_call_p.bind(*jax.tree.leaves((args, kwargs)), jaxpr=jaxpr)
        return jax.tree.unflatten(jax.tree.structure(out), flat)

    return call


def _lower_call(
    ctx: mlir.LoweringRuleContext, *operands: Any, jaxpr: ClosedJaxpr
) -> Any:
    module: Any = ctx.module_context
    overrides = _overrides() if tuple(module.platforms) == ("cpu",) else ()
    parameters = dataclasses.replace(
        module.lowering_parameters, override_lowering_rules=overrides
    )
    # Separate caches: operations outside this call must not find these lowerings.
    module = module.replace(
        lowering_parameters=parameters, lowering_cache={}, cached_primitive_lowerings={}
    )
    inner: Any = ctx.replace(module_context=module)
    out = mlir.core_call_lowering(inner, *operands, name="replicax", call_jaxpr=jaxpr)
    ctx.set_tokens_out(inner.tokens_out)
    return out


_replicax_call_p = Primitive("replicax_call")
_replicax_call_p.multiple_results = True
_replicax_call_p.def_effectful_abstract_eval(
    lambda *_, jaxpr: (jaxpr.out_avals, jaxpr.effects)
)
# The implementation outside of `jax.jit`, for example under `jax.disable_jit`.
_replicax_call_p.def_impl(lambda *args, jaxpr: jaxpr_as_fun(jaxpr)(*args))
mlir.register_lowering(_replicax_call_p, _lower_call, cacheable=False)
allow_high_operations(_replicax_call_p)


@functools.cache
def _overrides() -> tuple[tuple[Any, Callable[..., Any]], ...]:
    """Make the overriding rules: pairs of a primitive and its rule, as JAX needs."""
    rules_of_jax = {p: lowering_rule_for_cpus(p) for p in _RULES}
    unknown = [_RULES[p][0] for p, rule in rules_of_jax.items() if rule is None]
    if unknown:
        _log.info(
            "JAX %s has no known rule that lowers %s for CPUs: JAX lowers all of them, "
            "as with %s=off.",
            jax.__version__,
            " and ".join(unknown),
            SWITCH,
        )
    rules = {p: rule for p, rule in rules_of_jax.items() if rule is not None}
    if rule := rules.get(ad.add_jaxvals_p):
        # The choice depends on a sum's operands, so each sum must be lowered in line,
        # in all programs; JAX would lower sums of equal types once, as a function.
        mlir.register_lowering(ad.add_jaxvals_p, rule, cacheable=False)
    return tuple(
        (p, functools.partial(_lower, rule, _RULES[p][1])) for p, rule in rules.items()
    )


def _lower(
    rule_of_jax: Any,
    choose_fn: "_Choose",
    ctx: mlir.LoweringRuleContext,
    *operands: Any,
    **params: Any,
) -> Any:
    """Lower an operation with the function from `choose_fn`, or with JAX's rule."""
    fn = None
    if _is_plain(ctx, params):
        fn = choose_fn(ctx, operands, params)
    if fn is None:
        return rule_of_jax(ctx, *operands, **params)
    rule: Any = mlir.lower_fun(fn, multiple_results=False)
    return rule(ctx, *operands)


def _is_plain(ctx: mlir.LoweringRuleContext, params: dict[str, Any]) -> bool:
    """Whether all sizes are numbers, and no type has an explicit sharding.

    `jax.export` may have symbolic sizes, and the forms' reshapes would lose shardings.
    """
    avals: list[Any] = [*ctx.avals_in, *ctx.avals_out]
    specs = [aval.sharding.spec for aval in avals]
    if params.get("out_sharding") is not None:
        specs.append(params["out_sharding"].spec)
    has_sizes = all(isinstance(n, int) for x in avals for n in x.shape)
    return has_sizes and all(axis is None for spec in specs for axis in spec)


def _choose_convolution(
    ctx: mlir.LoweringRuleContext, operands: Sequence[Any], params: dict[str, Any]
) -> Callable[..., jax.Array] | None:
    lhs, rhs = ctx.avals_in
    out: Any = ctx.avals_out[0]
    form = choose(lhs, rhs, out, params)
    if form is None:
        return None
    fn = functools.partial(_convolve, form=form, dtype=out.dtype, params=params)
    # The other forms end with matrix products or sums of arrays in memory.
    return functools.partial(_written, fn) if form == "groups" else fn


def _choose_pooling(
    ctx: mlir.LoweringRuleContext, operands: Sequence[Any], params: dict[str, Any]
) -> Callable[..., jax.Array] | None:
    source, operand = ctx.avals_in
    if not pooling.replaces_xla(source, operand, params):
        return None
    return functools.partial(pooling.gradient, params=params)


def _is_divided_by_xla(ctx: mlir.LoweringRuleContext) -> bool:
    """Whether XLA partitions arrays over devices, so that dimensions must not merge.

    In a replica function, XLA does so only for `ModelParallelStrategy`.
    """
    context: Any = ctx.module_context.axis_context
    if not hasattr(context, "mesh"):
        return getattr(context, "num_devices", 1) > 1
    return context.mesh.size > 1 and not context.manual_axes.issuperset(
        context.mesh.axis_names
    )


def _choose_contraction(
    ctx: mlir.LoweringRuleContext, operands: Sequence[Any], params: dict[str, Any]
) -> Callable[..., jax.Array] | None:
    (of_lhs, of_rhs), (batch, _) = params["dimension_numbers"]
    leading = tuple(range(len(of_lhs)))
    if not leading or batch or not tuple(of_lhs) == tuple(of_rhs) == leading:
        return None
    avals: Sequence[Any] = ctx.avals_in
    lhs, rhs = avals
    num = len(leading)
    depth, rows = math.prod(lhs.shape[:num]), math.prod(lhs.shape[num:])
    columns = math.prod(rhs.shape[num:])
    may_swap = params["precision"] is None  # It may name one for each operand.
    is_tall = may_swap and 1 < columns <= min(depth, rows // _LEAST_RATIO)
    if (num == 1 and not is_tall) or _is_divided_by_xla(ctx):
        return None
    return functools.partial(_contract, params=params, is_tall=is_tall)


def _choose_sum(
    ctx: mlir.LoweringRuleContext, operands: Sequence[Any], params: dict[str, Any]
) -> Callable[..., jax.Array] | None:
    out: Any = ctx.avals_out[0]
    is_large = jnp.issubdtype(out.dtype, jnp.floating) and out.size >= _SMALLEST
    if not is_large or _is_divided_by_xla(ctx):
        return None
    # In a residual network the gradient at a layer's input is a long sum, which XLA
    # computes again in each reader: a step takes 1220 ms by XLA, 870 if it is written.
    is_long = _num_sums(operands) + 1 >= _MOST_SUMS
    return functools.partial(_written, lax.add) if is_long else None


def _contract(
    lhs: jax.Array, rhs: jax.Array, *, params: Mapping[str, Any], is_tall: bool
) -> jax.Array:
    """Compute `lax.dot_general_p` as a product of two matrices.

    `lhs[*contracted, *rows]` and `rhs[*contracted, *columns]` give `[*rows, *columns]`.
    For the gradient of a `Dense` layer's weights over many time steps, XLA transposes
    an operand: on one core a step takes 740 ms by XLA, 570 with this product. With
    `is_tall`, the transposed product is computed.
    """
    num = len(params["dimension_numbers"][0][0])
    contracted, rows, columns = lhs.shape[:num], lhs.shape[num:], rhs.shape[num:]
    x = lhs.reshape(math.prod(contracted), math.prod(rows))
    y = rhs.reshape(math.prod(contracted), math.prod(columns))
    if is_tall:
        x, y = y, x
    product = lax.dot_general(
        x,
        y,
        (((0,), (0,)), ((), ())),
        precision=params["precision"],
        preferred_element_type=params["preferred_element_type"],
    )
    if is_tall:
        # Without the barrier XLA would compute the product that it replaces.
        product = lax.optimization_barrier(product).T
    return product.reshape(*rows, *columns)


def _written(fn: Callable[..., jax.Array], *arrays: jax.Array) -> jax.Array:
    """Write `fn(*arrays)` to memory, where XLA would fuse it into each of its readers.

    Two readers can compute a convolution with different last bits. Then the gradient of
    `max`, which looks for the maximum in its input, does not find it and is NaN.
    """
    with set_xla_metadata(inlineable="false"):
        return jax.jit(fn)(*arrays)


def _num_sums(values: Sequence[Any]) -> int:
    """Count the sums that XLA would fuse into a reader of these MLIR values."""
    todo, visited, number = list(values), set(), 0
    while todo and len(visited) < _MOST_VISITS and number < _MOST_SUMS:
        operation = getattr(todo.pop().owner, "operation", None)
        # None: the value is an argument.
        if operation is None or operation in visited or operation.name not in _FUSED:
            continue
        visited.add(operation)
        number += operation.name == "stablehlo.add"
        todo.extend(operation.operands)
    return number


def _convolve(
    lhs: jax.Array, rhs: jax.Array, *, form: Form, dtype: Any, params: dict[str, Any]
) -> jax.Array:
    """Compute `lax.conv_general_dilated_p` in the form from `choose`."""
    lhs_spec, rhs_spec, out_spec = params["dimension_numbers"]
    of_batch, precision = params["batch_group_count"], params["precision"]
    windows = spatial_windows(lhs, rhs, params)
    # As in XLA, products of 16-bit floats are summed in float32.
    wide = widened(lhs.dtype)
    lhs, rhs = lhs.astype(wide), rhs.astype(wide)
    if form in ("outputs", "strips", "sums"):
        x = jnp.transpose(lhs, (lhs_spec[1], *lhs_spec[2:], lhs_spec[0]))
        kernel = jnp.transpose(rhs, (rhs_spec[1], *rhs_spec[2:], rhs_spec[0]))
        if form == "sums":
            y = by_sums(x, kernel, windows)
        elif form == "strips":
            y = by_strips(x, kernel, windows, num_strips(len(x), windows), precision)
        else:
            y = by_outputs(x, kernel, windows, of_batch, precision)
        order = (*out_spec[2:], *out_spec[:2])
    else:
        x = jnp.transpose(lhs, (lhs_spec[0], *lhs_spec[2:], lhs_spec[1]))
        if form == "taps":
            # JAX has reversed the kernel for the gradient; XLA cancels both reversals.
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
    """Reshape `[groups * n, *space, m]` to `[n, *space, groups * m]`."""
    x = x.reshape(groups, -1, *x.shape[1:])
    x = jnp.moveaxis(x, 0, -2)
    return x.reshape(*x.shape[:-2], -1)


_Choose = Callable[
    [mlir.LoweringRuleContext, Sequence[Any], dict[str, Any]],
    Callable[..., jax.Array] | None,
]
# Each primitive's name for messages, and the function that chooses its computation.
_RULES: Mapping[Any, tuple[str, _Choose]] = {
    lax.conv_general_dilated_p: ("convolutions", _choose_convolution),
    lax.select_and_scatter_add_p: ("gradients of max pooling", _choose_pooling),
    lax.dot_general_p: ("contractions", _choose_contraction),
    ad.add_jaxvals_p: ("sums of gradients", _choose_sum),
}
