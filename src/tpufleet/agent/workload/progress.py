"""Progress of a workload: read from `progress.json`, or inferred from its checkpoint names."""

from __future__ import annotations

import re
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from threading import Event

from tpufleet.agent import threads
from tpufleet.clocks import Clock
from tpufleet.errors import BadInput
from tpufleet.model import encoding
from tpufleet.model.hosts import Progress

POLL_SECONDS = 0.5
# `120`, `step_120`, `run-a.checkpoint-120`, `ckpt120.npz`, `model_120`; not `v2`, `from-attempt-3`.
_STEP = re.compile(
    r"(?:(?:.*[_.-])?(?:step|checkpoint|ckpt)|model|params|state|weights)?[_.-]?(\d+)(?:\.[a-z]\w*)?"
)
_TEMPORARY = re.compile(r"^\.|tmp")


def step_from_name(name: str) -> int | None:
    """The step in the name of a finished checkpoint; None when it does not look like one."""
    if _TEMPORARY.search(name):
        return None
    match = _STEP.fullmatch(name)
    return int(match[1]) if match else None


class ProgressReader:
    """Reads only. Runs in its own thread, since a network folder may hang."""

    def __init__(self, run_dir: Path, checkpoint: str, *, clock: Clock) -> None:
        self._file = run_dir / "progress.json"
        self._folder = Path(checkpoint) if checkpoint and "://" not in checkpoint else None
        self._clock = clock
        self._file_version: tuple[int, int] | None = None
        self._reported: Progress | None = None
        self._checkpoint_step: int | None = None
        self._checkpoint_at: datetime | None = None
        self._first_poll = True
        self.latest: Progress | None = None

    def watch(self, ended: Event) -> None:
        while not ended.wait(POLL_SECONDS):
            try:
                self.poll()
            except Exception:
                threads.log_exception("unexpected error while reading progress; continuing")
        self.poll()

    def poll(self) -> None:
        self._read_file()
        if self._reported is None or self._reported.checkpoint_step is None:
            self._read_folder()
        self.latest = self._merged()

    def _read_file(self) -> None:
        try:
            status = self._file.stat()
        except FileNotFoundError:
            return
        version = (status.st_ino, status.st_mtime_ns)
        if version == self._file_version:
            return
        self._file_version = version
        try:
            reported = encoding.from_json(self._file.read_bytes(), Progress)
        except BadInput as error:
            threads.log(f"ignoring progress.json: {error}")
            return
        at = reported.at or datetime.fromtimestamp(status.st_mtime, UTC)
        self._reported = replace(reported, at=at if at.tzinfo else at.replace(tzinfo=UTC))

    def _read_folder(self) -> None:
        steps = (step_from_name(entry.name) for entry in self._entries())
        newest = max((step for step in steps if step is not None), default=None)
        if newest is not None and newest != self._checkpoint_step:
            # A checkpoint that existed at the start is known, but is no progress of this attempt.
            self._checkpoint_at = None if self._first_poll else self._clock.now()
            self._checkpoint_step = newest
        self._first_poll = False

    def _entries(self) -> list[Path]:
        if self._folder is None:
            return []
        try:
            return list(self._folder.iterdir())
        except OSError:
            return []  # does not exist yet, or is not readable

    def _merged(self) -> Progress | None:
        if self._reported is None and self._checkpoint_step is None:
            return None
        reported = self._reported or Progress()
        if reported.checkpoint_step is not None or self._checkpoint_step is None:
            return reported
        times = [at for at in (reported.at, self._checkpoint_at) if at]
        return replace(
            reported,
            checkpoint_step=self._checkpoint_step,
            at=max(times) if times else None,
        )
