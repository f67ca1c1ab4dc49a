"""Every private name of JAX that replicax uses, with its reason.

Tested with JAX 0.10 to 0.12. Names are looked up when they are needed, so that this
module costs nothing to import and may be imported before JAX's devices are started.
`cluster.coordination_service` uses another private name itself, because it runs as a
script, in a process without this package.
"""

import contextlib
import dataclasses
import importlib
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import jax._src.array
import jax.core
import jax.extend.core

ArrayImpl = jax._src.array.ArrayImpl
"""The class of concrete arrays: its constructor does not check the parts."""


class TracedEquation(Protocol):
    """An equation of an unfinished trace, in the form of `jax.extend.core.JaxprEqn`."""

    primitive: jax.extend.core.Primitive
    params: dict[str, Any]
    in_tracers: Sequence[jax.Array]
    outvars: Sequence[jax.extend.core.Var]


def equation_of(value: object) -> TracedEquation | None:
    """Return the equation that computes a traced array.

    None for an argument of the function, and under another transformation, such as
    `vmap`.
    """
    return getattr(value, "parent", None)


def innermost(value: object) -> object:
    """Return the program's traced value below `vmap` and differentiation."""
    while True:
        inner = getattr(value, "primal", getattr(value, "val", None))
        if not isinstance(inner, jax.core.Tracer):
            return value
        value = inner


def is_batched(value: object) -> bool:
    """Whether a value under `vmap` has one entry for each mapped index."""
    return getattr(value, "batch_dim", None) is not None


def frames_of(equation: object) -> Iterator[tuple[str, int, str]]:
    """Yield an equation's Python frames, innermost first: file, line, function name.

    JAX's public `summarize` treats all frames outside of JAX as the user's.
    """
    source = getattr(equation, "source_info", None)
    for frame in getattr(getattr(source, "traceback", None), "frames", ()):
        yield frame.file_name, frame.line_num, frame.function_name


def distributed_state() -> Any:
    """Return the state of `jax.distributed`; its `client` has a key-value store."""
    return importlib.import_module("jax._src.distributed").global_state


def is_tpu_vm() -> bool:
    """Whether JAX found TPU chips and libtpu on this machine when it was imported."""
    return importlib.import_module("jax._src.cloud_tpu_init").running_in_cloud_tpu_vm


def lowering_rule_for_cpus(primitive: Any) -> Any:
    """Look up JAX's lowering rule of a primitive for CPUs; None if it is not found.

    JAX has a function to register rules but none to look them up.
    """
    mlir: Any = importlib.import_module("jax.interpreters.mlir")
    table = getattr(mlir, "_platform_specific_lowerings", None)
    if table is None:
        return None
    entry = table["cpu"].get(primitive)
    if entry is None:
        entry = (getattr(mlir, "_lowerings", None) or {}).get(primitive)
    return getattr(entry, "rule", entry)


def allow_high_operations(primitive: Any) -> None:
    """Let a primitive's parameter `jaxpr` have operations that JAX expands.

    From JAX 0.11 on some functions of jax.numpy, such as `searchsorted`, are traced as
    one operation. JAX expands them before it lowers a program, and calls `to_lojax` of
    each primitive that has a jaxpr.
    """
    tracing: Any = importlib.import_module("jax._src.interpreters.partial_eval")
    primitive.to_lojax = lambda *args, jaxpr: primitive.bind(
        *args, jaxpr=tracing.lower_jaxpr2(jaxpr)
    )


@contextlib.contextmanager
def attention_of_card(capability: tuple[int, int]) -> Iterator[None]:
    """Let JAX and Keras choose cuDNN's attention as on a card of a CUDA capability.

    They read the capability of the first local GPU; without a GPU they write attention
    as plain operations.
    """
    module: Any = importlib.import_module("jax._src.cudnn.fused_attention_stablehlo")
    before = module.check_compute_capability, module.is_cuda_compute_capability_equal

    def number(text: str) -> tuple[int, ...]:
        return tuple(map(int, text.split(".")))

    module.check_compute_capability = lambda least: capability >= number(least)
    module.is_cuda_compute_capability_equal = lambda text: capability == number(text)
    try:
        yield
    finally:
        module.check_compute_capability = before[0]
        module.is_cuda_compute_capability_equal = before[1]


def has_devices() -> bool:
    """Whether JAX has started its devices."""
    bridge = importlib.import_module("jax._src.xla_bridge")
    return bridge.backends_are_initialized()


def skip_platform(name: str) -> bool:
    """Make JAX find no devices of a platform; return whether JAX knew the platform.

    The platform stays registered: otherwise the imports of Pallas and Keras fail. The
    only public way is to name all other platforms.
    """
    bridge = importlib.import_module("jax._src.xla_bridge")
    # If a later version of JAX has no such table, JAX looks for all platforms.
    factories = getattr(bridge, "_backend_factories", {})
    if name not in factories:
        return False

    def refuse() -> None:
        raise RuntimeError(f"replicax found no {name} on this machine")

    factories[name] = dataclasses.replace(
        factories[name], factory=refuse, fail_quietly=True
    )
    return True


def replace_gloo(wrap: Any) -> None:
    """Wrap the function that makes JAX's Gloo collectives.

    JAX has no option for the address at which Gloo listens.
    """
    library: Any = importlib.import_module("jaxlib._jax")
    library.make_gloo_tcp_collectives = wrap(library.make_gloo_tcp_collectives)
