"""Maps objects to the entries of a checkpoint: named arrays and values.

An entry has functions to read and to write a part of an object.
"""

import dataclasses
import itertools
from collections.abc import Callable, Hashable, Iterable
from typing import TypeAlias

import jax
import jax.numpy as jnp
import keras
import numpy as np
from jax.sharding import NamedSharding

from replicax._private import keras as internals
from replicax._util import json_codec
from replicax._util.types import JSON, PyTree
from replicax.checkpoint.arrays import Shard, ShardedArray
from replicax.checkpoint.nnx_variables import is_nnx_object, variables_of
from replicax.checkpoint.variable_names import HasVariables, named_variables
from replicax.engine import device_put
from replicax.engine.protocols import STATE_HOME
from replicax.errors import CheckpointError

__all__ = [
    "ArrayEntry",
    "Entry",
    "RemoteEntries",
    "UnbuiltEntries",
    "ValueEntry",
    "bind",
    "encode",
    "state_accessors",
    "to_host",
]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ArrayEntry:
    """One array of an object.

    Attributes:
        name: The array's name in the checkpoint.
        shape: The required shape.
        dtype: The required dtype.
        read: Returns the array, on the devices or the host.
        write: Sets the array to a saved one, and keeps its sharding.
        in_tree: Whether the array is a leaf of a pytree or an NNX object. A checkpoint
            without some of these leaves is an error.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    read: Callable[[], np.ndarray | jax.Array]
    write: Callable[[ShardedArray], None]
    in_tree: bool = True


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ValueEntry:
    """A number, a string, or the state of an object, as JSON.

    Attributes:
        name: The value's name in the checkpoint.
        of_worker: Whether each worker has its own value, as for input iterators.
    """

    name: str
    of_worker: bool
    read: Callable[[], JSON]
    write: Callable[[JSON], object]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RemoteEntries:
    """The arrays of an object on servers; only the servers know their names.

    Attributes:
        name: Prefix of the arrays' names in the checkpoint, with a trailing slash.
        read: Returns the arrays by the rest of their names.
    """

    name: str
    read: Callable[[], dict[str, np.ndarray]]
    write: Callable[[dict[str, np.ndarray]], None]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class UnbuiltEntries:
    """The arrays that a model, a layer or an optimizer will have once it is built.

    Attributes:
        name: Prefix of the arrays' names in the checkpoint, with a trailing slash.
        owner: The object.
    """

    name: str
    owner: keras.Layer | keras.optimizers.Optimizer


Entry: TypeAlias = ArrayEntry | ValueEntry | RemoteEntries | UnbuiltEntries


def bind(name: str, value: PyTree) -> tuple[list[Entry], Callable[[], PyTree]]:
    """Make the entries of an object; their names begin with `name`.

    The object is a Keras object or variable, an NNX object, an object with a state, an
    array, a number, a string, or a pytree of these. Functions in a pytree are left out.

    Returns:
        The entries, and a function that returns the restored object: the same one, or a
        new tree of new leaves.

    Raises:
        TypeError: If a part of the object is of another type; the error names the part.
    """
    entries: list[Entry] = []
    leaves, structure = jax.tree_util.tree_flatten_with_path(value, is_leaf=_is_object)
    new_leaves = [leaf for _, leaf in leaves]
    setters: list[tuple[Callable[[PyTree], None], Callable[[], PyTree]]] = []
    for i, (path, leaf) in enumerate(leaves):
        suffix = jax.tree_util.keystr(path, simple=True, separator="/")
        leaf_name = f"{name}/{suffix}" if suffix else name
        if is_nnx_object(leaf) and not isinstance(leaf, HasVariables | keras.Variable):
            for inner, content, set_content in variables_of(leaf):
                own, restored_of = bind(f"{leaf_name}/{inner}".rstrip("/"), content)
                entries += own
                setters.append((set_content, restored_of))
        elif _is_object(leaf) or not (path and callable(leaf)):
            entries += _leaf_entries(leaf_name, leaf, new_leaves, i)

    def restored() -> PyTree:
        for set_content, restored_of in setters:
            set_content(restored_of())
        return jax.tree.unflatten(structure, new_leaves)

    return entries, restored


def _is_object(x: object) -> bool:
    return not isinstance(x, (dict, list, tuple)) and (
        isinstance(x, HasVariables | keras.Variable)
        or is_nnx_object(x)
        or state_accessors(x) is not None
    )


def state_accessors(
    x: object,
) -> tuple[Callable[[], PyTree], Callable[[PyTree], object]] | None:
    """Return the getter and the setter of an object's state, if it has one."""
    for getter, setter in (
        ("get_state", "set_state"),
        ("state_dict", "load_state_dict"),
    ):
        if callable(getattr(x, getter, None)) and callable(getattr(x, setter, None)):
            return getattr(x, getter), getattr(x, setter)
    return None


