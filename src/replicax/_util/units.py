"""Formats numbers with units for people."""

__all__ = ["binary_bytes", "decimal", "seconds"]


def decimal(value: float) -> str:
    """Format a number with a decimal prefix, to be followed by a unit.

    Example:
        >>> decimal(1.97e14) + "FLOP/s"
        '197 TFLOP/s'
    """
    for prefix in ("", "k", "M", "G", "T", "P"):
        if abs(value) < 999.5 or prefix == "P":
            break
        value /= 1000
    return f"{value:.3g} {prefix}"


def binary_bytes(value: float) -> str:
    """Format bytes with a binary unit.

    Example:
        >>> binary_bytes(16 * 2**30)
        '16.0 GiB'
    """
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(value) < 1023.5 or unit == "GiB":
            break
        value /= 1024
    return f"{value:.0f} B" if unit == "B" else f"{value:.1f} {unit}"


def seconds(value: float) -> str:
    """Format a duration.

    Example:
        >>> seconds(0.00123), seconds(2.5)
        ('1.23 ms', '2.5 s')
    """
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if value >= 0.9995 * size or unit == "us":
            break
    return f"{value / size:.3g} {unit}"
