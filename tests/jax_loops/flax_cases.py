"""Cases of Flax: NNX objects that steps change in place, and Linen's pytrees."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import linen, nnx
from flax.training.train_state import TrainState
from tests.jax_loops.cases import SEVERAL, Case, parts_of

import replicax as rx

CENTRAL = {("central",): (NotImplementedError, "CentralStorage")}
SEVERAL_OTHERS = SEVERAL[:-1]


class MLP(nnx.Module):
    def __init__(self, rngs: nnx.Rngs, **norm: Any) -> None:
        self.first = nnx.Linear(6, 8, rngs=rngs)
        self.norm = nnx.BatchNorm(8, momentum=0.5, rngs=rngs, **norm) if norm else None
        self.last = nnx.Linear(8, 3, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = self.first(x)
        return self.last(nnx.relu(x if self.norm is None else self.norm(x)))


class Tied(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.weight = nnx.Param(rngs.normal((6, 6)) / 6)
        self.again = self.weight

    def __call__(self, x: jax.Array) -> jax.Array:
        return jnp.tanh(x @ self.weight) @ self.again


class Conv(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.conv = nnx.Conv(1, 3, (3,), rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.conv(x[..., None]).mean(1)


class Recurrent(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.rnn = nnx.RNN(nnx.GRUCell(1, 3, rngs=rngs))

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.rnn(x[..., None])[:, -1]


class Attention(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.attention = nnx.MultiHeadAttention(2, 2, decode=False, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.attention(x.reshape(-1, 3, 2)).sum(2)


class Rematerialized(MLP):
    @nnx.remat
    def __call__(self, x: jax.Array) -> jax.Array:
        return super().__call__(x)


class Switched(MLP):
    def __call__(self, x: jax.Array) -> jax.Array:
        positive = lambda model, x: MLP.__call__(model, x)  # noqa: E731
        negative = lambda model, x: -MLP.__call__(model, x)  # noqa: E731
        return nnx.cond(
            x.shape[0] * self.first.bias[0] >= 0, positive, negative, self, x
        )


class Layers(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        @nnx.split_rngs(splits=3)
        @nnx.vmap
        def make(rngs: nnx.Rngs) -> nnx.Linear:
            return nnx.Linear(6, 6, rngs=rngs)

        self.layers = make(rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        def forward(x: jax.Array, layer: nnx.Linear) -> jax.Array:
            return jnp.tanh(layer(x))

        return forward(x, self.layers)


class Sown(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.linear = nnx.Linear(6, 3, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = self.linear(x)
        self.sow(nnx.Intermediate, "hidden", x)
        return x


class Total(nnx.Metric):
    """A metric that is no `Average`, so its state is not summed over the replicas."""

    def __init__(self) -> None:
        self.state = nnx.metrics.MetricState(jnp.float32(0))

    def update(self, *, values: jax.Array) -> None:
        self.state[...] += values


def loss_of(model: Any, batch: Any) -> tuple[jax.Array, jax.Array]:
    x, y = batch
    logits = model(x)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, y)
    return losses.mean(), logits


def trained(replicas: Any, objects: Any, batch: Any) -> Any:
    model, optimizer, *metrics = objects
    value_and_grad = nnx.value_and_grad(
        loss_of, has_aux=True, argnums=nnx.DiffState(0, optimizer.wrt)
    )
    (loss, logits), grads = value_and_grad(model, batch)
    loss, grads = replicas.mean((loss, grads))
    optimizer.update(model, grads)
    for metric in metrics:
        metric.update(logits=logits, labels=batch[1], values=logits)
    return loss


def combined_by_optimizer(replicas: Any, objects: Any, batch: Any) -> Any:
    model, optimizer = objects
    grads, _ = nnx.grad(loss_of, has_aux=True)(model, batch)
    optimizer.update(model, grads)


def training(
    make: Callable[[nnx.Rngs], Any], *metrics: Callable[[], Any], **options: Any
) -> Case:
    wrt = options.pop("wrt", nnx.Param)

    def start(replicas: Any) -> Any:
        model = make(nnx.Rngs(0))
        optimizer = nnx.Optimizer(model, optax.sgd(0.1, momentum=0.9), wrt=wrt)
        return (model, optimizer, *(metric() for metric in metrics))

    return nnx_case(**{"step": trained, "start": start} | options)


def nnx_case(**options: Any) -> Case:
    refused = options.pop("refused", {}) | CENTRAL
    return Case(**{"in_place": True, "jit": nnx.jit, "refused": refused} | options)


def mlp(replicas: Any) -> Any:
    return MLP(nnx.Rngs(0))


def applied(replicas: Any, model: Any, batch: Any) -> Any:
    return model(batch[0])


def by_parts(num: int, model: Any, batch: Any) -> Any:
    """Each replica's rows by a copy of the model; then the mean of the statistics."""
    copies = [nnx.clone(model) for _ in range(num)]
    parts = parts_of(batch, num)
    out = [copy(x) for copy, (x, _) in zip(copies, parts, strict=True)]
    states = [nnx.state(copy, nnx.BatchStat) for copy in copies]
    nnx.update(model, jax.tree.map(lambda *s: sum(s) / num, *states))
    return jnp.concatenate(out)


