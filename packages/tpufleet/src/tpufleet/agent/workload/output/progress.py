"""Progress of a workload: read from `progress.json`, or inferred from its checkpoint names."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from threading import Event

from tpufleet.agent import threads
from tpufleet.agent.workload import untrusted_files
from tpufleet.agent.workload.output.log_metrics import LogMetrics
from tpufleet.clocks import Clock
from tpufleet.errors import BadInput, FleetError
from tpufleet.model.fleet.hosts import (
    MAX_HEARTBEAT_POINTS,
    MAX_RECENT_POINTS,
    ProgramTimings,
    Progress,
    ProgressFile,
    ProgressPoint,
)
from tpufleet.model.values import encoding
from tpufleet.model.values.bounds import MAX_NUMBER
from tpufleet.model.values.redaction import Redactor
from tpufleet.runtime import gcs
from tpufleet.runtime.gcs import Bucket

PROGRESS_FILE = "run/progress.json"
MAX_KEPT_POINTS = 500  # while the server cannot be reached
MAX_PROGRESS_BYTES = 64 * 1024
POLL_SECONDS = 0.5
MIN_SPACING = timedelta(microseconds=1)  # two points have two times
STEP_NAMES = ("step", "total")  # patterns of these names are no metrics
BUCKET_POLL_SECONDS = 30.0  # each poll costs a few requests
# Deep enough for `runs/a/checkpoints/120`, and bounded for folders that hold more than checkpoints.
MAX_DEPTH = 5
MAX_FOLDERS = 200
# Orbax writes the first at the start and, where a rename is not atomic, the second at the end.
ORBAX_METADATA, ORBAX_COMMIT = "_CHECKPOINT_METADATA", "commit_success.txt"
# `120`, `step_120`, `run-a.checkpoint-120`, `ckpt120.npz`, `model_120`; not `v2`, `from-attempt-3`.
_STEP = re.compile(
    r"(?:(?:.*[_.-])?(?:step|checkpoint|ckpt)|model|params|state|weights)?[_.-]?(\d+)(?:\.[a-z]\w*)?"
)
_TEMPORARY = re.compile(r"^\.|tmp")


def step_from_name(name: str) -> int | None:
    """The step in the name of a finished checkpoint; None when it does not look like one, or when
    the number is larger than any that is reported."""
    if _TEMPORARY.search(name):
        return None
    match = _STEP.fullmatch(name)
    if match is None or len(match[1].lstrip("0")) > len(str(MAX_NUMBER)):
        return None  # Python refuses to convert thousands of digits
    return _bounded(int(match[1]))


ListFolder = Callable[[Path], list[str]]


# Names in a folder below the checkpoint location; those of folders end with a slash. Empty when
# there is no such folder.
Entries = Callable[[str], list[str]]


def newest_step(entries: Entries, *, atomic_rename: bool) -> int | None:
    """The newest complete checkpoint at any depth, in plain and in Orbax layouts. The inside of a
    checkpoint is not searched: it holds chunks with numbers as names. `atomic_rename`: a checkpoint
    appears under its name only when it is complete."""

    def is_complete(path: str) -> bool:
        if atomic_rename or not path.endswith("/"):
            return True
        names = entries(path)
        return ORBAX_METADATA not in names or ORBAX_COMMIT in names

    newest: int | None = None
    queue = deque([("", 0)])
    for _ in range(MAX_FOLDERS):
        if not queue:
            break
        path, depth = queue.popleft()
        steps: dict[int, str] = {}
        for name in entries(path):
            step = step_from_name(name.rstrip("/"))
            if step is not None:
                steps[step] = name
            elif name.endswith("/") and depth < MAX_DEPTH and not _TEMPORARY.search(name):
                queue.append((path + name, depth + 1))
        for step in sorted(steps, reverse=True):
            if newest is not None and step <= newest:
                break
            if is_complete(path + steps[step]):
                newest = step
                break
    return newest


class ProgressReader:
    """Reads only. Runs in its own thread, since a network folder may hang."""

    def __init__(
        self,
        attempt_folder: Path,
        checkpoint: str,
        *,
        clock: Clock,
        open_bucket: Callable[[str], Bucket] = Bucket,
        log_metrics: LogMetrics | None = None,
        list_folder: ListFolder = untrusted_files.list_named_by_job,
        last_step: int | None = None,
        log_size: Callable[[], int] = lambda: 0,
    ) -> None:
        """`list_folder` lists what the job may list: the agent may have more rights. `last_step`:
        of earlier attempts."""
        self._last_step = last_step
        self._timings = ProgramTimings()
        self.first: ProgressPoint | None = None  # the first step
        self.timings_at_first = self._timings
        self.advanced_at: datetime | None = None  # beyond the steps of earlier attempts
        self._log_size = log_size
        self._known_log_size = 0
        self._output_at: datetime | None = None
        self._log_metrics = log_metrics
        self._log_metrics_at: datetime | None = None
        self._logged_at: datetime | None = None  # of the last poll
        self._logged_step: float | None = None
        self._attempt_folder = attempt_folder
        self._in_bucket = checkpoint.startswith(gcs.SCHEME)
        self._entries: Entries | None = None
        if self._in_bucket:
            self._entries = open_bucket(checkpoint).entries
        elif checkpoint and "://" not in checkpoint:
            self._entries = lambda path: _list(list_folder, Path(checkpoint, path))
        self._redactor = Redactor(())
        self._clock = clock
        self._next_folder_poll: datetime | None = None
        self._file_version: tuple[int, int, int] | None = None
        self._file_error = ""
        self._reported: Progress | None = None
        self._checkpoint_step: int | None = None
        self._checkpoint_at: datetime | None = None
        self._first_poll = True
        self._points: deque[ProgressPoint] = deque(maxlen=MAX_KEPT_POINTS)
        self.latest: Progress | None = None
        self.checkpoint_at_start: int | None = None

    def watch(self, ended: Event) -> None:
        while not ended.wait(POLL_SECONDS):
            try:
                self.poll()
            except Exception:
                threads.log_exception("unexpected error while reading progress; continuing")
        try:
            self.poll(last=True)
        finally:
            if self._log_metrics is not None:
                self._log_metrics.close()
            self._redactor = Redactor(())  # keeps no secrets after the attempt

    def redact(self, redactor: Redactor) -> None:
        """Apply it to what is read from now on."""
        self._redactor = redactor

    def poll(self, *, last: bool = False) -> None:
        self._read_file()
        if self._reported is None or self._reported.checkpoint_step is None:
            self._read_folder(last)
        if self._log_metrics is not None and self._log_metrics.poll():
            self._log_metrics_at = self._clock.now()
        latest = self._with_log_metrics(self._merged())
        if (size := self._log_size()) != self._known_log_size:
            self._known_log_size, self._output_at = size, self._clock.now()
        if self._output_at is not None:
            latest = replace(latest or Progress(), output_at=self._output_at)
        self.latest = latest
        logged = self._log_metrics.take_points(last=last) if self._log_metrics is not None else []
        own = self._reported or Progress()
        if self._log_metrics_at is not None and own.step is None and not own.metrics:
            self._add_logged(logged)
        elif latest is not None and latest.at is not None:
            self._add_point(ProgressPoint(at=latest.at, step=latest.step, metrics=latest.metrics))

    def _add_logged(self, logged: list[dict[str, float]]) -> None:
        """Lines have no time: those that were found together are spread over the time since the
        last poll."""
        now = self._clock.now()
        before = self._points[-1].at if self._points else now - MIN_SPACING * len(logged)
        before = max(before, min(self._logged_at or before, now))
        spacing = max((now - before) / max(len(logged), 1), MIN_SPACING)
        for number, values in enumerate(logged, 1):
            metrics = {name: value for name, value in values.items() if name not in STEP_NAMES}
            self._logged_step = values.get("step", self._logged_step)
            at = before + number * spacing
            self._add_point(
                ProgressPoint(at=at, step=_whole(self._logged_step), metrics=metrics or None)
            )
        self._logged_at = now

    def points_after(self, moment: datetime | None) -> tuple[ProgressPoint, ...]:
        """What was reported after this, thinned. Safe from any thread."""
        points = [each for each in tuple(self._points) if moment is None or each.at > moment]
        while len(points) > MAX_HEARTBEAT_POINTS:
            points = points[:-1:2] + points[-1:]
        return tuple(points)

    def _add_point(self, point: ProgressPoint) -> None:
        if point.step is None and not point.metrics:
            return
        last = self._points[-1] if self._points else None
        if last is not None and point.at <= last.at:
            return
        self._points.append(point)
        # Programs may report where they start; the first step comes after that.
        if point.step in (None, 0, self._last_step, self.checkpoint_at_start):
            return
        if self.first is None:
            self.first, self.timings_at_first = point, self._timings
        if self.advanced_at is None and (self._last_step is None or point.step > self._last_step):
            self.advanced_at = point.at

    def _read_file(self) -> None:
        try:
            status, data = untrusted_files.read_below(
                self._attempt_folder, PROGRESS_FILE, MAX_PROGRESS_BYTES
            )
        except FileNotFoundError:
            return
        except OSError as error:
            self._ignore_file(str(error.strerror))
            return
        version = (status.st_ino, status.st_mtime_ns, status.st_size)
        if version == self._file_version:
            return
        self._file_version = version
        try:
            file = encoding.from_json(data, ProgressFile)
        except BadInput as error:
            self._ignore_file(str(error))
            return
        self._file_error = ""
        self._timings = file.timings
        at = _utc(file.at or datetime.fromtimestamp(status.st_mtime, UTC))
        self._reported = replace(
            file.latest,
            step=_bounded(file.step),
            total=_bounded(file.total),
            checkpoint_step=_bounded(file.checkpoint_step),
            at=at,
            message=self._redactor.text(file.message),
            metrics=self._redacted(file.metrics),
        )
        for point in file.recent[-MAX_RECENT_POINTS:]:
            self._add_point(
                ProgressPoint(
                    at=_utc(point.at),
                    step=_bounded(point.step),
                    metrics=self._redacted(point.metrics),
                )
            )

    def _redacted(self, metrics: dict[str, float] | None) -> dict[str, float] | None:
        if metrics is None:
            return None
        return {self._redactor.text(name): value for name, value in metrics.items()}

    def _ignore_file(self, error: str) -> None:
        if error != self._file_error:  # it is read twice a second
            threads.log(f"ignoring progress.json: {self._redactor.text(error)}")
            self._file_error = error

    def _read_folder(self, last: bool) -> None:
        now = self._clock.now()
        if self._entries is None or not (last or self._folder_is_due(now)):
            return
        try:
            newest = newest_step(self._entries, atomic_rename=not self._in_bucket)
        except FleetError as error:
            threads.log(f"cannot list the checkpoints; progress is unknown: {error}")
            return
        if newest is not None and newest != self._checkpoint_step:
            # A checkpoint that existed at the start is known, but is no progress of this attempt.
            self._checkpoint_at = None if self._first_poll else now
            self._checkpoint_step = newest
        if self._first_poll:
            self.checkpoint_at_start = newest
        self._first_poll = False

    def _folder_is_due(self, now: datetime) -> bool:
        if not self._in_bucket:
            return True
        if self._next_folder_poll is not None and now < self._next_folder_poll:
            return False
        self._next_folder_poll = now + timedelta(seconds=BUCKET_POLL_SECONDS)
        return True

    def _with_log_metrics(self, progress: Progress | None) -> Progress | None:
        """What the program reports itself takes precedence."""
        if self._log_metrics is None or self._log_metrics_at is None:
            return progress
        values = dict(self._log_metrics.values)
        step, total = (values.pop(name, None) for name in STEP_NAMES)
        reported = progress or Progress()
        times = [at for at in (reported.at, self._log_metrics_at) if at]
        return replace(
            reported,
            step=_whole(step) if reported.step is None else reported.step,
            total=_whole(total) if reported.total is None else reported.total,
            at=max(times),
            metrics={**values, **(reported.metrics or {})} or None,
        )

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


def _list(list_folder: ListFolder, path: Path) -> list[str]:
    try:
        return list_folder(path)
    except OSError:
        return []  # does not exist yet, or the job may not read it


def _utc(moment: datetime) -> datetime:
    return moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)


def _bounded(number: int | None) -> int | None:
    return number if number is not None and abs(number) <= MAX_NUMBER else None


def _whole(number: float | None) -> int | None:
    return int(number) if number is not None and 0 <= number <= MAX_NUMBER else None
