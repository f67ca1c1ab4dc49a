"""Cases of plain JAX and Optax: `step(replicas, state, batch)`, as in `cases`."""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.experimental import io_callback as io_callback_of_jax
from tests.jax_loops.cases import (
    BATCH,
    SEVERAL,
    Case,
    descended,
    loss_of,
    losses_of,
    parameters,
    parts_of,
)

import replicax as rx

gradient = jax.grad(loss_of)


class Weights(NamedTuple):
    params: Any
    rest: tuple[Any, ...]


def sgd(replicas: Any, params: Any, batch: Any) -> Any:
    loss, grads = replicas.mean(jax.value_and_grad(loss_of)(params, batch))
    return descended(params, grads), loss


def sums(replicas: Any, params: Any, batch: Any) -> Any:
    loss, grads = jax.value_and_grad(lambda p: losses_of(p, batch).sum() / BATCH)(
        params
    )
    return descended(params, replicas.sum(grads)), replicas.sum(loss)


def mixed_leaves(replicas: Any, state: Any, batch: Any) -> Any:
    params, (count, seen, none) = state
    params, _ = sgd(replicas, params, batch)
    return Weights(params, (count + 1, seen | True, none)), None


def static_leaves(replicas: Any, state: Any, batch: Any) -> Any:
    params, name, fn = state
    params, loss = sgd(replicas, params, batch)
    return (params, name, fn), fn(loss)


def equal_keys(replicas: Any, state: Any, batch: Any) -> Any:
    params, key = state
    key, noise_key = jax.random.split(key)
    grads = replicas.mean(gradient(params, batch))
    noise = jax.random.normal(noise_key, grads["w"].shape)
    return (descended(params, {**grads, "w": grads["w"] + noise}), key), None


def own_rows_of_a_mask(replicas: Any, state: Any, batch: Any) -> Any:
    params, key = state
    key, mask_key = jax.random.split(key)
    x, y = batch
    mask = jax.random.bernoulli(mask_key, shape=(BATCH, x.shape[1]))
    params, loss = sgd(replicas, params, (x * replicas.own_rows(mask, len(y)), y))
    return (params, key), loss


def folded_keys(replicas: Any, state: Any, batch: Any) -> Any:
    key = replicas.own_key(state)
    return state, jax.random.uniform(key, batch[1].shape)


