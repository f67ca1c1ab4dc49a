"""What limits a step first, and what to do about it."""

from replicax.planning.roofline import StepTime
from replicax.planning.types import Memory

__all__ = ["first_limit"]

_ADVICE = {
    "compute": (
        "The devices multiply as fast as they can: this is where a step should be. For "
        "shorter steps, take more devices or a smaller model."
    ),
    "memory bandwidth": (
        "The devices wait for their memory more than they multiply. Halve the bytes "
        "with keras.mixed_precision.set_global_policy('mixed_bfloat16'); take wider "
        "layers, or a larger batch per device where weights and optimizer slots are "
        "most of the bytes."
    ),
    "interconnect": (
        "The devices wait for each other. Take a larger batch per device, accumulate "
        "gradients over several batches (the optimizer's gradient_accumulation_steps), "
        "or take fewer devices."
    ),
    "network": (
        "The slices wait for each other over their hosts' network. Take one larger "
        "slice instead of several, or a larger batch per device."
    ),
    "memory capacity": (
        "The step does not fit into a device's memory. Take a smaller batch per "
        "device, keras.mixed_precision.set_global_policy('mixed_bfloat16'), "
        "recomputation (keras.RematScope), or chips with more memory."
    ),
}


def first_limit(
    time: StepTime | None, memory: Memory | None, *, fits: bool, num_devices: int
) -> tuple[str, str]:
    """The first limit of a step, and advice.

    Args:
        time: Of the step; None: not known, since it does not fit.
        memory: Of the step.
        fits: Whether it fits into a device.
        num_devices: Number of devices.

    Example:
        >>> from replicax.planning.bottleneck import first_limit
        >>> from replicax.planning.roofline import step_time
        >>> time = step_time(compute=3, memory=2, waited=1, hidden=0, network=0)
        >>> first_limit(time, None, fits=True, num_devices=2)[0]
        'compute'
    """
    if not fits or time is None:
        return "memory capacity", _ADVICE["memory capacity"]
    parts = {
        "compute": time.compute,
        "memory bandwidth": time.memory,
        "interconnect": time.exposed - time.network,
        "network": time.network,
    }
    limit = max(parts, key=lambda name: parts[name])
    advice = _ADVICE[limit]
    if limit in ("compute", "memory bandwidth") and num_devices > 1:
        share = time.exposed / time.total if time.total else 0.0
        advice += f" Communication is {share:.1%} of a step here."
    return limit, advice
