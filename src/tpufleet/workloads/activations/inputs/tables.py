"""Rows of Parquet files and of Hugging Face datasets on disk (Arrow streams), in blocks."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet

from tpufleet.errors import BadInput, NotFound

SALVAGE_ROWS = 16  # rows decoded at a time in a damaged row group


class ParquetRows:
    """Blocks are row groups."""

    def __init__(self, paths: list[Path]):
        self.paths = paths
        self._blocks: list[tuple[Path, int]] = []
        self.sizes: list[int] = []
        self._cached: tuple[int, pyarrow.Table] | None = None
        self._damage: dict[int, str] = {}
        for path in paths:
            with _naming(path):
                metadata = pyarrow.parquet.ParquetFile(path).metadata
            for group in range(metadata.num_row_groups):
                self._blocks.append((path, group))
                self.sizes.append(metadata.row_group(group).num_rows)

    def records(self, block: int, start: int, stop: int) -> Iterator[Mapping[str, Any]]:
        yield from self._read(block).slice(start, stop - start).to_pylist()

    def _read(self, block: int) -> pyarrow.Table:
        """A whole row group. The last one is cached: the next unit is likely to need it too."""
        if self._cached is None or self._cached[0] != block:
            path, group = self._blocks[block]
            file = pyarrow.parquet.ParquetFile(path)
            try:
                table = file.read_row_group(group)
            except (pyarrow.ArrowException, OSError) as error:
                if isinstance(error, OSError) and error.errno is not None:
                    raise  # the disk failed, not the data: another try may succeed
                self._damage[block] = f"row group {group} of {path.name} is damaged: {error}"
                table = _readable_part(file, group)
            self._cached = (block, table)
        return self._cached[1]

    def damage(self, block: int) -> str:
        return self._damage[block]


class ArrowRows:
    """Blocks are record batches of memory-mapped Arrow streams."""

    def __init__(self, paths: list[Path]):
        self.paths = paths
        self._batches: list[pyarrow.RecordBatch] = []
        for path in paths:
            with _naming(path), pyarrow.memory_map(str(path)) as mapped:
                self._batches += pyarrow.ipc.open_stream(mapped)
        self.sizes = [batch.num_rows for batch in self._batches]

    def records(self, block: int, start: int, stop: int) -> Iterator[Mapping[str, Any]]:
        yield from self._batches[block].slice(start, stop - start).to_pylist()

    def damage(self, block: int) -> str:
        raise AssertionError("a record batch is read as a whole")


def _readable_part(file: pyarrow.parquet.ParquetFile, group: int) -> pyarrow.Table:
    """The rows of a row group before the first page that cannot be decoded."""
    batches: list[pyarrow.RecordBatch] = []
    try:
        batches.extend(file.iter_batches(batch_size=SALVAGE_ROWS, row_groups=[group]))
    except (pyarrow.ArrowException, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise
    return pyarrow.Table.from_batches(batches, schema=file.schema_arrow)


def dataset_files(folder: Path, split: str | None) -> list[Path]:
    """The Arrow files written by `save_to_disk`, in the order of the dataset."""
    if (folder / "dataset_dict.json").exists():
        with _naming(folder / "dataset_dict.json"):
            splits = json.loads((folder / "dataset_dict.json").read_text())["splits"]
        wanted = split or ("train" if "train" in splits else splits[0])
        if wanted not in splits:
            raise NotFound(f"{folder} has no split {wanted!r}; splits: {', '.join(splits)}")
        folder = folder / wanted
    state = folder / "state.json"
    if not state.exists():
        raise NotFound(f"{folder} is not a saved dataset: it has no state.json")
    with _naming(state):
        files = json.loads(state.read_text())["_data_files"]
        return [folder / entry["filename"] for entry in files]


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Turn parse errors into BadInput with the file's name."""
    try:
        yield
    except (pyarrow.ArrowException, ValueError, KeyError, TypeError) as error:
        raise BadInput(f"{path} cannot be read: {error}") from error
