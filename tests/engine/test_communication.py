"""CommunicationOptions: its defaults and what it refuses."""

import dataclasses

import pytest

import replicax as rx


def test_defaults_leave_everything_to_xla() -> None:
    options = rx.CommunicationOptions()
    assert options.bytes_per_pack == 0
    assert options.timeout_seconds is None
    assert options.implementation is rx.CollectiveCommunication.AUTO
    assert options.compression is None
    assert options.gradient_hook is None


def test_frozen_keywords_only() -> None:
    options = rx.CommunicationOptions(bytes_per_pack=1)
    with pytest.raises(dataclasses.FrozenInstanceError, match="bytes_per_pack"):
        options.bytes_per_pack = 2  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(TypeError, match="positional"):
        rx.CommunicationOptions(1)  # pyright: ignore[reportCallIssue]
    assert options == rx.CommunicationOptions(bytes_per_pack=1)


@pytest.mark.parametrize("value", [-1, 1.5, "1", True, None])
def test_bytes_per_pack(value) -> None:
    with pytest.raises(ValueError, match=rf"bytes_per_pack must be .* got {value!r}"):
        rx.CommunicationOptions(bytes_per_pack=value)


def test_implementation() -> None:
    with pytest.raises(ValueError, match=r"implementation must be .* got 'NCCL'"):
        rx.CommunicationOptions(implementation="NCCL")


@pytest.mark.parametrize("value", ["float16", "bf16", True])
def test_compression(value) -> None:
    with pytest.raises(ValueError, match=f"compression must be .* got {value!r}"):
        rx.CommunicationOptions(compression=value)