def _leaf_entries(
    name: str, leaf: PyTree, new_leaves: list[PyTree], index: int
) -> Iterable[Entry]:
    def put(value: PyTree) -> None:
        new_leaves[index] = value

    if isinstance(leaf, keras.Variable):
        return [_variable_entry(name, leaf)]
    if isinstance(leaf, HasVariables):
        own: list[Entry] = [
            _variable_entry(f"{name}/{n}", v) for n, v in named_variables(leaf)
        ]
        can_be_built = isinstance(leaf, keras.Layer | keras.optimizers.Optimizer)
        if can_be_built and not leaf.built:
            own.append(UnbuiltEntries(name=f"{name}/", owner=leaf))
        home: PyTree = getattr(leaf, STATE_HOME, None)
        if home is None:
            return own
        # Parameter servers hold the optimizer's state.
        remote = RemoteEntries(
            name=f"{name}/",
            read=lambda: home.read_state(leaf),
            write=lambda arrays: home.write_state(leaf, arrays),
        )
        return [*own, remote]
    if accessors := state_accessors(leaf):
        return [_value_entry(name, *accessors, of_worker=True)]
    if isinstance(leaf, np.ndarray | np.generic | jax.Array | jax.ShapeDtypeStruct):
        return [_array_entry(name, leaf, put)]
    if isinstance(leaf, bool | int | float | str | bytes):
        return [_value_entry(name, lambda: leaf, put, of_worker=False)]
    raise TypeError(
        f"Checkpoint: {name} is a {type(leaf).__name__}, which cannot be saved. "
        "Expected a Keras or NNX object, a variable, an array, a number, a string, a "
        "pytree of these, or an object with get_state and set_state."
    )


def _value_entry(
    name: str,
    get: Callable[[], PyTree],
    put: Callable[[PyTree], object],
    *,
    of_worker: bool,
) -> ValueEntry:
    return ValueEntry(
        name=name,
        of_worker=of_worker,
        read=lambda: encode(get(), name),
        write=lambda state: put(json_codec.decode(state)),
    )


def _variable_entry(name: str, variable: keras.Variable) -> ArrayEntry:
    def read() -> jax.Array:
        if not internals.has_value(variable):
            raise CheckpointError(
                f"checkpoint: variable {variable.path!r} has no value: a running fit "
                "or an open scope holds it. Save after the end of that, or in a "
                "callback after model.jax_state_sync()."
            )
        return variable.value

    return ArrayEntry(
        name=name,
        shape=tuple(variable.shape),
        # JAX keeps 64-bit variables in 32 bits unless `jax_enable_x64` is on.
        dtype=str(jax.dtypes.canonicalize_dtype(variable.dtype)),
        read=read,
        write=lambda saved: internals.set_value(
            variable, _read(saved, internals.own_value(variable))
        ),
        in_tree=False,
    )


def _array_entry(
    name: str,
    leaf: np.ndarray | np.generic | jax.Array | jax.ShapeDtypeStruct,
    put: Callable[[np.ndarray | np.generic | jax.Array], None],
) -> ArrayEntry:
    if isinstance(leaf, jax.Array | jax.ShapeDtypeStruct):
        return _jax_entry(name, leaf, put)
    is_masked = isinstance(leaf, np.ma.MaskedArray)
    if is_masked or leaf.dtype.hasobject or leaf.dtype.fields is not None:
        kind = "a masked array" if is_masked else f"an array of dtype {leaf.dtype}"
        raise TypeError(
            f"Checkpoint: {name} is {kind}, which cannot be saved. Save its data, and "
            "its mask or its fields, as arrays of numbers."
        )
    is_scalar = isinstance(leaf, np.generic)
    return ArrayEntry(
        name=name,
        shape=leaf.shape,
        dtype=str(leaf.dtype),
        read=lambda: np.asarray(leaf),
        write=lambda saved: put(saved.read()[()] if is_scalar else saved.read()),
    )


def _jax_entry(
    name: str,
    leaf: jax.Array | jax.ShapeDtypeStruct,
    put: Callable[[jax.Array], None],
) -> ArrayEntry:
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        data, implementation = _key_data(leaf)

        def put_key(data: jax.Array) -> None:
            put(jax.random.wrap_key_data(data, impl=implementation))

        return _jax_entry(name, data, put_key)
    is_committed = isinstance(leaf, jax.ShapeDtypeStruct) or leaf.committed

    def read() -> jax.Array:
        if isinstance(leaf, jax.ShapeDtypeStruct):
            raise CheckpointError(
                f"Checkpoint: {name} is a jax.ShapeDtypeStruct, which has no values to "
                "save. Restore a checkpoint first, or pass an array."
            )
        return leaf

    def write(saved: ShardedArray) -> None:
        x = _read(saved, leaf)
        if isinstance(x, jax.Array):
            put(x)
        elif not isinstance(leaf.sharding, NamedSharding):
            put(jax.device_put(x, leaf.sharding if is_committed else None))
        elif not device_put.has_no_devices(leaf.sharding):
            put(device_put.laid_out(x, leaf.sharding))

    return ArrayEntry(
        name=name,
        shape=leaf.shape,
        dtype=str(leaf.dtype),
        read=read,
        write=write,
    )


