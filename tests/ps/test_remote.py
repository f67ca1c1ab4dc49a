"""Values that a worker sends to servers, and gets from them, are the very same."""

import socket
from concurrent.futures import ThreadPoolExecutor

import jax
import keras
import ml_dtypes
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from tests.ps import asking

import replicax as rx
from replicax.cluster.timeouts import Timeouts
from replicax.errors import ClusterMismatchError
from replicax.ps.board import Board
from replicax.ps.connection import ServerRefused
from replicax.ps.credentials import Credentials, new_token
from replicax.ps.groups import StepShare
from replicax.ps.optimizers import optimizer_rule
from replicax.ps.partition import VariableInfo, place
from replicax.ps.remote import RemoteGroup
from replicax.ps.service import Service
from replicax.ps.session import Session
from replicax.ps.store import VariableStore
from replicax.ps.variable_slices import VariableGroup

pytest.importorskip("pyarrow")

NUM_SERVERS = 3
CREDENTIALS = Credentials(token=new_token())
SHARDING = NamedSharding(Mesh(np.array(jax.devices()[:2]), ("x",)), PartitionSpec())
DTYPES = ("float32", "bfloat16", "float16", "int32", "uint8")
PARTITIONERS = [
    None,
    rx.experimental.partitioners.FixedShardsPartitioner(2),
    rx.experimental.partitioners.FixedShardsPartitioner(7),
    rx.experimental.partitioners.MinSizePartitioner(8, 4),
    rx.experimental.partitioners.MaxSizePartitioner(16),
]


def free_address():
    with socket.create_server(("127.0.0.1", 0)) as free:
        return f"127.0.0.1:{free.getsockname()[1]}"


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


def on_devices(values):
    return [jax.device_put(v, SHARDING) for v in values]


def assert_equal(actual, expected):
    for a, e in zip(actual, expected, strict=True):
        assert a.dtype == e.dtype
        assert a.shape == e.shape
        np.testing.assert_array_equal(
            np.asarray(a).astype("float32"), np.asarray(e).astype("float32")
        )


@settings(
    max_examples=12,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(VARIABLES, st.sampled_from(PARTITIONERS), st.integers(1, NUM_SERVERS))
def test_values_come_back_as_they_were_sent(
    session, variables, partitioner, num_servers
):
    group = group_of(variables, partitioner, num_servers)
    values = [array_of(*v, seed=i) for i, v in enumerate(variables)]
    remote = RemoteGroup(session, group, SHARDING)
    remote.create(on_devices(values))
    remote.require_created()
    assert remote.pull()
    assert_equal(remote.values, values)
    assert all(v.sharding == SHARDING for v in remote.values)
    assert not remote.pull()  # There is nothing newer.
    remote.assign(on_devices([-v for v in values]))
    other = RemoteGroup(session, group, SHARDING)
    other.pull()
    assert_equal(other.values, [-v for v in values])


@settings(
    max_examples=5,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(VARIABLES, st.sampled_from(PARTITIONERS))
def test_each_gradient_gets_to_its_variable(session, variables, partitioner):
    variables = [(shape, "float32") for shape, _ in variables]
    group = group_of(variables, partitioner)
    values = [array_of(*v, seed=i) for i, v in enumerate(variables)]
    steps = [array_of(*v, seed=-1 - i + 100) for i, v in enumerate(variables)]
    remote = RemoteGroup(session, group, SHARDING)
    remote.create(on_devices(values))
    remote.pull()
    applied = remote.finish(remote.push(on_devices(steps), remote.versions))
    assert applied.counts
    assert applied.staleness == 0
    # Whole numbers: sums are exact.
    assert_equal(remote.values, [v + s for v, s in zip(values, steps, strict=True)])
    assert set(remote.versions.values()) == {1}


def test_gradients_travel_as_bfloat16(session):
    group = group_of([((1000, 30), "float32")], None, 1)
    sent = {}
    for compression in (None, "bfloat16"):
        remote = RemoteGroup(
            session,
            VariableGroup(
                name=f"{group.name} {compression}", rule=group.rule, parts=group.parts
            ),
            SHARDING,
            compression,
        )
        remote.create(on_devices([np.zeros((1000, 30), "float32")]))
        remote.pull()
        before = session.connections[0].bytes_sent
        remote.finish(
            remote.push(on_devices([np.full((1000, 30), 0.1, "float32")]), {0: 0})
        )
        sent[compression] = session.connections[0].bytes_sent - before
        # 8 bits of mantissa.
        np.testing.assert_allclose(
            remote.values[0], 0.1, rtol=2**-8 if compression else 1e-7
        )
        assert remote.values[0].dtype == "float32"
    assert sent["bfloat16"] == pytest.approx(sent[None] / 2, rel=0.05)


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


def test_staleness_counts_the_updates_of_others(session):
    group = group_of([((2,), "float32")], None, 1)
    first = RemoteGroup(session, group, SHARDING)
    ones = on_devices([np.ones(2, "float32")])
    first.create(ones)
    first.pull()
    based_on = dict(first.versions)
    found = [first.finish(first.push(ones, based_on)).staleness for _ in range(3)]
    assert found == [0, 1, 2]


def test_a_step_that_was_committed_on_one_server_is_ended_by_the_next_worker():
    """The worker that began to end it has died between its two commits."""
    addresses = [free_address() for _ in range(2)]
    board = Board(["worker:0"], Timeouts(startup=60, heartbeat=30, chief=60))
    stores = [VariableStore(i) for i in range(2)]
    services = [
        Service(address, store, board if i == 0 else None, CREDENTIALS)
        for i, (address, store) in enumerate(zip(addresses, stores, strict=True))
    ]
    for service in services:
        service.serve_in_thread()
    session = Session(
        ["worker:0"], 0, addresses, CREDENTIALS, Timeouts(startup=20, step=10)
    )
    try:
        session.join()
        optimizer = keras.optimizers.SGD(1.0, global_clipnorm=1.0)
        infos = [VariableInfo(path=p, shape=(2,), dtype="float32") for p in "ab"]
        group = place("clipped", optimizer_rule(optimizer, []), infos, 2)
        remote = RemoteGroup(session, group, SHARDING)
        remote.create(on_devices([np.zeros(2, "float32")] * 2))
        remote.pull()
        share = {"num_parts": 2, "weight": 1.0}
        # This worker's parts are there as well, but it has lost the connection.
        senders = [(session.name, session.id, 5.0), ("worker:1", "b", 3.0)]
        with ThreadPoolExecutor(4) as threads:
            pushes = [
                threads.submit(
                    asking.push,
                    store,
                    "clipped",
                    worker=worker,
                    session=id,
                    sequence=1,
                    based_on=0,
                    vectors={"float32": np.full(2, gradient, "float32")},
                    part=StepShare(step=0, part=part, **share),
                )
                for part, (worker, id, gradient) in enumerate(senders)
                for store in stores
            ]
            norms = [push.result(20).squared_norms["all"] for push in pushes]
        asking.commit(stores[0], "clipped", 0, {"all": sum(norms) / 2})
        gradients = on_devices([np.full(2, 5.0, "float32")] * 2)
        mine = StepShare(step=0, part=0, **share)
        push = remote.push(gradients, remote.versions, mine)
        assert remote.finish(push).counts
        # The mean gradient is 4 everywhere, and its norm 8.
        assert_equal(remote.values, [np.full(2, -0.5, "float32")] * 2)
    finally:
        session.leave()
        for service in services:
            service.close()
