"""Folders on the host that outlive an attempt: the next one of the job finds them. So do jobs that
resume others, which have their checkpoints."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

from tpufleet.agent.workload import attempt_folder
from tpufleet.model.fleet.agent_protocol import Assignment

# What programs keep on the disk of their host, such as emergency checkpoints: of one job, since
# they are large.
LOCAL, LOCAL_VARIABLE = "local", "TPUFLEET_LOCAL_DIR"


def open_folder(assignment: Assignment, parent: Path, kept: int = 1) -> Path:
    """`kept`: of so many jobs; those of others are deleted."""
    lineage = f"{assignment.owner}\n{location(assignment)}"
    name = hashlib.sha256(lineage.encode()).hexdigest()[:16]
    folder = parent / name
    folder.mkdir(parents=True, exist_ok=True)
    used = parent / f"{name}.used"  # not in the folder: the job may change that
    used.touch()
    marks = sorted(parent.glob("*.used"), key=lambda path: path.stat().st_mtime)
    for old in marks[:-kept]:
        attempt_folder.delete_folders([old.with_suffix("")])
        old.unlink(missing_ok=True)
    return folder


def location(assignment: Assignment) -> str:
    """Of the checkpoints, those of attempts that started over too."""
    return re.sub(r"(/from-attempt-\d+)+/*$", "", assignment.checkpoint).rstrip("/")
