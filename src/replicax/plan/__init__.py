"""What a training step would do on other hardware: `replicax plan`, `rx.plan`."""

from replicax.plan.planning import plan
from replicax.plan.report import CollectiveUse, Memory, Plan, Scale

__all__ = ["CollectiveUse", "Memory", "Plan", "Scale", "plan"]
