"""`strategy.shard`, `init` and `global_batch`: shardings, and what is refused."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx
from jax.experimental import sparse
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import replicax as rx
from replicax.engine.composites import is_key


def cpus(num: int) -> list[str]:
    return [f"cpu:{i}" for i in range(num)]


STRATEGIES = {
    "one device": lambda: rx.OneDeviceStrategy("cpu:1"),
    "mirrored": lambda: rx.MirroredStrategy(cpus(4)),
    "multi-worker": lambda: rx.MultiWorkerMirroredStrategy(),
    "fully sharded": lambda: rx.FullyShardedStrategy(cpus(4)),
    "model parallel": lambda: rx.ModelParallelStrategy(
        model_parallel=2, devices=cpus(4)
    ),
}
# The specs of arrays [64, 128], [256], [30, 50] (no dimension divides by 4), [1024].
SPECS = {
    "fully sharded": (P(None, "replica"), P(), P(), P("replica")),
    "model parallel": (P(None, "model"), P(), P(None, "model"), P("model")),
}


class Params(NamedTuple):
    matrix: Any
    bias: Any
    odd: Any
    vector: Any


def params() -> Params:
    rng = np.random.default_rng(0)
    shapes = ((64, 128), (256,), (30, 50), (1024,))
    return Params(*(rng.normal(size=shape).astype("float32") for shape in shapes))


def spec(x: Any) -> P:
    names = [*x.sharding.spec]
    while names and names[-1] is None:
        names.pop()
    return P(*names)


@pytest.mark.parametrize("name", STRATEGIES)
def test_parameters_and_optimizer_state_have_the_same_layout(name: str) -> None:
    strategy = STRATEGIES[name]()
    tree = params()
    placed = strategy.shard(tree)
    wanted = Params(*SPECS.get(name, (P(),) * 4))
    assert jax.tree.map(spec, placed) == wanted
    assert all(x.sharding.mesh == strategy.mesh for x in placed)
    jax.tree.map(np.testing.assert_array_equal, placed, tree)

    state = strategy.shard(optax.adam(1e-3).init(tree))
    made = strategy.init(optax.adam(1e-3).init, placed)
    for adam in (state, made):
        assert jax.tree.map(spec, (adam[0].mu, adam[0].nu)) == (wanted, wanted)
        assert spec(adam[0].count) == P()

    abstract = strategy.shard(jax.eval_shape(lambda: tree))
    assert jax.tree.map(spec, abstract) == wanted
    assert all(isinstance(x, jax.ShapeDtypeStruct) for x in abstract)


def test_the_axes_of_meshes() -> None:
    assert STRATEGIES["mirrored"]().mesh.shape == {"replica": 4}
    assert STRATEGIES["model parallel"]().mesh.shape == {"replica": 2, "model": 2}


def test_leaves_of_every_kind() -> None:
    strategy = STRATEGIES["fully sharded"]()
    keys = jax.random.split(jax.random.key(0, impl="threefry2x32"), 2048)
    names = np.array(["a", "b"])
    tree = {"fn": len, "text": "x", "flag": True, "rate": 0.1, "none": None}
    arrays = {"scalar": np.float32(3), "keys": keys, "empty": np.zeros((0, 8))}
    placed = strategy.shard({**tree, **arrays, "names": names})
    assert {name: placed[name] for name in tree} == tree
    assert placed["names"] is names
    assert spec(placed["keys"]) == P("replica")
    assert placed["keys"].dtype == keys.dtype
    np.testing.assert_array_equal(*map(jax.random.key_data, (placed["keys"], keys)))
    assert placed["scalar"].sharding.is_fully_replicated
    assert placed["empty"].shape == (0, 8)
    assert placed["empty"].dtype == np.float32


@pytest.mark.parametrize("num", [1, 2])
@pytest.mark.parametrize("kind", [rx.MirroredStrategy, rx.FullyShardedStrategy])
def test_arrays_of_the_user_survive_donation(kind: Any, num: int) -> None:
    strategy = kind(cpus(num))
    foreign = Mesh(np.array(jax.devices()[:num]), ("x",))
    theirs = {
        "host": np.ones(4096, "float32"),
        "device": jnp.ones(4096),
        "divided": jax.device_put(np.ones(4096), NamedSharding(foreign, P("x"))),
        "replicated": jax.device_put(np.ones(4096), NamedSharding(foreign, P())),
    }
    placed = strategy.shard(theirs)
    assert strategy.shard(placed)["divided"] is placed["divided"]
    theirs["host"][:] = 5
    double = jax.jit(lambda tree: optax.tree.add(tree, tree), donate_argnums=0)
    assert {float(x.sum()) for x in double(placed).values()} == {2 * 4096}
    assert all(x.is_deleted() for x in placed.values())
    theirs["host"][:] = 1
    assert {float(x.sum()) for x in theirs.values()} == {4096}


@pytest.mark.parametrize("name", STRATEGIES)
def test_a_tree_on_a_foreign_mesh_is_resharded(name: str) -> None:
    strategy = STRATEGIES[name]()
    foreign = Mesh(np.array(jax.devices()[::-1]).reshape(2, 4), ("x", "y"))
    tree = params()
    theirs = Params(*(jax.device_put(x, NamedSharding(foreign, P("x"))) for x in tree))
    placed = strategy.shard(theirs)
    assert jax.tree.map(spec, placed) == Params(*SPECS.get(name, (P(),) * 4))
    jax.tree.map(np.testing.assert_array_equal, placed, tree)
    jax.tree.map(np.testing.assert_array_equal, theirs, tree)


def test_inside_jit_it_is_a_constraint() -> None:
    strategy = STRATEGIES["fully sharded"]()
    out = jax.jit(lambda x: strategy.shard({"w": x})["w"])(np.ones((64, 128)))
    assert spec(out) == P(None, "replica")


@pytest.mark.parametrize("name", ["foreign", "own"])
def test_under_a_mesh_of_the_user(name: str) -> None:
    strategy = STRATEGIES["fully sharded"]()
    kind = (jax.sharding.AxisType.Explicit,)
    foreign = jax.make_mesh((8,), ("data",), axis_types=kind)
    data = strategy.experimental_distribute_dataset(np.ones((6, 3)), batch_size=4)
    with jax.set_mesh(foreign if name == "foreign" else strategy.mesh):
        made = strategy.init(jax.random.normal, jax.random.key(0), (64, 128))
        placed = strategy.shard(jax.device_get(made))
        rows = [strategy.global_batch(batch) for batch in data]
    assert made.sharding == placed.sharding
    assert spec(placed) == P(None, "replica")
    assert [x.shape for x in rows] == [(4, 3), (2, 3)]


def test_a_layout_map_matches_paths_and_their_ends() -> None:
    strategy = STRATEGIES["model parallel"]()
    layout_map = {"dense/kernel": ("model", None), "out/dense/kernel": (None, "model")}
    tree = {
        "dense": {"kernel": np.ones((4, 6))},
        "out": {"dense": {"kernel": np.ones((4, 6))}},
        "other": np.ones((64, 128)),
    }
    wanted = {
        "dense": {"kernel": P("model")},
        "out": {"dense": {"kernel": P(None, "model")}},
        "other": P(None, "model"),  # As without a map.
    }
    assert jax.tree.map(spec, strategy.shard(tree, layout_map)) == wanted
    state = strategy.shard(optax.adam(1e-3).init(tree), layout_map)
    assert jax.tree.map(spec, state[0].mu) == wanted

    own = rx.ModelParallelStrategy(layout_map, 2, devices=cpus(4))
    wanted["other"] = P()
    assert jax.tree.map(spec, own.shard(tree)) == wanted
    assert jax.tree.map(spec, own.init(lambda: tree)) == wanted

    both = {"dense/kernel": ("replica", "model"), "other": (None, None)}
    placed = strategy.shard(tree, both)
    assert spec(placed["dense"]["kernel"]) == P("replica", "model")
    assert spec(placed["other"]) == P()


class Block(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.dense = nnx.Linear(64, 64, rngs=rngs)
        self.norm = nnx.BatchNorm(64, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)


def test_a_layout_map_knows_variables_of_flax() -> None:
    strategy = rx.ModelParallelStrategy(
        {"dense/kernel": ("model", None)}, devices=cpus(4)
    )
    state = strategy.shard(nnx.state(Block(nnx.Rngs(0))))
    assert spec(state["dense"]["kernel"]) == P("model")
    adam = strategy.shard(
        optax.adam(1e-3).init(nnx.state(Block(nnx.Rngs(0)), nnx.Param))
    )
    assert spec(adam[0].mu["dense"]["kernel"]) == P("model")
    boxed = {"kernel": linen.Partitioned(jnp.ones((8, 4)), names=(None, None))}
    assert spec(strategy.shard({"dense": boxed})["dense"]["kernel"].value) == P("model")


def test_a_map_without_match_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    strategy = rx.ModelParallelStrategy({"w": ("model",)}, devices=cpus(2))
    with pytest.raises(ValueError, match=r"1 arrays, such as 'a/kernel'.*end"):
        strategy.shard({"a": {"kernel": np.ones((4, 4))}}, {"b": ("model", None)})
    strategy.shard({"a": np.ones((4, 4)), "step": 0})
    assert "such as 'a'. They are not divided" in caplog.text
    caplog.clear()
    strategy.shard(optax.sgd(0.1).init({"w": np.ones(4)}))
    strategy.shard({"w": np.ones(4), "a": np.ones(4), "step": jnp.zeros(())})
    assert not caplog.text


@pytest.mark.parametrize(
    ("layout_map", "error", "text"),
    [
        ({"w": ("data", None)}, ValueError, "the only axis .* 'replica', not data"),
        ({"w": (None, "replica")}, ValueError, r"dimension 1 of 'w' \(8, 6\) over 4"),
        ("w", TypeError, "got 'w'"),
        ({"w": ("replica", None), ".*": (None, None)}, None, ""),
    ],
)
def test_bad_maps(layout_map: Any, error: Any, text: str) -> None:
    strategy = STRATEGIES["fully sharded"]()
    tree = {"w": np.ones((8, 6), "float32")}
    if error is None:
        assert spec(strategy.shard(tree, layout_map)["w"]) == P("replica")
        return
    with pytest.raises(error, match=f"Strategy.shard: .*{text}"):
        strategy.shard(tree, layout_map)


def test_what_is_refused() -> None:
    strategy = STRATEGIES["mirrored"]()
    batch = next(
        iter(strategy.experimental_distribute_dataset(np.ones((8, 3)), batch_size=8))
    )
    with pytest.raises(TypeError, match=r"shard: data/x is PerReplica.*global_batch"):
        strategy.shard({"data": {"x": batch}})
    with pytest.raises(TypeError, match=r"init: .* is PerReplica\("):
        strategy.init(lambda x: x, batch)
    for call in (strategy.shard, lambda x: strategy.init(lambda: x)):
        with pytest.raises(rx.ContextError, match="inside a replica function"):
            strategy.run(lambda call=call: call(jnp.ones(3)))
    with pytest.raises(rx.ContextError, match=r"Strategy.init: .* transformation"):
        jax.jit(lambda x: strategy.init(lambda: 2 * x))(1.0)
    central = rx.CentralStorageStrategy(cpus(2))
    for call in (central.shard, central.init, central.global_batch):
        with pytest.raises(ValueError, match="CentralStorageStrategy keeps variables"):
            call(batch)


def make(num: int) -> Any:
    """A model's state with random numbers of many kinds."""
    graph, state = nnx.split(Block(nnx.Rngs(num)))
    keys = jax.random.split(jax.random.key(num), 2)
    table = jax.random.truncated_normal(keys[0], -2, 2, (512, 64), jnp.bfloat16)
    return {
        "graph": graph,
        "state": state,
        "table": table,
        "order": jax.random.permutation(keys[1], 2048),
        "fn": len,
        "step": num,
    }


