"""Real launchers start two processes; where one is not installed its test skips."""

import contextlib
import importlib.util
import io
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from replicax.cluster.listening import free_port

pytestmark = [pytest.mark.multiprocess, pytest.mark.timeout(200)]

TRAIN = """
import sys
import replicax as rx

strategy = rx.MultiWorkerMirroredStrategy(timeouts=rx.Timeouts(startup=90))
import keras
import numpy as np

keras.utils.set_random_seed(0)
with strategy.scope():
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
x = np.arange(32, dtype="float32").reshape(8, 4) / 32
history = model.fit(x, np.ones((8, 1), "float32"), batch_size=8, epochs=2, verbose=0)
print(
    f"RESULT {strategy.task_type} {strategy.task_id} {strategy.num_workers} "
    f"{strategy.num_replicas_in_sync} {history.history['loss'][-1]:.5f} "
    f"{strategy.cluster_resolver.environment or 'none'} ",
    flush=True,
)
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    file = tmp_path / "train.py"
    file.write_text(TRAIN)
    return file


def environment(**more: str) -> dict[str, str]:
    return {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "JAX_NUM_CPU_DEVICES": "1",
        "KERAS_BACKEND": "jax",
        **more,
    }


def run(*commands: list[str], **variables: list[str]) -> str:
    """Run commands at once, the i-th with the i-th values; return their output."""
    processes = [
        subprocess.Popen(
            command,
            env=environment(**{name: values[i] for name, values in variables.items()}),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for i, command in enumerate(commands)
    ]
    try:
        return "".join(process.communicate(timeout=150)[0] for process in processes)
    finally:
        for process in processes:
            process.kill()
            process.wait()


def check(output: str, script: Path, launcher: str) -> None:
    """Both processes trained one model, as this process does."""
    results = re.findall(r"RESULT worker (\d) 2 2 (\S+) (\S+)", output)
    assert sorted(index for index, _, _ in results) == ["0", "1"], output
    assert {name for _, _, name in results} == {launcher}
    with contextlib.redirect_stdout(io.StringIO()) as alone:
        exec(script.read_text(), {})
    (loss,) = re.findall(r"RESULT None None 1 8 (\S+) none", alone.getvalue())
    assert {loss for _, loss, _ in results} == {loss}


def test_variables(script: Path) -> None:
    command = [sys.executable, str(script)]
    output = run(
        *(command, command),
        RANK=["0", "1"],
        WORLD_SIZE=["2", "2"],
        MASTER_ADDR=["localhost"] * 2,
        MASTER_PORT=[str(free_port())] * 2,
    )
    check(output, script, "torchrun")


@pytest.mark.slow
def test_jax_was_initialized_before(script: Path) -> None:
    text = f"import jax; jax.distributed.initialize('localhost:{free_port()}', 2, %d)\n"
    files = [script.with_name(f"{i}.py") for i in range(2)]
    for index, file in enumerate(files):
        file.write_text(text % index + TRAIN)
    output = run(*([sys.executable, str(file)] for file in files))
    check(output, script, "jax.distributed")


def mpirun(kind: str) -> list[str]:
    """The command of an MPI launcher, or the reason why there is none."""
    for name in ("mpirun", f"mpirun.{kind}", "mpiexec", "mpiexec.hydra"):
        if path := shutil.which(name):
            version = subprocess.run(
                [path, "--version"], capture_output=True, text=True, check=False
            ).stdout
            if ("Open MPI" in version) == (kind == "openmpi"):
                root = ["--allow-run-as-root", "--oversubscribe"]
                return [path, *(root if kind == "openmpi" else []), "-n", "2"]
    pytest.skip(f"no mpirun of {kind} is installed")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["openmpi", "mpich"])
def test_mpirun(kind: str, script: Path) -> None:
    command = mpirun(kind)
    check(run([*command, sys.executable, str(script)]), script, kind)
    # A shell between launcher and script changes nothing.
    shell = [*command, "sh", "-c", f"{sys.executable} {script}; true"]
    check(run(shell), script, kind)


@pytest.mark.slow
def test_srun(script: Path) -> None:
    sinfo = shutil.which("sinfo")
    if sinfo is None or subprocess.run([sinfo], check=False, timeout=30).returncode:
        pytest.skip("no Slurm is installed and running")
    command = [sys.executable, str(script)]
    check(run(["srun", "-n", "2", *command]), script, "none")
    output = run(["salloc", "-n", "2", *command])
    assert "Start the script with srun." in output


@pytest.mark.slow
def test_torchrun(script: Path) -> None:
    torchrun = shutil.which("torchrun")
    if torchrun is None:
        pytest.skip("no torchrun is installed")
    options = ["--nproc-per-node", "2", "--no-python"]
    output = run([torchrun, *options, sys.executable, str(script)])
    check(output, script, "torchrun")


RAY = """
import sys
import ray
from ray.train import ScalingConfig
from ray.train.v2.jax import JaxTrainer

ray.init(num_cpus=3, include_dashboard=False)
train = open(sys.argv[1]).read()

def loop():
    exec(train, {})

if sys.argv[2] == "trainer":
    JaxTrainer(loop, scaling_config=ScalingConfig(num_workers=2)).fit()
else:
    ray.get(ray.remote(loop).remote())
"""


@pytest.mark.slow
@pytest.mark.parametrize("how", ["trainer", "task"])
def test_ray(how: str, script: Path) -> None:
    if importlib.util.find_spec("ray") is None:
        pytest.skip("no Ray is installed")
    file = script.with_name("start.py")
    file.write_text(RAY)
    output = run([sys.executable, str(file), str(script), how])
    if how == "trainer":
        results = set(re.findall(r"RESULT worker (\d) 2 2 (\S+) ray", output))
        assert sorted(index for index, _ in results) == ["0", "1"], output
        assert len({loss for _, loss in results}) == 1
    else:
        assert "this process is an actor or a task of Ray" in output
