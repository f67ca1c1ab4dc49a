"""How long workers and parameter servers wait for each other."""

import dataclasses

__all__ = ["Timeouts"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Timeouts:
    """Deadlines, in seconds.

    Attributes:
        start_up: For all servers to be there, and for the chief's initial values.
        reply: For a server to answer.
        step: For other workers, where all have to come to the same point.
        server: For a lost server to come back.
        grace: For a lost chief, or the last worker, to come back.
        heartbeat: For a sign of life of each worker.
        shutdown: For the end of the job to be told.
    """

    start_up: float = 300.0
    reply: float = 600.0
    step: float = 600.0
    server: float = 300.0
    grace: float = 120.0
    heartbeat: float = 30.0
    shutdown: float = 10.0

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if not isinstance(value, int | float) or value <= 0:
                raise ValueError(
                    f"ParameterServerStrategy: {field.name}_timeout_seconds must be a "
                    f"positive number; got {value!r}."
                )
