"""Verifying a dataset: every sample stored exactly once, every byte as it was written."""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import groupby

from blake3 import blake3

from tpufleet.errors import FleetError, NotFound
from tpufleet.runtime import index_parts
from tpufleet.runtime.units import INDEXED_UNITS, Units
from tpufleet_activations import plans
from tpufleet_activations.io import datasets, shards
from tpufleet_activations.io.storage import Storage, read_exactly

READERS = 8
READ_BYTES = 8 * shards.PIECE  # in one request
# Names of messages of gangs: see `pipeline.gangs`.
_GANG_MESSAGE = re.compile(r"gangs/[0-9a-f]{32}-(\d{6,}|\d{8,}-\d{4,}-\d{3,})\.json")
# Errors of a table of samples whose bytes have changed: not JSON, or other keys and values.
_DAMAGED_METADATA = (ValueError, KeyError, TypeError, AttributeError)


@dataclass(frozen=True, kw_only=True, slots=True)
class VerificationReport:
    """The result of a verification. Shards that no commit refers to waste space, but are not
    problems."""

    units: int
    committed: int
    samples: int
    tokens: int
    bytes: int
    problems: tuple[str, ...]
    leftovers: tuple[str, ...]  # of workers that died or were too late, and before repairs
    uncommitted: tuple[str, ...] = ()  # shards of units that are not committed yet
    foreign: tuple[str, ...] = ()  # other files among the shards, which are never deleted
    bad_units: tuple[int, ...] = ()  # committed, but to be rebuilt
    checksums: bool = True  # whether every byte was read and hashed

    @property
    def intact(self) -> bool:
        return not self.problems and self.committed == self.units


def verify(
    storage: Storage, *, deep: bool = True, only: Collection[int] | None = None
) -> VerificationReport:
    """Check a dataset. `deep` reads and hashes every byte, of the units in `only` if given;
    otherwise only records and sizes."""
    dataset = datasets.Dataset(storage, indexed=False)
    plan = dataset.plan
    problems: list[str] = []
    samples = tokens = size = 0
    referenced: set[str] = set()
    problems += _gaps(dataset)
    problems += [f"unit {unit}: {reason}" for unit, reason in sorted(dataset.damaged.items())]
    bad = list(dataset.damaged)
    for unit in sorted(dataset.commits):
        files = dataset.files(unit)
        referenced.update(file.name for file in files)
        hashed = deep and (only is None or unit in only)
        found = [problem for file in files for problem in _file_problems(storage, file, hashed)]
        if not found:
            found = list(_unit_problems(dataset, unit))
        problems += [f"unit {unit}: {problem}" for problem in found]
        if found:
            bad.append(unit)
        samples += len(plan.sample_range(unit))
        tokens += sum(file.tensors[shards.TOKENS].shape[0] for file in files)
        size += sum(file.size for file in files)
    unreferenced = _classify(
        dataset, [name for name in storage.names(shards.FOLDER) if name not in referenced]
    )
    return VerificationReport(
        units=plan.units,
        committed=len(dataset.commits),
        samples=samples,
        tokens=tokens,
        bytes=size,
        problems=tuple(problems),
        **unreferenced,
        bad_units=tuple(sorted(bad)),
        checksums=deep,
    )


def reopen(storage: Storage, units: Collection[int]) -> list[int]:
    """Return committed or damaged units to the queue, to be extracted again. Their new shards have
    other names; the old ones become leftovers. The result are those reopened by this call."""
    count = plans.load(storage).units
    view = Units(storage, count=count, worker="repair", tolerant=True)
    known = view.committed().keys() | view.damaged.keys()
    chosen = [unit for unit in units if unit in known]
    view.announce_reopened(chosen)
    return [unit for unit in chosen if view.reopen(unit, "failed verification")]


def _classify(dataset: datasets.Dataset, names: Collection[str]) -> dict[str, tuple[str, ...]]:
    """Shards that no commit refers to, by field of the report. A shard of this dataset has a name
    that its writers give, with a token that one of its workers has claimed."""
    classes: dict[str, list[str]] = {name: [] for name in ("leftovers", "uncommitted", "foreign")}
    for name in names:
        parsed = shards.parse_name(name)
        commit = None if parsed is None else dataset.commits.get(parsed.unit)
        if parsed is None or parsed.unit >= dataset.plan.units:
            kind = "foreign"
        elif commit is None:
            kind = "uncommitted"
        elif parsed.token > commit.token:
            kind = "foreign"
        else:
            kind = "leftovers"
        classes[kind].append(name)
    return {kind: tuple(names) for kind, names in classes.items()}


