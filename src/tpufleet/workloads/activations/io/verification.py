"""Proof that a dataset is whole: every sample once, every byte as it was written."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import groupby

from tpufleet.errors import FleetError, NotFound
from tpufleet.workloads.activations.io import datasets, shards
from tpufleet.workloads.activations.io.storage import Storage

READERS = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class VerificationReport:
    """What was checked and what is wrong. Leftovers of dead workers are not wrong, only waste."""

    units: int
    committed: int
    samples: int
    tokens: int
    bytes: int
    problems: tuple[str, ...]
    leftovers: tuple[str, ...]

    @property
    def intact(self) -> bool:
        return not self.problems and self.committed == self.units


def verify(storage: Storage, *, deep: bool = True) -> VerificationReport:
    """Check a dataset. `deep` reads and hashes every byte; else only records and sizes."""
    dataset = datasets.Dataset(storage)
    plan = dataset.plan
    problems: list[str] = []
    samples = tokens = size = 0
    referenced: set[str] = set()
    problems += _gaps(dataset)
    kinds = {commit.outcome.get("compute") for commit in dataset.commits.values()} - {"", None}
    if len(kinds) > 1:
        problems.append(f"units were computed in different types: {', '.join(sorted(kinds))}")
    for unit in sorted(dataset.commits):
        files = dataset.files(unit)
        referenced.update(file.name for file in files)
        faults = [fault for file in files for fault in _file_faults(storage, file, deep)]
        if not faults:
            faults = list(_unit_faults(dataset, unit))
        problems += [f"unit {unit}: {fault}" for fault in faults]
        samples += len(plan.sample_range(unit))
        tokens += sum(file.tensors[datasets.TOKENS].shape[0] for file in files)
        size += sum(file.size for file in files)
    return VerificationReport(
        units=plan.units,
        committed=len(dataset.commits),
        samples=samples,
        tokens=tokens,
        bytes=size,
        problems=tuple(problems),
        leftovers=tuple(name for name in storage.names("shards/") if name not in referenced),
    )


def delete_leftovers(storage: Storage) -> list[str]:
    """Delete shards that no commit names, what gangs told each other, and parts of broken
    uploads. Only when all units are committed: a shard being uploaded now is not named yet."""
    report = verify(storage, deep=False)
    if report.committed < report.units:
        return []
    leftovers = [*report.leftovers, *storage.names("gangs/"), *storage.names("parts/")]
    for name in leftovers:
        storage.delete(name)
    return leftovers


def _gaps(dataset: datasets.Dataset) -> Iterator[str]:
    """What is not committed, neighbours together: there may be many thousands."""
    plan = dataset.plan
    missing = [unit for unit in range(plan.units) if unit not in dataset.commits]
    for _, group in groupby(enumerate(missing), key=lambda pair: pair[1] - pair[0]):
        units = [unit for _, unit in group]
        samples = range(plan.sample_range(units[0]).start, plan.sample_range(units[-1]).stop)
        many = f"units {units[0]:,} to {units[-1]:,}" if len(units) > 1 else f"unit {units[0]:,}"
        verb = "are" if len(units) > 1 else "is"
        yield f"{many} (samples {_words(samples)}) {verb} not committed"


def _file_faults(storage: Storage, file: shards.ShardFile, deep: bool) -> Iterator[str]:
    try:
        size = storage.size(file.name)
    except NotFound:
        yield f"{file.name} is missing"
        return
    if size != file.size:
        yield f"{file.name} has {size} bytes instead of {file.size}"
    elif deep:
        header = storage.read_range(file.name, 0, file.header_size)
        if hashlib.sha256(header).hexdigest() != file.header_sha256:
            yield f"{file.name}: the header was changed"
        with ThreadPoolExecutor(READERS) as pool:
            for tensor in file.tensors.values():
                if _digested(storage, file.name, tensor, pool) != tensor:
                    yield f"{file.name}: {tensor.name} was changed"


def _unit_faults(dataset: datasets.Dataset, unit: int) -> Iterator[str]:
    """Whether labels and contents agree: each sample once, rows as many as tokens."""
    if dataset.commits[unit].outcome["plan"] != dataset.plan.identity:
        yield "it was made for another plan"
    seen: Counter[int] = Counter()
    for number, file in enumerate(dataset.files(unit)):
        try:
            entries = dataset.file_metadata(unit, number)
        except (ValueError, FleetError) as error:
            yield f"{file.name}: descriptions cannot be read ({error})"
            continue
        seen.update(entry["sample"] for entry in entries)
        rows = file.tensors[datasets.TOKENS].shape[0]
        for site in dataset.sites:
            shape = file.unfolded.get(site, ("", file.tensors[site].shape))[1]
            if shape != (rows, dataset.plan.widths[site]):
                yield f"{file.name}: {site} has shape {list(shape)}, not {rows} rows"
        lengths = sum(entry["tokens"] for entry in entries)
        if lengths != rows:
            yield f"{file.name}: samples have {lengths} tokens together, but {rows} rows are stored"
    span = set(dataset.plan.sample_range(unit))
    for sample, times in sorted(seen.items()):
        if sample not in span:
            yield f"sample {sample} does not belong here"
        elif times > 1:
            yield f"sample {sample} is there {times} times"
    for sample in sorted(span - set(seen)):
        yield f"sample {sample} is missing"


def _digested(
    storage: Storage, name: str, tensor: shards.Tensor, pool: ThreadPoolExecutor
) -> shards.Tensor:
    """The tensor with the digest of the bytes that are stored now."""

    def piece(start: int) -> bytes:
        size = min(shards.PIECE, tensor.nbytes - start)
        return hashlib.sha256(storage.read_range(name, tensor.offset + start, size)).digest()

    return shards.with_digest(tensor, pool.map(piece, range(0, tensor.nbytes, shards.PIECE)))


def _words(span: range) -> str:
    return f"{span.start:,} to {span.stop - 1:,}"
