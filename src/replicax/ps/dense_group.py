"""A group of variables on one server, which the user's Keras optimizer updates.

The optimizer is built anew from its config, for variables of the parts' names and
shapes, and stepped by one compiled function of flat vectors. Its own variables (slots)
are this function's state; they are donated, the parameters are not, for those have been
handed out.
"""

import contextlib
import copy
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np

from replicax._util.types import JSONObject
from replicax.ps.call_log import Journaled, Note, Sessions, note_nothing
from replicax.ps.group_vectors import (
    FusedSpan,
    SlotKey,
    Slots,
    fused_spans,
    join,
    split,
    split_slices,
)
from replicax.ps.groups import Arrays, Group
from replicax.ps.limits import RefusedRequestError
from replicax.ps.optimizers import (
    build_recording,
    can_split,
    clips_on_worker,
    deserialize,
)
from replicax.ps.partition import VariableGroup, VariableSlice

__all__ = ["DenseGroup", "DifferentGroup", "ServerOptimizer"]

_Vectors = dict[str, jax.Array]


class ServerOptimizer:
    """Updates a server's `parts` of one group, whose values it is given each time.

    `norms` is what must be known of the *whole* gradient before it can be applied:
    None, `"global_clipnorm"`, or `"clipnorm"` where variables are split. Raises
    `ValueError` for an unknown rule; in `start`, if its optimizer cannot be built, or
    not for parts such as these.

    Example:
        >>> from replicax.ps.partition import VariableInfo, place
        >>> w = VariableInfo(path="w", shape=(2,), dtype="float32")
        >>> rule = ServerOptimizer(place("weights", {"kind": "add"}, [w], 1), 0)
        >>> vectors, state = rule.start({"float32": np.array([1, 2], np.float32)})
        >>> gradients = {"float32": np.array([1, 0], np.float32)}
        >>> vectors, state = rule.apply(vectors, state, gradients)
        >>> vectors["float32"].tolist()
        [2.0, 2.0]
    """

    def __init__(self, group: VariableGroup, server: int) -> None:
        kind = group.rule.get("kind")
        if kind not in ("add", "optimizer"):
            raise ValueError(
                f"group {group.name!r}: got rule kind={kind!r}, expected 'add' or "
                "'optimizer'."
            )
        self.group = group
        self.parts = group.slices_on(server)
        self.norms: str | None = None
        self._cpu = jax.devices("cpu")[0]
        self._optimizer: Any = None
        self._blocks = fused_spans(self.parts, lambda part: None)
        self._owners: list[tuple[int | None, str]] = []
        self._clip = self._scale = 1.0
        # Vectors are not donated: they were handed out.
        self._compiled = jax.jit(self._update, donate_argnums=1)
        self._compiled_norms = jax.jit(self._squared_norms)

    def start(
        self, vectors: Mapping[str, np.ndarray]
    ) -> tuple[_Vectors, list[jax.Array]]:
        """The vectors on the CPU, and the optimizer's variables before any step."""
        # JAX takes aligned host arrays as they are, and callers may change theirs.
        placed = {
            dtype: jax.device_put(np.array(vector), self._cpu)
            for dtype, vector in vectors.items()
        }
        if self.group.rule["kind"] == "add" or not self.parts:
            return placed, []
        with jax.default_device(self._cpu):
            state = self._build(placed)
            try:
                keys = map(self._norm_key, self.parts)
                norms = self.norms and dict.fromkeys(keys, jnp.zeros((), jnp.float32))
                jax.eval_shape(self._update, placed, state, placed, norms)
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
        squared_norms: Mapping[str, float] | None = None,
    ) -> tuple[_Vectors, list[jax.Array]]:
        """One step. Returns at once; `state` is used up, `vectors` stays valid.

        `gradients` may be of another float dtype, and must not change before the result
        is there. For rules with `norms`, `squared_norms` are the sums over all servers
        of what `squared_norms` returned.
        """
        if not vectors:
            return vectors, state
        given = None
        if self.norms is not None:
            given = {key: np.float32(v) for key, v in (squared_norms or {}).items()}
        # Committed to the CPU: a server's default device may be another one.
        placed = {
            dtype: jax.device_put(np.asarray(gradients[dtype]), self._cpu)
            for dtype in vectors
        }
        state, vectors = self._compiled(vectors, state, placed, given)
        return vectors, state

    def squared_norms(self, gradients: Mapping[str, np.ndarray]) -> dict[str, float]:
        """This server's share of the squared norms that `apply` needs; {} if none."""
        if self.norms is None or not gradients:
            return {}
        norms = self._compiled_norms(
            {d: jax.device_put(np.asarray(g), self._cpu) for d, g in gradients.items()}
        )
        return {key: float(value) for key, value in norms.items()}

    def slots(self, state: Sequence[jax.Array]) -> Slots:
        """The optimizer's variables by their owners; views of `state`."""
        slots: Slots = {}
        for (owner, name), value in zip(self._owners, state, strict=True):
            if owner is None:
                slots[SlotKey(name, None)] = np.asarray(value)
                continue
            block = self._blocks[owner]
            pieces = split_slices(block, self.parts, np.asarray(value))
            keys = [SlotKey(name, part) for part in block.parts]
            slots |= zip(keys, pieces, strict=True)
        return slots

    def with_slots(self, state: list[jax.Array], given: Slots) -> list[jax.Array]:
        """The state with other values for some of the optimizer's variables."""
        slots = self.slots(state)
        self.check_slots(state, {key: np.shape(value) for key, value in given.items()})
        changed = []
        for old, (owner, name) in zip(state, self._owners, strict=True):
            parts = (None,) if owner is None else self._blocks[owner].parts
            keys = [SlotKey(name, part) for part in parts]
            if not given.keys() & keys:
                changed.append(old)
                continue
            pieces = [np.ravel(given.get(key, slots[key])) for key in keys]
            value = np.concatenate(pieces).astype(old.dtype).reshape(old.shape)
            changed.append(jax.device_put(value, self._cpu))
        return changed

    def check_slots(
        self, state: Sequence[jax.Array], shapes: Mapping[SlotKey, tuple[int, ...]]
    ) -> dict[SlotKey, str]:
        """Dtypes of the variables of those names and shapes; refuses any others."""
        slots = self.slots(state)
        for key, shape in shapes.items():
            if key not in slots:
                shared = key.part is None
                names = {name for name, part in slots if (part is None) == shared}
                raise ValueError(
                    f"group {self.group.name!r}: its optimizer has no variable "
                    f"{key.name!r}, but {sorted(names)}. A learning rate that follows "
                    "a schedule cannot be set."
                )
            if shape != slots[key].shape:
                of_part = "" if key.part is None else f" of {self.parts[key.part].name}"
                raise ValueError(
                    f"group {self.group.name!r}: got shape {shape} for the "
                    f"optimizer's {key.name!r}{of_part}, expected {slots[key].shape}."
                )
        return {key: str(slots[key].dtype) for key in shapes}

    def _build(self, vectors: _Vectors) -> list[jax.Array]:
        rule = self.group.rule
        try:
            optimizer = deserialize(rule["config"])
        except (TypeError, ValueError, KeyError) as error:
            raise ValueError(
                f"group {self.group.name!r}: its optimizer cannot be built from its "
                f"config: {error} Classes of your own must be defined and registered "
                "before ParameterServerStrategy() is called, for that is where a "
                "server's script stays."
            ) from error
        self._take_over_clipping(optimizer)
        excluded = set(rule.get("no_weight_decay", ()))
        self._blocks = self._blocks_for(optimizer, excluded)
        firsts = [self.parts[block.parts[0]] for block in self._blocks]
        values = split(self._blocks, vectors)
        variables = list(map(_variable, firsts, values))
        without = [
            variable
            for part, variable in zip(firsts, variables, strict=True)
            if part.variable in excluded
        ]
        if without:
            for stepper in (optimizer, *getattr(optimizer, "optimizers", ())):
                stepper.exclude_from_weight_decay(var_list=without)
        self._owners, state = build_recording(
            optimizer, variables, rule.get("iterations", 0)
        )
        self._optimizer = optimizer
        return jax.device_put(state, self._cpu)

    def _blocks_for(
        self, optimizer: keras.optimizers.Optimizer, excluded: set[int]
    ) -> list[FusedSpan]:
        """What the optimizer takes for its variables: parts, or several as one."""
        is_one_by_one = can_split(optimizer) and not hasattr(optimizer, "optimizers")
        if not is_one_by_one or optimizer.clipnorm or self.norms is not None:
            return fused_spans(self.parts, lambda part: None)

        def kind_of(part: VariableSlice) -> bool | None:
            alone = part.constraint is not None
            return None if alone else part.variable in excluded

        return fused_spans(self.parts, kind_of)

    def _take_over_clipping(self, optimizer: keras.optimizers.Optimizer) -> None:
        """Settle who clips: optimizer, worker, or this rule with given norms."""
        group = self.group
        steppers = [optimizer, *getattr(optimizer, "optimizers", ())]
        if group.rule.get("clipped_by_worker") and clips_on_worker(optimizer):
            optimizer.clipnorm = optimizer.global_clipnorm = None
            optimizer.clipvalue = None
            return
        spread = len({part.server for part in group.parts}) > 1
        split = any(part.rows is not None for part in group.parts)
        for kind, matters in (("global_clipnorm", spread), ("clipnorm", split)):
            clips = [getattr(stepper, kind) for stepper in steppers]
            if not matters or not any(clips):
                continue
            if len(steppers) > 1 or optimizer.gradient_accumulation_steps:
                raise ValueError(
                    f"group {group.name!r}: {kind}={max(filter(None, clips))} needs "
                    "the whole gradient, and parts of it lie on other servers. With "
                    "gradient_accumulation_steps or MultiOptimizer that is not done: "
                    "use clipvalue, or one parameter server and no partitioner."
                )
            self.norms = kind
            self._clip = float(clips[0])
            self._scale = float(optimizer.loss_scale_factor or 1.0)
            setattr(optimizer, kind, None)
            optimizer.loss_scale_factor = None

    def _update(
        self,
        vectors: _Vectors,
        state: list[jax.Array],
        gradients: _Vectors,
        squared_norms: dict[str, jax.Array] | None,
    ) -> tuple[list[jax.Array], _Vectors]:
        # The state comes first: JAX gives donated memory to the first output of its
        # shape, and a vector in a slot's place costs copies of both.
        gradients = {d: g.astype(vectors[d].dtype) for d, g in gradients.items()}
        if self._optimizer is None:
            return state, {d: vectors[d] + gradients[d] for d in vectors}
        of_blocks = split(self._blocks, gradients)
        if squared_norms is not None:
            of_blocks = self._clipped(of_blocks, squared_norms)
        values, state = self._optimizer.stateless_apply(
            state, of_blocks, split(self._blocks, vectors)
        )
        return state, join(self._blocks, values, vectors)

    def _norm_key(self, part: VariableSlice) -> str:
        return "all" if self.norms == "global_clipnorm" else str(part.variable)

    def _squared_norms(self, gradients: _Vectors) -> dict[str, jax.Array]:
        norms: dict[str, jax.Array] = {}
        for part, gradient in zip(
            self.parts, split(self._blocks, gradients), strict=True
        ):
            square = jnp.sum(jnp.square(gradient.astype(jnp.float32) / self._scale))
            key = self._norm_key(part)
            norms[key] = norms[key] + square if key in norms else square
        return norms

    def _clipped(
        self, gradients: list[jax.Array], squared_norms: dict[str, jax.Array]
    ) -> list[jax.Array]:
        """What Keras' optimizer does, with norms that are given."""
        clipped = []
        for part, gradient in zip(self.parts, gradients, strict=True):
            gradient = gradient / self._scale
            norm = jnp.sqrt(squared_norms[self._norm_key(part)])
            if self.norms == "clipnorm":
                factor = self._clip / jnp.maximum(norm, self._clip)
            else:
                # An infinite norm makes all gradients NaN, as in Keras.
                factor = self._clip * jnp.minimum(1 / norm, 1 / self._clip)
                factor = factor + (norm - norm)
            clipped.append(gradient * factor.astype(gradient.dtype))
        return clipped