def _read(saved: ShardedArray, like: PyTree) -> np.ndarray | jax.Array:
    """Read an array to the host, or to the devices over which `like` is split."""
    sharding = getattr(like, "sharding", None)
    if (
        not isinstance(sharding, NamedSharding)
        or sharding.is_fully_replicated
        or device_put.has_no_devices(sharding)
    ):
        return saved.read()
    return saved.on_devices(sharding)


def _key_data(
    keys: jax.Array | jax.ShapeDtypeStruct,
) -> tuple[jax.Array | jax.ShapeDtypeStruct, Hashable]:
    """Return the data of random keys, or its shape, and the keys' implementation."""
    if isinstance(keys, jax.Array):
        return jax.random.key_data(keys), jax.random.key_impl(keys)
    implementations = []

    def data_of(keys: jax.Array) -> jax.Array:
        implementations.append(jax.random.key_impl(keys))
        return jax.random.key_data(keys)

    data = jax.eval_shape(data_of, keys)
    shape = jax.ShapeDtypeStruct(data.shape, data.dtype, sharding=keys.sharding)
    return shape, implementations[0]


def to_host(
    entries: Iterable[ArrayEntry], *, is_chief: bool
) -> dict[str, ShardedArray]:
    """Copy the arrays to the host; the next step may donate the originals.

    Nothing is communicated. Each worker copies its shards of the arrays that are split
    over workers; the chief copies all other arrays.
    """
    values = {entry.name: entry.read() for entry in entries}
    shards = {
        name: _shards_of(name, x, is_chief=is_chief) for name, x in values.items()
    }
    for shard in itertools.chain(*shards.values()):
        if isinstance(shard.data, jax.Array):
            shard.data.copy_to_host_async()
    arrays: dict[str, ShardedArray] = {}
    for name, x in values.items():
        copies = [
            shard
            if shard.data is None
            else dataclasses.replace(shard, data=np.array(shard.data))
            for shard in shards[name]
        ]
        arrays[name] = ShardedArray(tuple(x.shape), np.dtype(x.dtype), copies)
    return arrays


def _shards_of(name: str, x: np.ndarray | jax.Array, *, is_chief: bool) -> list[Shard]:
    """Divide an array into shards; only the worker that writes a shard has its data."""
    if isinstance(x, jax.Array) and not x.addressable_shards:
        holders = sorted({d.process_index for d in x.sharding.device_set})
        raise CheckpointError(
            f"checkpoint: {name} is on devices of the workers {holders} only. Place it "
            "on the devices of all workers, or save it in a script of those workers."
        )
    if not isinstance(x, jax.Array) or x.is_fully_replicated or not x.size:
        own = x.addressable_data(0) if isinstance(x, jax.Array) else x
        data = own if is_chief else None
        return [Shard(worker=0, start=(0,) * x.ndim, shape=tuple(x.shape), data=data)]
    shards: list[Shard] = []
    for part in x.global_shards:
        if part.replica_id:
            continue
        spans = [s.indices(n)[:2] for s, n in zip(part.index, x.shape, strict=True)]
        is_local = x.is_fully_addressable
        shard = Shard(
            worker=0 if is_local else part.device.process_index,
            start=tuple(start for start, _ in spans),
            shape=tuple(stop - start for start, stop in spans),
            data=part.data if is_chief or not is_local else None,
        )
        shards.append(shard)
    # `global_shards` iterates over a set, but all workers need the same order.
    return sorted(shards, key=lambda shard: shard.start)


def encode(value: PyTree, name: str) -> JSON:
    """Encode the state of the object `name` as JSON values.

    Raises:
        TypeError: If a part of the state cannot be saved.
    """
    try:
        return json_codec.encode(value, f"the state of {name}", _base_container)
    except TypeError as error:
        raise TypeError(
            f"Checkpoint: {error}, which cannot be saved. Expected dicts, lists, "
            "tuples, numbers, strings, bytes and arrays."
        ) from error


def _base_container(value: PyTree, what: str) -> JSON:
    """Encode a subclass of dict, list or tuple as its base class."""
    for kind in (dict, list, tuple):
        if isinstance(value, kind) and type(value) is not kind:
            return json_codec.encode(kind(value), what, _base_container)
    return None
