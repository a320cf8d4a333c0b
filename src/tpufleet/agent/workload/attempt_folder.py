"""The folder of one attempt on this host: code, run files, logs. Never used twice."""

from __future__ import annotations

import hashlib
import re
import shutil
from collections.abc import Iterable
from pathlib import Path

from tpufleet.client import snapshots
from tpufleet.errors import BadInput
from tpufleet.model.attempts import AttemptId

_PLAIN = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,120}")
MEBIBYTE = 2**20
_MARK = ".attempt"  # only folders that hold it are ever deleted


class AttemptFolder:
    def __init__(self, work: Path, attempt_id: AttemptId) -> None:
        self.path = work / _name(attempt_id)
        self.code = self.path / "code"
        self.run = self.path / "run"
        self.logs = self.path / "logs"
        self.output = self.path / "output.log"
        self.stop_file = self.run / "stop"
        self.result = self.run / "result"  # what the program hands over, if it does

    def create(self) -> bool:
        """False: it is there already, so this attempt began here before."""
        try:
            self.path.mkdir(mode=0o700, parents=True)
        except FileExistsError:
            return False
        (self.path / _MARK).touch()
        for folder in (self.code, self.run, self.logs):
            folder.mkdir()
        return True

    def unpack(self, archive: Path) -> None:
        """Fill the code folder, and nothing outside it. Not with the filters of `tarfile`: the
        Python of Debian 12 has none."""
        try:
            with archive.open("rb") as packed:
                snapshots.unpack(packed, self.code)
        except (BadInput, OSError) as error:
            raise BadInput(f"the snapshot does not unpack: {error}") from error
        archive.unlink()


def other_attempt_folders(work: Path, keep: Path) -> list[Path]:
    """The folders of all attempts but one."""
    return [mark.parent for mark in work.glob(f"*/{_MARK}") if mark.parent != keep]


def delete_folders(folders: Iterable[Path]) -> None:
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)  # what stays is tried after the next attempt


def overused(folder: Path | None, limit: int) -> str:
    """In words, when more is in a folder than may be; else empty."""
    used = sum(_blocks(path) for path in folder.rglob("*")) if folder is not None else 0
    if folder is None or used <= limit:
        return ""
    return f"{folder} holds {used / MEBIBYTE:.0f} MiB, and may hold {limit / MEBIBYTE:.0f} MiB"


def _blocks(path: Path) -> int:
    """Bytes on disk."""
    try:
        return path.lstat().st_blocks * 512
    except OSError:  # gone, or not ours to look at
        return 0


def _name(attempt_id: AttemptId) -> str:
    """The id itself where that is a harmless file name."""
    if _PLAIN.fullmatch(attempt_id):
        return attempt_id
    return "attempt-" + hashlib.sha256(attempt_id.encode()).hexdigest()[:32]
