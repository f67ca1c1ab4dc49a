"""The description of a table: sizes, initializer and optimizer of its rows."""

import dataclasses
import json

from replicax._util.types import JSONObject
from replicax.ps.group_state import RefusedRequestError
from replicax.ps.row_values import check_initializer

__all__ = ["TableError", "TableSpec"]


class TableError(RefusedRequestError):
    """A table cannot be made so, or what was asked of it does not fit it."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TableSpec:
    """What a table is, the same on all servers.

    Attributes:
        name: Unique in a job.
        num_rows: Rows on all servers together.
        dim: Elements of a row.
        dtype: Must be `"float32"`.
        initializer: How rows start: what `keras.initializers.serialize` returns for
            RandomUniform, RandomNormal, TruncatedNormal, Zeros, Ones or Constant.
        seed: Seed of random first values.
        rule: How rows are updated: `{"kind": "optimizer", "config": ...}`; see
            `row_optimizer`. None: not known yet; `Table.set_rule` says it.

    Raises:
        TableError: For sizes below 1, another dtype, or an initializer that rows cannot
            start from.
    """

    name: str
    num_rows: int
    dim: int
    dtype: str = "float32"
    initializer: JSONObject
    seed: int
    rule: JSONObject | None = None

    def __post_init__(self) -> None:
        if self.num_rows < 1 or self.dim < 1:
            raise TableError(
                f"Table {self.name!r}: got num_rows={self.num_rows!r} and "
                f"dim={self.dim!r}, expected at least 1 of each."
            )
        if self.dtype != "float32":
            raise TableError(
                f"Table {self.name!r}: got dtype={self.dtype!r}, but rows are float32 "
                "on the servers. Give the layer dtype='float32' or a mixed policy."
            )
        try:
            check_initializer(self.initializer)
        except ValueError as error:
            raise TableError(f"Table {self.name!r}: {error}") from error

    def fits(self, other: "TableSpec") -> bool:
        """Whether the other one, already there, can serve for this one.

        First values and the optimizer are those of the first, as every process that
        starts without a seed draws its own.
        """
        return all(
            getattr(self, field) == getattr(other, field)
            for field in ("name", "num_rows", "dim", "dtype")
        )

    def to_json(self) -> JSONObject:
        """The spec as JSON values; `TableSpec(**values)` makes it again."""
        return json.loads(json.dumps(dataclasses.asdict(self)))
