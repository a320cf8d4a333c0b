"""Sample sources: JSONL, Parquet, Hugging Face datasets on disk, plain text, and other kinds.

`resolve` finds (and downloads) the files once; `open_files` then works on local files only.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any, Protocol

from tpufleet.errors import BadInput, Conflict
from tpufleet_activations.input_errors import check_choice, no_split
from tpufleet_activations.inputs.files import (
    FileVersions,
    IndexedLines,
    check_encoding,
    content_digest,
    file_versions,
    find_files,
)
from tpufleet_activations.inputs.kinds import other_kinds
from tpufleet_activations.inputs.samples import DEFAULT_SPLIT, Sample, SampleSource
from tpufleet_activations.io.remote_files import data_folders, fetch, list_names

KINDS = ("jsonl", "parquet", "hf", "text")  # and those of `other_kinds`
DATA_SUFFIXES = {".jsonl": "jsonl", ".parquet": "parquet", ".txt": "text"}
SUFFIXES = (*DATA_SUFFIXES, ".json")
COMPRESSED = (".gz", ".zst", ".bz2", ".xz")
CSV = (".csv", ".tsv")
EACH_FILE = "file"  # instead of a split of text: its files are samples
# Words in names of files, and the split that they stand for: as of the Hugging Face Hub.
SPLIT_NAMES = {
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("validation", "valid", "val", "dev"), "validation"),
    **dict.fromkeys(("test", "testing", "eval", "evaluation"), "test"),
}
SHARD_OF_SPLIT = re.compile(r"(.+?)-\d{5}-of-\d{5}")
MARKERS = {"state.json", "dataset_dict.json"}  # of a dataset written by `save_to_disk`
LIST_FIELDS = ("messages", "tokens", "input_ids")
TEXT_FIELDS = ("text", "prompt")  # the first that a record has, without --text-field
ID_FIELDS = ("id", "task_id")
MASK = "attention_mask"  # beside input_ids: 0 for padding
ABSENT = object()
# Text files beside data of another kind that are no data.
NOTES = ("readme", "license", "licence", "notice", "copying", "citation", "changelog",
         "requirements", "checksums", "md5sums", "sha256sums")  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class DataFiles:
    """A plan's `data` (kind, path and options) together with its files on this machine."""

    data: Mapping[str, Any]
    paths: tuple[Path, ...]
    versions: FileVersions = ()  # of the files whose digest was checked


class Rows(Protocol):
    """Records of table files, in blocks: see `tables`."""

    paths: list[Path]
    sizes: list[int]  # rows of each block

    def records(self, block: int, start: int, stop: int) -> Iterator[Mapping[str, Any] | str]:
        """Rows of a block, in order, or why one cannot be read; fewer if the rest cannot be
        decoded, for the reason that `damage` returns."""

    def damage(self, block: int) -> str: ...


def resolve(data: Mapping[str, Any]) -> DataFiles:
    """Find the files that a plan's `data` describes; those in a bucket are downloaded."""
    kind, path = data["kind"], data["path"]
    check_choice("data kind", kind, kind_names())
    if other := other_kinds().get(kind):
        paths = list(other.find(data))
    elif kind == "hf":
        paths = _dataset_files(path, data.get("split"))
    else:
        suffix = {"jsonl": "*.jsonl", "parquet": "*.parquet", "text": "*.txt"}[kind]
        located = data_path(path)
        paths = find_files(located, (suffix,))
        _check_readable([file.name for file in paths], COMPRESSED)
        if (kind, data.get("split")) != ("text", EACH_FILE):
            paths = _of_split(path, paths, data.get("split"), folder=bool(list_names(located)))
    return DataFiles(data=data, paths=tuple(paths))


def data_path(path: str) -> str:
    """Where the files are: at the path, or if that is the root of a repository, in its only folder
    with data."""
    names = list_names(path)
    direct = {name for name in names if name.endswith(tuple(DATA_SUFFIXES)) and not _is_note(name)}
    if not names or direct or MARKERS & names:
        return path
    if any(kind.detect(path, names) for kind in other_kinds().values()):
        return path
    folders = data_folders(path)
    if len(folders) > 1:
        raise BadInput(
            f"{path} has several folders with data: {', '.join(folders)}; pass the path of one"
        )
    return "/".join([path.rstrip("/"), *folders]) if folders else path


