"""Grain datasets of the rows of CSV and Parquet files, whose columns are in memory."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import DTypeLike

from replicax.errors import InputError
from replicax.input.files import Paths, file_list, require_package
from replicax.input.grain_datasets import numpy_dataset

if TYPE_CHECKING:
    import grain
    import pyarrow as pa

__all__ = ["csv", "parquet"]


def csv(
    paths: Paths,
    label: str | None = None,
    *,
    columns: Sequence[str] | None = None,
    stacked: bool = False,
    dtypes: Mapping[str, DTypeLike] | None = None,
    missing: Mapping[str, Any] | None = None,
    names: Sequence[str] | None = None,
    delimiter: str = ",",
) -> "grain.MapDataset[Any]":
    r"""Make a Grain dataset of the rows of CSV files, which are read into memory.

    Reads with PyArrow, on all cores.

    Args:
        paths: Paths of UTF-8 files, or patterns such as `"part-*.csv"`.
        label: The column that becomes the second part of pairs `(row, label)`.
        columns: Columns to read, `label` among them. None: all columns.
        stacked: Whether a row is one array, `float32[F]`, of its `F` columns of numbers
            without `label`, in place of a dict. That is several times as fast.
        dtypes: Columns' dtypes; `str` is for text. Others are inferred.
        missing: Values for empty fields of columns of numbers.
        names: The columns' names, for files whose first line is not a header.
        delimiter: The character between fields.

    Returns:
        A `grain.MapDataset` of dicts from columns to values, or of pairs.

    Raises:
        FileNotFoundError: If a path or pattern matches no file.
        InputError: If a row has too few or too many fields, if a field does not have
            its column's dtype, or if it is empty and `missing` has no value for it.
        ImportError: If PyArrow is not installed.

    Example:
        >>> import pathlib, tempfile
        >>> file = pathlib.Path(tempfile.mkdtemp(), "points.csv")
        >>> _ = file.write_text("x,color,y\n1.5,red,0\n,blue,1\n")
        >>> for row, y in csv(file, label="y", missing={"x": 0.0}):
        ...     print(float(row["x"]), row["color"], int(y))
        1.5 red 0
        0.0 blue 1
    """
    require_package("pyarrow", "csv")
    import pyarrow as pa

    types = {
        name: pa.string() if np.dtype(dtype).kind == "U" else pa.from_numpy_dtype(dtype)
        for name, dtype in (dtypes or {}).items()
    }
    tables = [
        _csv_table(file, columns, types, names, delimiter)
        for file in file_list(paths, "csv")
    ]
    return _rows("csv", tables, label, stacked, missing or {})


def parquet(
    paths: Paths,
    label: str | None = None,
    *,
    columns: Sequence[str] | None = None,
    stacked: bool = False,
    missing: Mapping[str, Any] | None = None,
) -> "grain.MapDataset[Any]":
    """Make a Grain dataset of the rows of Parquet files, which are read into memory.

    For files that do not fit into memory see `grain.experimental.ParquetIterDataset`.

    Args:
        paths: Paths of files, or patterns such as `"train/*.parquet"`.
        label: See `csv`.
        columns: See `csv`.
        stacked: See `csv`.
        missing: Values for missing values of columns of numbers.

    Returns:
        A `grain.MapDataset` of dicts from columns to values, or of pairs. Lists of one
        length become arrays.

    Raises:
        FileNotFoundError: If a path or pattern matches no file.
        InputError: If a file is damaged, a column does not exist, or a value is missing
            and `missing` has none for it.
        ImportError: If PyArrow is not installed.

    Example:
        >>> import pathlib, tempfile, pyarrow, pyarrow.parquet
        >>> file = pathlib.Path(tempfile.mkdtemp(), "points.parquet")
        >>> table = pyarrow.table({"x": [[1.0, 2.0], [3.0, 4.0]], "y": [0, 1]})
        >>> pyarrow.parquet.write_table(table, file)
        >>> for row, y in parquet(file, label="y"):
        ...     print(row["x"].tolist(), int(y))
        [1.0, 2.0] 0
        [3.0, 4.0] 1
    """
    require_package("pyarrow", "parquet")
    import pyarrow as pa
    from pyarrow import parquet as reader

    tables = []
    for file in file_list(paths, "parquet"):
        try:
            opened = reader.ParquetFile(file)
            _check_columns("parquet", file, columns, opened.schema_arrow.names)
            tables.append(opened.read(columns))
        except (pa.ArrowInvalid, OSError) as error:
            raise InputError(
                f"parquet: cannot read {file}: {error}. The file is damaged, or is not "
                "a Parquet file; copy it again."
            ) from error
    return _rows("parquet", tables, label, stacked, missing or {})


def _csv_table(
    file: str,
    columns: Sequence[str] | None,
    types: "Mapping[str, pa.DataType]",
    names: Sequence[str] | None,
    delimiter: str,
    use_threads: bool = True,
) -> "pa.Table":
    import pyarrow as pa
    from pyarrow import csv as reader

    try:
        table = reader.read_csv(
            file,
            reader.ReadOptions(use_threads=use_threads, column_names=names),
            reader.ParseOptions(delimiter=delimiter, newlines_in_values=True),
            reader.ConvertOptions(column_types=types),
        )
    except pa.ArrowInvalid as error:
        if use_threads:  # Only errors of a single thread have the row's number.
            return _csv_table(file, columns, types, names, delimiter, False)
        raise InputError(
            f"csv: {file}: {error}. Correct the file, or pass another delimiter, or "
            "the column's type in dtypes."
        ) from error
    _check_columns("csv", file, [*(columns or ()), *types], table.column_names)
    return table.select(columns) if columns else table


def _check_columns(
    caller: str, file: str, columns: Sequence[str] | None, existing: Sequence[str]
) -> None:
    for name in columns or ():
        if name not in existing:
            raise InputError(
                f"{caller}: {file} has no column {name!r}; its columns are "
                f"{list(existing)}."
            )


def _rows(
    caller: str,
    tables: "Sequence[pa.Table]",
    label: str | None,
    stacked: bool,
    missing: Mapping[str, Any],
) -> "grain.MapDataset[Any]":
    import pyarrow as pa

    table = pa.concat_tables(tables, promote_options="permissive")
    wanted = [*missing, *([] if label is None else [label])]
    _check_columns(caller, "the data", wanted, table.column_names)
    arrays: dict[str, np.ndarray] = {}
    for name in table.column_names:
        column = table.column(name)
        if name in missing:
            column = column.fill_null(missing[name])
        if column.null_count:
            row = column.is_null().index(True).as_py()
            raise InputError(
                f"{caller}: column {name!r} has {column.null_count} missing values, "
                f"the first in row {row + 1} of the data. Pass a value for them: "
                f"missing={{{name!r}: ...}}."
            )
        arrays[name] = _as_array(column)
    labels = [] if label is None else [arrays.pop(label)]
    rows = _stack(caller, arrays) if stacked else arrays
    return numpy_dataset((rows, *labels) if labels else rows)


def _stack(caller: str, arrays: Mapping[str, np.ndarray]) -> np.ndarray:
    """Stack columns `[N]` to `float32[N, F]`."""
    for name, array in arrays.items():
        if array.ndim > 1 or array.dtype.kind not in "biuf":
            raise InputError(
                f"{caller}: column {name!r} of {array.dtype}{list(array.shape[1:])} "
                "cannot be stacked; expected numbers. Leave it out by columns=[...], "
                "or pass stacked=False."
            )
    return np.stack(list(arrays.values()), 1, dtype="float32", casting="same_kind")


def _as_array(column: "pa.ChunkedArray") -> np.ndarray:
    """Convert a column to `[N]`, or to `[N, k]` if its rows are lists of one length."""
    import pyarrow as pa
    from pyarrow.compute import call_function

    if pa.types.is_list(column.type) or pa.types.is_fixed_size_list(column.type):
        lengths = call_function("list_value_length", [column]).unique().to_pylist()
        if len(lengths) == 1:
            values = _as_array(call_function("list_flatten", [column]))
            return values.reshape(len(column), *lengths, *values.shape[1:])
    return column.to_numpy()
