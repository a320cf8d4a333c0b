"""Job documents for a fleet of extraction workers over zones: what `tpu submit` takes.

All workers share one dataset and one queue of units, so no zone has a share of its own that must
wait for it, and a worker that is lost costs at most the unit it was doing.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tpufleet.errors import BadInput

# Former names of accelerators that the TPU API spells differently.
SPELLINGS = {"v5e": "v5litepod"}


def worker_name(zone: str, number: int) -> str:
    """`tpu-us-central1-a-0`: numbers start again in each zone."""
    return f"tpu-{zone}-{number}"


def jobs(
    out: str,
    *,
    zones: Sequence[str],
    workers_per_zone: int,
    accelerator: str,
    stream_offset: int = 0,
    capacity: Sequence[str] = ("spot",),
    run_options: Sequence[str] = (),
    pool: str | None = None,
) -> list[dict[str, Any]]:
    """One job for each worker. `stream_offset` is where the workers' running numbers begin."""
    if "://" not in out:
        raise BadInput(f"{out} is a folder of this machine; a fleet needs gs://… or s3://…")
    if not zones or workers_per_zone < 1:
        raise BadInput("name at least one zone and one worker a zone")
    if len(set(zones)) != len(zones):
        raise BadInput("a zone is named twice; raise --workers-per-zone instead")
    kind, dash, size = accelerator.rpartition("-")
    accelerator = f"{SPELLINGS.get(kind, kind)}{dash}{size}"
    found = []
    for place, zone in enumerate(zones):
        for number in range(workers_per_zone):
            running = stream_offset + place * workers_per_zone + number
            found.append(
                {
                    "name": worker_name(zone, number),
                    "command": ["tpu", "extract", "run", out, *run_options],
                    "accelerator": accelerator,
                    "zones": [zone],
                    "capacity": list(capacity),
                    "tags": ["extract", f"stream_{running:03d}"],
                    **({"pool": pool} if pool else {}),
                }
            )
    return found


def documents(found: Iterable[Mapping[str, Any]]) -> str:
    """A job file of several documents. JSON is YAML, and quotes what must be quoted."""
    return "".join(f"---\n{json.dumps(job, indent=2)}\n" for job in found)
