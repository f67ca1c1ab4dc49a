"""XLA's options: what GPUs get, what users set themselves, what a version lacks."""

import logging
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest

from replicax.engine import xla_options
from replicax.engine.xla_options import (
    HEAP_BYTES,
    compiler_options,
    keep_loops,
    largest_array,
    without_kept_loops,
)

ALL_REDUCE = "xla_gpu_all_reduce_combine_threshold_bytes"
HEAP = "xla_multiheap_size_constraint_per_heap"
SCHEDULER = "xla_gpu_enable_latency_hiding_scheduler"


@pytest.mark.parametrize("platform", ["gpu", "cuda", "rocm"])
def test_gpus_overlap_sums_with_computation(platform) -> None:
    options = compiler_options(platform, {})
    assert options is not None
    assert options[SCHEDULER] is True
    assert options[ALL_REDUCE] == 32 * 2**20


def test_tpus_get_none() -> None:
    assert compiler_options("tpu", {}, bytes_per_pack=1024) is None


def test_steps_on_cpus_take_memory_in_pieces() -> None:
    options = compiler_options("cpu", {})
    assert options == {HEAP: HEAP_BYTES}
    step = jax.jit(lambda x: x + 1, compiler_options=dict(options))
    assert int(step(1)) == 2
    assert compiler_options("cpu", {}, largest_bytes=HEAP_BYTES) == options
    assert compiler_options("cpu", {}, largest_bytes=HEAP_BYTES + 1) is None
    assert compiler_options("cpu", {"XLA_FLAGS": f"--{HEAP}=-1"}) is None


def test_the_largest_array_is_found_wherever_it_is_made() -> None:
    def inner(x: jax.Array) -> jax.Array:
        return jnp.outer(x, x).sum()

    def looped(x: jax.Array) -> jax.Array:
        return jax.lax.fori_loop(0, 3, lambda i, y: y + inner(x), 0.0)

    def chosen(x: jax.Array) -> jax.Array:
        return jax.lax.cond(x[0] > 0, inner, lambda x: x[0], x)

    x = jnp.ones(10)
    for function in (inner, jax.jit(inner), looped, chosen, jax.checkpoint(inner)):
        assert largest_array(jax.make_jaxpr(function)(x)) == 4 * 10 * 10, function
    halves = jax.make_jaxpr(inner)(x.astype("bfloat16"))
    assert largest_array(halves) == 4 * 10 * 10
    assert largest_array(jax.make_jaxpr(lambda: jax.random.key(0))()) < 100
    assert largest_array(jax.make_jaxpr(lambda x: x)(x)) == 0


def test_xla_accepts_every_option(caplog) -> None:
    options = compiler_options("gpu", {})
    assert options is not None
    assert set(options) == set(xla_options._GPU), caplog.text
    step = jax.jit(lambda x: x + 1, compiler_options=dict(options))
    assert int(step(1)) == 2


def test_the_threshold_follows_the_packs() -> None:
    options = compiler_options("gpu", {}, bytes_per_pack=12345)
    assert options is not None
    assert options[ALL_REDUCE] == 12345


@pytest.mark.parametrize("as_file", [False, True])
@pytest.mark.parametrize(
    "flag", [f"--{ALL_REDUCE}=1", f"  --xla_foo=2   --{ALL_REDUCE}=1  "]
)
def test_what_the_user_set_is_left_alone(flag, as_file, tmp_path) -> None:
    if as_file:
        (tmp_path / "flags").write_text(flag)
        flag = str(tmp_path / "flags")
    options = compiler_options("gpu", {"XLA_FLAGS": flag}, bytes_per_pack=5)
    assert options is not None
    assert ALL_REDUCE not in options
    assert SCHEDULER in options


def test_a_flag_without_value_counts() -> None:
    options = compiler_options("gpu", {"XLA_FLAGS": f"--{SCHEDULER}"})
    assert options is not None
    assert SCHEDULER not in options


def test_a_file_of_flags_that_is_not_there(tmp_path) -> None:
    with pytest.raises(OSError, match="nowhere"):
        compiler_options("gpu", {"XLA_FLAGS": str(tmp_path / "nowhere")})


def test_what_xla_does_not_know_is_left_out_and_logged_once(
    monkeypatch, caplog
) -> None:
    monkeypatch.setattr(
        xla_options, "_GPU", {**xla_options._GPU, "xla_gpu_of_tomorrow": True}
    )
    xla_options._is_known.cache_clear()
    with caplog.at_level(logging.WARNING, "replicax"):
        for _ in range(2):
            options = compiler_options("gpu", {})
            assert options is not None
            assert "xla_gpu_of_tomorrow" not in options
            assert SCHEDULER in options
    assert caplog.text.count("no option xla_gpu_of_tomorrow") == 1
    # Nothing left is None, as jax.jit has it.
    monkeypatch.setattr(xla_options, "_GPU", {"xla_gpu_of_tomorrow": True})
    assert compiler_options("gpu", {}) is None


def test_other_errors_are_not_taken_for_a_missing_option() -> None:
    with pytest.raises(jax.errors.JaxRuntimeError, match="not a valid"):
        xla_options._is_known(SCHEDULER, "maybe")  # pyright: ignore[reportArgumentType]


FLAG = "--xla_backend_extra_options=xla_cpu_disable_loop_unrolling"


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (None, FLAG),
        ("  ", FLAG),
        ("--xla_dump_to=a", f"--xla_dump_to=a {FLAG}"),
        ("--xla_backend_extra_options=mine", "--xla_backend_extra_options=mine"),
        ("file_of_flags", "file_of_flags"),
        (FLAG, FLAG),
    ],
)
def test_loops_are_kept_unless_the_user_says_otherwise(before, after) -> None:
    environ = {"HOME": "here"} | ({} if before is None else {"XLA_FLAGS": before})
    keep_loops(environ)
    assert environ == {"HOME": "here", "XLA_FLAGS": after}
    keep_loops(environ)
    assert environ["XLA_FLAGS"] == after


def test_other_programs_do_not_get_it() -> None:
    environ = {"XLA_FLAGS": "--xla_dump_to=a", "HOME": "here"}
    before = dict(environ)
    keep_loops(environ)
    assert without_kept_loops(environ) == before
    assert without_kept_loops({"XLA_FLAGS": FLAG}) == {}
    assert without_kept_loops({}) == {}


def test_xla_has_read_it_in_a_process_that_imports_this_library(tmp_path) -> None:
    code = "import replicax, jax; jax.jit(lambda x: x + 1)(1.0)"

    def options(flags: str, folder: str) -> str:
        flags = f"{flags} --xla_dump_to={tmp_path / folder}"
        env = without_kept_loops(os.environ) | {"XLA_FLAGS": flags.strip()}
        command = [sys.executable, "-c", code]
        subprocess.run(command, check=True, timeout=120, env=env)
        (found,) = (tmp_path / folder).rglob("*lambda*debug_options")
        return found.read_text()

    assert "xla_cpu_disable_loop_unrolling" in options("", "ours")
    mine = "--xla_backend_extra_options=xla_cpu_of_the_user"
    assert "xla_cpu_disable_loop_unrolling" not in options(mine, "theirs")
