"""Hashes texts."""

import hashlib

__all__ = ["digest"]


def digest(text: str, num_bytes: int = 12) -> str:
    """Hash a text to `2 * num_bytes` hexadecimal digits, equal in all processes."""
    return hashlib.blake2b(text.encode(), digest_size=num_bytes).hexdigest()
