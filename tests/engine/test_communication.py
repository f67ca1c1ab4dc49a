"""What `CommunicationOptions` refuses."""

from typing import Any

import pytest

import replicax as rx


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("bytes_per_pack", value) for value in (-1, 1.5, "1", True, None)),
        ("implementation", "NCCL"),
        *(("compression", value) for value in ("float16", "bf16", True)),
    ],
)
def test_invalid_options_are_refused(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=rf"{name} must be .* got {value!r}"):
        rx.CommunicationOptions(**{name: value})
