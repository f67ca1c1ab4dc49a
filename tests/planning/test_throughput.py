"""Examples per second and MFU in the logs of `fit`."""

import math
import time
from types import SimpleNamespace

import keras
import numpy as np
import pytest

import replicax as rx
from replicax.planning.throughput import _published_peak

X = np.random.default_rng(0).normal(size=(53, 4)).astype("float32")


def fit(callbacks, **options):
    strategy = rx.MirroredStrategy(["cpu:0", "cpu:1"])
    with strategy.scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    options = {"batch_size": 8, "epochs": 2, "verbose": 0} | options
    return model.fit(X, X[:, :1], callbacks=callbacks, **options).history


def test_logs_have_examples_per_second_and_mfu(tmp_path):
    log = tmp_path / "log.csv"
    speed = rx.callbacks.Throughput(100.0, peak_flops=1e9)
    history = fit([speed, keras.callbacks.CSVLogger(log)], validation_split=0.1)
    rates = history["examples_per_second"]
    assert len(rates) == 2
    assert all(0 < rate < 1e7 for rate in rates)
    # The devices of both replicas.
    assert history["mfu"] == [rate * 100.0 / 2e9 for rate in rates]
    assert log.read_text().startswith("epoch,examples_per_second,loss,mfu,val_loss")


def test_time_of_a_sleeping_callback_counts():
    """53 examples in 7 batches, of which the last waits: no other rate is possible."""
    wait_s = 0.2
    sleeper = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: time.sleep(wait_s)
    )
    history = fit([rx.callbacks.Throughput(), sleeper])
    assert 0 < history["examples_per_second"][-1] < 53 / (7 * wait_s)


def test_without_a_known_peak_there_is_no_mfu():
    assert "mfu" not in fit([rx.callbacks.Throughput(100.0)])  # On CPUs.
    assert "mfu" not in fit([rx.callbacks.Throughput()])


def test_an_epoch_that_only_compiles_is_nan():
    first, second = fit([rx.callbacks.Throughput()], batch_size=64)[
        "examples_per_second"
    ]
    assert math.isnan(first)
    assert second > 0


@pytest.mark.parametrize("is_first", [True, False])
def test_shares_the_recorder_of_a_report(tmp_path, is_first):
    speed = rx.callbacks.Throughput()
    report = rx.callbacks.Report(tmp_path / "report.html", diagnosis=False)
    history = fit([speed, report] if is_first else [report, speed])
    assert history["examples_per_second"][-1] > 0
    assert (tmp_path / "report.html").exists()


def devices(*kinds):
    return [SimpleNamespace(device_kind=kind) for kind in kinds]


@pytest.mark.parametrize(
    ("kinds", "dtype", "peak"),
    [
        (["NVIDIA H100 80GB HBM3"] * 2, "bfloat16", 2 * 989.4e12),
        (["NVIDIA H100 80GB HBM3"], "float32", 494.7e12),
        (["TPU v5 lite"], "float32", 197e12),
        (["TPU v5 lite", "cpu"], "float32", None),
    ],
)
def test_published_peaks(kinds, dtype, peak):
    assert _published_peak(devices(*kinds), dtype) == peak


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"flops_per_example": 0}, "flops_per_example must be positive.*got 0"),
        ({"flops_per_example": math.nan}, "flops_per_example.*got nan"),
        ({"flops_per_example": 1, "peak_flops": -1.0}, "peak_flops must.*got -1.0"),
        ({"peak_flops": 1e12}, "peak_flops=.*Pass flops_per_example"),
    ],
)
def test_bad_numbers_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        rx.callbacks.Throughput(**options)