def _variable(part: VariableSlice, value: jax.Array) -> keras.Variable:
    """A variable as the worker's, by whose path and name optimizers choose."""
    *scope, name = part.path.split("/")
    within = contextlib.nullcontext()
    if scope:  # An absolute path, whatever scope the calling thread is in.
        within = keras.name_scope(scope[-1], override_parent="/".join(scope[:-1]))
    variable_class: Any = keras.Variable
    with within:
        variable = variable_class(value, dtype=part.dtype, name=name)
    if part.constraint is not None:
        if part.rows is not None:
            raise ValueError(
                f"part {part.name!r}: a variable with a constraint cannot be split."
            )
        variable.constraint = keras.constraints.deserialize(
            copy.deepcopy(part.constraint)
        )
    return variable


class DifferentGroup(RefusedRequestError):
    """A group of that name is here, and it is another one."""


class DenseGroup(Group):
    """A group of variables. Its fields are read and written under its condition.

    Vectors are of its dtypes and lengths, gradients also of other float dtypes:
    `messages` lets no others in.
    """

    def __init__(
        self,
        group: VariableGroup,
        vectors: Arrays,
        server: int,
        note: Note = note_nothing,
        sessions: Sessions | None = None,
    ) -> None:
        super().__init__(f"group {group.name!r}", server, note, sessions)
        self.group = group
        self.lengths = group.lengths_on(server)
        with _refusing():
            self._optimizer = ServerOptimizer(group, server)
            self.vectors, self._slots = self._optimizer.start(vectors)
        self.norms = self._optimizer.norms
        self.unweighted = [
            dtype
            for dtype in self.lengths
            if not jnp.issubdtype(np.dtype(dtype), jnp.floating)
        ]

    @property
    def num_bytes(self) -> int:
        """Bytes of its vectors; slots are the optimizer's business."""
        return sum(vector.nbytes for vector in self.vectors.values())

    @property
    def is_trained(self) -> bool:
        """Whether an optimizer updates it; to moving statistics workers only add."""
        return self.group.rule["kind"] != "add"

    def status(self) -> JSONObject:
        """Versions and sizes, and how often each worker has pushed."""
        with self.condition:
            pushed_by = {w: sum(h.values()) for w, h in self.staleness.items()}
            more = {"steps": self.steps, "is_trained": self.is_trained}
            return super().status() | more | {"pushed_by": pushed_by}

    def require_same(self, other: VariableGroup) -> None:
        """Refuse another group of this name."""
        if self.group.digest != other.digest:
            raise DifferentGroup(
                f"{self.what} is here already, and differs from the new one in "
                f"{_difference(self.group, other)}. Give the new one another name, or "
                "restart the servers without their snapshots."
            )

    def replace(self, vectors: Arrays) -> None:
        """Take other values; the optimizer's slots stay. It counts as an update."""
        self.vectors, _ = self._optimizer.start(vectors)
        self.version += 1
        self.steps += 1
        self.step = None
        self.condition.notify_all()

    def slots(self) -> Slots:
        """The optimizer's variables, copied."""
        return self._optimizer.slots(_copies(self._slots))

    def check_slots(
        self, shapes: Mapping[SlotKey, tuple[int, ...]]
    ) -> dict[SlotKey, str]:
        """Dtypes of some of the optimizer's variables, if they are here and fit."""
        with _refusing():
            return self._optimizer.check_slots(self._slots, shapes)

    def assign_slots(self, slots: Slots) -> None:
        """Set some of the optimizer's variables."""
        with _refusing():
            self._slots = self._optimizer.with_slots(self._slots, slots)

    def _add(
        self, total: dict[str, np.ndarray] | None, gradients: Arrays, weight: float
    ) -> dict[str, np.ndarray]:
        first = total is None
        total = {} if total is None else total
        for dtype, gradient in gradients.items():
            # Gradients may come as bfloat16; sums are in the group's dtype.
            term = gradient.astype(np.dtype(dtype), copy=first)
            # NaN and infinity go through, as in Keras.
            with np.errstate(all="ignore"):
                if weight != 1.0:
                    factor = term.dtype.type(weight)
                    term = np.multiply(term, factor, out=term if first else None)
                if first:
                    total[dtype] = term
                else:
                    total[dtype] += term
        return total

    def _divide(self, total: dict[str, np.ndarray], weights: float) -> None:
        for vector in total.values():
            with np.errstate(all="ignore"):
                vector /= vector.dtype.type(weights)

    def _apply(self, gradients: Arrays, squared_norms: dict[str, float] | None) -> None:
        self.vectors, self._slots = self._optimizer.apply(
            self.vectors, self._slots, gradients, squared_norms
        )

    def _squared_norms(self, gradients: Arrays) -> dict[str, float]:
        return self._optimizer.squared_norms(gradients)

    def state(self) -> tuple[dict[str, np.ndarray | jax.Array], JSONObject]:
        """Arrays by name, and all else as JSON values."""
        arrays: dict[str, np.ndarray | jax.Array]
        arrays = {f"values/{dtype}": vector for dtype, vector in self.vectors.items()}
        arrays |= {f"slots/{i}": slot for i, slot in enumerate(_copies(self._slots))}
        return arrays, {"group": self.group.to_json(), **self._counts()}

    def load_state(
        self, arrays: Arrays, meta: JSONObject, journal: Journaled | None = None
    ) -> None:
        """Go on from what `state` returned; the group was made with its values."""
        slots = [arrays[f"slots/{i}"] for i in range(len(arrays) - len(self.vectors))]
        shapes, expected = (
            [(x.shape, str(x.dtype)) for x in each] for each in (slots, self._slots)
        )
        if shapes != expected:
            raise RefusedRequestError(
                f"{self.what}: the state has optimizer variables of {shapes}, but this "
                f"version of Keras has {expected}. Use the version that wrote it."
            )
        self._slots = [
            jax.device_put(np.array(new), old.device)
            for new, old in zip(slots, self._slots, strict=True)
        ]
        self._load_counts(meta, journal or {})


@contextlib.contextmanager
def _refusing() -> Iterator[None]:
    try:
        yield
    except ValueError as error:
        raise RefusedRequestError(str(error)) from error


@jax.jit
def _copies(state: list[jax.Array]) -> list[jax.Array]:
    """Copies that a later step, which takes the originals' memory, leaves alone."""
    return [jnp.copy(x) for x in state]


def _difference(one: VariableGroup, other: VariableGroup) -> str:
    """What differs first between two groups, in words."""
    if one.rule != other.rule:
        keys = sorted(one.rule.keys() | other.rule.keys())
        key = next(k for k in keys if one.rule.get(k) != other.rule.get(k))
        return f"its rule: {key} is {one.rule.get(key)!r} and {other.rule.get(key)!r}"
    if len(one.parts) != len(other.parts):
        return f"its parts: {len(one.parts)} and {len(other.parts)}"
    for a, b in zip(one.parts, other.parts, strict=True):
        if a != b:
            return f"part {a.name!r}: {a} and {b}"
    return "nothing but the order of its values"
