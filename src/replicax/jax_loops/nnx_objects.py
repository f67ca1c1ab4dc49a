"""NNX objects among the arguments of `Strategy.run`, which the function changes.

`run` flattens all objects of a call as one graph, so they may share variables. Their
arrays become variables of the engine, which combines new values by the NNX type:

- `BatchStat`: the mean over the replicas;
- `MetricState` of `Average`: the sum of the replicas' increments; of `Welford`: the
  statistics of all replicas' values;
- `RngKey`: each replica folds its number into the key, and draws from the result;
- all others, such as `Param` and `OptState`, must be equal on all replicas.

The function gets new objects with these values. `run` stores the combined values in the
caller's objects. Calls with objects of equal structure share a program.
"""

import contextlib
import itertools
import sys
import threading
import types
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import keras
from jax.sharding import NamedSharding
from jax.tree_util import KeyPath

from replicax._private import keras as internals
from replicax._private.flax import observed_reads
from replicax._util.types import PyTree
from replicax._util.user_code import describe
from replicax.checkpoint.nnx_variables import is_nnx_object
from replicax.engine import device_put
from replicax.engine.arguments import Placeholder, argument_name
from replicax.engine.cache import ProgramCache
from replicax.engine.composites import is_key
from replicax.engine.protocols import StrategyLike
from replicax.engine.replica import ReplicaContext
from replicax.engine.scope import Scope, current_context
from replicax.engine.values import ARRAY_TYPES, PerReplica
from replicax.engine.variables import Variable
from replicax.jax_loops.nnx_metrics import combined_welfords, summed_variables

__all__ = ["CallWithObjects", "NNXObjects", "extract_objects", "only_arguments_read"]


class CallWithObjects(NamedTuple):
    """A call of `Strategy.run` with NNX objects, which placeholders replace.

    Attributes:
        objects: The structure of the objects, with the engine's variables.
        leaves: The caller's NNX variables, and arrays that are attributes.
        arrays: The arrays of `leaves`.
        fn: The replica function.
        args: Its arguments, with a `Placeholder` in place of each object.
        kwargs: Its keyword arguments, with `Placeholder`s as well.
    """

    objects: "NNXObjects"
    leaves: list[Any]
    arrays: list[Any]
    fn: Callable[..., PyTree]
    args: tuple[PyTree, ...]
    kwargs: dict[str, PyTree]


# The classes of most leaves, for a fast test: each call searches all leaves.
_PLAIN = {*ARRAY_TYPES, dict, list, tuple, int, float, complex, bool, str, type(None)}


def _is_leaf(value: object) -> bool:
    """Whether a search for objects does not descend into a value."""
    if type(value) in _PLAIN:
        return False
    # A `State` is an argument like other pytrees; JAX warns if it flattens an iterator.
    others = (sys.modules["flax.nnx"].State, PerReplica, Iterator)
    return isinstance(value, others) or is_nnx_object(value)


def extract_objects(
    fn: Callable[..., PyTree],
    args: tuple[PyTree, ...],
    kwargs: dict[str, PyTree],
    strategy: StrategyLike,
    cache: "ProgramCache[NNXObjects]",
) -> CallWithObjects | None:
    """Replace the NNX objects of a call by placeholders; None if there are no objects.

    If `fn` is an object or its method, the object becomes the first argument, and `fn`
    the function of its class.

    Raises:
        TypeError: If an NNX variable holds anything but arrays and numbers.
        NotImplementedError: If the strategy's variables are not on the replicas.
    """
    if "flax.nnx" not in sys.modules:
        return None
    if isinstance(fn, types.MethodType) and is_nnx_object(fn.__self__):
        fn, args = fn.__func__, (fn.__self__, *args)
    elif is_nnx_object(fn):
        fn, args = type(fn).__call__, (fn, *args)
    leaves = jax.tree.leaves((args, kwargs), is_leaf=_is_leaf)
    if not any(is_nnx_object(x) for x in leaves if type(x) not in _PLAIN):
        return None
    pairs, tree = jax.tree_util.tree_flatten_with_path((args, kwargs), is_leaf=_is_leaf)
    roots = {path: x for path, x in pairs if is_nnx_object(x)}
    graphdef, _, leaves, contents = _flat(tuple(roots.values()))
    arrays, structure = jax.tree.flatten(contents)
    kinds = tuple((jnp.shape(x), jnp.result_type(x)) for x in arrays)
    objects = cache.get(
        NNXObjects,
        (graphdef, structure, tuple(roots), kinds),
        lambda: NNXObjects(strategy, roots),
    )
    placeholders = iter(objects.placeholders)
    flat = [next(placeholders) if is_nnx_object(x) else x for _, x in pairs]
    args, kwargs = jax.tree.unflatten(tree, flat)
    return CallWithObjects(objects, leaves, arrays, fn, args, kwargs)


