"""The machines of the seeds' texts: tasks of a cluster on this one."""

import json
import os

__all__ = ["take_machine"]


def take_machine() -> tuple[list[str], int]:
    """The workers' addresses, on free ports, and which of them this process is.

    Seeds set `TF_CONFIG` themselves: the one that the test set is gone afterwards.
    """
    config = json.loads(os.environ.pop("TF_CONFIG"))
    return config["cluster"]["worker"], config["task"]["index"]