def dropped(replicas: Any, dropout: Any, batch: Any) -> Any:
    return dropout(batch[0])


def dropped_by_parts(num: int, dropout: Any, batch: Any) -> Any:
    """Each replica draws with a key of its own, folded from the key and its number."""
    out = []
    for i, (x, _) in enumerate(parts_of(batch, num)):
        copy, key = nnx.clone(dropout), dropout.rngs.key[...]
        copy.rngs.key[...] = key if num == 1 else jax.random.fold_in(key, i)
        out.append(copy(x))
    dropout.rngs.count[...] = dropout.rngs.count[...] + 1
    return jnp.concatenate(out)


def dropped_by_rngs(replicas: Any, rngs: Any, batch: Any) -> Any:
    return nnx.Dropout(0.5)(batch[0], rngs=rngs)


def by_rngs_by_parts(num: int, rngs: Any, batch: Any) -> Any:
    out, stream = [], rngs.dropout
    for i, (x, _) in enumerate(parts_of(batch, num)):
        copy, key = nnx.clone(rngs), stream.key[...]
        copy.dropout.key[...] = key if num == 1 else jax.random.fold_in(key, i)
        out.append(nnx.Dropout(0.5)(x, rngs=copy))
    stream.count[...] = stream.count[...] + 1
    return jnp.concatenate(out)


def global_norm(replicas: Any, norm: Any, batch: Any) -> Any:
    norm.axis_name = replicas.axis_names() or None
    out = norm(batch[0])
    norm.axis_name = None
    return out


def jitted_inside(replicas: Any, model: Any, batch: Any) -> Any:
    grads, _ = nnx.jit(nnx.grad(loss_of, has_aux=True))(model, batch)
    mean = replicas.mean(grads)
    nnx.update(model, jax.tree.map(jnp.subtract, nnx.state(model, nnx.Param), mean))


def pops(replicas: Any, model: Any, batch: Any) -> Any:
    model(batch[0])
    return nnx.pop(model, nnx.Intermediate)["hidden"][0]


def trains_a_clone(replicas: Any, model: Any, batch: Any) -> Any:
    clone = nnx.clone(model)
    grads, _ = nnx.grad(loss_of, has_aux=True)(clone, batch)
    mean = replicas.mean(grads)
    nnx.update(clone, jax.tree.map(jnp.subtract, nnx.state(clone, nnx.Param), mean))
    return clone(batch[0])


def moving_average(replicas: Any, models: Any, batch: Any) -> Any:
    model, average = models
    grads, _ = nnx.grad(loss_of, has_aux=True)(model, batch)
    state = jax.tree.map(jnp.subtract, nnx.state(model), replicas.mean(grads))
    nnx.update(model, state)
    nnx.update(average, optax.incremental_update(state, nnx.state(average), 0.1))


def forgotten(replicas: Any, model: Any, batch: Any) -> Any:
    grads, _ = nnx.grad(loss_of, has_aux=True)(model, batch)
    nnx.update(model, jax.tree.map(jnp.subtract, nnx.state(model), grads))


def counted(replicas: Any, metric: Any, batch: Any) -> Any:
    metric.update(values=batch[0].sum())


def swapped(replicas: Any, model: Any, batch: Any) -> Any:
    a, b = model["layers"]
    a.kernel, b.kernel = b.kernel, a.kernel
    a.bias = nnx.Param(a.bias + replicas.sum(batch[1].sum()))
    return b(jnp.tanh(a(batch[0])))


def in_nnx_jit(replicas: Any, objects: Any, batch: Any) -> Any:
    return nnx.jit(lambda objects: trained(replicas, objects, batch))(objects)


def in_nnx_scan(replicas: Any, objects: Any, batch: Any) -> Any:
    @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=(nnx.Carry, 0))
    def steps(objects: Any, _: Any) -> Any:
        return objects, trained(replicas, objects, batch)

    return steps(objects, jnp.arange(3))[1]