def _of_split(path: str, paths: list[Path], split: str | None, *, folder: bool) -> list[Path]:
    """The files of a split, by their names, as the Hugging Face Hub divides them. Those of several
    splits are not merged, unless a pattern names them."""
    splits: dict[str, list[Path]] = {}
    for file in paths:
        splits.setdefault(split_of(file.name), []).append(file)
    if split is None and (len(splits) == 1 or not folder):
        return paths
    wanted = SPLIT_NAMES.get(split or "", split)
    if not wanted or wanted not in splits:
        raise no_split(path, split, sorted(filter(None, splits)))
    return splits[wanted]


def split_of(name: str) -> str:
    """`test` of `test-00000-of-00002.parquet` and `my_test.parquet`; empty if it names none."""
    if shard := SHARD_OF_SPLIT.match(name):
        return SPLIT_NAMES.get(shard[1], shard[1])
    words = re.split("[^a-z0-9]+", name.lower())
    return next((SPLIT_NAMES[word] for word in words if word in SPLIT_NAMES), "")


def check_split(data: Mapping[str, Any]) -> None:
    """Raise if a split is chosen of data that has none, all of which would be read; or none of a
    saved dataset with several."""
    split, kind = data.get("split"), data.get("kind")
    if kind == "hf":
        from tpufleet_activations.inputs import tables

        tables.check_split(fetch(data["path"], recursive=True), split)
        return
    if split is None or kind in KINDS:
        return
    raise BadInput(f"--split {split}: {data['path']} is {kind} data, which has no splits")


def unused_splits(data: Mapping[str, Any]) -> list[str]:
    """Those of a saved dataset that are not used because no split is chosen."""
    if data.get("kind") != "hf" or data.get("split") is not None:
        return []
    from tpufleet_activations.inputs import tables

    splits = tables.dataset_splits(fetch(data["path"], recursive=True))
    return [name for name in splits if name != DEFAULT_SPLIT] if len(splits) > 1 else []


def open_files(files: DataFiles) -> SampleSource:
    data, paths = files.data, list(files.paths)
    kind, limit = data["kind"], data.get("max_samples")
    if other := other_kinds().get(kind):
        return other.open(paths, data)
    if kind == "text":
        return TextSource(paths, whole=data.get("split") == EACH_FILE, limit=limit)
    check_choice("data kind", kind, KINDS)
    fields = {name: data.get(name) for name in ("text_field", "id_field")}
    rows = _open_rows(kind, paths, used_fields(**fields))
    return RecordSource(rows, limit=limit, **fields)


class PlannedSource:
    """Reads samples only while the files hold the planned data: they may be replaced during a run.

    Files are hashed when they are opened and when they have changed since, not for every read.
    """

    def __init__(self, files: DataFiles, planned: str):
        self._files, self._planned = files, planned
        self._versions = files.versions
        self._source: SampleSource | None = None

    def read(self, span: range) -> list[Sample]:
        while True:
            try:
                if self._source is None:
                    self._source = open_files(self._files)
                samples = self._source.read(span)
            except Exception:
                # Files that change while they are read may fail in any way.
                if self._unchanged():
                    raise
                continue
            if self._unchanged():
                return samples

    def _unchanged(self) -> bool:
        """Whether everything read since the last check was planned. Raises Conflict if the files
        now hold other data; if only their versions differ, they have to be read again."""
        if self._source is not None and self._current() == self._versions:
            return True
        self._versions = check_data(self._files, self._planned)
        self._source = None
        return False

    def _current(self) -> FileVersions:
        try:
            return file_versions(self._files.paths)
        except OSError:
            return ()


def check_data(files: DataFiles, planned: str) -> FileVersions:
    """The versions of the files. Raises Conflict unless they hold the planned data."""
    try:
        before = file_versions(files.paths)
        current = open_files(files).digest()
        settled = file_versions(files.paths) == before
    except FileNotFoundError as error:
        raise changed("data", f"{error.filename} is missing") from error
    if not settled:
        raise changed("data", "during the check")
    check_digest("data", planned, current)
    return before


def check_digest(what: str, planned: str, current: str) -> None:
    if current != planned:
        raise changed(what, f"digest {current[:12]}, planned {planned[:12]}")


def changed(what: str, evidence: str) -> Conflict:
    """The model, tokenizer or data are not those of the plan."""
    return Conflict(
        f"the {what} has changed since the plan was made ({evidence}); restore it, or run "
        "`tpu extract plan` with another output folder"
    )


def open_source(data: Mapping[str, Any]) -> SampleSource:
    """`resolve` and `open_files` in one call, for a source that is opened once."""
    return open_files(resolve(data))


def kind_names() -> tuple[str, ...]:
    return (*KINDS, *other_kinds())


