"""Parquet files with a dataclass for each row: written atomically, read with errors that name the file."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast, get_args

import msgspec
import numpy as np
import numpy.typing as npt

from marsrl.rollout.text import without_surrogates
from marsrl.rollout.types import Segment
from marsrl.trainer.runs.directory import opened_atomically

if TYPE_CHECKING:
    import pyarrow as pa  # Imported in the functions that use it, because it starts threads.

Row = TypeVar("Row")
_ROW_GROUP = 32  # rows per row group, the unit that is read to show one row: some 10 MB of long completions


def _schema(kind: type) -> pa.Schema:
    """Return a schema with a nullable column for each field."""
    import pyarrow as pa

    types = {
        "int": pa.int32(),
        "float": pa.float64(),
        "bool": pa.bool_(),
        "str": pa.string(),
        "Finish": pa.string(),
        "Mapping[str, float | None]": pa.map_(pa.string(), pa.float64()),
        "tuple[Segment, ...]": pa.list_(pa.struct({field.name: pa.int32() for field in fields(Segment)})),
        "Prefix": pa.struct({"uid": pa.string(), "num_tokens": pa.int32()}),
        "Caller": pa.struct({"uid": pa.string(), "call": pa.int32()}),
        "IntArray": pa.list_(pa.int32()),
        "FloatArray": pa.list_(pa.float32()),
        "BoolArray": pa.list_(pa.bool_()),
    }
    return pa.schema({field.name: types[str(field.type).removesuffix(" | None")] for field in fields(kind)})


def write_rows(path: Path, kind: type[Row], rows: Iterable[Row]) -> Path:
    """Write a file and return its path. Lone surrogates in texts, which UTF-8 cannot encode, become "?"."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    schema, remaining = _schema(kind), map(_columns, rows)
    with opened_atomically(path) as file, pq.ParquetWriter(file, schema, compression="zstd") as writer:
        while group := list(itertools.islice(remaining, _ROW_GROUP)):
            writer.write_batch(pa.RecordBatch.from_pylist(group, schema))
    return path


def _columns(row: Any) -> dict[str, Any]:
    values = msgspec.to_builtins(row, builtin_types=(np.ndarray,))  # Unlike asdict, this copies no values in Python.
    return {name: without_surrogates(value) for name, value in values.items()}


def read_rows(path: Path, kind: type[Row], what: str, filters: Any = None) -> list[Row]:
    """Read the rows that pass the filters (as in pyarrow.parquet.read_table).

    Only columns that are fields of `kind` are read.

    what: describes the file in errors.

    Raises ValueError, with the file, if it is missing or damaged.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        # Without partitioning=None a folder called step=9 in the path would become a column.
        columns = [
            name for name in pq.read_schema(path).names if name in {field.name for field in fields(cast(Any, kind))}
        ]
        table = pq.read_table(path, columns=columns, filters=filters, partitioning=None)
        rows = table.to_pylist(maps_as_pydicts="strict")
        return [msgspec.convert(row, kind, dec_hook=_array) for row in rows]
    except FileNotFoundError as error:
        raise ValueError(f"{path} is gone (a step that is played again has a new file)") from error
    except (pa.ArrowException, OSError, ValueError, KeyError) as error:  # A duplicate key in a map raises KeyError.
        raise ValueError(f"{path} is not a {what} ({error!r}); the file is damaged") from error


def _array(kind: Any, values: Sequence[Any]) -> npt.NDArray[Any]:
    """Return the array of a list column; kind: IntArray, FloatArray or BoolArray."""
    return np.array(values, get_args(get_args(kind)[1])[0])
