"""Cases of Equinox: modules with functions and numbers among their leaves."""

import io
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from tests.jax_loops.cases import SEVERAL, Case, parts_of

import replicax as rx

KEY = jax.random.key(0)


class Scaled(eqx.Module):
    """A layer with a hyperparameter, a name, a function, and a count of its calls."""

    linear: eqx.nn.Linear
    rate: float
    activation: Callable[..., jax.Array]
    count: int = 0
    name: str = eqx.field(static=True, default="scaled")

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.rate * self.activation(self.linear(x))


class Conv(eqx.Module):
    conv: eqx.nn.Conv1d

    def __init__(self) -> None:
        self.conv = eqx.nn.Conv1d(1, 3, 3, key=KEY)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.conv(x[None]).mean(1)


class WithDropout(eqx.Module):
    linear: eqx.nn.Linear
    dropout: eqx.nn.Dropout

    def __init__(self) -> None:
        self.linear = eqx.nn.Linear(6, 3, key=KEY)
        self.dropout = eqx.nn.Dropout(0.5)

    def __call__(self, x: jax.Array, key: jax.Array) -> jax.Array:
        return self.linear(self.dropout(x, key=key))


class WithNorm(eqx.Module):
    norm: eqx.nn.BatchNorm
    linear: eqx.nn.Linear

    def __init__(self) -> None:
        self.norm = eqx.nn.BatchNorm(6, "batch", momentum=0.5, mode="batch")
        self.linear = eqx.nn.Linear(6, 3, key=KEY)

    def __call__(self, x: jax.Array, state: Any) -> tuple[jax.Array, Any]:
        x, state = self.norm(x, state)
        return self.linear(x), state


def first_weight(layers: Any) -> Any:
    return layers[0].weight


def last_weight(layers: Any) -> Any:
    return layers[1].weight


class Tied(eqx.Module):
    shared: eqx.nn.Shared

    def __init__(self) -> None:
        layers = [eqx.nn.Linear(6, 6, key=k) for k in jax.random.split(KEY)]
        self.shared = eqx.nn.Shared(layers, last_weight, first_weight)

    def __call__(self, x: jax.Array) -> jax.Array:
        first, last = self.shared()
        return last(jnp.tanh(first(x)))


class Layers(eqx.Module):
    """Stacked layers, made by `filter_vmap` and applied by `scan`."""

    layers: eqx.nn.Linear

    def __init__(self) -> None:
        make = eqx.filter_vmap(lambda key: eqx.nn.Linear(6, 6, key=key))
        self.layers = make(jax.random.split(KEY, 3))

    def __call__(self, x: jax.Array) -> jax.Array:
        arrays, rest = eqx.partition(self.layers, eqx.is_array)
        forward = lambda x, layer: (jnp.tanh(eqx.combine(layer, rest)(x)), None)  # noqa: E731
        return jax.lax.scan(forward, x, arrays)[0]


class Recurrent(eqx.Module):
    cell: eqx.nn.GRUCell

    def __init__(self) -> None:
        self.cell = eqx.nn.GRUCell(1, 3, key=KEY)

    def __call__(self, x: jax.Array) -> jax.Array:
        step = lambda h, x: (self.cell(x, h), None)  # noqa: E731
        return jax.lax.scan(step, jnp.zeros(3), x[:, None])[0]


class Attention(eqx.Module):
    attention: eqx.nn.MultiheadAttention

    def __init__(self) -> None:
        self.attention = eqx.nn.MultiheadAttention(2, 2, key=KEY)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x.reshape(3, 2)
        return self.attention(x, x, x).sum(1)


def mlp() -> eqx.nn.MLP:
    return eqx.nn.MLP(6, 3, 8, 2, key=KEY)


def scaled() -> Scaled:
    return Scaled(eqx.nn.Linear(6, 3, key=KEY), 0.5, jnp.tanh)


def parameters_of(model: Any) -> Any:
    return eqx.filter(model, eqx.is_inexact_array)


def entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def loss_of(model: Any, batch: Any) -> jax.Array:
    return entropy(jax.vmap(model)(batch[0]), batch[1])


def descended(model: Any, grads: Any) -> Any:
    return eqx.apply_updates(model, jax.tree.map(lambda g: -0.1 * g, grads))


def sgd(replicas: Any, model: Any, batch: Any) -> Any:
    loss, grads = replicas.mean(eqx.filter_value_and_grad(loss_of)(model, batch))
    return descended(model, grads), loss