def split_and_merged(replicas: Any, state: Any, batch: Any) -> Any:
    model = nnx.merge(GRAPH, state)
    grads, _ = nnx.grad(loss_of, has_aux=True)(model, batch)
    grads = replicas.mean(grads)
    return jax.tree.map(lambda p, g: p - 0.1 * g, state, grads), None


GRAPH, STATE = nnx.split(MLP(nnx.Rngs(0)))
DIVERGES = {SEVERAL_OTHERS: (rx.DivergenceError, r"args\[0\]")}

NNX = {
    "MLP, momentum, metrics": training(
        MLP,
        nnx.metrics.Accuracy,
        nnx.metrics.Average,
        nnx.metrics.Welford,
        lambda: nnx.MultiMetric(a=nnx.metrics.Accuracy(), b=nnx.metrics.Average()),
        rtol=1e-4,  # Welford subtracts squares.
    ),
    "distributed in nnx.Optimizer": nnx_case(
        step=combined_by_optimizer,
        start=lambda r: (
            (model := MLP(nnx.Rngs(0))),
            nnx.Optimizer(model, r.distributed(optax.sgd(0.1)), wrt=nnx.Param),
        ),
    ),
    "Welford, reset": nnx_case(
        step=lambda _, metric, batch: (
            metric.reset(),
            metric.update(values=batch[0]),
        )[1],
        start=lambda _: nnx.metrics.Welford(),
    ),
    "Welford, not changed": nnx_case(
        step=lambda _, metric, batch: nnx.cond(
            batch[1].sum() < 0, lambda m: m.reset(), lambda _: None, metric
        ),
        start=lambda _: nnx.metrics.Welford(),
    ),
    "nnx.jit of the step": training(MLP, nnx.metrics.Accuracy, step=in_nnx_jit),
    "nnx.scan of steps": training(MLP, nnx.metrics.Accuracy, step=in_nnx_scan),
    "variables are swapped and replaced": nnx_case(
        step=swapped,
        start=lambda _: nnx.Dict(
            layers=nnx.List(nnx.Linear(6, 6, rngs=nnx.Rngs(i)) for i in range(2))
        ),
    ),
    "Conv": training(Conv),
    "shared weights": training(Tied),
    "RNN": training(Recurrent),
    "attention": training(Attention),
    "nnx.vmap and nnx.scan": training(Layers),
    "nnx.remat": training(Rematerialized),
    "nnx.cond": training(Switched),
    "LoRA": training(
        lambda rngs: nnx.LoRA(
            6, 2, 3, base_module=nnx.Linear(6, 3, rngs=rngs), rngs=rngs
        ),
        wrt=nnx.LoRAParam,
    ),
    "BatchNorm": nnx_case(
        step=applied,
        start=lambda _: MLP(nnx.Rngs(0), use_running_average=False),
        by_hand=by_parts,
        even=True,
    ),
    "BatchNorm, evaluated": nnx_case(
        step=applied, start=lambda _: MLP(nnx.Rngs(0), use_running_average=True)
    ),
    "BatchNorm, axis_name": nnx_case(
        step=global_norm, start=lambda _: nnx.BatchNorm(6, rngs=nnx.Rngs(0)), even=True
    ),
    "BatchNorm, axis_name, uneven": nnx_case(
        step=global_norm,
        start=lambda _: nnx.BatchNorm(6, rngs=nnx.Rngs(0)),
        refused={SEVERAL_OTHERS: (ValueError, "axis_names")},
    ),
    "Dropout": nnx_case(
        step=dropped,
        start=lambda _: nnx.Dropout(0.5, rngs=nnx.Rngs(0)),
        by_hand=dropped_by_parts,
        even=True,
    ),
    "Rngs as an argument": nnx_case(
        step=dropped_by_rngs,
        start=lambda _: nnx.Rngs(dropout=0),
        by_hand=by_rngs_by_parts,
        even=True,
    ),
    "evaluation": nnx_case(step=applied, start=mlp),
    "a metric that is a sum": nnx_case(
        step=counted, start=lambda _: Total(), refused=DIVERGES
    ),
    "no all_reduce": nnx_case(step=forgotten, start=mlp, refused=DIVERGES),
    "sow and pop": nnx_case(step=pops, start=lambda _: Sown(nnx.Rngs(0))),
    "nnx.jit in the step": nnx_case(step=jitted_inside, start=mlp),
    "clones": nnx_case(step=trains_a_clone, start=mlp),
    "average of weights": nnx_case(
        step=moving_average, start=lambda r: (mlp(r), mlp(r))
    ),
    "split and merge": Case(step=split_and_merged, start=lambda _: STATE),
}


