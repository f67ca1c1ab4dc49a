"""`StrategyExtended`: what tools for `tf.distribute` ask about a worker."""

import dataclasses

__all__ = ["StrategyExtended"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class StrategyExtended:
    """Facts about this worker, which KerasTuner and similar tools read.

    (TF: `tf.distribute.StrategyExtended`; its methods for strategies' authors have no
    counterpart.)

    Attributes:
        num_workers: Number of processes that train together.
        should_checkpoint: Whether this process writes checkpoints: the chief does.
        should_save_summary: Whether this process writes summaries: the chief does.
    """

    num_workers: int
    should_checkpoint: bool
    should_save_summary: bool

    def _in_multi_worker_mode(self) -> bool:
        """KerasTuner calls it, to let the chief alone report a trial."""
        return self.num_workers > 1
