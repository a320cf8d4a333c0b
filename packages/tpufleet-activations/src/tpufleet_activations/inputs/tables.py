"""Rows of Parquet files and of Hugging Face datasets on disk (Arrow streams), in blocks."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet

from tpufleet.errors import missing, unreadable
from tpufleet_activations.input_errors import no_split
from tpufleet_activations.inputs.samples import DEFAULT_SPLIT

# Raised for times that are too precise or too far for `datetime`, or of an unknown time zone.
UNREPRESENTABLE = (pyarrow.ArrowException, ValueError, OverflowError)


class ParquetRows:
    """Blocks are row groups. Only `columns` are read, or all; the others are None."""

    def __init__(self, paths: list[Path], columns: Set[str] | None = None):
        self.paths, self._columns = paths, columns
        self._blocks: list[tuple[Path, int]] = []
        self.sizes: list[int] = []
        self._cached: tuple[int, pyarrow.Table, list[str]] | None = None
        self._damage: dict[int, str] = {}
        for path in paths:
            with _naming(path):
                metadata = pyarrow.parquet.ParquetFile(path).metadata
            for group in range(metadata.num_row_groups):
                self._blocks.append((path, group))
                self.sizes.append(metadata.row_group(group).num_rows)

    def records(self, block: int, start: int, stop: int) -> Iterator[Mapping[str, Any]]:
        table, names = self._read(block)
        yield from _records(table.slice(start, stop - start), names)

    def _read(self, block: int) -> tuple[pyarrow.Table, list[str]]:
        """A whole row group, and the names of all columns. The last one is cached: the next unit is
        likely to need it too."""
        if self._cached is None or self._cached[0] != block:
            path, group = self._blocks[block]
            file = pyarrow.parquet.ParquetFile(path)
            names = file.schema_arrow.names
            columns = [name for name in names if self._columns is None or name in self._columns]
            try:
                table = file.read_row_group(group, columns=columns)
            except (pyarrow.ArrowException, OSError) as error:
                if isinstance(error, OSError) and error.errno is not None:
                    raise  # the disk failed, not the data: another try may succeed
                self._damage[block] = f"row group {group} of {path.name} is damaged: {error}"
                table = file.schema_arrow.empty_table().select(columns)
            self._cached = (block, table, names)
        return self._cached[1:]

    def damage(self, block: int) -> str:
        return self._damage[block]


class ArrowRows:
    """Blocks are record batches of memory-mapped Arrow streams; `columns` as above."""

    def __init__(self, paths: list[Path], columns: Set[str] | None = None):
        self.paths, self._columns = paths, columns
        self._batches: list[pyarrow.RecordBatch] = []
        for path in paths:
            with _naming(path), pyarrow.memory_map(str(path)) as mapped:
                self._batches += pyarrow.ipc.open_stream(mapped)
        self.sizes = [batch.num_rows for batch in self._batches]

    def records(self, block: int, start: int, stop: int) -> Iterator[Mapping[str, Any]]:
        batch = self._batches[block]
        names = batch.schema.names
        used = [
            number
            for number, name in enumerate(names)
            if self._columns is None or name in self._columns
        ]
        yield from _records(batch.select(used).slice(start, stop - start), names)

    def damage(self, block: int) -> str:
        raise AssertionError  # a record batch is read as a whole


def _records(
    rows: pyarrow.Table | pyarrow.RecordBatch, names: Sequence[str]
) -> Iterator[Mapping[str, Any]]:
    absent = dict.fromkeys(names)
    try:
        records = rows.to_pylist()
    except UNREPRESENTABLE:
        columns = ([_python_value(value) for value in column] for column in rows.columns)
        values = zip(*columns, strict=True)
        records = [dict(zip(rows.schema.names, row, strict=True)) for row in values]
    for record in records:
        yield {**absent, **record}


def _python_value(value: pyarrow.Scalar) -> Any:
    """With times as text if Python has no equal of them. Decided by the value alone, so that it
    does not depend on the rows that are read together."""
    try:
        return value.as_py()
    except UNREPRESENTABLE:
        if isinstance(value, pyarrow.StructScalar):
            return {name: _python_value(item) for name, item in value.items()}
        if isinstance(value, pyarrow.ListScalar):
            return [_python_value(item) for item in value.values]
    try:
        return value.cast(pyarrow.string()).as_py()
    except pyarrow.ArrowException:  # an unknown time zone
        return value.cast(pyarrow.timestamp(value.type.unit)).cast(pyarrow.string()).as_py()


def dataset_splits(folder: Path) -> list[str]:
    """The splits of a DatasetDict written by `save_to_disk`; none of a single Dataset."""
    path = folder / "dataset_dict.json"
    if not path.exists():
        return []
    with _naming(path):
        return list(json.loads(path.read_text())["splits"])


def check_split(folder: Path, split: str | None) -> None:
    """Raise if it is not clear which of the data a new plan is to use."""
    splits, state = dataset_splits(folder), folder / "state.json"
    if splits and split is None and DEFAULT_SPLIT not in splits and len(splits) > 1:
        raise no_split(folder, DEFAULT_SPLIT, splits)
    if not splits and split is not None and state.exists():
        with _naming(state):
            own = json.loads(state.read_text()).get("_split")
        if split != own:
            raise no_split(folder, split, [own] if own else [])


def dataset_files(folder: Path, split: str | None) -> list[Path]:
    """The Arrow files written by `save_to_disk`, in the order of the dataset."""
    if splits := dataset_splits(folder):
        wanted = split or (DEFAULT_SPLIT if DEFAULT_SPLIT in splits else splits[0])
        if wanted not in splits:
            raise no_split(folder, wanted, splits)
        folder = folder / wanted
    state = folder / "state.json"
    if not state.exists():
        raise missing(state)
    with _naming(state):
        files = json.loads(state.read_text())["_data_files"]
        return [folder / entry["filename"] for entry in files]


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Turn parse errors into BadInput with the file's name."""
    try:
        yield
    except (pyarrow.ArrowException, ValueError, KeyError, TypeError) as error:
        raise unreadable(path, error) from error
