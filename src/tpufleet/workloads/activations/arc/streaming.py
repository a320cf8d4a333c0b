"""How far each stream of tasks is, told as the former stream manifest told it.

Units are not bound to streams any more; a stream is completed when all that comes from it is.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from tpufleet.errors import BadInput
from tpufleet.runtime.units import Units
from tpufleet.workloads.activations import inputs, plans
from tpufleet.workloads.activations.arc import former
from tpufleet.workloads.activations.arc.source import ArcSource
from tpufleet.workloads.activations.io.storage import Storage


def stream_manifest(storage: Storage, data: str | None = None) -> dict[str, Any]:
    """The manifest of a dataset's streams, from its records. `data` says where they lie here."""
    plan = plans.load(storage)
    described = {**plan.data, "path": data or plan.data.get("path")}
    source = inputs.open_source(described, plan.seed) if described["kind"] == "arc" else None
    if not isinstance(source, ArcSource):
        raise BadInput("only datasets that are made from ARC streams have a manifest")
    units = Units(storage, count=plan.units, worker="reader")
    commits, held = units.committed(), units.open_claims()
    streams, times = {}, []
    for number, (path, span) in enumerate(source.streams()):
        wanted = range(plan.unit_of(span[0]), plan.unit_of(span[-1]) + 1) if len(span) else range(0)
        done = [commits[unit] for unit in wanted if unit in commits]
        begun = [*done, *(held[unit] for unit in wanted if unit in held)]
        whole = len(done) == len(wanted)
        times += [entry.at for entry in begun]
        streams[number] = {
            "status": former.COMPLETED if whole else "in_progress" if begun else "pending",
            "dataset_path": str(path),
            "pod_id": max(begun, key=lambda entry: entry.at).worker if begun else None,
            "started_at": _time(min((entry.at for entry in begun), default=None)),
            "completed_at": _time(max((c.at for c in done), default=None)) if whole else None,
        }
    folder = str(described["path"])
    return former.build_manifest(
        streams, folder, _time(min(times, default=None)), _time(max(times, default=None))
    )


def _time(seconds: float | None) -> str | None:
    return None if seconds is None else datetime.fromtimestamp(seconds, UTC).isoformat()
