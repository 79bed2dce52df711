"""Parquet files with a dataclass for each row: written atomically, read with errors that name the file."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from marsrl.trainer.runs.directory import opened_atomically

if TYPE_CHECKING:
    import pyarrow as pa  # imported where it is used: it starts threads
    import pyarrow.parquet as pq


@cache
def schema_of(row: type, *places: str) -> pa.Schema:
    """The columns of a file: `places` (int32), then the dataclass's fields by their types; any may be null."""
    import pyarrow as pa

    segment = pa.struct([("start", pa.int32()), ("end", pa.int32()), ("version", pa.int32())])
    types = {
        "int": pa.int32(),
        "float": pa.float64(),
        "bool": pa.bool_(),
        "str": pa.string(),
        "Finish": pa.string(),
        "Mapping[str, float | None]": pa.map_(pa.string(), pa.float64()),
        "tuple[Segment, ...]": pa.list_(segment),
        "IntArray": pa.list_(pa.int32()),
        "FloatArray": pa.list_(pa.float32()),
        "BoolArray": pa.list_(pa.bool_()),
    }
    own = [(field.name, types[str(field.type).removesuffix(" | None")]) for field in fields(row)]
    return pa.schema([*((name, pa.int32()) for name in places), *own])


def write_rows(path: Path, schema: pa.Schema, groups: Iterable[Sequence[dict[str, Any]]]) -> Path:
    """Write a file, a row group for each of `groups`, and return its path."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    with opened_atomically(path) as file, pq.ParquetWriter(file, schema, compression="zstd") as writer:
        for rows in groups:
            writer.write_batch(pa.RecordBatch.from_pylist(rows, schema))
    return path


@contextmanager
def opened(path: str | Path, what: str) -> Iterator[pq.ParquetFile]:
    """Open the file for reading in the body. what: describes its contents in errors.

    Raises ValueError: the file, which the message names, is missing or damaged.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path) as file:
            yield file
    except FileNotFoundError as error:
        raise ValueError(f"{path} is gone (a step that is played again has a new file)") from error
    except (pa.ArrowException, OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is no {what} ({error!r}); the file is damaged") from error