class Linen(linen.Module):
    use_norm: bool = False
    axis_name: Any = None

    @linen.compact
    def __call__(self, x: jax.Array, train: bool = True) -> jax.Array:
        x = linen.Dense(8)(x)
        if self.use_norm:
            x = linen.BatchNorm(not train, axis_name=self.axis_name)(x)
        return linen.Dense(3)(linen.relu(x))


def trains_linen(replicas: Any, state: Any, batch: Any) -> Any:
    def loss(params: Any) -> jax.Array:
        return loss_of(lambda x: state.apply_fn(params, x), batch)[0]

    return state.apply_gradients(grads=replicas.mean(jax.grad(loss)(state.params))), 0


def statistics(use_mean: bool, axis_name: bool = False) -> Any:
    def step(replicas: Any, variables: Any, batch: Any) -> Any:
        names = (replicas.axis_names() or None) if axis_name else None
        out, new = Linen(use_norm=True, axis_name=names).apply(
            variables, batch[0], mutable=["batch_stats"]
        )
        new = replicas.mean(new) if use_mean else new
        return {**variables, **new}, out

    return step


def statistics_by_hand(num: int, variables: Any, batch: Any) -> Any:
    model = Linen(use_norm=True)
    out, new = zip(
        *(
            model.apply(variables, x, mutable=["batch_stats"])
            for x, _ in parts_of(batch, num)
        ),
        strict=True,
    )
    mean = jax.tree.map(lambda *s: sum(s) / num, *new)
    return {**variables, **mean}, jnp.concatenate(out)


def linen_norm(replicas: Any) -> Any:
    return Linen(use_norm=True).init(jax.random.key(0), jnp.ones((1, 6)))


class LinenRecurrent(linen.Module):
    @linen.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return linen.RNN(linen.GRUCell(3))(x[..., None])[:, -1]


class LinenAttention(linen.Module):
    @linen.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = x.reshape(-1, 3, 2)
        return linen.MultiHeadDotProductAttention(num_heads=2)(x).sum(2)


class LinenShared(linen.Module):
    @linen.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        layer = linen.Dense(6)
        return layer(jnp.tanh(layer(x)))


class LinenConv(linen.Module):
    @linen.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return linen.remat(linen.Conv)(3, (3,))(x[..., None]).mean(1)


class LinenLayers(linen.Module):
    @linen.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        def layer(dense: Any, x: jax.Array, _: None) -> tuple[jax.Array, None]:
            return jnp.tanh(dense(x)), None

        scan = linen.scan(
            layer, variable_axes={"params": 0}, split_rngs={"params": True}, length=3
        )
        return scan(linen.Dense(6), x, None)[0]


def linen_training(model: Any) -> Case:
    def start(_: Any) -> Any:
        params = model.init(jax.random.key(0), jnp.ones((1, 6)))
        tx = optax.sgd(0.1, momentum=0.9)
        return TrainState.create(apply_fn=model.apply, params=params, tx=tx)

    return Case(
        step=trains_linen,
        start=start,
        compared=lambda state: (state.params, state.step),
    )


def linen_dropped(replicas: Any, key: Any, batch: Any) -> Any:
    key, own = jax.random.split(key)
    rngs = {"dropout": replicas.own_key(own)}
    return key, linen.Dropout(0.5, deterministic=False).apply({}, batch[0], rngs=rngs)


def linen_dropped_by_hand(num: int, key: Any, batch: Any) -> Any:
    key, own = jax.random.split(key)
    dropout = linen.Dropout(0.5, deterministic=False)
    out = [
        dropout.apply({}, x, rngs={"dropout": jax.random.fold_in(own, i)})
        for i, (x, _) in enumerate(parts_of(batch, num))
    ]
    return key, jnp.concatenate(out)


LINEN = {
    "TrainState": linen_training(Linen()),
    "RNN": linen_training(LinenRecurrent()),
    "attention": linen_training(LinenAttention()),
    "shared weights": linen_training(LinenShared()),
    "Conv and remat": linen_training(LinenConv()),
    "scan": linen_training(LinenLayers()),
    "Dropout": Case(
        step=linen_dropped,
        start=lambda _: jax.random.key(0),
        by_hand=linen_dropped_by_hand,
        even=True,
    ),
    "BatchNorm, averaged": Case(
        step=statistics(use_mean=True),
        start=linen_norm,
        by_hand=statistics_by_hand,
        even=True,
    ),
    "BatchNorm, axis_name": Case(
        step=statistics(use_mean=False, axis_name=True), start=linen_norm, even=True
    ),
    "BatchNorm, own statistics": Case(
        step=statistics(use_mean=False),
        start=linen_norm,
        refused={SEVERAL: (rx.DivergenceError, "batch_stats")},
    ),
}
