"""The GPU of this machine, and what it could compute."""

import os
import subprocess
import sys

__all__ = ["gpu_name", "peak_flops"]

# Dense bfloat16 products per second, as the makers' data sheets have them. A card has
# all words of its line; lines with more words come first.
_PEAKS: tuple[tuple[str, float], ...] = (
    ("H100 PCIe", 756e12),
    ("H100 NVL", 835e12),
    ("H100", 989e12),
    ("H200", 989e12),
    ("GH200", 989e12),
    ("B200", 2250e12),
    ("A100", 312e12),
    ("A30", 165e12),
    ("A10", 125e12),
    ("L40S", 362e12),
    ("L40", 181e12),
    ("L4", 121e12),
)
_PROGRAM = """
import jax
print("GPU " + jax.devices("cuda")[0].device_kind)
"""


def gpu_name(*, limit_seconds: float = 120.0) -> str | None:
    """The name of the first CUDA device that JAX finds here.

    A process of its own asks: this one takes no memory of the device.

    Args:
        limit_seconds: For the answer.

    Returns:
        A name such as "NVIDIA H100 80GB HBM3", or None if there is none.

    Raises:
        subprocess.TimeoutExpired: If the driver does not answer in time.
    """
    environment = {
        **os.environ,
        "JAX_PLATFORMS": "cuda,cpu",
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
    }
    ended = subprocess.run(
        [sys.executable, "-c", _PROGRAM],
        env=environment,
        capture_output=True,
        text=True,
        timeout=limit_seconds,
        check=False,
    )
    for line in ended.stdout.splitlines():
        if line.startswith("GPU "):
            return line[4:]
    return None  # Without a GPU, or without its JAX, the process fails.


def peak_flops(name: str | None) -> float | None:
    """What a card of this name can compute in bfloat16.

    Args:
        name: What `gpu_name` returned.

    Returns:
        Operations per second, or None if the card is not known.

    Example:
        >>> peak_flops("NVIDIA H100 80GB HBM3")
        989000000000000.0
        >>> peak_flops("NVIDIA GeForce GTX 1080") is None
        True
    """
    words = set((name or "").replace("-", " ").split())
    for line, peak in _PEAKS:
        if words.issuperset(line.split()):
            return peak
    return None
