"""How long the workers of a cluster wait for each other."""

import dataclasses

__all__ = ["Deadlines"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Deadlines:
    """Deadlines, in seconds.

    Attributes:
        start_up: For all workers to be there, and to agree on a new program.
        step: For a worker to get as far as the others, and for a step to finish.
        heartbeat: For a sign of life of each process; they give one a second.
        shutdown: For all workers to come to the end of their script.
    """

    start_up: float = 300.0
    step: float = 600.0
    heartbeat: float = 30.0
    shutdown: float = 300.0

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if not isinstance(value, int | float) or value <= 0:
                raise ValueError(
                    f"{field.name}_timeout_seconds must be a positive number; got "
                    f"{value!r}."
                )