def numbers(tree: Any) -> list[np.ndarray]:
    arrays = [x for x in jax.tree.leaves(tree) if not callable(x)]
    return [
        np.asarray(jax.random.key_data(x) if is_key(x) else x, dtype="float32")
        for x in arrays
    ]


@pytest.mark.parametrize("num", [1, 2, 4, 8])
def test_init_makes_the_same_values_on_any_number_of_devices(num: int) -> None:
    strategy = rx.FullyShardedStrategy(cpus(num))
    made = strategy.init(make, 3)
    eager = make(3)
    assert made["fn"] is len
    assert made["step"] == 3
    assert made["step"].sharding == NamedSharding(strategy.mesh, P())
    assert made["graph"] == eager["graph"]
    for x, wanted in zip(
        numbers(made), numbers(eager | {"step": jnp.int32(3)}), strict=True
    ):
        np.testing.assert_array_equal(x, wanted)
    nnx.merge(made["graph"], made["state"]).dense(np.ones((2, 64), "float32"))
    if num > 1:
        assert spec(made["table"]) == P("replica")


def test_init_traces_arrays_and_compiles_other_leaves_in() -> None:
    strategy = STRATEGIES["fully sharded"]()
    weights = strategy.shard({"w": np.ones((64, 64), "float32")})

    def fn(x: Any, scale: Any, *, shape: Any, name: str) -> Any:
        assert isinstance(x["w"], jax.core.Tracer)
        assert isinstance(scale, jax.core.Tracer)
        assert name == "twice"
        return {name: scale * x["w"].reshape(shape)}

    out = strategy.init(fn, weights, np.float32(2), shape=(32, 128), name="twice")
    np.testing.assert_array_equal(out["twice"], np.full((32, 128), 2))
    assert spec(out["twice"]) == P(None, "replica")
    abstract = strategy.init(
        fn,
        jax.eval_shape(lambda: weights),
        np.float32(2),
        shape=(32, 128),
        name="twice",
    )
    assert isinstance(abstract["twice"], jax.ShapeDtypeStruct)
    assert abstract["twice"].sharding == out["twice"].sharding


