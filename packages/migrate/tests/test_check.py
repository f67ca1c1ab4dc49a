"""The check: a ported script is run to its first training step."""

from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from replicax.cli import app

pytestmark = [pytest.mark.multiprocess, pytest.mark.timeout(240)]
slow = pytest.mark.slow


def invoke(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["migrate", "--check", *map(str, arguments)])


def checked(folder: Path, text: str) -> tuple[int, str]:
    """The exit status of a check, and what it prints."""
    script = folder / "train.py"
    script.write_text(text)
    result = invoke("--quiet", "--diff", script)
    first, last = result.stderr.splitlines()
    assert first.endswith("nothing is left to port by hand")
    return result.exit_code, last.removeprefix(f"{script}:").strip()


MODULES = {
    "model.py": """import tensorflow as tf


def make():
    return tf.keras.Sequential([tf.keras.Input((3,)), tf.keras.layers.Dense(3)])
""",
    "train.py": """import sys

import numpy as np
import tensorflow as tf
from model import make

strategy = tf.distribute.MirroredStrategy()
x = np.ones((80, int(sys.argv[1])), "float32")
with strategy.scope():
    model = make()
    model.compile("sgd", "mse")

model.fit(tf.data.Dataset.from_tensor_slices((x, x)).batch(4))
""",
}


def test_an_error_has_its_line_of_the_original(tmp_path: Path) -> None:
    paths = [tmp_path / name for name in MODULES]
    for path in paths:
        path.write_text(MODULES[path.name])
    result = invoke("--arguments", "4", "--diff", *paths)
    assert result.exit_code == 1
    assert f"{paths[0]}: checked" in result.stderr  # It runs with the other.
    assert f"{paths[1]}:13: check: ValueError: " in result.stderr
    assert "to have value 3, but received input" in result.stderr
    assert paths[1].read_text() == MODULES["train.py"]