def folded_by_hand(num: int, state: Any, batch: Any) -> Any:
    shape = (len(batch[1]) // num,)
    keys = [jax.random.fold_in(state, i) for i in range(num)]
    return state, jnp.concatenate([jax.random.uniform(k, shape) for k in keys])


def scan(replicas: Any, params: Any, batch: Any) -> Any:
    return jax.lax.scan(lambda p, _: sgd(replicas, p, batch), params, None, length=3)


def remat(replicas: Any, params: Any, batch: Any) -> Any:
    grads = jax.grad(jax.checkpoint(loss_of))(params, batch)
    return descended(params, replicas.mean(grads)), None


def vmap_of_grad(replicas: Any, params: Any, batch: Any) -> Any:
    each = jax.vmap(lambda x, y: gradient(params, (x[None], y[None])), in_axes=(0, 0))(
        *batch
    )
    mean = jax.tree.map(lambda g: g.mean(0), each)
    return descended(params, replicas.mean(mean)), each["w"]


@jax.custom_vjp
def clipped(x: jax.Array) -> jax.Array:
    return x


clipped.defvjp(lambda x: (x, None), lambda _, g: (jnp.clip(g, -0.01, 0.01),))


def custom_vjp(replicas: Any, params: Any, batch: Any) -> Any:
    x, y = batch
    grads = jax.grad(lambda p: loss_of({**p, "w": clipped(p["w"])}, (x, y)))(params)
    total = replicas.mean(jax.tree.map(jnp.abs, grads))
    return params, total["w"].sum() < 1


def while_loop(replicas: Any, params: Any, batch: Any) -> Any:
    def body(carry: Any) -> Any:
        params, count, _ = carry
        params, loss = sgd(replicas, params, batch)
        return params, count + 1, loss

    params, count, _ = jax.lax.while_loop(
        lambda c: (c[1] < 5) & (c[2] > 1.0), body, (params, 0, jnp.float32(9))
    )
    return params, count


def cond(replicas: Any, state: Any, batch: Any) -> Any:
    params, count = state
    new, _ = sgd(replicas, params, batch)
    params = jax.lax.cond(count % 2 == 0, lambda: new, lambda: params)
    return (params, count + 1), None


TABLE = jnp.arange(18.0).reshape(6, 3) / 100


def closure_over_arrays(replicas: Any, params: Any, batch: Any) -> Any:
    return sgd(replicas, {**params, "w": params["w"] + TABLE}, batch)


def accumulated(replicas: Any, state: Any, batch: Any) -> Any:
    params, total, count = state
    grads = replicas.mean(gradient(params, batch))
    total = jax.tree.map(jnp.add, total, grads)
    is_last = count % 2 == 1
    stepped = descended(params, total, 0.05)
    params = jax.tree.map(lambda a, b: jnp.where(is_last, a, b), stepped, params)
    total = jax.tree.map(lambda t: jnp.where(is_last, 0, t), total)
    return (params, total, count + 1), None


def moving_average(replicas: Any, state: Any, batch: Any) -> Any:
    params, average = state
    params, _ = sgd(replicas, params, batch)
    return (params, optax.incremental_update(params, average, 0.1)), None


def by_norm(grads: Any) -> Any:
    scale = jnp.minimum(1, 0.1 / optax.tree.norm(grads))
    return jax.tree.map(lambda g: g * scale, grads)


def clip_after(replicas: Any, params: Any, batch: Any) -> Any:
    return descended(params, by_norm(replicas.mean(gradient(params, batch)))), None


def clip_before(replicas: Any, params: Any, batch: Any) -> Any:
    return descended(params, replicas.mean(by_norm(gradient(params, batch)))), None


def clip_before_by_hand(num: int, params: Any, batch: Any) -> Any:
    own = [by_norm(gradient(params, part)) for part in parts_of(batch, num)]
    mean = jax.tree.map(lambda *g: sum(g) / num, *own)
    return descended(params, mean), None


def integers(replicas: Any, state: Any, batch: Any) -> Any:
    _, y = batch
    return state + replicas.sum((y == 0).sum()), replicas.mean(y.sum()) / len(y)


def gathered(replicas: Any, params: Any, batch: Any) -> Any:
    logits = replicas.gather(batch[0] @ params["w"])
    return params, jax.nn.softmax(logits @ logits.T)


def per_row(replicas: Any, params: Any, batch: Any) -> Any:
    return params, losses_of(params, batch)


def forgotten(replicas: Any, params: Any, batch: Any) -> Any:
    return descended(params, gradient(params, batch)), None


def gradient_through_mean(replicas: Any, params: Any, batch: Any) -> Any:
    grads = jax.grad(lambda p: replicas.mean(loss_of(p, batch)))(params)
    return descended(params, grads), None


def forgotten_statistics(replicas: Any, state: Any, batch: Any) -> Any:
    params, mean = state
    params, _ = sgd(replicas, params, batch)
    return (params, 0.9 * mean + 0.1 * batch[0].mean(0)), None


def own_state(replicas: Any, total: Any, batch: Any) -> Any:
    total = total + batch[0].sum()
    return total, replicas.sum(total)


def printed(replicas: Any, params: Any, batch: Any) -> Any:
    params, loss = sgd(replicas, params, batch)
    jax.debug.print("loss {}", loss)
    return params, loss


def by_axis_names(replicas: Any, params: Any, batch: Any) -> Any:
    grads = gradient(params, batch)
    if names := replicas.axis_names():
        grads = jax.lax.pmean(grads, names)
    return descended(params, grads), None


def product_with_hessian(replicas: Any, params: Any, batch: Any) -> Any:
    grads, product = jax.jvp(lambda p: gradient(p, batch), (params,), (params,))
    return descended(params, replicas.mean(grads)), replicas.mean(product)


def jit_in_the_step(replicas: Any, params: Any, batch: Any) -> Any:
    grads = jax.jit(gradient)(params, batch)
    return descended(params, replicas.mean(grads)), None


def whole_step_jitted(replicas: Any, params: Any, batch: Any) -> Any:
    return jax.jit(functools.partial(sgd, replicas))(params, batch)


def pure_callback(replicas: Any, params: Any, batch: Any) -> Any:
    x, y = batch
    shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
    x = jax.pure_callback(np.sin, shape, x, vmap_method="expand_dims")
    return sgd(replicas, params, (x, y))


def io_callback(replicas: Any, params: Any, batch: Any) -> Any:
    params, loss = sgd(replicas, params, batch)
    io_callback_of_jax(lambda loss: None, None, loss)
    return params, loss


def from_the_host(replicas: Any, params: Any, batch: Any) -> Any:
    params, _ = sgd(replicas, params, batch)
    scalar = jax.ShapeDtypeStruct((), jnp.float32)
    rate = io_callback_of_jax(lambda: np.float32(0.1), scalar)
    return {**params, "w": params["w"] * rate}, None


def growing(replicas: Any, state: Any, batch: Any) -> Any:
    return (*state, replicas.mean(loss_of(parameters(), batch))), None


def bfloat16(replicas: Any, params: Any, batch: Any) -> Any:
    half = optax.tree_utils.tree_cast(params, jnp.bfloat16)
    x, y = batch
    grads = gradient(half, (x.astype(jnp.bfloat16), y))
    grads = optax.tree_utils.tree_cast(grads, jnp.float32)
    return descended(params, replicas.mean(grads)), None


def with_parameters(*others: Any) -> Any:
    return lambda _: (parameters(), *others)


zeros = functools.partial(jax.tree.map, jnp.zeros_like)
DIVERGES = {SEVERAL: (rx.DivergenceError, "all_reduce")}

PLAIN = {
    "sgd": Case(step=sgd, start=parameters),
    "sums, divided by the batch": Case(step=sums, start=parameters),
    "tuples, ints, bools, None": Case(
        step=mixed_leaves,
        start=lambda _: Weights(parameters(), (jnp.int32(0), jnp.array(False), None)),
    ),
    "strings and functions": Case(
        step=static_leaves,
        start=lambda _: (parameters(), "name", jnp.tanh),
        jit=lambda step: step,
    ),
    "typed keys": Case(step=equal_keys, start=with_parameters(jax.random.key(0))),
    "raw keys": Case(step=equal_keys, start=with_parameters(jax.random.PRNGKey(0))),
    "a mask by rows": Case(
        step=own_rows_of_a_mask, start=with_parameters(jax.random.key(0))
    ),
    "keys of replicas": Case(
        step=folded_keys,
        start=lambda _: jax.random.key(0),
        by_hand=folded_by_hand,
        even=True,
    ),
    "scan": Case(step=scan, start=parameters),
    "remat": Case(step=remat, start=parameters),
    "vmap of grad": Case(step=vmap_of_grad, start=parameters, even=True),
    "custom_vjp": Case(step=custom_vjp, start=parameters),
    "while_loop": Case(step=while_loop, start=parameters),
    "cond": Case(step=cond, start=with_parameters(0)),
    "closure over arrays": Case(step=closure_over_arrays, start=parameters),
    "donate": Case(step=sgd, start=parameters, donate=(0,)),
    "accumulated gradients": Case(
        step=accumulated, start=with_parameters(zeros(parameters()), 0)
    ),
    "average of weights": Case(
        step=moving_average, start=with_parameters(parameters())
    ),
    "clip after all_reduce": Case(step=clip_after, start=parameters),
    "clip before all_reduce": Case(
        step=clip_before, start=parameters, by_hand=clip_before_by_hand, even=True
    ),
    "sums and means of ints": Case(step=integers, start=lambda _: jnp.int32(0)),
    "all_gather": Case(step=gathered, start=parameters),
    "results of rows": Case(step=per_row, start=parameters),
    "no all_reduce": Case(step=forgotten, start=parameters, refused=DIVERGES),
    "grad through all_reduce": Case(
        step=gradient_through_mean, start=parameters, refused=DIVERGES
    ),
    "own statistics": Case(
        step=forgotten_statistics,
        start=with_parameters(jnp.zeros(6)),
        refused={SEVERAL: (rx.DivergenceError, r"\[1\]")},
    ),
    "per_replica": Case(
        step=own_state,
        start=lambda replicas: replicas.per_replica(np.float32(0)),
        compared=lambda _: None,
        even=True,
    ),
    "per_replica, uneven": Case(
        step=own_state,
        start=lambda replicas: replicas.per_replica(np.float32(0)),
        refused={SEVERAL: (ValueError, r"all in args\[0\], 1 in args\[1\]\[0\]")},
    ),
    "debug.print": Case(step=printed, start=parameters),
    "pmean": Case(step=by_axis_names, start=parameters, even=True),
    "pmean, uneven": Case(
        step=by_axis_names,
        start=parameters,
        refused={SEVERAL: (ValueError, "axis_names")},
    ),
    "jvp of grad": Case(step=product_with_hessian, start=parameters),
    "jit in the step": Case(step=jit_in_the_step, start=parameters),
    "jit of the step": Case(step=whole_step_jitted, start=parameters),
    "pure_callback": Case(step=pure_callback, start=parameters),
    "io_callback": Case(step=io_callback, start=parameters),
    "io_callback into state": Case(
        step=from_the_host, start=parameters, refused=DIVERGES
    ),
    "growing state": Case(step=growing, start=lambda _: ()),
    # A bfloat16 has 8 bits.
    "bfloat16": Case(step=bfloat16, start=parameters, rtol=2e-2),
}


def trained_by(tx: Any) -> Any:
    def step(replicas: Any, state: Any, batch: Any) -> Any:
        params, moments = state
        own = tx(replicas)
        updates, moments = own.update(gradient(params, batch), moments, params)
        return (optax.apply_updates(params, updates), moments), None

    return step


def optimizer(tx: Any, **options: Any) -> Case:
    """`tx(replicas)` is the whole transformation."""

    def start(replicas: Any) -> Any:
        params = parameters()
        return params, tx(replicas).init(params)

    # Adam divides small numbers by small ones.
    options = {"rtol": 2e-4, "compared": lambda state: state[0]} | options
    return Case(step=trained_by(tx), start=start, **options)


def reduced_first(replicas: Any, state: Any, batch: Any) -> Any:
    params, moments = state
    grads = replicas.mean(gradient(params, batch))
    updates, moments = optax.adam(0.01).update(grads, moments, params)
    return (optax.apply_updates(params, updates), moments), None


def lookahead(replicas: Any, state: Any, batch: Any) -> Any:
    params, moments = state
    tx = replicas.distributed(optax.lookahead(optax.sgd(0.1), 2, 0.5))
    grads = gradient(params.fast, batch)
    updates, moments = tx.update(grads, moments, params)
    return (optax.apply_updates(params, updates), moments), None


def lookahead_start(replicas: Any) -> Any:
    params = optax.LookaheadParams.init_synced(parameters())
    tx = replicas.distributed(optax.lookahead(optax.sgd(0.1), 2, 0.5))
    return params, tx.init(params)


def plateau(combined: bool) -> Any:
    tx = optax.chain(optax.sgd(0.1), optax.contrib.reduce_on_plateau(patience=1))

    def step(replicas: Any, state: Any, batch: Any) -> Any:
        params, moments = state
        loss, grads = jax.value_and_grad(loss_of)(params, batch)
        loss = replicas.mean(loss) if combined else loss
        updates, moments = replicas.distributed(tx).update(
            grads, moments, params, value=loss
        )
        return (optax.apply_updates(params, updates), moments), None

    def start(replicas: Any) -> Any:
        return parameters(), replicas.distributed(tx).init(parameters())

    return Case(step=step, start=start, refused={} if combined else DIVERGES)


def combined(replicas: Any, fn: Any) -> Any:
    """The mean of `fn` over the replicas; its gradient is the mean of theirs."""

    @jax.custom_vjp
    def mean(params: Any) -> jax.Array:
        return replicas.mean(fn(params))

    def backward(grads: Any, cotangent: jax.Array) -> Any:
        return (jax.tree.map(lambda g: cotangent * g, grads),)

    mean.defvjp(lambda p: replicas.mean(jax.value_and_grad(fn)(p)), backward)
    return mean


def lbfgs(loss_in: Any, **options: Any) -> Case:
    """`loss_in(replicas, batch)` is the loss that the line search compares."""
    tx = optax.lbfgs()

    def step(replicas: Any, state: Any, batch: Any) -> Any:
        params, moments = state
        loss = loss_in(replicas, batch)
        value, grad = jax.value_and_grad(loss)(params)
        updates, moments = replicas.distributed(tx).update(
            grad, moments, params, value=value, grad=grad, value_fn=loss
        )
        return (optax.apply_updates(params, updates), moments), value

    def start(replicas: Any) -> Any:
        return parameters(), replicas.distributed(tx).init(parameters())

    return Case(
        step=step,
        start=start,
        compared=lambda state: state[0],
        # A line search compares losses, and divides their differences.
        rtol=2e-3,
        **options,
    )


def loss_of_all_rows(replicas: Any, batch: Any) -> Any:
    rows = jax.tree.map(replicas.gather, batch)
    return lambda params: loss_of(params, rows)


def loss_of_own_rows(replicas: Any, batch: Any) -> Any:
    return lambda params: loss_of(params, batch)


def combined_loss(replicas: Any, batch: Any) -> Any:
    return combined(replicas, loss_of_own_rows(replicas, batch))


def accumulating(**options: Any) -> Case:
    """Each replica adds up its gradients; every second step combines the sums."""

    def tx(replicas: Any) -> Any:
        return optax.MultiSteps(replicas.distributed(optax.adam(0.01)), 2)

    def start(replicas: Any) -> Any:
        state = tx(replicas).init(parameters())
        own = replicas.per_replica(state.acc_grads)
        return parameters(), state._replace(acc_grads=own)

    return dataclasses.replace(optimizer(tx, **options), start=start)


# `test_optax` has many transformations inside of `distributed`.
OPTAX = {
    "adam": optimizer(lambda r: r.distributed(optax.adam(0.01))),
    "all_reduce, then adam": Case(
        step=reduced_first,
        start=lambda _: (parameters(), optax.adam(0.01).init(parameters())),
        rtol=2e-4,
    ),
    "distributed in a chain": optimizer(
        lambda r: optax.chain(r.distributed(optax.scale_by_adam()), optax.scale(-0.01))
    ),
    "MultiSteps around": accumulating(even=True),
    "MultiSteps around, equal state": optimizer(
        lambda r: optax.MultiSteps(r.distributed(optax.adam(0.01)), 2),
        refused={SEVERAL: (rx.DivergenceError, "acc_grads")},
    ),
    "not distributed": optimizer(lambda _: optax.adam(0.01), refused=DIVERGES),
    "lookahead": Case(step=lookahead, start=lookahead_start, compared=lambda s: s[0]),
    "plateau": plateau(combined=True),
    "plateau, own loss": plateau(combined=False),
    "lbfgs, gathered rows": lbfgs(loss_of_all_rows),
    "lbfgs, combined loss": lbfgs(combined_loss),
    "lbfgs, own loss": lbfgs(loss_of_own_rows, refused=DIVERGES),
}
