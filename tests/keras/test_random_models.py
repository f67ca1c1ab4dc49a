"""Random models train as in plain Keras, which runs in a process of its own."""

import os
import pickle
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from tests.keras import random_models

import replicax as rx
import replicax.testing

pytestmark = [
    pytest.mark.slow,
    pytest.mark.multiprocess,
    pytest.mark.filterwarnings("ignore"),  # Of data that end; plain Keras warns, too.
]

SEEDS = range(10)
DEVICES = [f"cpu:{i}" for i in range(4)]
STRATEGIES = {
    "two": lambda: rx.MirroredStrategy(DEVICES[:2]),
    "three": lambda: rx.MirroredStrategy(DEVICES[:3]),
    "shard_update": lambda: rx.MirroredStrategy(DEVICES, shard_update=True),
    "fully sharded": lambda: rx.FullyShardedStrategy(DEVICES),
    "central": lambda: rx.CentralStorageStrategy(DEVICES[:2], "cpu:3"),
}


def of_plain_keras(folder, in_shares):
    file = Path(folder, "found.pkl")
    subprocess.run(
        [
            *(sys.executable, random_models.__file__, str(file), str(in_shares)),
            *map(str, SEEDS),
        ],
        env=os.environ | {"KERAS_BACKEND": "jax", "JAX_PLATFORMS": "cpu"},
        timeout=300,
        check=True,
    )
    return pickle.loads(file.read_bytes())


def assert_same(actual, expected):
    # float32 sums in another order, through some ten steps of optimizers that divide.
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    named = jax.tree_util.tree_leaves_with_path(actual)
    for (path, a), e in zip(named, jax.tree.leaves(expected), strict=True):
        where = jax.tree_util.keystr(path)
        np.testing.assert_allclose(a, e, rtol=2e-3, atol=2e-4, err_msg=where)


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    return of_plain_keras(tmp_path_factory.mktemp("plain"), in_shares=False)


@pytest.mark.timeout(400)
@pytest.mark.parametrize("name", STRATEGIES)
def test_random_models(plain, name):
    strategy = STRATEGIES[name]()
    for seed in SEEDS:
        with strategy.scope():
            found = random_models.outcome(seed)
        print("seed", seed)
        assert_same(found, plain[seed])


def of_workers(strategy_of):
    strategy = strategy_of()
    found = {}
    for seed in SEEDS:
        print("seed", seed, flush=True)
        with strategy.scope():
            found[seed] = random_models.outcome(seed, in_shares=True)
    return found


def workers():
    return rx.MultiWorkerMirroredStrategy()


def servers():
    return rx.ParameterServerStrategy()


@pytest.mark.timeout(700)
@pytest.mark.parametrize(
    ("strategy_of", "tasks"),
    [(workers, {"worker": 2}), (servers, {"worker": 1, "ps": 2})],
)
def test_random_models_in_clusters(tmp_path, strategy_of, tasks):
    pytest.importorskip("pyarrow")
    plain = of_plain_keras(tmp_path, in_shares=True)
    results = replicax.testing.run(
        of_workers,
        tasks=tasks,
        args=(strategy_of,),
        logical_devices=1,
        deadline_seconds=360,
    )
    for i in range(tasks["worker"]):
        name = f"worker:{i}"
        found = results[name].value
        for seed in SEEDS:
            print(name, "seed", seed)
            assert_same(found[seed], plain[seed])
