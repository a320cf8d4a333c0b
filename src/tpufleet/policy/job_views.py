"""What a step reads and what it writes: a job with all that belongs to it, and what changes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime

from tpufleet.model.attempts import Attempt
from tpufleet.model.events import Event
from tpufleet.model.hosts import Host, Progress
from tpufleet.model.jobs import Job
from tpufleet.model.slices import SliceId, SliceState, TpuSlice

USABLE_STATES = frozenset({SliceState.REQUESTED, SliceState.BOOTING, SliceState.READY})


@dataclass(frozen=True, kw_only=True, slots=True)
class JobView:
    """A job and all that belongs to it."""

    job: Job
    attempts: tuple[Attempt, ...] = ()
    slices: Mapping[SliceId, TpuSlice] = field(default_factory=dict)  # held, or of its attempt
    hosts: Mapping[SliceId, tuple[Host, ...]] = field(default_factory=dict)
    progress: Progress | None = None  # newest of the live attempt

    @property
    def attempt(self) -> Attempt | None:
        return self.attempts[-1] if self.attempts and self.attempts[-1].live else None

    @property
    def usable_slices(self) -> tuple[TpuSlice, ...]:
        """Slices held by the job that work, or will."""
        return tuple(
            tpu_slice
            for tpu_slice in self.slices.values()
            if tpu_slice.job_id == self.job.id and tpu_slice.state in USABLE_STATES
        )

    def slices_of(self, attempt: Attempt) -> list[TpuSlice]:
        return [self.slices[slice_id] for slice_id in attempt.slices if slice_id in self.slices]

    def hosts_of(self, attempt: Attempt) -> list[Host]:
        return [host for slice_id in attempt.slices for host in self.hosts.get(slice_id, ())]


@dataclass(kw_only=True, slots=True)
class Step:
    """What changes, and when to look again."""

    job: Job
    attempt: Attempt | None = None  # new or changed
    slices: list[TpuSlice] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    wake_at: datetime | None = None

    def changes_nothing(self, view: JobView) -> bool:
        """Everything as the view shows it."""
        same_attempt = self.attempt is None or self.attempt is view.attempt
        return self.job is view.job and same_attempt and not self.slices
