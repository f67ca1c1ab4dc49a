"""A server that lost its values with the chief gets no new ones beside old ones."""

import signal

import keras
import pytest
from tests.ps.jobs import BATCH_SIZE, LABELS, POINTS, Job, Watched, make, network

import replicax as rx

pytest.importorskip("pyarrow")
pytestmark = [
    pytest.mark.multiprocess,
    pytest.mark.slow,
    pytest.mark.timeout(150),
]


def model_of_rows():
    """A model whose dense variables are all on one server, and rows on both."""
    model = keras.Sequential(
        [
            keras.Input((8,), dtype="int32"),
            rx.layers.Embedding(8, 4, name="rows"),
            keras.layers.GlobalAveragePooling1D(),
        ]
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("sgd", loss)
    return model


def train(options, rows):
    strategy = make(options)
    with strategy.scope():
        model = model_of_rows() if rows else network()
    x = POINTS.astype("int32") % 8 if rows else POINTS
    model.fit(
        x,
        LABELS,
        batch_size=BATCH_SIZE,
        epochs=50,
        verbose=0,
        callbacks=[Watched(strategy)],
    )


@pytest.mark.parametrize(
    ("server", "rows"), [("ps:0", False), ("ps:1", False), ("ps:1", True)]
)
def test_the_restarted_chief_names_the_server(tmp_path, server, rows):
    with Job(tmp_path, train, workers=1, options={}, rows=rows) as cluster:
        cluster.wait_for_step("worker:0", 5)
        for name in ("worker:0", server):
            cluster.kill(name)
        for name in (server, "worker:0"):
            cluster.restart(name)
        code = cluster.task("worker:0").wait(timeout_seconds=60)
        output = cluster.task("worker:0").output
        assert code == 138, output
        assert f"{server} has lost its values" in output.splitlines()[-1], output
        assert cluster.task(server).wait(timeout_seconds=60) != -signal.SIGKILL