def _flat(objects: tuple[Any, ...]) -> tuple[Any, list[Any], list[Any], list[Any]]:
    """The graph of objects, and its leaves' paths, the leaves, and their values."""
    from flax import nnx

    graphdef, state = nnx.graph.flatten(objects, graph=True)
    paths, leaves = [path for path, _ in state], [leaf for _, leaf in state]
    contents = [x.get_raw_value() if isinstance(x, nnx.Variable) else x for x in leaves]
    return graphdef, paths, leaves, contents


class NNXObjects:
    """The NNX objects of calls of one structure, and a strategy's variables for them.

    Between calls the variables have no values.

    Attributes:
        placeholders: For each object, the leaf that stands for it in the arguments.
        positions: The positions of arguments with objects; -1 for keyword arguments.
    """

    def __init__(self, strategy: StrategyLike, roots: Mapping[KeyPath, Any]) -> None:
        """`roots`: the objects of the first call with this structure, by path."""
        arguments = [argument_name(path) for path in roots]
        if not strategy.home.on_replicas or strategy.group.updates_at_home:
            raise NotImplementedError(
                f"Strategy.run: {arguments[0]} is an NNX object, but {strategy!r} "
                "keeps variables apart from its replicas. Use rx.MirroredStrategy or "
                "rx.FullyShardedStrategy."
            )
        self.positions = {p[1].idx if p[0].idx == 0 else -1 for p in roots}
        self._strategy = strategy
        self._lock = threading.Lock()
        objects = tuple(roots.values())
        self.placeholders = [Placeholder(self, i) for i in range(len(objects))]
        self._graphdef, self._paths, leaves, contents = _flat(objects)
        self._structure = jax.tree.structure(contents)
        self._variables: list[Variable] = []
        # Whether each array is an attribute of an object, not of an NNX variable.
        self._is_attribute: list[bool] = []
        self._key_impls: dict[int, Any] = {}  # By the numbers of random keys.
        # By number: the key in the last call, and its data in the variable's layout.
        self._placed_keys: dict[int, tuple[jax.Array, jax.Array]] = {}
        summed = summed_variables(objects)
        with Scope(strategy):
            for (entry, *inner), array in jax.tree_util.tree_leaves_with_path(contents):
                (number, *attributes), leaf = self._paths[entry.idx], leaves[entry.idx]
                names = [arguments[number], *map(str, [*attributes, *inner])]
                self._add(names, leaf, array, is_sum=id(leaf) in summed)

    def _add(self, names: list[str], leaf: Any, array: Any, *, is_sum: bool) -> None:
        """Make the variable of an array, without a value."""
        from flax import nnx

        if isinstance(array, jax.Ref) or getattr(leaf, "hijax", False):
            raise TypeError(
                f"Strategy.run: {'.'.join(names)} is an NNX variable made with "
                "ref=True or hijax=True. Make it without: run changes NNX variables "
                "in place."
            )
        aggregation = "sum" if is_sum else "none"
        if is_key(array):
            self._key_impls[len(self._variables)] = jax.random.key_impl(array)
            array = jax.random.key_data(array)
            aggregation = "only_first_replica"  # Replicas fold their number in.
        dtype = jnp.result_type(array)
        if isinstance(leaf, nnx.BatchStat) and jnp.issubdtype(dtype, jnp.inexact):
            aggregation = "mean"
        *outer, name = (x.replace("/", "|") for x in names)
        with contextlib.ExitStack() as scopes:
            for part in outer:
                scopes.enter_context(keras.name_scope(part))
            variable = keras.Variable(
                "zeros",
                jnp.shape(array),
                str(dtype),
                trainable=isinstance(leaf, nnx.Param),
                autocast=False,
                aggregation=aggregation,
                name=name,
            )
        internals.write_values([variable], [None])
        self._variables.append(variable)
        self._is_attribute.append(not isinstance(leaf, nnx.Variable))

    @contextlib.contextmanager
    def in_variables(self, call: CallWithObjects) -> Generator[None]:
        """Move the arrays of a call's objects to the variables, and back at the end."""
        with self._lock:
            internals.write_values(
                self._variables,
                [self._placed(i, array) for i, array in enumerate(call.arrays)],
            )
            try:
                yield
            finally:
                values = internals.read_values(self._variables)
                internals.write_values(self._variables, itertools.repeat(None))
                for number, impl in self._key_impls.items():
                    key, data = self._placed_keys[number]
                    values[number] = (
                        key
                        if values[number] is data
                        else jax.random.wrap_key_data(values[number], impl=impl)
                    )
                contents = jax.tree.unflatten(self._structure, values)
                nnx = sys.modules["flax.nnx"]
                for leaf, content in zip(call.leaves, contents, strict=True):
                    if isinstance(leaf, nnx.Variable):
                        leaf.set_raw_value(content)

    def _placed(self, number: int, array: Any) -> jax.Array:
        """Place an array, or the data of a key, in the layout of its variable."""
        variable = self._variables[number]
        layout: NamedSharding = internals.layout_of(variable)
        if number in self._key_impls:
            key, data = self._placed_keys.get(number, (None, None))
            if key is not array or data is None:
                data = device_put.laid_out(jax.random.key_data(array), layout)
                self._placed_keys[number] = (array, data)
            return data
        if not isinstance(array, jax.Array):
            array = jnp.asarray(array)
        if array.sharding == layout:
            return array
        devices = array.sharding.device_set
        if len(devices) > 1 and devices != layout.device_set:
            raise ValueError(
                f"Strategy.run: {variable.path} is on {len(devices)} devices, which "
                f"are not those of {self._strategy!r}. Use an object with one strategy "
                "only, or move its arrays to one device first (jax.device_put)."
            )
        return device_put.unaliased(array, layout)

    def call(
        self,
        fn: Callable[..., PyTree],
        args: tuple[PyTree, ...],
        kwargs: Mapping[str, PyTree],
    ) -> PyTree:
        """Call `fn` in a trace, with objects that have the variables' values."""
        from flax import nnx

        context = current_context()
        assert context is not None
        keys = {n: self._variables[n].value for n in self._key_impls}
        before = [v.value for v in self._variables]
        for number, data in keys.items():
            before[number] = self._key_of_replica(number, data, context)
        contents = jax.tree.unflatten(self._structure, before)
        objects = nnx.graph.unflatten(self._graphdef, contents)
        args, kwargs = jax.tree.map(
            lambda x: objects[x.index] if isinstance(x, Placeholder) else x,
            (args, dict(kwargs)),
        )
        with combined_welfords(objects, context):
            results = fn(*args, **kwargs)
        caller = f"Strategy.run({describe(fn)})"
        pairs = jax.tree_util.tree_leaves_with_path(results, is_leaf=_is_leaf)
        for path, value in pairs:
            if is_nnx_object(value):
                raise TypeError(
                    f"{caller}: results{jax.tree_util.keystr(path)} is an NNX object, "
                    f"{type(value).__name__}. The caller's objects are changed in "
                    "place: return arrays, or nnx.state(object)."
                )
        self._assign(objects, before, keys, caller)
        return results

    def _key_of_replica(
        self, number: int, data: jax.Array, context: ReplicaContext
    ) -> jax.Array:
        key = jax.random.wrap_key_data(data, impl=self._key_impls[number])
        if self._strategy.num_replicas_in_sync == 1:
            return key
        fold = jax.vmap(jax.random.fold_in, (0, None))
        folded = fold(key.reshape(-1), context.replica_id_of_seeds)
        return folded.reshape(key.shape)

    def _assign(
        self,
        objects: tuple[Any, ...],
        before: Sequence[jax.Array],
        keys: Mapping[int, jax.Array],
        caller: str,
    ) -> None:
        """Assign the values that the function has changed to the variables.

        `before` are the values before the call; `keys` the data of the keys that
        replicas have folded their number into.
        """
        graphdef, paths, _, contents = _flat(objects)
        after, structure = jax.tree.flatten(contents)
        if (graphdef, structure) != (self._graphdef, self._structure):
            changed = {*paths} ^ {*self._paths}
            names = sorted(".".join(map(str, path[1:])) for path in changed)
            raise TypeError(
                f"{caller}: the function changes the structure of its NNX "
                f"objects: {', '.join(names) or 'a static attribute'}. Make all "
                "attributes before the first step, take intermediates out with "
                "nnx.pop, and count in an nnx.Variable."
            )
        for number, variable in enumerate(self._variables):
            old, new = before[number], after[number]
            if new is old:
                continue
            kind = (jnp.shape(new), jnp.result_type(new))
            if kind != (old.shape, old.dtype) or self._is_attribute[number]:
                raise TypeError(
                    f"{caller}: the function assigns {kind[1]}{list(kind[0])} to "
                    f"{variable.path}, {old.dtype}{list(old.shape)}. Assign arrays of "
                    "the same shape and dtype, and only to NNX variables."
                )
            if number in keys:  # Control flow copies unchanged keys.
                folded, new = jax.random.key_data(old), jax.random.key_data(new)
                same = jnp.all(new == folded, -1, keepdims=True)
                new = jnp.where(same, keys[number], new)
            variable.assign(new)


@contextlib.contextmanager
def only_arguments_read(caller: str) -> Generator[None]:
    """Raise a TypeError if a traced function reads an NNX variable of no argument."""

    def refuse(name: str, content: Any) -> None:
        kinds = [str(jax.typeof(x)) for x in jax.tree.leaves(content)]
        raise TypeError(
            f"{caller}: the function reads {name} of "
            f"{', '.join(kinds)}, of an object that is no argument, so its present "
            "value would be compiled in. The traceback shows the line. Pass the "
            "object: strategy.run(fn, args=(model, batch)). The function may change "
            "it in place."
        )

    if "flax.nnx" in sys.modules:
        with observed_reads(refuse):
            yield
    else:
        yield
