"""Progress of each ARC stream, in the format of the older scripts' stream manifest.

Units are not tied to streams; a stream is completed when all units with its samples are committed.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from tpufleet.errors import BadInput
from tpufleet.runtime.units import Claim, Commit, Units
from tpufleet_activations import plans
from tpufleet_activations.inputs import sources
from tpufleet_activations.io.storage import Storage
from tpufleet_migration.activations.arc.source import ArcSource


def stream_manifest(storage: Storage, data: str | None = None) -> dict[str, Any]:
    """The manifest of a dataset's streams. `data` overrides where they were when planned."""
    plan = plans.load(storage)
    described = {**plan.data, "path": data or plan.data.get("path")}
    source = sources.open_source(described) if described["kind"] == "arc" else None
    if not isinstance(source, ArcSource):
        raise BadInput(f"stream manifests need ARC data; this dataset has kind {plan.data['kind']}")
    units = Units(storage, count=plan.units, worker="reader")
    commits, claims = units.committed(), units.open_claims()
    streams, times = {}, []
    for number, (path, span) in enumerate(source.streams()):
        wanted = range(plan.unit_of(span[0]), plan.unit_of(span[-1]) + 1) if len(span) else range(0)
        done = [commits[unit] for unit in wanted if unit in commits]
        started: list[Claim | Commit] = [
            *done,
            *(claims[unit] for unit in wanted if unit in claims),
        ]
        completed = len(done) == len(wanted)
        times += [entry.at for entry in started]
        status = "in_progress" if started else "pending"
        streams[str(number)] = {
            "status": "completed" if completed else status,
            "dataset_path": str(path),
            "pod_id": max(started, key=lambda entry: entry.at).worker if started else None,
            "started_at": _time(min((entry.at for entry in started), default=None)),
            "completed_at": _time(max((c.at for c in done), default=None)) if completed else None,
        }
    return {
        "total_streams": len(streams),
        "dataset_dir": str(described["path"]),
        "created_at": _time(min(times, default=None)),
        "updated_at": _time(max(times, default=None)),
        "streams": streams,
    }


def _time(seconds: float | None) -> str | None:
    return None if seconds is None else datetime.fromtimestamp(seconds, UTC).isoformat()
