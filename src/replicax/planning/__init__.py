"""Plans: what a training step would do on other hardware: `replicax plan`, `rx.plan`.

Strategies take devices that are only described. Variables stay on this machine,
programs are traced and compiled for the described mesh, and handed to the plan in place
of being run; the plan reads the compiled program.
"""

from replicax.planning.analysis import plan
from replicax.planning.report import CollectiveUse, Memory, Plan, Scale

__all__ = ["CollectiveUse", "Memory", "Plan", "Scale", "plan"]
