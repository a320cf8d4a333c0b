"""How far a workload is: what it writes to `progress.json`, and what its checkpoints show."""

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

LOOK_SECONDS = 0.5
# `120`, `step_120`, `run-a.checkpoint-120`, `ckpt120.npz`, `model_120`; not `v2`, `from-attempt-3`.
_STEP = re.compile(
    r"(?:(?:.*[_.-])?(?:step|checkpoint|ckpt)|model|params|state|weights)?[_.-]?(\d+)(?:\.[a-z]\w*)?"
)
_TEMPORARY = re.compile(r"^\.|tmp")


def step_from_name(name: str) -> int | None:
    """The step that the name of a finished checkpoint tells, if it looks like one."""
    if _TEMPORARY.search(name):
        return None
    match = _STEP.fullmatch(name)
    return int(match[1]) if match else None


class ProgressReader:
    """Looks only; runs in a thread of its own, since a network folder may hang."""

    def __init__(self, run_dir: Path, checkpoint: str, *, clock: Clock) -> None:
        self._file = run_dir / "progress.json"
        self._folder = Path(checkpoint) if checkpoint and "://" not in checkpoint else None
        self._clock = clock
        self._seen: tuple[int, int] | None = None
        self._told: Progress | None = None
        self._found: int | None = None
        self._found_at: datetime | None = None
        self._first_look = True
        self.latest: Progress | None = None

    def watch(self, ended: Event) -> None:
        while not ended.wait(LOOK_SECONDS):
            try:
                self.poll()
            except Exception:
                threads.log_exception("could not read the progress of the workload")
        self.poll()

    def poll(self) -> None:
        self._read_file()
        if self._told is None or self._told.checkpoint_step is None:
            self._read_folder()
        self.latest = self._merged()

    def _read_file(self) -> None:
        try:
            facts = self._file.stat()
        except FileNotFoundError:
            return
        seen = (facts.st_ino, facts.st_mtime_ns)
        if seen == self._seen:
            return
        self._seen = seen
        try:
            told = encoding.from_json(self._file.read_bytes(), Progress)
        except BadInput as error:
            threads.log(f"progress.json is not understood: {error}")
            return
        at = told.at or datetime.fromtimestamp(facts.st_mtime, UTC)
        self._told = replace(told, at=at if at.tzinfo else at.replace(tzinfo=UTC))

    def _read_folder(self) -> None:
        steps = (step_from_name(entry.name) for entry in self._entries())
        newest = max((step for step in steps if step is not None), default=None)
        if newest is not None and newest != self._found:
            # What lay there at the start is known, but is no progress of this attempt.
            self._found_at = None if self._first_look else self._clock.now()
            self._found = newest
        self._first_look = False

    def _entries(self) -> list[Path]:
        if self._folder is None:
            return []
        try:
            return list(self._folder.iterdir())
        except OSError:
            return []  # not there yet, or not for us to see

    def _merged(self) -> Progress | None:
        if self._told is None and self._found is None:
            return None
        told = self._told or Progress()
        if told.checkpoint_step is not None or self._found is None:
            return told
        moments = [moment for moment in (told.at, self._found_at) if moment]
        return replace(told, checkpoint_step=self._found, at=max(moments) if moments else None)
