"""The folder of one attempt on this host: code, run files, logs. Never used twice. And folders that
outlive it: the next attempt of the job finds them."""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import IO

from tpufleet import deep_folders
from tpufleet.agent import threads
from tpufleet.agent.workload import untrusted_files
from tpufleet.client import snapshots
from tpufleet.errors import BadInput
from tpufleet.model.fleet.agent_protocol import Assignment
from tpufleet.model.job.attempts import AttemptId

MEBIBYTE = 2**20
STOP_FILE, PEER_GONE_FILE = "run/stop", "run/peer-gone"  # read by `tpufleet.runtime`
SAVING_PREFIX = "saving."  # of files in `run`, of processes that write a checkpoint
TOKEN_FILE, CERTIFICATES_FILE = "run/token", "run/ca.pem"
# What programs keep on the disk of their host, such as emergency checkpoints: of one job, since
# they are large.
LOCAL, LOCAL_VARIABLE = "local", "TPUFLEET_LOCAL_DIR"
_SAFE_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,120}")
_MARKER = ".attempt"  # only folders that contain it are ever deleted


class AttemptFolder:
    def __init__(self, work_dir: Path, attempt_id: AttemptId) -> None:
        self.path = work_dir / _folder_name(attempt_id)
        self.code = self.path / "code"
        self.run = self.path / "run"
        self.logs = self.path / "logs"
        self.output = self.path / "output.log"
        self.token = self.path / TOKEN_FILE
        self.certificates = self.path / CERTIFICATES_FILE

    def create(self) -> bool:
        """False when it exists already: this attempt was started on this host before."""
        try:
            self.path.mkdir(mode=0o700, parents=True)
        except FileExistsError:
            return False
        (self.path / _MARKER).touch()
        for folder in (self.code, self.run, self.logs):
            folder.mkdir()
        return True

    def write_credentials(self, token: str, certificates: str) -> None:
        """For the processes of the attempt, before any of them runs. `certificates` are those that
        the server is recognised by, besides the system's."""
        for path, content in ((self.token, token), (self.certificates, certificates)):
            if content:
                flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
                with os.fdopen(os.open(path, flags, 0o600), "w") as file:
                    file.write(content + "\n")

    def write_stop_file(self, name: str = STOP_FILE) -> None:
        """The program may have replaced or removed its folders; then it gets signals only."""
        try:
            flags = os.O_WRONLY | os.O_CREAT | os.O_NONBLOCK
            os.close(untrusted_files.open_below(self.path, name, flags, 0o644))
        except OSError as error:
            threads.log(f"cannot write {self.path / name}: {error.strerror}")

    def is_saving(self) -> bool:
        """Whether a process says that it writes a checkpoint."""
        try:
            names = untrusted_files.list_named_by_job(self.run)
        except OSError:
            return False
        return any(name.startswith(SAVING_PREFIX) and self._is_locked(name) for name in names)

    def _is_locked(self, name: str) -> bool:
        """By its process. What a process left that was killed is not."""
        try:
            descriptor = untrusted_files.open_below(self.run, name, untrusted_files.READ_FLAGS)
        except OSError:
            return False
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        except OSError:
            return False
        finally:
            os.close(descriptor)
        return False

    def unpack(self, archive: IO[bytes]) -> None:
        """Extract into the code folder, and nothing outside it. Does not use the extraction filters
        of `tarfile`: the Python of Debian 12 has none."""
        try:
            archive.seek(0)
            snapshots.unpack(archive, self.code)
        except (BadInput, OSError) as error:
            raise BadInput(f"cannot unpack the snapshot: {error}") from error


def other_attempt_folders(work_dir: Path, keep: Path) -> list[Path]:
    """The folders of all attempts but one."""
    return [marker.parent for marker in work_dir.glob(f"*/{_MARKER}") if marker.parent != keep]


def delete_folders(folders: Iterable[Path]) -> None:
    for folder in folders:
        try:
            deep_folders.delete(folder)
        except OSError as error:  # deleted after the next attempt
            threads.log(f"cannot delete {folder}: {error.strerror}")


def lineage_folder(assignment: Assignment, parent: Path, kept: int = 1) -> Path:
    """Of a job, and of those that resume it, which have its checkpoints. `kept`: of so many jobs;
    those of others are deleted."""
    lineage = f"{assignment.owner}\n{lineage_location(assignment)}"
    name = hashlib.sha256(lineage.encode()).hexdigest()[:16]
    folder = parent / name
    folder.mkdir(parents=True, exist_ok=True)
    used = parent / f"{name}.used"  # not in the folder: the job may change that
    used.touch()
    marks = sorted(parent.glob("*.used"), key=lambda path: path.stat().st_mtime)
    for old in marks[:-kept]:
        delete_folders([old.with_suffix("")])
        old.unlink(missing_ok=True)
    return folder


def lineage_location(assignment: Assignment) -> str:
    """Of the checkpoints, those of attempts that started over too."""
    return re.sub(r"(/from-attempt-\d+)+/*$", "", assignment.checkpoint).rstrip("/")


def over_limit(folder: Path, limit_bytes: int) -> str | None:
    """A message when the folder uses more disk than the limit, else None."""
    used = deep_folders.disk_usage(folder.resolve())
    if used <= limit_bytes:
        return None
    return (
        f"{folder} uses {used / MEBIBYTE:.0f} MiB, more than its limit of "
        f"{limit_bytes / MEBIBYTE:.0f} MiB"
    )


def _folder_name(attempt_id: AttemptId) -> str:
    """The id itself where that is a safe file name."""
    if _SAFE_NAME.fullmatch(attempt_id):
        return attempt_id
    return "attempt-" + hashlib.sha256(attempt_id.encode()).hexdigest()[:32]
