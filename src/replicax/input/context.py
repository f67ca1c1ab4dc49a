"""What an input function is told about the pipeline it makes."""

import dataclasses

__all__ = ["InputContext"]


@dataclasses.dataclass(frozen=True)
class InputContext:
    """Which part of the input a pipeline serves.

    `strategy.distribute_datasets_from_function(fn)` calls `fn` with one of these. (TF:
    `tf.distribute.InputContext`.)

    Attributes:
        num_input_pipelines: Number of pipelines, one per worker.
        input_pipeline_id: This pipeline's number, from 0.
        num_replicas_in_sync: Number of replicas of all workers.
    """

    num_input_pipelines: int = 1
    input_pipeline_id: int = 0
    num_replicas_in_sync: int = 1

    def __post_init__(self) -> None:
        for name in ("num_input_pipelines", "num_replicas_in_sync"):
            if getattr(self, name) < 1:
                raise ValueError(
                    f"InputContext: got {name}={getattr(self, name)!r}, expected 1 or "
                    "more."
                )
        if not 0 <= self.input_pipeline_id < self.num_input_pipelines:
            raise ValueError(
                f"InputContext: got input_pipeline_id={self.input_pipeline_id!r}, "
                f"expected 0 to {self.num_input_pipelines - 1}, one per pipeline."
            )

    def get_per_replica_batch_size(self, global_batch_size: int) -> int:
        """Number of examples that one replica gets of a global batch.

        Args:
            global_batch_size: `B`, the examples of all replicas in one step.

        Returns:
            `B / num_replicas_in_sync`. 8 examples on 2 replicas are 4 each.

        Raises:
            ValueError: If the replicas cannot share the batch equally.
        """
        num_replicas = self.num_replicas_in_sync
        if global_batch_size < 1 or global_batch_size % num_replicas:
            above = max(1, -(-global_batch_size // num_replicas)) * num_replicas
            raise ValueError(
                "InputContext.get_per_replica_batch_size: got "
                f"global_batch_size={global_batch_size!r}, expected a multiple of the "
                f"{num_replicas} replicas. Use {above}, for example."
            )
        return global_batch_size // num_replicas
