"""What a training step would do on other hardware: `replicax plan`, `rx.plan`."""

from replicax.plan.parts import CollectiveUse, Memory, Scale
from replicax.plan.planning import plan
from replicax.plan.report import Plan

__all__ = ["CollectiveUse", "Memory", "Plan", "Scale", "plan"]