def optimized(replicas: Any, state: Any, batch: Any) -> Any:
    model, moments = state
    grads = eqx.filter_grad(loss_of)(model, batch)
    tx = replicas.distributed(optax.adam(0.01))
    updates, moments = tx.update(grads, moments, parameters_of(model))
    return (eqx.apply_updates(model, updates), moments), None


def optimized_start(replicas: Any) -> Any:
    model = WithDropout().linear
    return model, replicas.distributed(optax.adam(0.01)).init(parameters_of(model))


PARAMETERS, REST = eqx.partition(mlp(), eqx.is_inexact_array)


def partitioned(replicas: Any, params: Any, batch: Any) -> Any:
    grads = jax.grad(lambda p: loss_of(eqx.combine(p, REST), batch))(params)
    return descended(params, replicas.mean(grads)), None


def counting(replicas: Any, model: Any, batch: Any) -> Any:
    model, _ = sgd(replicas, model, batch)
    return eqx.tree_at(lambda m: m.count, model, model.count + 1), None


def trains_inexact_leaves(replicas: Any, model: Any, batch: Any) -> Any:
    """Decays inexact arrays; `rate` is a number, and does not decay."""
    decay = jax.tree.map(lambda w: -0.1 * w, parameters_of(model))
    return eqx.apply_updates(model, decay), None


def dropped(replicas: Any, state: Any, batch: Any) -> Any:
    model, key = state
    key, own = jax.random.split(key)
    keys = jax.random.split(replicas.own_key(own), len(batch[1]))

    def loss(model: Any) -> jax.Array:
        return entropy(jax.vmap(model)(batch[0], keys), batch[1])

    model = descended(model, replicas.mean(eqx.filter_grad(loss)(model)))
    return (model, key), jax.vmap(model)(batch[0], keys)


def dropped_by_hand(num: int, state: Any, batch: Any) -> Any:
    """Each replica draws with a key of its own, folded from the key and its number."""
    model, key = state
    key, own = jax.random.split(key)
    parts = parts_of(batch, num)
    keys = [
        jax.random.split(jax.random.fold_in(own, i), len(y))
        for i, (_, y) in enumerate(parts)
    ]
    x, y = batch

    def loss(model: Any) -> jax.Array:
        return entropy(jax.vmap(model)(x, jnp.concatenate(keys)), y)

    model = descended(model, eqx.filter_grad(loss)(model))
    return (model, key), jax.vmap(model)(x, jnp.concatenate(keys))


def evaluated(replicas: Any, model: Any, batch: Any) -> Any:
    return model, jax.vmap(eqx.nn.inference_mode(model))(batch[0], key=None)


def of_batch(model: Any) -> Any:
    return jax.vmap(model, axis_name="batch", in_axes=(0, None), out_axes=(0, None))


def normalized(average: bool = False, of_all: bool = False) -> Any:
    def step(replicas: Any, both: Any, batch: Any) -> Any:
        model, state = both
        if of_all:
            names = ("batch", *replicas.axis_names())
            model = eqx.tree_at(lambda m: m.norm.axis_name, model, names)
        forward = jax.vmap(
            model, axis_name="batch", in_axes=(0, None), out_axes=(0, None)
        )
        out, state = forward(batch[0], state)
        if average:
            arrays, rest = eqx.partition(state, eqx.is_inexact_array)
            state = eqx.combine(replicas.mean(arrays), rest)
        return (both[0], state), out

    return step


def normalized_by_hand(num: int, both: Any, batch: Any) -> Any:
    model, state = both
    copies = [jax.tree.map(jnp.copy, state) for _ in range(num)]
    pairs = zip(parts_of(batch, num), copies, strict=True)
    out, states = zip(*(of_batch(model)(x, s) for (x, _), s in pairs), strict=True)
    means, rest = eqx.partition(states[0], eqx.is_inexact_array)
    others = [eqx.filter(s, eqx.is_inexact_array) for s in states]
    means = jax.tree.map(lambda *s: sum(s) / num, *others)
    return (model, eqx.combine(means, rest)), jnp.concatenate(out)


def vmap_of_grad(replicas: Any, model: Any, batch: Any) -> Any:
    def grad(model: Any, x: jax.Array, y: jax.Array) -> Any:
        return eqx.filter_grad(lambda m: entropy(m(x), y))(model)

    grads = eqx.filter_vmap(grad, in_axes=(None, 0, 0))(model, *batch)
    mean = replicas.mean(jax.tree.map(lambda g: g.mean(0), grads))
    return descended(model, mean), grads.layers[0].bias


