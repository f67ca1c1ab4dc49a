"""Writes and reads the arrays of a checkpoint with Orbax.

Import it late: Orbax takes long to import.
"""

import asyncio
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

__all__ = ["restore", "write"]

_READ_AT_ONCE = 4
# TensorStore keeps written data in memory until a file is full, by default 2 GiB, and
# reads in pieces of the same size.
_FILE_BYTES = 64 << 20


class _Arrays(ocp.type_handlers.NumpyHandler):
    """Writes arrays without a copy, and reads a few at a time, to save memory.

    After a failed write, it waits for the other writes. Otherwise TensorStore would
    write into a folder that is already deleted.
    """

    def __init__(self) -> None:
        super().__init__()
        self._deepcopy_host_arrays = False  # Other Orbax releases copy.

    async def deserialize(
        self, infos: Sequence[Any], args: Sequence[Any] | None = None
    ) -> Sequence[np.ndarray]:
        arrays: list[np.ndarray] = []
        for i in range(0, len(infos), _READ_AT_ONCE):
            some = slice(i, i + _READ_AT_ONCE)
            arrays += await super().deserialize(infos[some], args and args[some])
        return arrays

    async def _background_serialize(self, *args: Any, **kwargs: Any) -> None:
        try:
            await super()._background_serialize(*args, **kwargs)
        except Exception:
            others = asyncio.all_tasks() - {asyncio.current_task()}
            await asyncio.gather(*others, return_exceptions=True)
            raise


def write(folder: Path, arrays: Mapping[str, np.ndarray]) -> None:
    """Write arrays by name; the folder must not exist.

    Raises:
        Exception: Of various types, if the write fails.
    """
    logging.getLogger("absl").addFilter(_is_not_thread_traceback)  # Adds it only once.
    with _checkpointer() as checkpointer:
        checkpointer.save(
            folder.absolute(),
            ocp.args.PyTreeSave(dict(arrays), ocdbt_target_data_file_size=_FILE_BYTES),
        )


def restore(folder: Path) -> dict[str, np.ndarray]:
    """Read all arrays.

    Raises:
        Exception: Of various types, if the read fails.
    """
    with _checkpointer() as checkpointer:
        restored = checkpointer.restore(folder.absolute())
    return {name: np.asarray(x) for name, x in restored.items()}


def _checkpointer() -> ocp.Checkpointer:
    """Make an Orbax checkpointer for this process alone."""
    process = jax.process_index()
    options = ocp.options.MultiprocessingOptions(
        primary_host=process,
        active_processes={process},
        barrier_sync_key_prefix=f"replicax-{process}",
    )
    handlers = ocp.type_handlers.create_type_handler_registry(
        (np.ndarray, _Arrays()),
        # No array is a jax.Array, but Orbax warns without a handler for them.
        (jax.Array, ocp.type_handlers.get_type_handler(jax.Array)),
    )
    handler = ocp.PyTreeCheckpointHandler(
        multiprocessing_options=options, type_handler_registry=handlers
    )
    return ocp.Checkpointer(handler, multiprocessing_options=options)


def _is_not_thread_traceback(record: logging.LogRecord) -> bool:
    # Orbax raises the error; besides, it logs a traceback for each of its threads.
    return "_SignalingThread.run() raised" not in str(record.msg)
