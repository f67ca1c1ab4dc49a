"""XLA's compiler options, and those that users set themselves."""

import jax
import jax.numpy as jnp
import pytest

from replicax.engine.jaxprs import largest_array
from replicax.engine.overlap.xla_options import compiler_options

GATHER = "xla_gpu_all_gather_combine_threshold_bytes"
SCATTER = "xla_gpu_reduce_scatter_combine_threshold_bytes"
MIB = 2**20


@pytest.mark.parametrize("platform", ["gpu", "cuda", "rocm"])
def test_all_of_a_bucket_is_scattered_at_once(platform) -> None:
    options = compiler_options(platform, {}, scattered_bytes=64 * MIB, num_devices=4)
    assert options == {GATHER: 9 * MIB // 4, SCATTER: 16 * MIB}


@pytest.mark.parametrize(
    ("total", "spans_hosts", "merged"),
    [(3, False, 1), (3, True, 4), (16, True, 4), (1024, False, 32), (1024, True, 32)],
)
def test_gathers_are_a_part_of_a_bucket(total, spans_hosts, merged) -> None:
    options = compiler_options(
        "gpu", {}, scattered_bytes=total * MIB, spans_hosts=spans_hosts
    )
    assert options == {GATHER: merged * MIB * 9 // 32, SCATTER: total * MIB}


def test_without_scattered_sums_xla_has_its_defaults() -> None:
    assert compiler_options("gpu", {}, num_devices=8) is None


def test_tpus_get_none() -> None:
    assert compiler_options("tpu", {}, scattered_bytes=MIB) is None


def test_the_largest_array_is_found_in_inner_functions() -> None:
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
    options = compiler_options("gpu", {}, scattered_bytes=MIB)
    assert options is not None
    assert set(options) == {GATHER, SCATTER}, caplog.text
    step = jax.jit(lambda x: x + 1, compiler_options=dict(options))
    assert int(step(1)) == 2


@pytest.mark.parametrize("as_file", [False, True])
@pytest.mark.parametrize("flag", [f"--{GATHER}=1", f"  --xla_foo=2   --{GATHER}=1  "])
def test_what_the_user_set_is_left_alone(flag, as_file, tmp_path) -> None:
    if as_file:
        (tmp_path / "flags").write_text(flag)
        flag = str(tmp_path / "flags")
    options = compiler_options("gpu", {"XLA_FLAGS": flag}, scattered_bytes=MIB)
    assert options is not None
    assert GATHER not in options
    assert SCATTER in options


@pytest.mark.parametrize("switch", ["on", "off"])
@pytest.mark.parametrize(
    ("flags", "passes"),
    [
        ("", "all-reduce-promotion"),
        ("--xla_disable_hlo_passes=foo,bar", "foo,bar,all-reduce-promotion"),
    ],
)
def test_the_pass_that_crashes_on_cpus_is_off(
    flags, passes, switch, monkeypatch
) -> None:
    monkeypatch.setenv("REPLICAX_CPU", switch)
    options = compiler_options("cpu", {"XLA_FLAGS": flags}, is_partitioned=True)
    assert options is not None
    assert options["xla_disable_hlo_passes"] == passes
    assert "xla_disable_hlo_passes" not in (compiler_options("cpu", {}) or {})


def test_a_flag_without_value_counts() -> None:
    options = compiler_options(
        "gpu", {"XLA_FLAGS": f"--{SCATTER}"}, scattered_bytes=MIB
    )
    assert options is not None
    assert SCATTER not in options


def test_a_file_of_flags_that_is_not_there(tmp_path) -> None:
    with pytest.raises(OSError, match="nowhere"):
        compiler_options(
            "gpu", {"XLA_FLAGS": str(tmp_path / "nowhere")}, scattered_bytes=MIB
        )
