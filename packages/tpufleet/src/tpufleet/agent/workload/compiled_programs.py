"""Where the attempts of a job find the programs that earlier ones compiled: JAX's own cache, in a
folder that outlives them.

Only for jobs of one process. JAX writes programs from process 0 alone, so that in a gang whose
hosts share no disk the others would compile as before, and process 0 would wait for them in its
first collective, which has a timeout.
"""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

from tpufleet.agent.workload import attempt_folder
from tpufleet.agent.workload.containment import Containment
from tpufleet.model.fleet.agent_protocol import Assignment

FOLDER = "compiled"
DIRECTORY = "JAX_COMPILATION_CACHE_DIR"
KEPT_JOBS = 8  # on this host, where jobs have no folder that the server deletes with them


def applies_to(assignment: Assignment) -> bool:
    """A container sees no other folders of its host."""
    return assignment.num_processes == 1 and assignment.image is None


def variables(folder: Path) -> dict[str, str]:
    """Also for programs that compile fast: with many of them a start takes long."""
    return {
        DIRECTORY: str(folder),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }


def open_folder(assignment: Assignment, work_dir: Path, containment: Containment) -> Path:
    """On simulated slices one for all of them, elsewhere one on each host. Jobs that resume others
    have their checkpoints, and so their programs."""
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