def detect_kind(path: str) -> str:
    """The kind of data at a path, from file names and the first line."""
    path = data_path(path)
    name = path.rstrip("/").lower()
    entries = set() if name.endswith(SUFFIXES) else list_names(path)
    if MARKERS & entries:
        return "hf"
    if not entries:
        entries = {name}
    kind = _kind_of_files(path, {entry for entry in entries if not entry.startswith(".")})
    kind = kind or _kind_of_files(path, entries)
    if kind is not None:
        return kind
    _check_readable(sorted(entries), (*COMPRESSED, *CSV))
    if "://" not in path:
        find_files(path, ("*",))  # raises if nothing is there
    raise BadInput(
        f"cannot detect the kind of data at {path}; pass --kind {'|'.join(kind_names())}"
    )


def _check_readable(names: Sequence[str], suffixes: tuple[str, ...]) -> None:
    """Raise for files that no kind of data can be."""
    for name in names:
        if not name.lower().endswith(suffixes):
            continue
        raise BadInput(
            f"compressed and CSV files are not read: {name}; decompress it, or convert it to JSONL "
            "or Parquet"
        )


def _kind_of_files(path: str, names: Set[str]) -> str | None:
    """By suffix. Alone, .json files hold lines; else they describe the other files."""
    present = {suffix for suffix in SUFFIXES if any(name.endswith(suffix) for name in names)}
    kinds = {suffix: kind for suffix, kind in DATA_SUFFIXES.items() if suffix in present}
    for name, other in other_kinds().items():
        if own := other.detect(path, names):
            kinds = {max(own): name} | {s: kind for s, kind in kinds.items() if s not in own}
    if ".json" in present and not kinds:
        return "jsonl"
    text = [name for name in names if name.endswith(".txt")]
    if len(kinds) > 1 and text and all(map(_is_note, text)):
        del kinds[".txt"]
    if len(kinds) > 1:
        *others, last = kinds.values()
        first = f", or a path such as '{path.rstrip('/')}/*{next(iter(kinds))}'"
        raise BadInput(
            f"{path} holds {', '.join(others)} and {last} data; pass --kind "
            f"{'|'.join(kinds.values())}{'' if '://' in path else first}"
        )
    return next(iter(kinds.values()), None)


def _is_note(name: str) -> bool:
    return name.endswith(".txt") and Path(name).stem.lower() in NOTES


def read_records(path: str) -> Iterator[Mapping[str, Any]]:
    """All records of a JSONL, Parquet or saved dataset, unchanged and in order."""
    kind = detect_kind(path)
    check_choice("data kind", kind, ("jsonl", "parquet", "hf"))
    paths = list(resolve({"kind": kind, "path": path}).paths)
    rows = _open_rows(kind, paths)
    for block, count in enumerate(rows.sizes):
        left = count
        for record in rows.records(block, 0, count):
            if isinstance(record, str):
                raise BadInput(f"{path}: {record}")
            yield record
            left -= 1
        if left:
            raise BadInput(rows.damage(block))


class JsonRows:
    """The lines of JSONL files, as one block of `Rows`: `text`, `messages` (and `tools`) or
    `tokens`, perhaps an id."""

    def __init__(self, paths: list[Path]):
        self.paths, self._lines = paths, IndexedLines(paths)
        self.sizes = [len(self._lines)]

    def records(self, block: int, start: int, stop: int) -> Iterator[Mapping[str, Any] | str]:
        for line in self._lines.read(range(start, stop)):
            try:
                record = json.loads(line)
                yield record if isinstance(record, dict) else "not a JSON object on one line"
            except (ValueError, RecursionError) as error:
                yield f"not JSON: {error}"

    def damage(self, block: int) -> str:
        raise AssertionError  # lines are damaged one by one


class TextSource:
    """Plain text: a sample is a line, or a whole file."""

    def __init__(self, paths: Sequence[Path], *, whole: bool, limit: int | None = None):
        check_encoding(paths)
        self._paths, self._limit = paths, limit
        self._lines = None if whole else IndexedLines(paths)

    def count(self) -> int:
        total = len(self._paths) if self._lines is None else len(self._lines)
        return apply_limit(total, self._limit)

    def read(self, span: range) -> list[Sample]:
        if self._lines is None:
            return [_text(n, self._paths[n].name, self._paths[n].read_bytes()) for n in span]
        return [
            _text(index, str(index), line.rstrip(b"\r\n"))
            for index, line in zip(span, self._lines.read(span), strict=True)
        ]

    def digest(self) -> str:
        return content_digest(self._paths, self._lines is None, self._limit)


