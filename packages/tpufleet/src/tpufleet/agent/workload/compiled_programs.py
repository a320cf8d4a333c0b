"""Where the attempts of a job find the programs that earlier ones compiled: JAX's own cache, in a
folder that outlives them. JAX writes it from process 0 and reads it in all processes."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

from tpufleet.agent.workload import attempt_folder
from tpufleet.agent.workload.containment import Containment
from tpufleet.model.fleet.agent_protocol import Assignment

FOLDER = "compiled"
KEPT_JOBS = 8  # on this host, where jobs have no folder that the server deletes with them


def variables(folder: Path) -> dict[str, str]:
    """Also for programs that compile fast: with many of them a start takes long."""
    return {
        "JAX_COMPILATION_CACHE_DIR": str(folder),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }


def open_folder(assignment: Assignment, work_dir: Path, containment: Containment) -> Path:
    """Of a simulated slice: beside the checkpoints, for all hosts. Elsewhere: of this host. Jobs
    that resume others have their checkpoints, and so their programs."""
    if (shared := containment.beside_checkpoint(assignment.checkpoint, FOLDER)) is not None:
        return shared
    lineage = re.sub(r"(/from-attempt-\d+)+/*$", "", assignment.checkpoint)
    name = hashlib.sha256(f"{assignment.owner}\n{lineage}".encode()).hexdigest()[:16]
    folder = work_dir / FOLDER / name
    folder.mkdir(parents=True, exist_ok=True)
    used = folder.parent / f"{name}.used"  # not in the folder: the job may change that
    used.touch()
    marks = sorted(folder.parent.glob("*.used"), key=lambda path: path.stat().st_mtime)
    for old in marks[:-KEPT_JOBS]:
        attempt_folder.delete_folders([old.with_suffix("")])
        old.unlink(missing_ok=True)
    return folder
