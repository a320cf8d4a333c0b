"""Importing pickle shards and checkpoints of the older scripts into a dataset.

Each worker of the older scripts had its own folder (`tpu_0`, `host_00`) and numbered its samples
from 0, so a sample is identified by folder and number.
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

from tpufleet.errors import BadInput, Conflict, NotFound, busy
from tpufleet.runtime.units import Claim, Units
from tpufleet_activations import plans
from tpufleet_activations.input_errors import check_choice
from tpufleet_activations.io import remote_files, unit_writer
from tpufleet_activations.io.storage import Storage, translate_disk_errors
from tpufleet_activations.model import sites
from tpufleet_migration.activations import pickle_shards

SHARD = re.compile(r"shard_\d+\.pkl(\.gz)?$")
FILE_PATTERNS = ("*shard_*.pkl", "*shard_*.pkl.gz", "*checkpoint_*.json")
MIN_UNIT_SAMPLES = 16
DTYPES = {"bfloat16": "bf16", "float32": "f32"}


class LegacySampleId(NamedTuple):
    """The folder of a sample's worker, and its number there."""

    folder: str
    number: int

    def __str__(self) -> str:
        return f"{self.folder}/{self.number}" if self.folder else str(self.number)


class RecordLocation(NamedTuple):
    """The location of one layer of one sample."""

    path: Path
    record: int


@dataclass(frozen=True, kw_only=True, slots=True)
class LegacyShards:
    """The contents of a folder of pickle shards."""

    records: Mapping[LegacySampleId, Mapping[int, RecordLocation]]
    layers: tuple[int, ...]
    width: int
    dtype: str
    digest: str
    shards: int
    checkpoints: tuple[Mapping[str, Any], ...]

    @property
    def incomplete(self) -> list[LegacySampleId]:
        """Samples with missing layers: the older run was killed while it wrote them."""
        return [sample for sample, layers in self.records.items() if len(layers) < len(self.layers)]

    @property
    def reported_samples(self) -> int | None:
        """The number of processed samples according to the checkpoints."""
        counts = [body.get("total_samples_processed") for body in self.checkpoints]
        return sum(filter(None, counts)) if counts else None

    def checkpoint_value(self, key: str) -> str:
        """The value of a key if all checkpoints agree on it, else "unknown"."""
        values = {str(body[key]) for body in self.checkpoints if body.get(key)}
        return values.pop() if len(values) == 1 else "unknown"


def scan_shards(source: str) -> LegacyShards:
    """All shards below a folder or bucket prefix. Of a sample stored twice, the later is used."""
    folder = remote_files.fetch(source, recursive=True, patterns=FILE_PATTERNS)
    paths = sorted(
        (path for path in folder.rglob("shard_*") if SHARD.search(path.name)),
        key=lambda path: _natural_key(str(path)),
    )
    if not paths:
        raise NotFound(f"no shard_NNNN.pkl.gz files in {source}")
    records: dict[LegacySampleId, dict[int, RecordLocation]] = {}
    width, kind = 0, ""
    digest = hashlib.sha256()
    for path in paths:
        group = path.parent.relative_to(folder).as_posix().removeprefix(".")
        with open(path, "rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
        for layer, entries in pickle_shards.read_shard(path).items():
            for number, record in enumerate(entries):
                records.setdefault(LegacySampleId(group, record["sample_idx"]), {})[layer] = (
                    RecordLocation(path, number)
                )
                width, kind = record["activation"].shape[-1], record["activation"].dtype.name
    check_choice(f"{source}: dtype", kind, DTYPES)
    return LegacyShards(
        records=dict(
            sorted(records.items(), key=lambda item: (_natural_key(item[0][0]), item[0][1]))
        ),
        layers=tuple(sorted({layer for layers in records.values() for layer in layers})),
        width=width,
        dtype=DTYPES[kind],
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
    """Create a dataset from pickle shards. An interrupted import can be resumed."""
    legacy = scan_shards(source)
    incomplete = set(legacy.incomplete)
    if incomplete and not skip_incomplete:
        some = ", ".join(str(sample) for sample in sorted(incomplete)[:10])
        raise BadInput(
            f"{len(incomplete)} samples have missing layers: {some}; pass --skip-torn to skip them"
        )
    order = [sample for sample in legacy.records if sample not in incomplete]
    names = tuple(f"{sites.parse_site(site)}.{layer}" for layer in legacy.layers)
    with translate_disk_errors(storage, "units that are imported are kept; run the import again"):
        plan = plans.write(
            storage,
            plans.ExtractionPlan(
                model=legacy.checkpoint_value("model_path"),
                model_digest="unknown",
                tokenizer="unknown",
                tokenizer_digest="unknown",
                data={
                    "kind": "former-shards",
                    "path": source,
                    "dataset": legacy.checkpoint_value("dataset_path"),
                },
                data_digest=legacy.digest,
                samples=len(order),
                # About as many as in a shard, so that few shards are in memory at a time.
                unit_samples=max(len(order) // legacy.shards, MIN_UNIT_SAMPLES),
                sites=names,
                widths=dict.fromkeys(names, legacy.width),
                dtype=legacy.dtype,
            ),
        )
        name = f"import-{legacy.digest[:12]}"
        units = Units(storage, count=plan.units, worker=name, incarnation=time.time_ns())
        loaded: dict[Path, Any] = {}
        while (claim := units.claim()) is not None:
            samples = (legacy.records[order[index]] for index in plan.sample_range(claim.unit))
            needed = {location.path for layers in samples for location in layers.values()}
            loaded = {path: loaded.get(path) or pickle_shards.read_shard(path) for path in needed}
            files = _record(storage, plan, claim, order, legacy, loaded)
            units.commit(claim, unit_writer.commit_outcome(plan, claim.unit, files))
    if not units.finished():
        raise Conflict(busy("import into this dataset"))
    return plan, legacy


def _record(
    storage: Storage,
    plan: plans.ExtractionPlan,
    claim: Claim,
    order: list[LegacySampleId],
    legacy: LegacyShards,
    loaded: Mapping[Path, Any],
) -> list[dict[str, Any]]:
    span = plan.sample_range(claim.unit)

    def stored(index: int, layer: int) -> dict[str, Any]:
        location = legacy.records[order[index]][layer]
        return loaded[location.path][layer][location.record]

    samples = []
    for index in span:
        first = stored(index, legacy.layers[0])
        rows = first["activation"].shape[0]
        samples.append(
            unit_writer.StoredSample(
                sample=index,
                tokens=np.full(rows, -1, np.int32),  # not stored in pickle shards
                positions=np.arange(rows, dtype=np.int32),
                metadata={"id": str(order[index]), "preview": first.get("text_preview", "")},
            )
        )
    writer = unit_writer.UnitWriter(storage, plan, claim, samples)
    try:
        for name, layer in zip(plan.sites, legacy.layers, strict=True):
            for index in span:
                writer.append(name, stored(index, layer)["activation"])
        return writer.finish()
    except BaseException:
        writer.abandon()
        raise


def _checkpoints(folder: Path) -> list[Mapping[str, Any]]:
    """The checkpoint files next to the shards; truncated ones are ignored."""
    checkpoints: list[Mapping[str, Any]] = []
    for path in sorted(folder.rglob("checkpoint_*.json")):
        try:
            body = json.loads(path.read_text())
        except ValueError:
            continue
        if isinstance(body, dict):
            checkpoints.append(body)
    return checkpoints


def _natural_key(text: str) -> list[tuple[int, str]]:
    """Sorts `tpu_2` before `tpu_10`."""
    parts = re.split(r"(\d+)", text)
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in parts]
