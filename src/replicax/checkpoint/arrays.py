"""Writes and reads the arrays of a checkpoint with Orbax.

Import it late: Orbax takes long to import.
"""

import asyncio
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

__all__ = ["restore", "write"]


class _AllWritten(ocp.type_handlers.NumpyHandler):
    """A handler that, after a failed write, waits for the other writes to end.

    Orbax raises at the first failure and closes its event loop. TensorStore still
    writes the other arrays, into a folder that is deleted meanwhile, and prints a
    traceback for each because the loop is closed.
    """

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
    logging.getLogger("absl").addFilter(_is_not_of_a_thread)  # Once, however often.
    with _checkpointer() as checkpointer:
        checkpointer.save(folder.absolute(), ocp.args.PyTreeSave(dict(arrays)))


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
        (np.ndarray, _AllWritten()),
        # No array is a jax.Array, but Orbax warns without a handler for them.
        (jax.Array, ocp.type_handlers.get_type_handler(jax.Array)),
    )
    handler = ocp.PyTreeCheckpointHandler(
        multiprocessing_options=options, type_handler_registry=handlers
    )
    return ocp.Checkpointer(handler, multiprocessing_options=options)


def _is_not_of_a_thread(record: logging.LogRecord) -> bool:
    # Orbax logs a traceback of 30 lines for each of its threads, and raises the error.
    return "_SignalingThread.run() raised" not in str(record.msg)
