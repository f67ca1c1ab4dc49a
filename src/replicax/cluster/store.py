"""Client of the key-value store in JAX's coordination service."""

import ctypes
from typing import Any

import jax

from replicax._private.jax import distributed_state

__all__ = ["Store", "StoreError"]


class StoreError(ConnectionError):
    """The coordination service did not answer, or refused the call."""


class Store:
    """The key-value store that all workers share; a call takes about 0.3 ms.

    Keys have folders, separated by slashes. Values are small texts.
    """

    def __init__(self, client: Any) -> None:
        self._client = client

    @staticmethod
    def abandon() -> None:
        """Drop JAX's client, whose shutdown would wait for the failed workers."""
        state = distributed_state()
        client, state.client = state.client, None
        # Leaked on purpose: the destructor would wait, too.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(client))

    def put(self, key: str, value: str) -> None:
        """Store `value` under `key`, replacing an older value."""
        self._call(self._client.key_value_set, key, value, allow_overwrite=True)

    def read(self, folder: str) -> dict[str, str]:
        """Read all values in `folder`, by their keys relative to it."""
        prefix = f"{folder}/"
        pairs = self._call(self._client.key_value_dir_get, prefix)
        return {key.partition(prefix)[2]: value for key, value in pairs}

    def delete(self, key: str) -> None:
        """Delete a key, and all keys in the folder of the same name."""
        self._call(self._client.key_value_delete, key)

    @staticmethod
    def _call(method: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return method(*args, **kwargs)
        except jax.errors.JaxRuntimeError as error:
            raise StoreError(str(error).partition("\n")[0]) from error