def test_the_check_has_a_deadline(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("import time\n\ntime.sleep(50)\n")
    result = invoke("--check-seconds", "0.5", "--diff", script)
    assert result.exit_code == 2
    assert ":1: not checked: it made no training step within 0.5 s" in result.stderr


FIT = """import numpy as np
import tensorflow as tf

strategy = {strategy}
x = np.ones((40, 3), "float32")
with strategy.scope():
    model = tf.keras.Sequential([tf.keras.Input((3,)), tf.keras.layers.Dense(3)])
    model.compile("sgd", "mse")
model.fit({data})
raise ValueError("The second step has ended.")
"""
STRATEGIES = {
    "mirrored": 'tf.distribute.MirroredStrategy(["/gpu:0", "/gpu:1"])',
    "central": "tf.distribute.experimental.CentralStorageStrategy()",
    "one": 'tf.distribute.OneDeviceStrategy("/gpu:0")',
    "default": "tf.distribute.get_strategy()",
    "workers": """0
import os
os.environ["TF_CONFIG"] = '{"cluster": {"worker": ["h0:1", "h1:1"]}, "task":' \\
    ' {"type": "worker", "index": 0}}'
strategy = tf.distribute.MultiWorkerMirroredStrategy()""",
    "tpu": """tf.distribute.cluster_resolver.TPUClusterResolver(tpu="")
tf.config.experimental_connect_to_cluster(strategy)
tf.tpu.experimental.initialize_tpu_system(strategy)
strategy = tf.distribute.TPUStrategy(strategy)""",
}
SERVERS = """tf.distribute.experimental.ParameterServerStrategy(
    tf.distribute.cluster_resolver.TFConfigClusterResolver())"""
REPEATED = """tf.data.Dataset.from_tensor_slices((x, x{})).batch(8).repeat(),
          steps_per_epoch=10"""


@slow
@pytest.mark.parametrize("name", STRATEGIES)
def test_fit_trains_on_cpus(tmp_path: Path, name: str) -> None:
    script = FIT.format(strategy=STRATEGIES[name], data="x, x, batch_size=8")
    assert checked(tmp_path, script) == (0, "checked")


@slow
def test_fit_trains_beside_a_server(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    script = FIT.format(strategy=SERVERS, data=REPEATED)
    assert checked(tmp_path, script.format("")) == (0, "checked")
    status, text = checked(tmp_path, script.format("[:, :2]"))
    assert status == 1
    assert text.startswith("10: check: TypeError: ")


@slow
@pytest.mark.parametrize(
    ("data", "error"),
    [
        ('np.array(["a"] * 40), x', "Invalid dtype: str"),
        ("x, x[:, :2]", "incompatible shapes"),
        ("(b for b in [(x, x), (x, x[:, :2])])", "incompatible shapes"),
        ('(b for b in [(x, x), (x.astype("U1"), x)])', "non-array argument"),
    ],
)
def test_two_batches_are_read(tmp_path: Path, data: str, error: str) -> None:
    script = FIT.format(strategy=STRATEGIES["mirrored"], data=data)
    status, text = checked(tmp_path, script)
    assert status == 1
    assert text.startswith("9: check: ")
    assert error in text


LOOP = """
@tf.function
def step(x):
    with tf.GradientTape() as tape:
        loss = tf.nn.compute_average_loss(tf.reduce_sum(model(x) ** 2, axis=-1))
    gradients = tape.gradient(loss, model.trainable_variables)
    model.optimizer.apply_gradients(zip(gradients, model.trainable_variables))
    return loss


dataset = tf.data.Dataset.from_tensor_slices(x).batch(8)
for batch in strategy.experimental_distribute_dataset(dataset):
    loss = strategy.reduce("SUM", strategy.run(step, args=(batch,)), axis=None)
    print(float(loss))
"""


@slow
def test_a_loop_trains(tmp_path: Path) -> None:
    script = FIT.format(strategy=STRATEGIES["mirrored"], data="x, x").replace(
        "model.fit(x, x)\n", LOOP
    )
    assert checked(tmp_path, script) == (0, "checked")
    status, text = checked(tmp_path, script.replace("float(loss)", "float(loss) @ 1"))
    assert status == 1
    assert text.startswith("22: check: TypeError: unsupported operand")


ESTIMATOR = """import numpy as np
import tensorflow as tf

words = tf.feature_column.categorical_column_with_vocabulary_list("word", ["a", "b"])
columns = [tf.feature_column.indicator_column(words)]


def input_fn():
    word, label = np.array(["a", "b"] * 4), np.array([0, 1] * 4)
    dataset = tf.data.Dataset.from_tensor_slices(({"word": word}, label))
    return dataset.batch(2).repeat()


def model_fn(features, labels, mode):
    net = tf.compat.v1.feature_column.input_layer(features, columns)
    loss = tf.reduce_mean(tf.keras.layers.Dense(1)(net) ** 2)
    optimizer = tf.compat.v1.train.GradientDescentOptimizer(0.1)
    train_op = optimizer.minimize(loss, tf.compat.v1.train.get_global_step())
    return tf.estimator.EstimatorSpec(mode, loss=loss, train_op=train_op)


estimator = tf.estimator.LinearClassifier(columns)
tf.estimator.train_and_evaluate(
    estimator, tf.estimator.TrainSpec(input_fn, 10), tf.estimator.EvalSpec(input_fn))
raise ValueError("The second step has ended.")
"""


@slow
def test_an_estimator_trains(tmp_path: Path) -> None:
    assert checked(tmp_path, ESTIMATOR) == (0, "checked")
    # Strings reach a model function as they are.
    own = ESTIMATOR.replace("LinearClassifier(columns)", "Estimator(model_fn)")
    status, text = checked(tmp_path, own)
    assert status == 1
    assert text.startswith("23: check: TypeError: dataset: leaf [0]['word']")


ARGUMENT = """import argparse; parser = argparse.ArgumentParser()
parser.add_argument("data"); parser.parse_args()"""


@slow
@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ('open("/none/data.csv")', "1: not checked: FileNotFoundError: "),
        ("import none_such", "1: not checked: ModuleNotFoundError: "),
        (ARGUMENT, "2: not checked: the script exits with status 2"),
        ("if False: model.fit(x)", "1: not checked: it ended without a training"),
    ],
)
def test_what_is_not_here_is_not_run(tmp_path: Path, text: str, reason: str) -> None:
    status, message = checked(tmp_path, f"{text}\n")
    assert status == 2
    assert message.startswith(reason)
