"""A worker's client of a group: values and gradients survive the way to servers."""

import jax
import keras
import ml_dtypes
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from tests.ps.addresses import free_address

import replicax as rx
from replicax._util.arrays import aligned
from replicax.cluster.timeouts import Timeouts
from replicax.errors import ClusterMismatchError
from replicax.ps.board import Board
from replicax.ps.connection import ServerRefused
from replicax.ps.credentials import Credentials, new_token
from replicax.ps.group_vectors import GroupLayout
from replicax.ps.optimizers import optimizer_rule
from replicax.ps.partition import VariableGroup, VariableInfo, place
from replicax.ps.remote import RemoteGroup
from replicax.ps.service import Service
from replicax.ps.session import Session
from replicax.ps.store import VariableStore

pytest.importorskip("pyarrow")

NUM_SERVERS = 3
CREDENTIALS = Credentials(token=new_token())
SHARDING, ON_ONE = (
    NamedSharding(Mesh(np.array(jax.devices()[:n]), ("x",)), PartitionSpec())
    for n in (2, 1)
)
DTYPES = ("float32", "bfloat16", "float16", "int32", "uint8")
PARTITIONERS = [
    None,
    rx.experimental.partitioners.FixedShardsPartitioner(2),
    rx.experimental.partitioners.FixedShardsPartitioner(7),
    rx.experimental.partitioners.MinSizePartitioner(8, 4),
    rx.experimental.partitioners.MaxSizePartitioner(16),
]


@pytest.fixture(scope="module")
def session():
    """A worker of real servers in this process."""
    addresses = [free_address() for _ in range(NUM_SERVERS)]
    board = Board(["worker:0"], Timeouts(startup=60, heartbeat=30, chief=60))
    services = [
        Service(
            address,
            VariableStore(i),
            board if i == 0 else None,
            CREDENTIALS,
        )
        for i, address in enumerate(addresses)
    ]
    for service in services:
        service.serve_in_thread()
    session = Session(
        ["worker:0"], 0, addresses, CREDENTIALS, Timeouts(startup=20, step=10)
    )
    session.join()
    # Threads that live as long as the session begin here.
    first = RemoteGroup(session, group_of([((1,), "uint8")] * 3, None), SHARDING)
    first.create(on_devices([np.zeros(1, "uint8")] * 3))
    yield session
    session.leave()
    for service in services:
        service.close()


def array_of(shape, dtype, seed):
    raw = np.random.default_rng(seed).bytes(max(1, int(np.prod(shape))) * 4)
    numbers = np.frombuffer(raw, np.int32)[: int(np.prod(shape))] % 201 - 100
    kind = np.dtype(getattr(ml_dtypes, dtype, dtype))
    return numbers.reshape(shape).astype(kind)


VARIABLES = st.lists(
    st.tuples(
        st.lists(st.integers(1, 5), max_size=3).map(tuple), st.sampled_from(DTYPES)
    ),
    min_size=1,
    max_size=6,
)
NUMBERS = iter(range(10**9))


def group_of(variables, partitioner, num_servers=NUM_SERVERS):
    return place(
        f"group {next(NUMBERS)}",
        {"kind": "add"},
        [
            VariableInfo(path=f"v{i}", shape=shape, dtype=dtype)
            for i, (shape, dtype) in enumerate(variables)
        ],
        num_servers,
        partitioner,
    )


def on_devices(values, sharding=SHARDING):
    return [jax.device_put(v, sharding) for v in values]


def assert_equal(actual, expected):
    for a, e in zip(actual, expected, strict=True):
        assert a.dtype == e.dtype
        assert a.shape == e.shape
        np.testing.assert_array_equal(
            np.asarray(a).astype("float32"), np.asarray(e).astype("float32")
        )


@settings(
    max_examples=12,
    suppress_health_check=[
        HealthCheck.function_scoped_fixture,
        HealthCheck.too_slow,
    ],
)
@given(
    VARIABLES,
    st.sampled_from(PARTITIONERS),
    st.integers(1, NUM_SERVERS),
    st.sampled_from([SHARDING, ON_ONE]),
)
def test_values_survive_a_round_trip(
    session, variables, partitioner, num_servers, sharding
):
    group = group_of(variables, partitioner, num_servers)
    values = [array_of(*v, seed=i) for i, v in enumerate(variables)]
    remote = RemoteGroup(session, group, sharding)
    remote.create(on_devices(values, sharding))
    remote.require_created()
    assert remote.pull()
    assert_equal(remote.values, values)
    assert all(v.sharding == sharding for v in remote.values)
    assert not remote.pull()  # There is nothing newer.
    remote.assign(on_devices([-v for v in values], sharding))
    other = RemoteGroup(session, group, sharding)
    other.pull()
    assert_equal(other.values, [-v for v in values])


