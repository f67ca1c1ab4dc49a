"""Arrays in a folder, as Orbax writes them.

To be imported when it is needed: Orbax takes long to import.
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
    """Writes arrays, and if one fails, fails when nothing writes any more.

    Orbax fails with the first and closes its event loop. TensorStore writes the others
    nevertheless, into a folder that is deleted meanwhile, and prints a traceback for
    each when there is no loop to tell.
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
        Exception: Of many kinds, if it cannot.
    """
    logging.getLogger("absl").addFilter(_is_not_of_a_thread)  # Once, however often.
    with _checkpointer() as checkpointer:
        checkpointer.save(folder.absolute(), ocp.args.PyTreeSave(dict(arrays)))


def restore(folder: Path) -> dict[str, np.ndarray]:
    """Read all arrays.

    Raises:
        Exception: Of many kinds, if it cannot.
    """
    with _checkpointer() as checkpointer:
        restored = checkpointer.restore(folder.absolute())
    return {name: np.asarray(x) for name, x in restored.items()}


def _checkpointer() -> ocp.Checkpointer:
    """An Orbax checkpointer of this process alone."""
    process = jax.process_index()
    options = ocp.options.MultiprocessingOptions(
        primary_host=process,
        active_processes={process},
        barrier_sync_key_prefix=f"replicax-{process}",
    )
    handlers = ocp.type_handlers.create_type_handler_registry(
        (np.ndarray, _AllWritten()),
        # There are none, but Orbax warns if it cannot write them.
        (jax.Array, ocp.type_handlers.get_type_handler(jax.Array)),
    )
    handler = ocp.PyTreeCheckpointHandler(
        multiprocessing_options=options, type_handler_registry=handlers
    )
    return ocp.Checkpointer(handler, multiprocessing_options=options)


def _is_not_of_a_thread(record: logging.LogRecord) -> bool:
    # Orbax logs a traceback of 30 lines for each of its threads, and raises the error.
    return "_SignalingThread.run() raised" not in str(record.msg)
