"""Where samples come from: JSONL, Parquet, Hugging Face datasets on disk, text, and ARC tasks."""

from __future__ import annotations

import glob
import hashlib
import json
from bisect import bisect_right
from collections.abc import Iterator, Mapping
from itertools import accumulate
from pathlib import Path
from typing import Any

from tpufleet.errors import BadInput, NotFound
from tpufleet.workloads.activations.arc import former
from tpufleet.workloads.activations.io.remote_files import fetch, list_names
from tpufleet.workloads.activations.samples import Sample, SampleSource

# Lines between two remembered places in a file: a seek and at most this many lines to read.
STRIDE = 256
KINDS = ("jsonl", "parquet", "hf", "text", "arc")
ENDINGS = (".jsonl", ".json", ".parquet", ".txt")


def open_source(data: Mapping[str, Any], seed: int = 42) -> SampleSource:
    """The source that a plan's `data` describes: kind, path, and the kind's options."""
    kind, path = data.get("kind"), data.get("path")
    if kind not in KINDS:
        raise BadInput(f"data kind {kind!r} is not one of {', '.join(KINDS)}")
    if not path:
        raise BadInput("data needs a path")
    limit = data.get("max_samples")
    if kind == "arc":
        from tpufleet.workloads.activations.arc.source import ArcSource, find_task_files

        return ArcSource(IndexedLines(find_task_files(data)), data, seed)
    if kind == "text":
        return TextSource(
            find_files(path, ("*.txt",)), whole=data.get("split") == "file", limit=limit
        )
    fields = {name: data.get(name) for name in ("text_field", "id_field")}
    if kind == "jsonl":
        return JsonLinesSource(IndexedLines(find_files(path, ("*.jsonl",))), limit=limit, **fields)
    from tpufleet.workloads.activations import tables

    if kind == "parquet":
        rows = tables.ParquetRows(find_files(path, ("*.parquet",)))
    else:
        rows = tables.ArrowRows(
            tables.dataset_files(fetch(path, recursive=True), data.get("split"))
        )
    return TableSource(rows, limit=limit, **fields)


def detect_kind(path: str) -> str:
    name = path.rstrip("/").lower()
    inside = set() if name.endswith(ENDINGS) else list_names(path)
    if {"state.json", "dataset_dict.json"} & inside:
        return "hf"
    if former.MASTER_METADATA in inside:
        return "arc"
    for ending, kind in ((".jsonl", "jsonl"), (".json", "jsonl"), (".parquet", "parquet")):
        if name.endswith(ending) or any(entry.endswith(ending) for entry in inside):
            return "arc" if kind == "jsonl" and _holds_tasks(path) else kind
    if name.endswith(".txt") or any(entry.endswith(".txt") for entry in inside):
        return "text"
    raise BadInput(f"cannot tell what {path} holds; say --kind {'|'.join(KINDS)}")


def _holds_tasks(path: str) -> bool:
    """Whether this is a manifest of streams, or the first line an ARC task."""
    first = find_files(path, ("*.jsonl", "*.json"))[0]
    if former.is_manifest(first):
        return True
    with open(first, "rb") as file:
        line = next((line for line in file if line.strip()), b"")
    try:
        record = json.loads(line)
    except ValueError:
        return False
    return isinstance(record, dict) and {"train", "test"} <= set(record)


def find_files(path: str, patterns: tuple[str, ...]) -> list[Path]:
    """The files of a path, folder, glob or object-store address, in the order of their names."""
    place = fetch(path)
    if place.is_file():
        return [place]
    if place.is_dir():
        found = sorted(file for pattern in patterns for file in place.glob(pattern))
    else:
        found = sorted(Path(name) for name in glob.glob(str(place)))
    if not found:
        raise NotFound(f"no data at {path}")
    return found


