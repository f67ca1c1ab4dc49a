"""Ray Train's workers. In actors and tasks of plain Ray, `membership` raises."""

import contextlib
import sys
from typing import Any

from replicax.cluster.environments.base import (
    ClusterEnvironment,
    IncompleteError,
    Membership,
    bracketed,
)
from replicax.cluster.listening import free_port

__all__ = ["RayTrain"]


class RayTrain(ClusterEnvironment):
    """A worker of Ray Train's `JaxTrainer` or another of its trainers."""

    name = "ray"

    def detect(self) -> bool:
        """Whether this process runs a worker of Ray Train, an actor or a task."""
        ray: Any = sys.modules.get("ray")
        if ray is None or not ray.is_initialized():
            return False
        context = ray.get_runtime_context()
        return bool(context.get_actor_id() or context.get_task_id())

    def membership(self) -> Membership:
        """Ask Ray Train for the index and the number of workers."""
        index, count = 0, None
        with contextlib.suppress(ImportError, RuntimeError):
            import ray.train  # pyright: ignore[reportMissingImports]

            context = ray.train.get_context()
            index, count = context.get_world_rank(), context.get_world_size()
        if not count:
            raise IncompleteError(
                "ray: this process is an actor or a task of Ray, not a worker of Ray "
                "Train. Use Ray Train's JaxTrainer, or set TF_CONFIG in each actor."
            )
        return Membership(index=index, count=count)

    def coordinator(self, place: Membership) -> str:
        """Broadcast the address of worker 0.

        Ray warns each minute about missing workers, and raises an error after
        `RAY_TRAIN_COLLECTIVE_TIMEOUT_S` seconds if this variable is set.
        """
        import ray.train.collective  # pyright: ignore[reportMissingImports]
        import ray.util  # pyright: ignore[reportMissingImports]

        host = bracketed(ray.util.get_node_ip_address())
        address = f"{host}:{free_port() if place.index == 0 else 0}"
        return ray.train.collective.broadcast_from_rank_zero(address)

    def described(self) -> str:
        """The source of the values."""
        return "ray.train.get_context()"