def ensemble(_: Any) -> Any:
    return eqx.filter_vmap(lambda key: eqx.nn.MLP(6, 3, 8, 1, key=key))(
        jax.random.split(KEY, 2)
    )


def trains_an_ensemble(replicas: Any, models: Any, batch: Any) -> Any:
    grad = eqx.filter_vmap(eqx.filter_grad(loss_of), in_axes=(eqx.if_array(0), None))
    return descended(models, replicas.mean(grad(models, batch))), None


def jitted_inside(replicas: Any, model: Any, batch: Any) -> Any:
    loss, grads = eqx.filter_jit(eqx.filter_value_and_grad(loss_of))(model, batch)
    return descended(model, replicas.mean(grads)), replicas.mean(loss)


def checkpointed(replicas: Any, model: Any, batch: Any) -> Any:
    grads = eqx.filter_grad(eqx.filter_checkpoint(loss_of))(model, batch)
    return descended(model, replicas.mean(grads)), None


def made_in_the_step(replicas: Any, _: Any, batch: Any) -> Any:
    return sgd(replicas, mlp(), batch)


OUTER = mlp()


def closure(replicas: Any, state: Any, batch: Any) -> Any:
    return state, jax.vmap(OUTER)(batch[0])


def method(replicas: Any, model: Any, batch: Any) -> Any:
    return model, jax.vmap(model.__call__)(batch[0])


def forgotten(replicas: Any, model: Any, batch: Any) -> Any:
    return descended(model, eqx.filter_grad(loss_of)(model, batch)), None


def serialised(model: Any) -> Any:
    """The model as a file holds it."""
    file = io.BytesIO()
    eqx.tree_serialise_leaves(file, model)
    file.seek(0)
    return eqx.tree_deserialise_leaves(file, mlp())


def training(make: Callable[[], Any], **options: Any) -> Case:
    return module_case(step=sgd, start=lambda _: make(), **options)


def module_case(**options: Any) -> Case:
    return Case(jit=eqx.filter_jit, **options)


def with_norm(_: Any) -> Any:
    return eqx.nn.make_with_state(WithNorm)()


EQUINOX = {
    "MLP": training(mlp),
    "rx.distributed": module_case(
        step=optimized,
        start=optimized_start,
        compared=lambda state: state[0],
        rtol=2e-4,
    ),
    "partition and combine": module_case(step=partitioned, start=lambda _: PARAMETERS),
    "fields: static, numbers, functions": training(scaled),
    "a number that counts": module_case(step=counting, start=lambda _: scaled()),
    "a number is no parameter": module_case(
        step=trains_inexact_leaves, start=lambda _: scaled()
    ),
    "Dropout": module_case(
        step=dropped,
        start=lambda _: (WithDropout(), KEY),
        by_hand=dropped_by_hand,
        even=True,
    ),
    "inference_mode": module_case(step=evaluated, start=lambda _: WithDropout()),
    "BatchNorm, averaged State": module_case(
        step=normalized(average=True),
        start=with_norm,
        by_hand=normalized_by_hand,
        even=True,
    ),
    "BatchNorm, axis_names": module_case(
        step=normalized(of_all=True), start=with_norm, even=True
    ),
    "BatchNorm, own State": module_case(
        step=normalized(),
        start=with_norm,
        refused={SEVERAL: (rx.DivergenceError, "all_reduce")},
    ),
    "Conv": training(Conv),
    "RNN": training(Recurrent),
    "attention": training(Attention),
    "shared leaves": training(Tied, compared=parameters_of),
    "stacked layers and scan": training(Layers),
    "filter_vmap of filter_grad": module_case(
        step=vmap_of_grad, start=lambda _: mlp(), even=True
    ),
    "an ensemble by filter_vmap": module_case(step=trains_an_ensemble, start=ensemble),
    "filter_jit in the step": module_case(step=jitted_inside, start=lambda _: mlp()),
    "filter_checkpoint": module_case(step=checkpointed, start=lambda _: mlp()),
    "made in the step": module_case(step=made_in_the_step, start=lambda _: None),
    "closed-over": module_case(step=closure, start=lambda _: None),
    "a bound method": module_case(step=method, start=lambda _: mlp()),
    "serialised": training(mlp, compared=serialised),
    "donate": training(mlp, donate=(0,)),
    "no all_reduce": module_case(
        step=forgotten,
        start=lambda _: mlp(),
        refused={SEVERAL: (rx.DivergenceError, "all_reduce")},
    ),
}
