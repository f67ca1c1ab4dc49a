"""The switch `REPLICAX_CPU`, and XLA's options for CPUs."""

import functools
import os
import subprocess
import sys
from collections.abc import Callable

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import replicax as rx
from replicax.cpu import settings
from replicax.cpu.settings import compiler_options, heap_bytes, keep_loops
from replicax.engine.overlap import xla_options

HEAP = "xla_multiheap_size_constraint_per_heap"
FLAG = "--xla_backend_extra_options=xla_cpu_disable_loop_unrolling"


def test_the_switch(monkeypatch) -> None:
    monkeypatch.delenv("REPLICAX_CPU", raising=False)
    assert settings.is_on()
    assert not settings.is_tuned()
    for choice, is_on, is_tuned in [
        ("", True, False),
        ("on", True, False),
        ("tuned", True, True),
        ("off", False, False),
    ]:
        monkeypatch.setenv("REPLICAX_CPU", choice)
        assert (settings.is_on(), settings.is_tuned()) == (is_on, is_tuned)


def test_an_unknown_value_is_an_error_of_the_strategy(monkeypatch) -> None:
    monkeypatch.setenv("REPLICAX_CPU", "fast")
    with pytest.raises(
        ValueError, match=r"REPLICAX_CPU has 'fast'.*'on', 'off', 'tuned'"
    ):
        rx.OneDeviceStrategy("cpu:0")


def test_steps_on_cpus_allocate_memory_in_pieces() -> None:
    options = xla_options.compiler_options("cpu", {})
    assert options == compiler_options({})
    assert options[HEAP] == heap_bytes()
    step = jax.jit(lambda x: x + 1, compiler_options=dict(options))
    assert int(step(1)) == 2
    assert compiler_options({}, largest_bytes=heap_bytes()) == options
    assert HEAP not in compiler_options({}, largest_bytes=heap_bytes() + 1)


def test_steps_are_ordered_for_least_memory() -> None:
    """XLA's default computes all eight products before it sums one."""

    def temporaries(**options: int | str) -> int:
        def fn(x: jax.Array) -> jax.Array:
            return sum((jnp.sin(x @ (x * i)).sum() for i in range(8)), jnp.zeros(()))

        step = jax.jit(fn, compiler_options=options)
        compiled = step.lower(jnp.ones((64, 64))).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    assert temporaries(**compiler_options({})) <= temporaries() // 2


def test_convolutions_use_all_cores() -> None:
    """Eigen computes convolutions; YNNPACK, on one core, still computes products."""

    def text(fn: Callable[..., jax.Array], *args: jax.Array) -> str:
        options = dict(compiler_options({}))
        step = jax.jit(fn, compiler_options=options)
        return str(step.lower(*args).compile().as_text())

    image, kernel = jnp.ones((2, 8, 8, 4)), jnp.ones((3, 3, 4, 8))
    numbers = ("NHWC", "HWIO", "NHWC")
    convolve = functools.partial(
        lax.conv_general_dilated,
        window_strides=(1, 1),
        padding="SAME",
        dimension_numbers=numbers,
    )
    assert " convolution(" in text(convolve, image, kernel)
    assert "ynn" not in text(convolve, image, kernel)
    square = jnp.ones((64, 64))
    plain = str(jax.jit(jnp.matmul).lower(square, square).compile().as_text())
    assert ("ynn" in text(jnp.matmul, square, square)) == ("ynn" in plain)


def test_options_of_the_user_are_not_overridden(monkeypatch) -> None:
    for name in compiler_options({}):
        others = compiler_options({"XLA_FLAGS": f"--{name}=mine"})
        assert others.keys() == compiler_options({}).keys() - {name}
    monkeypatch.setenv("REPLICAX_CPU", "off")
    assert compiler_options({}) == {}


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
def test_loops_are_kept_unless_the_user_has_set_options(
    before, after, monkeypatch
) -> None:
    unchanged = {"HOME": "here"} | ({} if before is None else {"XLA_FLAGS": before})
    environ = dict(unchanged)
    keep_loops(environ)
    assert environ == {"HOME": "here", "XLA_FLAGS": after}
    keep_loops(environ)
    assert environ["XLA_FLAGS"] == after
    monkeypatch.setenv("REPLICAX_CPU", "off")
    environ = dict(unchanged)
    keep_loops(environ)
    assert environ == unchanged


@pytest.mark.slow
def test_xla_reads_the_flag_after_set_logical_devices(tmp_path) -> None:
    code = "import replicax as rx, jax; {} jax.jit(lambda x: x + 1)(1.0)"

    def options(folder: str, flags: str = "", call: str = "") -> str:
        flags = f"{flags} --xla_dump_to={tmp_path / folder}"
        env = dict(os.environ) | {"XLA_FLAGS": flags.strip()}
        command = [sys.executable, "-c", code.format(call)]
        subprocess.run(command, check=True, timeout=120, env=env)
        (dump,) = (tmp_path / folder).rglob("*lambda*debug_options")
        return dump.read_text()

    call = "rx.set_logical_devices(2);"
    assert "xla_cpu_disable_loop_unrolling" in options("ours", call=call)
    mine = "--xla_backend_extra_options=xla_cpu_of_the_user"
    assert "xla_cpu_disable_loop_unrolling" not in options("theirs", mine, call)
    assert "xla_cpu_disable_loop_unrolling" not in options("imported")
