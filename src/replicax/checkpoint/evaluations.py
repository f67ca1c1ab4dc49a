"""Evaluations of checkpoints, a line of JSON for each."""

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

__all__ = ["METRICS_FILE", "append_evaluation"]

METRICS_FILE = "metrics.jsonl"


def append_evaluation(
    folder: Path, checkpoint: str, results: Mapping[str, Any]
) -> None:
    """Add a line to the evaluations in a folder, which is made.

    Args:
        folder: It gets `METRICS_FILE`.
        checkpoint: What was evaluated.
        results: Numbers or arrays by name.
    """
    line: dict[str, Any] = {"checkpoint": checkpoint, "time": time.time()}
    line |= {name: np.asarray(value).tolist() for name, value in results.items()}
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / METRICS_FILE).open("a") as stream:
        stream.write(json.dumps(line) + "\n")