def content_digest(paths: list[Path], *extra: Any) -> str:
    digest = hashlib.sha256(json.dumps(extra, sort_keys=True).encode())
    for path in paths:
        with open(path, "rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()


def read_records(path: str) -> Iterator[Mapping[str, Any]]:
    """The rows of a dataset as they are, one after the other."""
    from tpufleet.workloads.activations import tables

    kind = detect_kind(path)
    if kind == "jsonl":
        yield from map(json.loads, IndexedLines(find_files(path, ("*.jsonl",))))
        return
    if kind not in ("parquet", "hf"):
        raise BadInput(f"{path} holds {kind}; rows come from jsonl, parquet or saved datasets")
    rows: Any = (
        tables.ParquetRows(find_files(path, ("*.parquet",)))
        if kind == "parquet"
        else tables.ArrowRows(tables.dataset_files(fetch(path, recursive=True), None))
    )
    for block, count in enumerate(rows.sizes):
        yield from rows.records(block, 0, count)


class IndexedLines:
    """Numbered non-empty lines of some files, found by a seek."""

    def __init__(self, paths: list[Path]):
        self.paths = paths
        self._places: list[tuple[Path, int]] = []  # of every STRIDE-th line
        self._count = 0
        self.ends: list[int] = []  # for each file, how many lines there are up to its end
        for path in paths:
            self._scan(path)
            self.ends.append(self._count)

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[bytes]:
        return self.read(range(self._count))

    def read(self, span: range) -> Iterator[bytes]:
        if not len(span):
            return
        number = span.start // STRIDE * STRIDE
        first, offset = self._places[span.start // STRIDE]
        for path in self.paths[self.paths.index(first) :]:
            with open(path, "rb") as file:
                file.seek(offset)
                offset = 0
                for line in file:
                    if not line.strip():
                        continue
                    if number >= span.stop:
                        return
                    if number >= span.start:
                        yield line
                    number += 1

    def digest(self, *extra: Any) -> str:
        return content_digest(self.paths, *extra)

    def _scan(self, path: Path) -> None:
        offset = 0
        with open(path, "rb") as file:
            for line in file:
                if line.strip():
                    if self._count % STRIDE == 0:
                        self._places.append((path, offset))
                    self._count += 1
                offset += len(line)


class JsonLinesSource:
    """One JSON object a line: `text`, `messages` or `tokens`, and perhaps an id."""

    def __init__(
        self,
        lines: IndexedLines,
        *,
        text_field: str | None = None,
        id_field: str | None = None,
        limit: int | None = None,
    ):
        self._lines, self._fields, self._limit = lines, (text_field, id_field), limit

    def count(self) -> int:
        return apply_limit(len(self._lines), self._limit)

    def read(self, span: range) -> list[Sample]:
        return [
            self._sample(index, line)
            for index, line in zip(span, self._lines.read(span), strict=True)
        ]

    def digest(self) -> str:
        return self._lines.digest(*self._fields, self._limit)

    def _sample(self, index: int, line: bytes) -> Sample:
        try:
            record = json.loads(line)
        except ValueError as error:
            return Sample(index=index, id=str(index), skip_reason=f"not JSON: {error}")
        if not isinstance(record, dict):
            return Sample(index=index, id=str(index), skip_reason="not a JSON object")
        return sample_from_record(record, index, *self._fields)


class TextSource:
    """Plain text: a sample is a line, or a whole file."""

    def __init__(self, paths: list[Path], *, whole: bool, limit: int | None = None):
        self._paths, self._limit = paths, limit
        self._lines = None if whole else IndexedLines(paths)

    def count(self) -> int:
        every = len(self._paths) if self._lines is None else len(self._lines)
        return apply_limit(every, self._limit)

    def read(self, span: range) -> list[Sample]:
        if self._lines is None:
            return [_text(n, self._paths[n].name, self._paths[n].read_bytes()) for n in span]
        return [
            _text(index, str(index), line.rstrip(b"\r\n"))
            for index, line in zip(span, self._lines.read(span), strict=True)
        ]

    def digest(self) -> str:
        return content_digest(self._paths, self._lines is None, self._limit)


class TableSource:
    """Rows of Parquet or Arrow files."""

    def __init__(
        self,
        rows: Any,
        *,
        text_field: str | None = None,
        id_field: str | None = None,
        limit: int | None = None,
    ):
        self._rows, self._fields, self._limit = rows, (text_field, id_field), limit
        ends = list(accumulate(rows.sizes, initial=0))
        self._starts, self._count = ends[:-1], ends[-1]

    def count(self) -> int:
        return apply_limit(self._count, self._limit)

    def read(self, span: range) -> list[Sample]:
        found: list[Sample] = []
        block = bisect_right(self._starts, span.start) - 1 if len(span) else 0
        index = span.start
        while index < span.stop:
            start = self._starts[block]
            stop = min(span.stop, start + self._rows.sizes[block])
            for record in self._rows.records(block, index - start, stop - start):
                found.append(sample_from_record(record, index, *self._fields))
                index += 1
            block += 1
        return found

    def digest(self) -> str:
        return content_digest(self._rows.paths, *self._fields, self._limit)


def _text(index: int, name: str, data: bytes) -> Sample:
    try:
        return Sample(index=index, id=name, text=data.decode("utf-8"))
    except UnicodeDecodeError as error:
        return Sample(index=index, id=name, skip_reason=f"not UTF-8: {error.reason}")


def sample_from_record(
    record: Mapping[str, Any], index: int, text_field: str | None, id_field: str | None
) -> Sample:
    name = next((key for key in (id_field, "id", "task_id") if key and key in record), None)
    label = str(record[name]) if name else str(index)
    if text_field is None and isinstance(record.get("messages"), list):
        return Sample(index=index, id=label, messages=record["messages"])
    if text_field is None and isinstance(record.get("tokens"), list):
        return Sample(index=index, id=label, tokens=record["tokens"])
    wanted = text_field or next((key for key in ("text", "prompt") if key in record), "text")
    text = record.get(wanted)
    if not isinstance(text, str):
        there = ", ".join(sorted(map(str, record))) or "nothing"
        return Sample(
            index=index, id=label, skip_reason=f"no text field {wanted!r}; there is {there}"
        )
    return Sample(index=index, id=label, text=text)


def apply_limit(count: int, limit: int | None) -> int:
    return count if limit is None else min(count, limit)