def test_no_device_has_all_of_what_init_makes() -> None:
    strategy = rx.FullyShardedStrategy()

    def fn(key: Any) -> Any:
        return jax.random.normal(key, (1024, 1024))

    sharding = strategy.shard(jax.eval_shape(fn, jax.random.key(0))).sharding
    jitted = jax.jit(fn, out_shardings=sharding)
    memory = jitted.lower(jax.random.key(0)).compile().memory_analysis()
    assert memory.output_size_in_bytes == 4 * 1024 * 1024 // 8
    assert memory.temp_size_in_bytes < 4 * 1024 * 1024 // 2
    np.testing.assert_array_equal(
        strategy.init(fn, jax.random.key(0)), jitted(jax.random.key(0))
    )


@pytest.mark.parametrize("remainder", ["keep", "pad", "drop"])
@pytest.mark.parametrize("per_device", [1, 2])
@pytest.mark.parametrize("is_inside", [False, True], ids=["outside", "inside jit"])
def test_global_batches(remainder: str, per_device: int, is_inside: bool) -> None:
    strategy = rx.MirroredStrategy(cpus(4), replicas_per_device=per_device)
    data = {"x": np.arange(26 * 3, dtype="float32").reshape(26, 3), "y": np.arange(26)}
    dataset = strategy.experimental_distribute_dataset(
        data, batch_size=16, remainder=remainder
    )
    convert = jax.jit(strategy.global_batch) if is_inside else strategy.global_batch
    batches = [convert(batch) for batch in dataset]
    masks = [np.ones(16, bool)] * 2
    if remainder == "pad":
        batches, masks = map(list, zip(*batches, strict=True))
    num_rows = {"keep": 10, "drop": 8, "pad": 12 if per_device == 1 else 16}[remainder]
    assert [len(x["y"]) for x in batches] == [16, num_rows]
    divided = NamedSharding(strategy.mesh, P("replica"))
    whole = NamedSharding(strategy.mesh, P())
    for leaf in jax.tree.leaves(batches):
        wanted = whole if len(leaf) % 4 else divided
        assert leaf.sharding.is_equivalent_to(wanted, leaf.ndim)
    masks[1] = np.asarray(masks[1])[:num_rows]
    pairs = zip(batches, masks, strict=True)
    rows = [np.asarray(batch["y"])[np.asarray(mask)] for batch, mask in pairs]
    size = 24 if remainder == "drop" else 26
    np.testing.assert_array_equal(np.concatenate(rows), data["y"][:size])
    np.testing.assert_array_equal(batches[1]["x"][:8], data["x"][16:24])


