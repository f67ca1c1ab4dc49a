"""What a training step would do on other hardware: `replicax plan`, `rx.plan`."""

from replicax.planning.planning import plan
from replicax.planning.report import Plan
from replicax.planning.types import CollectiveUse, Memory, Scale

__all__ = ["CollectiveUse", "Memory", "Plan", "Scale", "plan"]
