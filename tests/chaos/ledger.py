"""What the counting program wrote down, and what must be true of it."""

from __future__ import annotations

import fcntl
import hashlib
import itertools
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tpufleet.runtime.object_store import FolderStore
from tpufleet.runtime.units import Units


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """One process of one attempt, as it saw itself."""

    attempt: int
    process: int
    notes: tuple[dict, ...]

    def of(self, kind: str) -> list[dict]:
        return [note for note in self.notes if note["kind"] == kind]

    @property
    def began(self) -> float:
        return self.notes[0]["at"]

    @property
    def last(self) -> float:
        return self.notes[-1]["at"]

    @property
    def lines(self) -> int:
        """How many lines it surely wrote to its output."""
        return max((note.get("lines", 0) for note in self.notes), default=0)


def read(folder: Path) -> list[Run]:
    """Every process that ever began, by attempt and process."""
    runs = []
    for path in folder.glob("*.jsonl"):
        attempt, process = path.name.split(".")[:2]
        notes = tuple(json.loads(line) for line in path.read_text().splitlines())
        if notes:
            runs.append(Run(attempt=int(attempt), process=int(process), notes=notes))
    return sorted(runs, key=lambda run: (run.attempt, run.process))


def violations(runs: Sequence[Run], folder: Path, *, steps: int, processes: int) -> Iterator[str]:
    """Whatever is wrong, in words."""
    yield from _of_single_runs(runs)
    yield from _overlaps(runs)
    yield from _repeated_work(runs)
    yield from _missing_work(runs, folder, steps, processes)


def _of_single_runs(runs: Sequence[Run]) -> Iterator[str]:
    for run in runs:
        who = f"process {run.process} of attempt {run.attempt}"
        if len(run.of("start")) != 1 or len({note["pid"] for note in run.notes}) != 1:
            yield f"{who} ran more than once: {run.of('start')}"
        after = run.notes[0].get("after", -1)
        numbers = [note["step"] for note in run.of("step")]
        if numbers != list(range(after + 1, after + 1 + len(numbers))):
            yield f"{who} went on from step {after} with {numbers}"
        for note in run.notes:
            if note.get("others"):
                yield f"{who} ran while {note['others']} lived, at {note['at']:.3f}"


def _overlaps(runs: Sequence[Run]) -> Iterator[str]:
    spans: dict[int, tuple[float, float]] = {}
    for run in runs:
        began, last = spans.get(run.attempt, (run.began, run.last))
        spans[run.attempt] = (min(began, run.began), max(last, run.last))
    ordered = sorted(spans.items())
    for (one, (_, last)), (other, (began, _)) in itertools.pairwise(ordered):
        if began <= last:
            yield f"attempt {other} began {last - began:.3f} s before the last sign of {one}"


def _repeated_work(runs: Sequence[Run]) -> Iterator[str]:
    """Only steps after the last checkpoint may be done again."""
    saved: dict[int, int] = {}  # attempt → newest step that a process knows to be committed
    for run in runs:
        for note in run.of("saved"):
            saved[run.attempt] = max(saved.get(run.attempt, -1), note["step"])
    for run in runs:
        known = max((step for number, step in saved.items() if number < run.attempt), default=-1)
        after = run.notes[0].get("after", -1)
        if after < known:
            yield f"attempt {run.attempt} went on from step {after}; step {known} was saved before"


def _missing_work(runs: Sequence[Run], folder: Path, steps: int, processes: int) -> Iterator[str]:
    last = max((run.attempt for run in runs), default=0)
    for process in range(processes):
        done = {note["step"] for run in runs if run.process == process for note in run.of("step")}
        if missing := sorted(set(range(steps)) - done):
            yield f"process {process} never did the steps {missing}"
        ending = [run for run in runs if (run.attempt, run.process) == (last, process)]
        if not any(run.of("finished") for run in ending):
            yield f"process {process} did not finish in the last attempt, {last}"
        path = folder / f"result.{process}"
        result = json.loads(path.read_text()) if path.exists() else None
        if result is None or result["state"] != digest_after(steps, process):
            yield f"process {process} has the result {result}"


def unit_violations(runs: Sequence[Run], folder: Path, *, units: int) -> Iterator[str]:
    """Every unit is committed, and by one process only."""
    yield from _overlaps(runs)
    for run in runs:
        for note in run.notes:
            if note.get("others"):
                yield f"attempt {run.attempt} ran while {note['others']} lived"
    commits = Counter(note["unit"] for run in runs for note in run.of("committed"))
    if twice := {unit: times for unit, times in commits.items() if times > 1}:
        yield f"these units were committed more than once: {twice}"
    committed = Units(FolderStore(folder / "units"), count=units, worker="reader").committed()
    if missing := sorted(set(range(units)) - set(committed)):
        yield f"these units were never committed: {missing}"


def cancelled_violations(runs: Sequence[Run], ended_at: float) -> Iterator[str]:
    """Nothing begins once the job is known to have ended, and attempts never overlap."""
    yield from _of_single_runs(runs)
    yield from _overlaps(runs)
    yield from _repeated_work(runs)
    for run in runs:
        if run.began > ended_at:
            late = run.began - ended_at
            yield f"process {run.process} of attempt {run.attempt} began {late:.1f} s after the end"


def alive(folder: Path) -> list[str]:
    """Processes of any attempt that live at this moment, with all that they have forked."""
    names = []
    for path in folder.glob("*.alive"):
        with path.open("rb") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                names.append(f"{folder.name}/{path.name}")
    return names


def digest_after(steps: int, process: int) -> str:
    """What the counting program comes to when it does every step once and in order."""
    state = ""
    for step in range(steps):
        state = hashlib.sha256(f"{state}:{process}:{step}".encode()).hexdigest()
    return state


def log_violation(text: bytes, run: Run, *, whole: bool) -> str | None:
    """Why a log is not what the program wrote; `whole`: its very end must be there too."""
    me = f"{run.attempt}.{run.process}"
    *lines, rest = text.split(b"\n")
    # Not what the agent and Python say, such as an error when the disk is full.
    own = [line + b"\n" for line in lines if line.startswith(f"{me} line ".encode())]
    cut_off = rest if rest.startswith(f"{me} l".encode()) else b""
    written = b"".join(own) + cut_off
    # One step more may have been written than was noted down.
    expected = b"".join(line_of(me, number) for number in range(1, run.lines + 100))
    if not expected.startswith(written):
        pairs = enumerate(zip(written, expected, strict=False))
        same = next((at for at, (one, other) in pairs if one != other), len(expected))
        return f"differs at byte {same}: {written[max(0, same - 100) : same + 200]!r}"
    least = sum(len(line_of(me, number)) for number in range(1, run.lines + 1))
    if whole and len(written) < least:
        return f"holds {len(written)} of at least {least} bytes"
    return None


def line_of(me: str, number: int) -> bytes:
    digest = hashlib.sha256(f"{me}:{number}".encode()).hexdigest()
    return f"{me} line {number} {digest}\n".encode()
