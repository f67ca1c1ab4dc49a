"""Runs the user's Keras optimizer on a server's shards of a group.

The optimizer is rebuilt from its config, for variables with the shards' names and
shapes. One compiled function of flat vectors applies it. The optimizer's state (Keras:
`optimizer.variables`) is donated. The parameters are not donated, because answers may
still refer to them.

The result of an elementwise optimizer does not depend on the boundaries of variables.
So neighbouring shards form a span, which the optimizer treats as one variable: a model
of hundreds of variables needs only a few operations on long vectors.
"""

import contextlib
import copy
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np

from replicax._util.arrays import FlatLayout
from replicax.cpu import memory
from replicax.ps.group_vectors import SlotKey, Slots
from replicax.ps.optimizers import (
    build_recording,
    can_split,
    clips_on_worker,
    deserialize,
)
from replicax.ps.partition import VariableGroup, VariableShard

__all__ = ["ServerOptimizer"]

_Vectors = dict[str, jax.Array]


class ServerOptimizer:
    """Updates a server's shards of one group: a pure function of values and state.

    Raises `ValueError` for an unknown rule. `start` raises `ValueError` if the
    optimizer cannot be built or compiled for these shards.
    """

    def __init__(self, group: VariableGroup, server: int) -> None:
        kind = group.rule.get("kind")
        if kind not in ("add", "optimizer"):
            raise ValueError(
                f"group {group.name!r}: got rule kind={kind!r}, expected 'add' or "
                "'optimizer'."
            )
        self.group = group
        self.shards = group.shards_on(server)
        self._cpu = jax.devices("cpu")[0]
        self._optimizer: Any = None
        self._spans, self._layout = self._fuse(lambda shard: None)
        self._owners: list[tuple[int | None, str]] = []
        self._has_begun = False
        # Only the state is donated: answers may still refer to the vectors.
        self._compiled = jax.jit(self._update, donate_argnums=1)

    def start(
        self, vectors: Mapping[str, np.ndarray]
    ) -> tuple[_Vectors, list[jax.Array]]:
        """Put the vectors on the CPU, and initialize the optimizer's variables."""
        # Copied: JAX may alias an aligned host array, which the caller may change.
        placed = {
            dtype: jax.device_put(np.array(vector), self._cpu)
            for dtype, vector in vectors.items()
        }
        if not self.group.is_trained or not self.shards:
            return placed, []
        with jax.default_device(self._cpu):
            state = self._build(placed)
            try:
                jax.eval_shape(self._update, placed, state, placed)
            except Exception as error:
                raise ValueError(
                    f"group {self.group.name!r}: {type(self._optimizer).__name__} "
                    f"cannot be compiled for a parameter server: {error}"
                ) from error
        return placed, state

    def apply(
        self,
        vectors: _Vectors,
        state: list[jax.Array],
        gradients: Mapping[str, np.ndarray],
    ) -> tuple[_Vectors, list[jax.Array]]:
        """Dispatch one step, without waiting; donates `state`, not `vectors`.

        `gradients` may have another float dtype, and must not change before the result
        is computed.
        """
        if not vectors:
            return vectors, state
        # Placed on the CPU, which may not be the server's default device.
        placed = {
            dtype: jax.device_put(np.asarray(gradients[dtype]), self._cpu)
            for dtype in vectors
        }
        state, vectors = self._compiled(vectors, state, placed)
        if not self._has_begun:  # After the first call has compiled the step.
            self._has_begun = True
            memory.return_freed()
        return vectors, state

    def slots(self, state: Sequence[jax.Array]) -> Slots:
        """The optimizer's variables by name and shard, as views of `state`."""
        slots: Slots = {}
        for (owner, name), value in zip(self._owners, state, strict=True):
            if owner is None:
                slots[SlotKey(name, None)] = np.asarray(value)
                continue
            span, pieces = self._spans[owner], [np.asarray(value)]
            if len(span) > 1:  # The slot of a single shard may have another shape.
                shapes = [("", self.shards[i].shape) for i in span]
                pieces = FlatLayout(shapes).unpack({"": pieces[0]})
            keys = [SlotKey(name, shard) for shard in span]
            slots |= zip(keys, pieces, strict=True)
        return slots

    def with_slots(self, state: list[jax.Array], new: Slots) -> list[jax.Array]:
        """Return a state in which the slots in `new` are replaced."""
        slots = self.slots(state)
        self.check_slots(state, {key: np.shape(value) for key, value in new.items()})
        changed = []
        for old, (owner, name) in zip(state, self._owners, strict=True):
            shards = [None] if owner is None else self._spans[owner]
            keys = [SlotKey(name, shard) for shard in shards]
            if not new.keys() & keys:
                changed.append(old)
                continue
            pieces = [np.ravel(new.get(key, slots[key])) for key in keys]
            value = np.concatenate(pieces).astype(old.dtype).reshape(old.shape)
            changed.append(jax.device_put(value, self._cpu))
        return changed

    def check_slots(
        self, state: Sequence[jax.Array], shapes: Mapping[SlotKey, tuple[int, ...]]
    ) -> dict[SlotKey, str]:
        """The slots' dtypes by key; raise for unknown keys or different shapes."""
        slots = self.slots(state)
        for key, shape in shapes.items():
            if key not in slots:
                shared = key.shard is None
                names = {name for name, shard in slots if (shard is None) == shared}
                raise ValueError(
                    f"group {self.group.name!r}: its optimizer has no variable "
                    f"{key.name!r}, but {sorted(names)}. A learning rate that follows "
                    "a schedule cannot be set."
                )
            if shape != slots[key].shape:
                of_shard = (
                    "" if key.shard is None else f" of {self.shards[key.shard].name}"
                )
                raise ValueError(
                    f"group {self.group.name!r}: got shape {shape} for the "
                    f"optimizer's {key.name!r}{of_shard}, expected {slots[key].shape}."
                )
        return {key: str(slots[key].dtype) for key in shapes}

    def _build(self, vectors: _Vectors) -> list[jax.Array]:
        rule = self.group.rule
        try:
            optimizer = deserialize(rule["config"])
        except (TypeError, ValueError, KeyError) as error:
            raise ValueError(
                f"group {self.group.name!r}: its optimizer cannot be built from its "
                f"config: {error} Define and register your own classes before "
                "ParameterServerStrategy() is called: a server's script does not get "
                "past that call."
            ) from error
        if clips_on_worker(optimizer):  # `clip_before_push` has clipped the gradients.
            optimizer.clipnorm = optimizer.global_clipnorm = optimizer.clipvalue = None
        excluded = set(rule.get("no_weight_decay", ()))
        self._spans, self._layout = self._spans_for(optimizer, excluded)
        firsts = [self.shards[span[0]] for span in self._spans]
        variables = list(map(_variable, firsts, self._layout.unpack(vectors)))
        without = [
            variable
            for shard, variable in zip(firsts, variables, strict=True)
            if shard.variable in excluded
        ]
        if without:
            optimizer.exclude_from_weight_decay(var_list=without)
        self._owners, state = build_recording(
            optimizer, variables, rule.get("iterations", 0)
        )
        self._optimizer = optimizer
        return jax.device_put(state, self._cpu)

    def _spans_for(
        self, optimizer: keras.optimizers.Optimizer, excluded: set[int]
    ) -> tuple[list[list[int]], FlatLayout]:
        """The spans of shards that are the optimizer's variables, and their layout."""
        if not can_split(optimizer) or optimizer.clipnorm:
            return self._fuse(lambda shard: None)

        def kind_of(shard: VariableShard) -> bool | None:
            alone = shard.constraint is not None
            return None if alone else shard.variable in excluded

        return self._fuse(kind_of)

    def _fuse(
        self, kind_of: Callable[[VariableShard], Hashable | None]
    ) -> tuple[list[list[int]], FlatLayout]:
        """Spans of shard indices, in order of their first shards, and their layout.

        Neighbours of the same dtype and kind form one span, a flat vector. A shard of
        kind None is a span by itself, and keeps its shape.
        """
        spans: list[list[int]] = []
        newest: dict[str, tuple[list[int], Hashable | None]] = {}  # By dtype.
        for i, shard in enumerate(self.shards):
            kind = kind_of(shard)
            span, previous = newest.get(shard.dtype, ([], None))
            if kind is None or kind != previous:
                span = []
                spans.append(span)
                newest[shard.dtype] = span, kind
            span.append(i)
        shapes = []
        for first, *others in spans:
            size = sum(self.shards[i].size for i in (first, *others))
            shape = (size,) if others else self.shards[first].shape
            shapes.append((self.shards[first].dtype, shape))
        return spans, FlatLayout(shapes)

    def _update(
        self,
        vectors: _Vectors,
        state: list[jax.Array],
        gradients: _Vectors,
    ) -> tuple[list[jax.Array], _Vectors]:
        # The state comes first: JAX reuses donated memory for the first output of the
        # same shape, and a vector in the state's memory would cost copies of both.
        gradients = {d: g.astype(vectors[d].dtype) for d, g in gradients.items()}
        if self._optimizer is None:
            return state, {d: vectors[d] + gradients[d] for d in vectors}
        of_spans = self._layout.unpack(gradients)
        values, state = self._optimizer.stateless_apply(
            state, of_spans, self._layout.unpack(vectors)
        )
        return state, self._joined(values, vectors)

    def _joined(self, values: Sequence[jax.Array], like: _Vectors) -> _Vectors:
        """Concatenate the spans' values to one vector per dtype."""
        joined: _Vectors = {}
        for (dtype, start, _), value in zip(self._layout.spans, values, strict=True):
            whole = like[dtype]
            flat = value.reshape(-1).astype(whole.dtype)
            if flat.size == whole.size:
                joined[dtype] = flat
                continue
            # An update in place is faster than `concatenate`.
            target = joined.get(dtype, jnp.zeros_like(whole))
            joined[dtype] = jax.lax.dynamic_update_slice(target, flat, (start,))
        return joined


def _variable(shard: VariableShard, value: jax.Array) -> keras.Variable:
    """Create a variable with the worker's name and path, which optimizers may read."""
    *scope, name = shard.path.split("/")
    within = contextlib.nullcontext()
    if scope:  # An absolute path, independent of the calling thread's scope.
        within = keras.name_scope(scope[-1], override_parent="/".join(scope[:-1]))
    variable_class: Any = keras.Variable
    with within:
        variable = variable_class(value, dtype=shard.dtype, name=name)
    if shard.constraint is not None:
        if shard.rows is not None:
            raise ValueError(
                f"shard {shard.name!r}: a variable with a constraint cannot be split."
            )
        variable.constraint = keras.constraints.deserialize(
            copy.deepcopy(shard.constraint)
        )
    return variable
