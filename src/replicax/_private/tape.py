"""A trace of JAX that records operations as they run, for gradients afterwards.

JAX differentiates functions, and its public names have no tape. But each operation goes
through the innermost trace, also inside `vmap` or a branch of `cond`. This one runs the
operation in the trace around it, once, and keeps its derivative, a linear function of
the operation's inputs.
"""

import dataclasses
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax._src.core import Trace
from jax._src.interpreters import ad
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import ClosedJaxpr, find_top_trace, set_current_trace
from jax.interpreters.ad import Zero
from jax.interpreters.partial_eval import dce_jaxpr


@dataclasses.dataclass(frozen=True, slots=True)
class _Recorded:
    """A recorded operation; `inputs` and `outputs` are ids of arrays.

    `derivative` maps changes of the inputs to changes of the outputs. If JAX has none,
    it is the error that JAX raised.
    """

    derivative: Callable[..., Sequence[jax.Array]] | Exception
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]


class Recording(Trace):
    """Records operations on watched arrays, and on arrays computed from these.

    Attributes:
        parent_trace: The trace in which the operations run.
        is_open: Whether the tape's `with` has not ended.
        is_paused: Whether operations run unrecorded.
    """

    def __init__(self) -> None:
        super().__init__()
        self.parent_trace = find_top_trace(())
        self.requires_low = False
        self.is_open = True
        self.is_paused = False
        self._operations: list[_Recorded] = []
        # Watched and computed arrays by id. They stay alive, so that ids are unique.
        self._arrays: dict[int, Any] = {}

    def watch(self, array: Any) -> int:
        """Record the operations on `array` from now on; return the present position."""
        self._arrays[id(array)] = array
        return len(self._operations)

    def alias(self, array: Any) -> Any:
        """An equal array that is another object."""
        with set_current_trace(self.parent_trace):
            alias = checkpoint_name(array, "replicax_source")
            return jnp.copy(array) if alias is array else alias

    def release(self) -> None:
        """Forget all arrays, and record no more."""
        self.is_paused = True
        self._arrays, self._operations = {}, []

    def stage_value(self, val: Any) -> Any:
        """JAX calls this to lift a constant into the trace."""
        return val if id(val) in self._arrays else self.parent_trace.stage_value(val)

    def process_primitive(self, *args: Any) -> Any:
        """JAX calls this for most operations."""
        return self._process("process_primitive", args, {})

    def process_call(self, *args: Any) -> Any:
        """JAX calls this for calls of functions that it has not traced."""
        return self._process("process_call", args, {})

    def process_custom_jvp_call(self, *args: Any, **kwargs: Any) -> Any:
        """JAX calls this for functions with `jax.custom_jvp`."""
        return self._process("process_custom_jvp_call", args, kwargs)

    def process_custom_vjp_call(self, *args: Any, **kwargs: Any) -> Any:
        """JAX calls this for functions with `jax.custom_vjp`."""
        return self._process("process_custom_vjp_call", args, kwargs)

    def process_shard_map(self, *args: Any, **kwargs: Any) -> Any:
        """JAX calls this for `jax.shard_map`."""
        return self._process("process_shard_map", args, kwargs)

    def _process(self, method: str, args: Sequence[Any], kwargs: Any) -> Any:
        """Run an operation: `args` are a primitive, functions, arrays, parameters."""
        number = next(i for i, x in enumerate(args) if isinstance(x, list | tuple))
        arrays = args[number]
        active = {id(x): x for x in arrays if id(x) in self._arrays}
        primitive = args[0]
        are_linear: list[bool] = []

        def run(trace: Any, replaced: Mapping[int, Any]) -> Any:
            changed = [replaced.get(id(x), x) for x in arrays]
            if method == "process_primitive":
                # JAX expands some operations first where the trace cannot have them.
                types = tuple(map(jax.typeof, changed))
                return primitive.bind_with_trace(trace, changed, types, args[-1])
            before, after = args[:number], args[number + 1 :]
            return getattr(trace, method)(*before, changed, *after, **kwargs)

        def results_in(trace: Any, replaced: Mapping[int, Any]) -> list[Any]:
            outs = run(trace, replaced)
            return list(outs) if primitive.multiple_results else [outs]

        if self.is_paused or not active:
            return run(self.parent_trace, {})

        def operation(*values: Any) -> tuple[list[Any], list[Any]]:
            trace = find_top_trace(())
            outs = results_in(trace, dict(zip(active, values, strict=True)))
            are_linear[:] = [getattr(x, "_trace", None) is trace for x in outs]
            return _split(outs, are_linear)

        derivative: Any
        with set_current_trace(self.parent_trace):
            try:
                linear, derivative, rest = jax.linearize(
                    operation, *active.values(), has_aux=True
                )
            except Exception as error:  # noqa: BLE001 - Raised if a gradient needs it.
                outs = results_in(self.parent_trace, {})
                are_linear[:] = [jnp.issubdtype(x.dtype, jnp.inexact) for x in outs]
                (linear, rest), derivative = _split(outs, are_linear), error
        # Eager operations, such as `stop_gradient`, may return an input itself.
        linear, rest = (
            [self.alias(x) if id(x) in self._arrays else x for x in part]
            for part in (linear, rest)
        )
        self._arrays |= {id(x): x for x in linear}
        outputs = tuple(map(id, linear))
        self._operations.append(_Recorded(derivative, tuple(active), outputs))
        parts = iter(rest), iter(linear)
        outs = [next(parts[is_linear]) for is_linear in are_linear]
        return outs if primitive.multiple_results else outs[0]

    def linear_program(
        self,
        targets: Sequence[Any],
        sources: Sequence[tuple[Any, int]],
        residual: Callable[[Any], Any],
    ) -> tuple[ClosedJaxpr, list[int]]:
        """The changes of targets as a linear function of changes of the sources.

        Args:
            targets: Arrays that may depend on the sources.
            sources: Watched arrays with their positions.
            residual: Gives the array to use for a saved one.

        Returns:
            The function, and the numbers of the targets that it returns. After the
            sources, it has arguments for other arrays, which do not change here.
        """
        keys = [id(source) for source, _ in sources]
        path, unchanged = self._path(targets, sources)
        others = [key for key in self._arrays if key in unchanged]
        numbers: list[int] = []

        def changes(deltas: list[Any], of_others: list[Any]) -> list[Any]:
            env = dict(zip(others, of_others, strict=True))
            for step in path:
                if isinstance(step, int):
                    key, delta = keys[step], deltas[step]
                    env[key] = env[key] + delta if key in env else delta
                else:
                    derivative: Any = jax.tree.map(residual, step.derivative)
                    outs = derivative(*[env[key] for key in step.inputs])
                    env.update(zip(step.outputs, outs, strict=True))
            numbers[:] = [i for i, x in enumerate(targets) if id(x) in env]
            return [env[id(targets[i])] for i in numbers]

        of_others = [self._arrays[key] for key in others]
        return jax.make_jaxpr(changes)([x for x, _ in sources], of_others), numbers

    def _path(
        self, targets: Sequence[Any], sources: Sequence[tuple[Any, int]]
    ) -> tuple[list[int | _Recorded], set[int]]:
        """Numbers of sources, and the operations from these to targets, in order.

        Also the ids of arrays that the operations use, but that no source changes.
        """
        needed = set(map(id, targets))
        events: list[tuple[int, int, int | _Recorded]]
        events = [(position, i, i) for i, (_, position) in enumerate(sources)]
        for position, x in reversed([*enumerate(self._operations)]):
            if not needed.isdisjoint(x.outputs):
                needed.update(x.inputs)
                events.append((position, len(sources), x))
        path, changed, unchanged = [], set(), set()
        for *_, event in sorted(events, key=operator.itemgetter(0, 1)):
            if isinstance(event, int):
                changed.add(id(sources[event][0]))
            elif changed.isdisjoint(event.inputs):
                continue
            elif isinstance(event.derivative, Exception):
                raise event.derivative
            else:
                unchanged.update(set(event.inputs) - changed)
                changed.update(event.outputs)
            path.append(event)
        return path, unchanged


def _split(
    values: Sequence[Any], are_first: Sequence[bool]
) -> tuple[list[Any], list[Any]]:
    pairs = list(zip(values, are_first, strict=True))
    return [x for x, first in pairs if first], [x for x, first in pairs if not first]


def transposed(linear: ClosedJaxpr, cotangents: Sequence[Any]) -> list[Any]:
    """The gradients of a linear function's arguments; None where there are none.

    `jax.linear_transpose` would first evaluate parts of loops separately.
    """
    # As JAX does: some transposition rules need all cotangents.
    jaxpr, _ = dce_jaxpr(linear.jaxpr, [True] * len(cotangents), instantiate=True)
    unknown = [ad.UndefinedPrimal(v.aval) for v in jaxpr.invars]
    grads = ad.backward_pass(jaxpr, True, linear.consts, unknown, cotangents)
    return [None if isinstance(x, Zero) else x for x in grads]


def program_trace() -> Any:
    """The innermost trace of JAX that is not a `Recording`."""
    trace = find_top_trace(())
    while isinstance(trace, Recording):
        trace = trace.parent_trace
    return trace
