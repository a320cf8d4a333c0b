"""Taking in what the former scripts stored: their shards, and what their checkpoints say of them.

Each worker of a former fleet had a folder (`tpu_0`, `host_00`) and numbered its samples from 0, so
samples are told apart by folder and number.
"""

from __future__ import annotations

import hashlib
import json
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tpufleet.errors import BadInput, Conflict, NotFound
from tpufleet.runtime.units import Claim, Units
from tpufleet.workloads.activations import legacy, plans
from tpufleet.workloads.activations.io import remote_files, unit_writer
from tpufleet.workloads.activations.io.storage import Storage
from tpufleet.workloads.activations.model import sites

SHARD = re.compile(r"shard_(\d+)\.pkl(\.gz)?$")
WANTED = ("*shard_*.pkl", "*shard_*.pkl.gz", "*checkpoint_*.json")
FEWEST = 16  # samples of a unit
STORED = {"bfloat16": "bf16", "float16": "f16", "float32": "f32"}


class LegacySampleId(NamedTuple):
    """A sample as it was numbered: the folder of its worker, and its number there."""

    folder: str
    number: int

    def __str__(self) -> str:
        return f"{self.folder}/{self.number}" if self.folder else str(self.number)


class RecordLocation(NamedTuple):
    """Where one layer of one sample lies."""

    path: Path
    record: int


@dataclass(frozen=True, kw_only=True, slots=True)
class LegacyShards:
    """What lies in a folder of former shards."""

    records: Mapping[LegacySampleId, Mapping[int, RecordLocation]]
    layers: tuple[int, ...]
    width: int
    dtype: str
    digest: str
    shards: int
    checkpoints: tuple[Mapping[str, Any], ...]

    @property
    def incomplete(self) -> list[LegacySampleId]:
        """Samples that lack a layer: a former run was killed while it wrote them."""
        return [old for old, layers in self.records.items() if len(layers) < len(self.layers)]

    @property
    def reported_samples(self) -> int | None:
        """How many samples the former checkpoints call processed."""
        counts = [found.get("total_samples_processed") for found in self.checkpoints]
        return sum(filter(None, counts)) if counts else None

    def checkpoint_value(self, key: str) -> str:
        """What the checkpoints agree on."""
        answers = {str(found[key]) for found in self.checkpoints if found.get(key)}
        return answers.pop() if len(answers) == 1 else "unknown"


