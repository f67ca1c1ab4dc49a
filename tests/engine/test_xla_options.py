"""XLA's options: what GPUs get, what users set themselves, what a version lacks."""

import logging

import jax
import jax.numpy as jnp
import pytest

from replicax.engine import xla_options
from replicax.engine.xla_options import compiler_options, largest_array

ALL_REDUCE = "xla_gpu_all_reduce_combine_threshold_bytes"
SCHEDULER = "xla_gpu_enable_latency_hiding_scheduler"


@pytest.mark.parametrize("platform", ["gpu", "cuda", "rocm"])
def test_gpus_overlap_sums_with_computation(platform) -> None:
    options = compiler_options(platform, {})
    assert options is not None
    assert options[SCHEDULER] is True
    assert options[ALL_REDUCE] == 32 * 2**20


def test_scattered_sums_are_merged_by_what_is_summed() -> None:
    options = compiler_options("gpu", {}, num_devices=8)
    assert options is not None
    assert options["xla_gpu_reduce_scatter_combine_threshold_bytes"] == 4 * 2**20
    assert options["xla_gpu_all_gather_combine_threshold_bytes"] == 32 * 2**20


def test_tpus_get_none() -> None:
    assert compiler_options("tpu", {}, bytes_per_pack=1024) is None


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