def test_donated_values_do_not_overwrite_received_bytes():
    """On one CPU device values are views of it, so that nothing is copied."""
    group = group_of([((64, 16), "float32"), ((16,), "float32")], None, 1)
    layout = GroupLayout(group, ON_ONE, None)
    sent = [array_of((64, 16), "float32", 1), array_of((16,), "float32", 2)]
    (pieces,) = layout.all_vectors(on_devices(sent, ON_ONE)).values()
    received = aligned(4 * (64 * 16 + 16)).view("float32")
    received[:] = np.concatenate(pieces["float32"])
    before = received.copy()
    values = layout.on_devices({0: {"float32": received}})
    assert_equal(values, sent)
    addresses = [v.addressable_data(0).unsafe_buffer_pointer() for v in values]
    assert min(addresses) == received.ctypes.data
    doubled = jax.jit(lambda x: [v * 2 for v in x], donate_argnums=0)(values)
    assert_equal(doubled, [2 * v for v in sent])
    np.testing.assert_array_equal(received, before)


@settings(
    max_examples=5,
    suppress_health_check=[
        HealthCheck.function_scoped_fixture,
        HealthCheck.too_slow,
    ],
)
@given(VARIABLES, st.sampled_from(PARTITIONERS))
def test_each_gradient_reaches_its_variable(session, variables, partitioner):
    variables = [(shape, "float32") for shape, _ in variables]
    group = group_of(variables, partitioner)
    values = [array_of(*v, seed=i) for i, v in enumerate(variables)]
    steps = [array_of(*v, seed=-1 - i + 100) for i, v in enumerate(variables)]
    remote = RemoteGroup(session, group, SHARDING)
    remote.create(on_devices(values))
    remote.pull()
    assert remote.await_push(remote.push(on_devices(steps), remote.versions)) == 0
    # Whole numbers: sums are exact.
    assert_equal(remote.values, [v + s for v, s in zip(values, steps, strict=True)])
    assert set(remote.versions.values()) == {1}


def test_gradients_are_sent_as_bfloat16(session):
    group = group_of([((1000, 30), "float32")], None, 1)
    sent = {}
    for compression in (None, "bfloat16"):
        remote = RemoteGroup(
            session,
            VariableGroup(
                name=f"{group.name} {compression}", rule=group.rule, shards=group.shards
            ),
            SHARDING,
            compression,
        )
        remote.create(on_devices([np.zeros((1000, 30), "float32")]))
        remote.pull()
        before = session.connections[0].num_bytes
        remote.await_push(
            remote.push(on_devices([np.full((1000, 30), 0.1, "float32")]), {0: 0})
        )
        sent[compression] = session.connections[0].num_bytes - before
        # 8 bits of mantissa.
        np.testing.assert_allclose(
            remote.values[0], 0.1, rtol=2**-8 if compression else 1e-7
        )
        assert remote.values[0].dtype == "float32"
    assert sent[None] - sent["bfloat16"] == pytest.approx(2 * 1000 * 30, rel=0.05)


def test_another_group_of_that_name_is_refused(session):
    group = group_of([((4, 3), "float32")], None)
    RemoteGroup(session, group, SHARDING).create(
        on_devices([np.zeros((4, 3), "float32")])
    )
    other = place(
        group.name,
        group.rule,
        [VariableInfo(path="v0", shape=(4, 2), dtype="float32")],
        NUM_SERVERS,
    )
    with pytest.raises(ClusterMismatchError, match="differs from the chief's"):
        RemoteGroup(session, other, SHARDING).require_created()
    with pytest.raises(ServerRefused):
        RemoteGroup(session, other, SHARDING).create(
            on_devices([np.zeros((4, 2), "float32")])
        )


def test_a_restarted_chief_continues_the_restored_step_count(session, caplog):
    optimizer = keras.optimizers.SGD(0.5)
    infos = [VariableInfo(path="w", shape=(2,), dtype="float32")]
    rule = optimizer_rule(optimizer, [])
    group = place(f"restored {next(NUMBERS)}", rule, infos, NUM_SERVERS)
    values = on_devices([np.ones(2, "float32")])
    restored = {("iteration", None): np.asarray(7, "int32")}
    chief = RemoteGroup(session, group, SHARDING)
    chief.create(values, restored)
    chief.pull()
    chief.await_push(chief.push(values, chief.versions))
    again = RemoteGroup(session, group, SHARDING)
    with caplog.at_level("WARNING", logger="replicax"):
        again.create(values, restored)
    assert (
        "values that this script has assigned or restored are not used" in caplog.text
    )
    again.pull()
    for each in (chief, again):
        (steps,) = each.optimizer.slots("iteration").values()
        assert each.steps + each.steps_ahead == steps == 8
