"""Ray Train's workers. In actors and tasks of plain Ray, `membership` raises."""

import contextlib
import sys
import threading
from typing import Any, NoReturn

from replicax._util.waiting import wait_for
from replicax.cluster.environments.base import (
    ClusterEnvironment,
    IncompleteError,
    Membership,
    bracketed,
)
from replicax.cluster.listening import free_port
from replicax.cluster.timeouts import Timeouts
from replicax.errors import ClusterError

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

    def coordinator(self, place: Membership, timeouts: Timeouts) -> str:
        """Broadcast the address of worker 0."""
        return _broadcast(place.index or 0, place.count, timeouts.startup)

    def described(self) -> str:
        """The source of the values."""
        return "ray.train.get_context()"


def _broadcast(index: int, count: int, seconds: float) -> str:
    import ray.train.collective  # pyright: ignore[reportMissingImports]
    import ray.util  # pyright: ignore[reportMissingImports]

    host = bracketed(ray.util.get_node_ip_address())
    own = f"{host}:{free_port() if index == 0 else 0}"
    outcome: list[str | BaseException] = []

    def broadcast() -> None:
        try:
            outcome.append(ray.train.collective.broadcast_from_rank_zero(own))
        except BaseException as error:  # noqa: BLE001 - the waiting thread raises it
            outcome.append(error)

    # In a thread, because Ray's call has no deadline.
    thread = threading.Thread(target=broadcast, name="replicax-ray", daemon=True)
    thread.start()

    def late() -> NoReturn:
        raise ClusterError(
            f"worker:{index}: not all of the {count} workers of Ray Train created a "
            f"strategy within {seconds:.0f} s. Create it in every worker, or give it "
            "more time (rx.Timeouts(startup=...))."
        )

    (result,) = wait_for(
        lambda: outcome or None,
        seconds,
        late=late,
        sleep=thread.join,
        pauses=(1.0, 1.0),
    )
    if isinstance(result, BaseException):
        raise result
    return result
