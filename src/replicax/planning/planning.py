"""`rx.plan`: a step's plan from within Python."""

from collections.abc import Mapping, Sequence
from typing import Any

from replicax.planning.analysis import analyse
from replicax.planning.capture import capture_call, capture_fit, is_model
from replicax.planning.report import Plan
from replicax.planning.topology import find_topology

__all__ = ["plan"]


def plan(
    strategy: Any,
    step: Any,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    topology: str = "v5e:16x16",
    num_slices: int = 1,
) -> Plan:
    """Compile a training step for other hardware, without running it.

    The strategy's program is made for the devices of `topology`, one replica each, as
    if the strategy had been made there. Nothing is run, and no variable changes.

    Args:
        strategy: Whose variables the step trains; any that holds them on its replicas.
        step: A replica function, as `strategy.run` takes it, in which an optimizer
            makes an update; or a compiled Keras model.
        args: Of a replica function: its arguments, in which `jax.ShapeDtypeStruct`s may
            stand for arrays. A `PerReplica` is `[R, ...]` with an entry for each chip
            of the topology; one of `strategy` itself stands for entries like its own.
            Of a model: one global batch `(x, y)` or `(x, y, sample_weight)`, with
            leaves `[B, ...]` for all chips together.
        kwargs: Keyword arguments of a replica function.
        topology: A slice of TPU chips, such as `"v5e:2x4"`, which need not be here, or
            devices of this machine, `"cpu:8"` or `"gpu:4"`.
        num_slices: Number of such slices, joined by their hosts' network.

    Returns:
        FLOPs, bytes, memory, collectives, predicted times, and what limits the step.

    Raises:
        DeviceError: For an unknown topology; the known ones are listed.
        ImportError: Without libtpu, for TPUs.
        ValueError: If the step does not train.

    Example:
        >>> import jax, keras, replicax as rx
        >>> strategy = rx.MirroredStrategy()
        >>> with strategy.scope():
        ...     model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
        ...     model.compile(optimizer="sgd", loss="mse")
        >>> x = jax.ShapeDtypeStruct((512, 4), "float32")
        >>> y = jax.ShapeDtypeStruct((512, 2), "float32")
        >>> plan = rx.plan(strategy, model, (x, y), topology="cpu:1")
        >>> plan.num_devices, plan.fits
        (1, True)
    """
    hardware = find_topology(topology, num_slices)
    if is_model(step):
        if kwargs:
            raise TypeError(
                f"plan: a model takes its batch as args=(x, y); got {kwargs=!r}."
            )
        capture = capture_fit(strategy, step, args, hardware)
    else:
        capture = capture_call(strategy, step, args, kwargs or {}, hardware)
    return analyse(capture, hardware)