class RecordSource:
    """Records of JSONL, Parquet or Arrow files."""

    def __init__(
        self,
        rows: Rows,
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
        samples: list[Sample] = []
        block = bisect_right(self._starts, span.start) - 1 if len(span) else 0
        index = span.start
        while index < span.stop:
            start = self._starts[block]
            stop = min(span.stop, start + self._rows.sizes[block])
            for record in self._rows.records(block, index - start, stop - start):
                samples.append(self._sample(record, index))
                index += 1
            while index < stop:
                samples.append(self._sample(self._rows.damage(block), index))
                index += 1
            block += 1
        return samples

    def digest(self) -> str:
        return content_digest(self._rows.paths, *self._fields, self._limit)

    def _sample(self, record: Mapping[str, Any] | str, index: int) -> Sample:
        if isinstance(record, str):
            return Sample(index=index, id=str(index), skip_reason=record)
        return sample_from_record(record, index, *self._fields)


def used_fields(text_field: str | None, id_field: str | None) -> Set[str]:
    """The fields whose values `sample_from_record` uses; of the others it uses the names."""
    texts = (text_field,) if text_field else (*LIST_FIELDS, "tools", *TEXT_FIELDS)
    names = {*texts, MASK, *((id_field,) if id_field else ID_FIELDS)}
    return names | {name.partition(".")[0] for name in names}


def field_value(record: Mapping[str, Any], name: str) -> Any:
    """Of a field, or of one within others: `a.b`. ABSENT if there is none."""
    if name in record:
        return record[name]
    outer, dot, inner = name.partition(".")
    within = record.get(outer) if dot else None
    return field_value(within, inner) if isinstance(within, Mapping) else ABSENT


def sample_from_record(
    record: Mapping[str, Any], index: int, text_field: str | None, id_field: str | None
) -> Sample:
    ids = [field_value(record, name) for name in ((id_field,) if id_field else ID_FIELDS)]
    known = (value for value in ids if value is not None and value is not ABSENT)
    sample_id = str(next(known, index))
    present = ", ".join(sorted(map(str, record))) or "none"

    def skipped(reason: str) -> Sample:
        return Sample(index=index, id=sample_id, skip_reason=reason)

    if id_field and ids[0] is ABSENT:
        return skipped(f"no id field {id_field!r}; fields: {present}")
    for name in (text_field,) if text_field else LIST_FIELDS:
        items = field_value(record, name)
        if not isinstance(items, list):
            continue
        if name == "messages" or (text_field and items and isinstance(items[0], Mapping)):
            tools = record["tools"] if isinstance(record.get("tools"), list) else None
            return Sample(index=index, id=sample_id, messages=items, tools=tools)
        mask = field_value(record, name.removesuffix("input_ids") + MASK)
        if name.endswith("input_ids") and isinstance(mask, list):  # without padding
            if len(mask) != len(items):
                return skipped(f"{MASK} has {len(mask)} values, {name} has {len(items)}")
            items = [token for token, real in zip(items, mask, strict=True) if real]
        return Sample(index=index, id=sample_id, tokens=items)
    text_key = text_field or next((key for key in TEXT_FIELDS if key in record), "text")
    text = field_value(record, text_key)
    if isinstance(text, str):
        return Sample(index=index, id=sample_id, text=text)
    wanted = "text"
    if text_field is None and text is ABSENT:
        wanted = "a list"
        text_key = next((key for key in LIST_FIELDS if key in record), text_key)
        text = record.get(text_key, ABSENT)
    if text is ABSENT:
        return skipped(f"no text field {text_key!r}; fields: {present}")
    kind = "null" if text is None else f"of type {type(text).__name__}"
    return skipped(f"field {text_key!r} is {kind} instead of {wanted}")


def apply_limit(count: int, limit: int | None) -> int:
    return count if limit is None else min(count, limit)


def _open_rows(kind: str, paths: list[Path], columns: Set[str] | None = None) -> Rows:
    """`columns` None: all."""
    if kind == "jsonl":
        return JsonRows(paths)
    from tpufleet_activations.inputs import tables  # pyarrow is an optional dependency

    return (tables.ParquetRows if kind == "parquet" else tables.ArrowRows)(paths, columns)


def _dataset_files(path: str, split: str | None) -> list[Path]:
    from tpufleet_activations.inputs import tables

    return tables.dataset_files(fetch(path, recursive=True), split)


def _text(index: int, name: str, data: bytes) -> Sample:
    try:
        return Sample(index=index, id=name, text=data.decode("utf-8"))
    except UnicodeDecodeError as error:
        return Sample(index=index, id=name, skip_reason=f"not UTF-8: {error.reason}")
