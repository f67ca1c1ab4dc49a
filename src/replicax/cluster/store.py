"""The key-value store of JAX's coordination service, which all workers share."""

import ctypes
from typing import Any

import jax

from replicax._private.jax import distributed_state

__all__ = ["Store", "StoreError"]


class StoreError(ConnectionError):
    """The coordination service did not answer, or refused."""


class Store:
    """Small texts under names with slashes. A call takes about 0.3 ms."""

    def __init__(self, client: Any) -> None:
        self._client = client

    @staticmethod
    def abandon() -> None:
        """Let this process end without JAX's wait for the others, who have failed."""
        state = distributed_state()
        client, state.client = state.client, None
        # Its destructor would wait, too.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(client))

    def put(self, key: str, value: str) -> None:
        """Store `value` under `key`, in place of what was there."""
        self._call(self._client.key_value_set, key, value, allow_overwrite=True)

    def read(self, folder: str) -> dict[str, str]:
        """Everything stored in `folder`, by the rest of its key."""
        prefix = f"{folder}/"
        found = self._call(self._client.key_value_dir_get, prefix)
        return {key.partition(prefix)[2]: value for key, value in found}

    def delete(self, key: str) -> None:
        """Remove a key, and all that is stored under it as a folder."""
        self._call(self._client.key_value_delete, key)

    @staticmethod
    def _call(method: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return method(*args, **kwargs)
        except jax.errors.JaxRuntimeError as error:
            raise StoreError(str(error).partition("\n")[0]) from error
