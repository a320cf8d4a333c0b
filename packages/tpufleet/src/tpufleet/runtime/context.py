"""The identity of this process in its job, from the environment, with defaults outside tpufleet."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tpufleet.errors import BadInput


@dataclass(frozen=True, kw_only=True, slots=True)
class Context:
    """Outside tpufleet: process 0 of 1, with checkpoints in ./checkpoints."""

    process_id: int = 0
    num_processes: int = 1
    local_process_id: int = 0  # among those of this host
    coordinator_address: str | None = None
    job_id: str = "alone"
    attempt: int = 0
    slice_index: int = 0
    num_slices: int = 1
    max_slices: int = 1  # that the job asks for; an elastic one may run on fewer
    accelerator: str = ""
    chips: int = 0  # of this process; 0: unknown
    checkpoint_dir: str = "checkpoints"  # a folder that all processes share, or an object store
    log_dir: Path = Path("logs")
    local_dir: Path | None = None  # on this host; the next attempt of the job there finds it
    run_dir: Path | None = None  # None outside tpufleet: no progress, no stop file

    @property
    def alone(self) -> bool:
        return self.run_dir is None


def context(environ: Mapping[str, str] | None = None) -> Context:
    """The context of this process."""
    environ = os.environ if environ is None else environ
    run_dir, local_dir = environ.get("TPUFLEET_RUN_DIR"), environ.get("TPUFLEET_LOCAL_DIR")
    num_slices = whole_number(environ, "MEGASCALE_NUM_SLICES", 1)
    here = Context(
        process_id=whole_number(environ, "TPUFLEET_PROCESS_ID", 0),
        num_processes=whole_number(environ, "TPUFLEET_NUM_PROCESSES", 1),
        local_process_id=whole_number(environ, "TPUFLEET_LOCAL_PROCESS_ID", 0),
        coordinator_address=environ.get("TPUFLEET_COORDINATOR_ADDRESS") or None,
        job_id=environ.get("TPUFLEET_JOB_ID", "alone"),
        attempt=whole_number(environ, "TPUFLEET_ATTEMPT", 0),
        slice_index=whole_number(environ, "MEGASCALE_SLICE_ID", 0),
        num_slices=num_slices,
        max_slices=max(num_slices, whole_number(environ, "TPUFLEET_MAX_SLICES", 1)),
        accelerator=environ.get("TPUFLEET_ACCELERATOR", ""),
        chips=whole_number(environ, "TPUFLEET_CHIPS", 0),
        checkpoint_dir=environ.get("TPUFLEET_CHECKPOINT_DIR") or os.path.abspath("checkpoints"),
        log_dir=Path(environ.get("TPUFLEET_LOG_DIR") or "logs"),
        local_dir=Path(local_dir) if local_dir else None,
        run_dir=Path(run_dir) if run_dir else None,
    )
    if here.process_id >= here.num_processes:
        raise BadInput(
            f"TPUFLEET_PROCESS_ID is {here.process_id}, "
            f"but TPUFLEET_NUM_PROCESSES is {here.num_processes}; ids start at 0"
        )
    return here


def whole_number(environ: Mapping[str, str], name: str, default: int = 0) -> int:
    value = environ.get(name, "")
    if not value:
        return default
    if not value.isdecimal():
        raise BadInput(f"{name} must be a whole number, not {value!r}")
    return int(value)
