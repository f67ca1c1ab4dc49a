"""Our steps beside hand-written ones in JAX, as programs for GPUs not here.

Compiles the benchmark's cases, `fit` of a Keras model under MirroredStrategy and the
step of the peer "bare JAX", with the CUDA compiler, and reads the programs: kernels,
bytes that they read and write, temporaries, and what all-reduces carry. Nothing is run.

    pip install 'replicax[plan-cuda]'
    JAX_PLATFORMS=cpu python benchmarks/gpu_programs.py abcdefgh

What is compiled goes to `results/gpu_programs.json`, case by case, and from there to
docs/performance.md (`python scripts/performance_page.py`). ResNets take minutes.
"""

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ.setdefault("KERAS_BACKEND", "jax")
HERE = Path(__file__).parent
sys.path.insert(0, str(HERE / "bench" / "peers"))

import jax
import jax_models
import keras
import keras_models
import numpy as np
from cases import CASES, Case
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax_step import first_state, step_of

import replicax as rx
from replicax.planning.capture import attention_of, capture_fit, compile_lowered
from replicax.planning.hlo_summary import read_program
from replicax.planning.schedule import read_schedule
from replicax.planning.topology import DeviceTopology, find_topology

FILE = HERE / "results" / "gpu_programs.json"


def by_replicax(case: Case, topology: DeviceTopology) -> jax.stages.Lowered:
    """The step of `fit`."""
    strategy = rx.MirroredStrategy()
    with strategy.scope():
        model = keras_models.build(keras, case)
        model.compile(
            keras_models.optimizer_of(keras, case), keras_models.loss_of(keras, case)
        )
    capture = capture_fit(strategy, model, batch(case, topology), topology)
    assert capture.lowered is not None
    return capture.lowered


def by_hand(case: Case, topology: DeviceTopology) -> jax.stages.Lowered:
    """The step of the peer "bare JAX"."""
    num = len(topology.devices)
    mesh = Mesh(np.array(topology.devices), ("replica",))
    whole, rows = PartitionSpec(), PartitionSpec("replica")
    step = jax.shard_map(
        step_of(case, num), mesh=mesh, in_specs=(whole, rows, rows), out_specs=whole
    )
    state = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(
            x.shape, x.dtype, sharding=NamedSharding(mesh, whole)
        ),
        first_state(case),
    )
    arrays = batch(case, topology, sharding=NamedSharding(mesh, rows))
    jax_models.compiles_for_card = True
    with attention_of(topology):
        return jax.jit(step, donate_argnums=0).lower(state, *arrays)


def batch(
    case: Case, topology: DeviceTopology, **where: Any
) -> list[jax.ShapeDtypeStruct]:
    """As many examples for each card as the case has on one device."""
    example = case.data(1)
    num = case.batch * len(topology.devices)
    return [
        jax.ShapeDtypeStruct((num, *x.shape[1:]), x.dtype, **where) for x in example
    ]


def facts(lowered: jax.stages.Lowered, topology: DeviceTopology) -> dict[str, float]:
    """A program in numbers, of one card."""
    compiled = compile_lowered(lowered, topology.devices)
    text = compiled.as_text() or ""
    kernels = list(read_schedule(text).kernels())
    collectives = read_program(text).collectives
    memory = compiled.memory_analysis()
    assert memory is not None  # XLA says it of GPUs.
    return {
        "kernels": sum(times for _, times in kernels),
        "bytes": sum(times * kernel.bytes for kernel, times in kernels),
        "temporaries": memory.temp_size_in_bytes,
        "peak": memory.temp_size_in_bytes
        + memory.argument_size_in_bytes
        + memory.output_size_in_bytes
        - memory.alias_size_in_bytes,
        "collectives": sum(c.count for c in collectives),
        "sent": sum(c.count * c.bytes for c in collectives),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("cases", nargs="?", default="".join(CASES))
    parser.add_argument("--topology", default="h100:8")
    options = parser.parse_args()
    topology = find_topology(options.topology)
    found = json.loads(FILE.read_text()) if FILE.exists() else {"cases": {}}
    for key in options.cases:
        case = CASES[key]
        keras.utils.clear_session()
        keras.mixed_precision.set_global_policy("float32")  # `build` sets the case's.
        programs = {
            "replicax": facts(by_replicax(case, topology), topology),
            "by hand": facts(by_hand(case, topology), topology),
        }
        found["cases"][key] = programs
        found |= {
            "topology": options.topology,
            "versions": {m.__name__: m.__version__ for m in (jax, keras)},
        }
        FILE.write_text(json.dumps(found, indent=1, sort_keys=True) + "\n")
        print(key, case.title, json.dumps(programs), flush=True)


if __name__ == "__main__":
    main()