def scan_shards(source: str) -> LegacyShards:
    """All shards below a folder or a bucket's prefix. Of a sample stored twice the later counts."""
    folder = remote_files.fetch(source, recursive=True, patterns=WANTED)
    paths = sorted(
        (path for path in folder.rglob("shard_*") if SHARD.search(path.name)),
        key=lambda path: (_natural(str(path.parent)), int(SHARD.search(path.name)[1])),
    )
    if not paths:
        raise NotFound(f"{source} holds no shard_NNNN.pkl.gz")
    places: dict[LegacySampleId, dict[int, RecordLocation]] = {}
    width, kind = 0, ""
    digest = hashlib.sha256()
    for path in paths:
        group = path.parent.relative_to(folder).as_posix().removeprefix(".")
        with open(path, "rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
        for layer, records in legacy.read_shard(path).items():
            for number, record in enumerate(records):
                places.setdefault(LegacySampleId(group, record["sample_idx"]), {})[layer] = (
                    RecordLocation(path, number)
                )
                width, kind = record["activation"].shape[-1], record["activation"].dtype.name
    if kind not in STORED:
        raise BadInput(f"activations are {kind or 'missing'}; known are {', '.join(STORED)}")
    return LegacyShards(
        records=dict(sorted(places.items(), key=lambda item: (_natural(item[0][0]), item[0][1]))),
        layers=tuple(sorted({layer for found in places.values() for layer in found})),
        width=width,
        dtype=STORED[kind],
        digest=digest.hexdigest(),
        shards=len(paths),
        checkpoints=tuple(_checkpoints(folder)),
    )


def import_shards(
    source: str,
    storage: Storage,
    *,
    site: str = "resid_post",
    skip_incomplete: bool = False,
) -> tuple[plans.ExtractionPlan, LegacyShards]:
    """Make a dataset of former shards. Doing it again goes on where it was left."""
    found = scan_shards(source)
    torn = set(found.incomplete)
    if torn and not skip_incomplete:
        some = ", ".join(str(old) for old in sorted(torn)[:10])
        raise BadInput(f"{len(torn)} samples lack some layers: {some}; --skip-torn leaves them out")
    order = [old for old in found.records if old not in torn]
    names = tuple(f"{sites.parse_site(site)}.{layer}" for layer in found.layers)
    plan = plans.write(
        storage,
        plans.ExtractionPlan(
            model=found.checkpoint_value("model_path"),
            model_digest="unknown",
            tokenizer="unknown",
            tokenizer_digest="unknown",
            data={
                "kind": "former-shards",
                "path": source,
                "dataset": found.checkpoint_value("dataset_path"),
            },
            data_digest=found.digest,
            samples=len(order),
            # About as many as a shard holds, so that few shards are in memory at a time.
            unit_samples=max(len(order) // found.shards, FEWEST),
            sites=names,
            widths=dict.fromkeys(names, found.width),
            dtype=found.dtype,
        ),
    )
    name = f"import-{found.digest[:12]}"
    units = Units(storage, count=plan.units, worker=name, incarnation=time.time_ns())
    loaded: dict[Path, Any] = {}
    while (claim := units.claim()) is not None:
        samples = (found.records[order[index]] for index in plan.sample_range(claim.unit))
        needed = {place.path for layers in samples for place in layers.values()}
        loaded = {path: loaded.get(path) or legacy.read_shard(path) for path in needed}
        file = _record(storage, plan, claim, order, found, loaded)
        units.commit(claim, unit_writer.commit_outcome(plan, claim.unit, [file]))
    if not units.finished():
        raise Conflict("another import works on this dataset; wait for it, or try again later")
    return plan, found


def _record(
    storage: Storage,
    plan: plans.ExtractionPlan,
    claim: Claim,
    order: list[LegacySampleId],
    found: LegacyShards,
    loaded: Mapping[Path, Any],
) -> dict[str, Any]:
    span = plan.sample_range(claim.unit)

    def stored(index: int, layer: int) -> dict[str, Any]:
        place = found.records[order[index]][layer]
        return loaded[place.path][layer][place.record]

    recorded = []
    for index in span:
        first = stored(index, found.layers[0])
        rows = first["activation"].shape[0]
        recorded.append(
            unit_writer.StoredSample(
                sample=index,
                tokens=np.full(rows, -1, np.int32),  # the former form does not keep them
                positions=np.arange(rows, dtype=np.int32),
                metadata={"id": str(order[index]), "preview": first.get("text_preview", "")},
            )
        )
    recorder = unit_writer.UnitWriter(storage, plan, claim, recorded)
    try:
        for name, layer in zip(plan.sites, found.layers, strict=True):
            for index in span:
                recorder.append(name, stored(index, layer)["activation"])
        return recorder.finish()
    except BaseException:
        recorder.abandon()
        raise


def _checkpoints(folder: Path) -> list[Mapping[str, Any]]:
    """The former checkpoints that lie beside the shards; a torn one says nothing."""
    found = []
    for path in sorted(folder.rglob("checkpoint_*.json")):
        try:
            body = json.loads(path.read_text())
        except ValueError:
            continue
        if isinstance(body, dict):
            found.append(body)
    return found


def _natural(text: str) -> list[tuple[int, str]]:
    """`tpu_2` before `tpu_10`."""
    parts = re.split(r"(\d+)", text)
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in parts]