def delete_leftovers(storage: Storage) -> list[str]:
    """Delete shards that no commit refers to, and messages of gangs, but no file whose name this
    dataset does not give. Does nothing unless all units are committed: a worker may be uploading
    a shard right now."""
    report = verify(storage, deep=False)
    if report.committed < report.units:
        return []
    leftovers = [
        *report.leftovers,
        *(name for name in storage.names("gangs/") if _GANG_MESSAGE.fullmatch(name)),
    ]
    if report.units >= INDEXED_UNITS:
        # Readers of an outdated index would look for what is deleted.
        Units(storage, count=report.units, worker="sweep").write_index()
        leftovers += index_parts.obsolete(storage)
    for name in leftovers:
        storage.delete(name)
    return leftovers


def _gaps(dataset: datasets.Dataset) -> Iterator[str]:
    """Units that are not committed, adjacent ones as one problem: there may be thousands."""
    plan = dataset.plan
    known = dataset.commits.keys() | dataset.damaged.keys()
    missing = [unit for unit in range(plan.units) if unit not in known]
    for _, group in groupby(enumerate(missing), key=lambda pair: pair[1] - pair[0]):
        units = [unit for _, unit in group]
        samples = range(plan.sample_range(units[0]).start, plan.sample_range(units[-1]).stop)
        many = f"units {units[0]:,} to {units[-1]:,}" if len(units) > 1 else f"unit {units[0]:,}"
        verb = "are" if len(units) > 1 else "is"
        bounds = f"{samples.start:,} to {samples.stop - 1:,}"
        yield f"{many} (samples {bounds}) {verb} not committed"


def _file_problems(storage: Storage, file: shards.ShardFile, deep: bool) -> list[str]:
    try:
        return list(_content_problems(storage, file, deep))
    except NotFound:
        return [f"{file.name} is missing"]
    except OSError as error:  # of its disk; other shards may be intact
        return [f"{file.name} cannot be read: {error}"]


def _content_problems(storage: Storage, file: shards.ShardFile, deep: bool) -> Iterator[str]:
    size = storage.size(file.name)
    if size != file.size:
        yield f"{file.name} has {size:,} bytes, expected {file.size:,}"
    elif deep:
        header = read_exactly(storage, file.name, 0, file.header_size)
        intact = {"the header": hashlib.sha256(header).hexdigest() == file.header_sha256}
        with ThreadPoolExecutor(READERS) as pool:
            for name, tensor in file.tensors.items():
                intact[name] = _rehash(storage, file, tensor, pool) == tensor
        for part in [part for part, matches in intact.items() if not matches]:
            yield f"{file.name}: checksum mismatch in {part}"


def _unit_problems(dataset: datasets.Dataset, unit: int) -> Iterator[str]:
    """Mismatches of labels and contents: each sample once, as many rows as tokens."""
    if dataset.commits[unit].outcome["plan"] != dataset.plan.identity:
        yield "written for a different plan"
    counts: Counter[tuple[int, int]] = Counter()  # by sample and context
    contexts: dict[int, int] = {}
    readable = True
    for number, file in enumerate(dataset.files(unit)):
        try:
            entries = dataset.file_metadata(unit, number)
            stored = [(entry["sample"], entry.get("context", 0)) for entry in entries]
            known = {entry["sample"]: entry.get("contexts", 1) for entry in entries}
            lengths = sum(entry["tokens"] for entry in entries)
        except (*_DAMAGED_METADATA, OSError, FleetError) as error:
            yield f"{file.name}: sample metadata cannot be read: {error!r}"
            readable = False
            continue
        counts.update(stored)
        contexts.update(known)
        rows = file.tensors[shards.TOKENS].shape[0]
        for site in dataset.sites:
            shape = file.uncompressed.get(site, ("", file.tensors[site].shape))[1]
            if shape != (rows, dataset.plan.widths[site]):
                yield f"{file.name}: {site} has shape {list(shape)}, expected {rows} rows"
        if lengths != rows:
            yield f"{file.name}: samples have {lengths} tokens, but {rows} rows are stored"
    samples = dataset.plan.sample_range(unit)
    expected = {(n, context) for n in samples for context in range(contexts.get(n, 1))}
    if not readable:
        expected &= counts.keys()  # which of the others are missing is unknown
    for sample, context in sorted(expected | counts.keys()):
        times, wanted = counts[sample, context], int((sample, context) in expected)
        if times != wanted:
            part = f"context {context} of " if contexts.get(sample, 1) > 1 else ""
            yield f"{part}sample {sample} is stored {times} times, expected {wanted}"


def _rehash(
    storage: Storage, file: shards.ShardFile, tensor: shards.Tensor, pool: ThreadPoolExecutor
) -> shards.Tensor:
    """The tensor with the digest of the bytes as currently stored."""

    def pieces(start: int) -> bytes:
        size = min(READ_BYTES, tensor.nbytes - start)
        data = memoryview(read_exactly(storage, file.name, tensor.offset + start, size))
        starts = range(0, len(data), shards.PIECE)
        return b"".join(blake3(data[at : at + shards.PIECE]).digest() for at in starts)

    return shards.with_digest(tensor, pool.map(pieces, range(0, tensor.nbytes, READ_BYTES)))