def test_batches_that_are_whole_on_each_device_are_reported(
    caplog: pytest.LogCaptureFixture,
) -> None:
    strategy = rx.MirroredStrategy(cpus(4))
    data = np.zeros((7, 2), "float32")
    for _ in range(2):
        for batch in strategy.experimental_distribute_dataset(data, batch_size=7):
            assert strategy.global_batch(batch).sharding.is_fully_replicated
    assert caplog.text.count("4 devices do not divide a batch of 7 rows") == 1
    assert "remainder='pad'" in caplog.text


def test_invalid_batches() -> None:
    strategy = rx.MirroredStrategy(cpus(2))
    with pytest.raises(TypeError, match=r"got a ArrayImpl without PerReplica"):
        strategy.global_batch(jnp.ones(4))
    with pytest.raises(ValueError, match="one scalar for each replica"):
        strategy.global_batch(rx.PerReplica(np.ones(2)))
    with pytest.raises(ValueError, match="3 values but the strategy has 2 replicas"):
        strategy.global_batch(rx.PerReplica(np.ones((3, 2))))
    table = sparse.BCOO.fromdense(jnp.eye(4).reshape(2, 2, 4), n_batch=1)
    with pytest.raises(TypeError, match="BCOO"):
        strategy.global_batch(rx.PerReplica(table))
    batch = (rx.PerReplica(np.ones((2, 3))), 0.5)
    assert strategy.global_batch(batch)[1] == 0.5


@pytest.mark.parametrize("name", STRATEGIES)
def test_run_warns_of_large_arguments_that_it_replicates(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    strategy = STRATEGIES[name]()
    large, small = np.zeros((256, 256), "float32"), np.zeros((64, 64), "float32")
    strategy.run(lambda tree: tree["w"].sum(), args=({"w": small},))
    assert not caplog.text
    for _ in range(2):
        strategy.run(lambda tree: tree["w"].sum(), args=({"w": large},))
    count = caplog.text.count("argument float32[256, 256] is replicated on each device")
    assert count == (name in SPECS)
    assert ("strategy.shard" in caplog.text) == (name in SPECS)
