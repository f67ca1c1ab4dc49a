"""Jobs with parameter servers over a network that has faults: what is counted once."""

import json
import os
import threading
import time

import keras
import numpy as np
import pytest
from tests.ps.faulty_network import Network
from tests.ps.jobs import (
    BATCH_SIZE,
    LABELS,
    POINTS,
    Job,
    Watched,
    all_done,
    check_counts,
    counts_of,
    make,
    network,
)

import replicax as rx
from replicax.ps.client_stream import ClientStream
from replicax.ps.connection import Connection

pytest.importorskip("pyarrow")
pytestmark = [
    pytest.mark.multiprocess,
    pytest.mark.slow,
    pytest.mark.timeout(200),
]

HEARTBEAT_S = 3  # As in `TIMEOUTS` of these jobs.
NUM_CLOSURES = 40
REPEATS = 20


# What the tasks run.


def networks_before_servers():
    """Put networks between this worker and the servers; a server has none."""
    config = json.loads(os.environ["TF_CONFIG"])
    if config["task"]["type"] != "worker":
        return []
    networks = [Network(address) for address in config["cluster"]["ps"]]
    config["cluster"]["ps"] = [network.address for network in networks]
    os.environ["TF_CONFIG"] = json.dumps(config)
    return networks


def lose_answers(networks, step):
    """What was asked is done, and the answers are lost; in both servers in turn."""
    if step % 6 == 3:
        networks[step // 6 % 2].lose("down")


def vanish(networks, step, seconds=1.5 * HEARTBEAT_S):
    if step == 5:
        networks[0].is_dead = networks[1].is_dead = True
        threading.Timer(seconds, come_back, [networks]).start()


def come_back(networks):
    for each in networks:
        each.is_dead = False
    print("back again", flush=True)


def vanish_for_long(networks, step):
    vanish(networks, step, seconds=3 * HEARTBEAT_S)


def vanish_from_the_second(networks, step):
    vanish(networks[1:] * 2, step)


def reset_often(networks, step):
    networks[step % 2].reset()


FAULTS = {
    fault.__name__: fault
    for fault in (
        lose_answers,
        vanish,
        vanish_for_long,
        vanish_from_the_second,
        reset_often,
    )
}


class Disturbs(keras.callbacks.Callback):
    """Disturbs the networks of one worker in the midst of its steps."""

    def __init__(self, networks, fault):
        super().__init__()
        self.networks, self.fault = networks, FAULTS[fault]
        self.steps = 0

    def on_train_batch_begin(self, batch, logs=None):
        self.steps += 1
        # Not between two calls: a step takes some milliseconds.
        threading.Timer(0.002, self.fault, [self.networks, self.steps]).start()


def lose_first_answers():
    """Lose this process's first answer to each kind of message and call, by server.

    The server has done what it was asked for, and is asked again.
    """
    lost = set()

    def with_losses(answered, kind_of):
        def answer(*arguments, **named):
            found = answered(*arguments, **named)
            kind = kind_of(*arguments)
            if kind not in lost:
                lost.add(kind)
                raise ConnectionResetError(f"the answer to {kind} is lost")
            return found

        return answer

    ClientStream.transfer = with_losses(
        ClientStream.transfer, lambda x, header, *_: (x.name, header["op"])
    )
    Connection._act = with_losses(Connection._act, lambda x, name, *_: (x.task, name))


def distant(options, fault=None):
    """A worker's strategy, with networks between it and its servers, and these."""
    networks = networks_before_servers()
    if fault == "lose_first_answers" and networks:
        lose_first_answers()
    strategy = make(options)
    for connection in strategy.session.connections:
        connection.shares_memory = False
    return strategy, networks


def disturbed(strategy, networks, fault, index=1):
    is_due = fault in FAULTS and strategy.session.index == index
    return [Disturbs(networks, fault)] if is_due else []


def any_order(options, fault, index):
    strategy, networks = distant(options, fault)
    with strategy.scope():
        model = network()
    model.fit(
        np.tile(POINTS, (REPEATS, 1)),
        np.tile(LABELS, REPEATS),
        batch_size=BATCH_SIZE,
        verbose=0,
        callbacks=[Watched(strategy), *disturbed(strategy, networks, fault, index)],
    )
    strategy.session.barrier("all have trained")
    return counts_of(strategy) if strategy.is_chief else None


def closures(options, fault):
    """Functions of a coordinator, each of which makes one update."""
    strategy, networks = distant(options, fault)
    coordinator = rx.ClusterCoordinator(strategy)
    with strategy.scope():
        model = network()
    disturbs = disturbed(strategy, networks, fault)

    def step(number):
        rows = slice(number % 8 * BATCH_SIZE, (number % 8 + 1) * BATCH_SIZE)
        for callback in disturbs:
            callback.on_train_batch_begin(number)
        time.sleep(0.03)

        def update():
            with rx.GradientTape() as tape:
                loss = model.compute_loss(
                    y=LABELS[rows], y_pred=model(POINTS[rows], training=True)
                )
            variables = model.trainable_variables
            model.optimizer.apply(tape.gradient(loss, variables), variables)
            return loss

        return float(strategy.reduce("mean", strategy.run(update)))

    results = [coordinator.schedule(step, (i,)) for i in range(NUM_CLOSURES)]
    coordinator.join()
    losses = coordinator.fetch(results)
    servers = [c.call("store.status") for c in strategy.session.connections]
    return [len(losses), [server["applied"] for server in servers]]


# The tests' side.


@pytest.mark.parametrize(
    ("fault", "index"),
    [
        ("lose_answers", 1),
        ("vanish_for_long", 1),
        ("vanish_from_the_second", 0),
        ("lose_first_answers", 1),
    ],
)
def test_steps_in_any_order_are_made_once(tmp_path, fault, index):
    with Job(tmp_path, any_order, options={}, fault=fault, index=index) as cluster:
        results = cluster.ended(100)
    found = all_done(results)
    check_counts(found)
    assert found["lost"] <= 1
    assert found["next"] == REPEATS * len(LABELS) // BATCH_SIZE
    if "vanish" not in fault:
        assert found["lost"] == 0
    assert found["pushes"].keys() == {"worker:0", "worker:1"}


@pytest.mark.parametrize("fault", ["lose_answers", "vanish", "lose_first_answers"])
def test_closures_make_their_updates_once(tmp_path, fault):
    with Job(tmp_path, closures, options={}, fault=fault, workers=3) as cluster:
        results = cluster.ended(100)
    assert all_done(results) == [NUM_CLOSURES, [NUM_CLOSURES] * 2]
