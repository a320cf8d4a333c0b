"""Slices that boot: explain what they wait for, and give up those that will not come up."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timedelta

import msgspec

from tpufleet.controller import server_contact
from tpufleet.controller.placement_inputs import ControllerSettings
from tpufleet.controller.working_set import WorkingSet
from tpufleet.model.fleet.bootstrap import BootstrapReport
from tpufleet.model.fleet.slices import LossReason, SliceId, SliceState, TpuSlice
from tpufleet.model.job.jobs import JobId
from tpufleet.model.tpu import type_lookup
from tpufleet.model.values.records import replace
from tpufleet.policy.events import slice_event
from tpufleet.policy.recovery import liveness

# Of a slice about which nothing new is known: only the time passes.
RECHECK_INTERVAL = timedelta(seconds=1)


class FutileJob(msgspec.Struct, frozen=True, kw_only=True):
    """A job whose slices were paid for and never connected, too often."""

    job_id: JobId
    reason: str
    advice: str


class BootMonitor:
    def __init__(
        self, working_set: WorkingSet, settings: ControllerSettings, server_url: str
    ) -> None:
        self._working_set = working_set
        self._settings = settings
        self._server_url = server_url
        # Slice → what was known about it, and when it was checked.
        self._checked: dict[SliceId, tuple[tuple[object, ...], datetime]] = {}

    def check(self, now: datetime) -> list[FutileJob]:
        """Jobs to fail."""
        working_set = self._working_set
        for refusal in working_set.refusals.unreachable():
            if refusal.server_url != self._server_url:
                server_contact.restored(working_set, refusal.provider, now)
        booting = list(working_set.slices_by_state[SliceState.BOOTING])
        checked = [
            self._check_slice(working_set.slices[slice_id], now)
            for slice_id in booting
            if self._is_due(slice_id, now)
        ]
        self._checked = {each: self._checked[each] for each in booting}
        return [futile for futile in checked if futile is not None]

    def _is_due(self, slice_id: SliceId, now: datetime) -> bool:
        working_set = self._working_set
        facts = (
            working_set.slices[slice_id],
            len(working_set.hosts.get(slice_id, {})),
            working_set.bootstrap.get(slice_id, ()),
        )
        known, checked_at = self._checked.get(slice_id, ((), now))
        if known == facts and checked_at <= now < checked_at + RECHECK_INTERVAL:
            return False
        self._checked[slice_id] = (facts, now)
        return True

    def _check_slice(self, tpu_slice: TpuSlice, now: datetime) -> FutileJob | None:
        working_set = self._working_set
        if tpu_slice.silent_since is not None:
            job = working_set.jobs.get(tpu_slice.job_id) if tpu_slice.job_id else None
            unwanted = job is not None and job.cancel_requested_by and not tpu_slice.pool
            if unwanted or liveness.stays_silent(tpu_slice, now, working_set.present_since):
                working_set.release_slice(tpu_slice, LossReason.HOST_LOST, tpu_slice.reason, now)
            return None
        connected = len(working_set.hosts.get(tpu_slice.id, {}))
        reports = working_set.bootstrap.get(tpu_slice.id, ())
        failure = self._failure(tpu_slice, connected, reports, now)
        if failure:
            working_set.record_refusal(tpu_slice, failure, now)
            working_set.release_slice(tpu_slice, LossReason.BOOT_FAILED, failure, now)
            return self._count_futile_creation(tpu_slice, failure, now)
        problem = self._contact_problem(tpu_slice, connected, reports, now)
        if problem:
            server_contact.lost(working_set, tpu_slice, self._server_url, problem, now)
            working_set.release_slice(tpu_slice, LossReason.BOOT_FAILED, problem, now)
            return None
        expected = type_lookup.find(tpu_slice.accelerator).hosts
        reason = liveness.boot_reason(
            tpu_slice, connected, expected, self._server_url, reports, now
        )
        self._explain(tpu_slice, reason, now)
        return None

    def _failure(
        self,
        tpu_slice: TpuSlice,
        connected: int,
        reports: Sequence[BootstrapReport],
        now: datetime,
    ) -> str:
        """Why this slice will not come up; empty if it may."""
        working_set, settings = self._working_set, self._settings
        since = working_set.last_queued_at.get(tpu_slice.id, tpu_slice.requested_at)
        timeout = settings.boot_timeout_by_provider.get(tpu_slice.provider, settings.boot_timeout)
        present = working_set.present_since
        # The final failure of a host, which no waiting repairs.
        failure = next((report.text for report in reports if report.failed), "")
        if not failure and liveness.boot_failed(tpu_slice, since, now, timeout, present):
            failure = f"boot timeout: only {connected} hosts came up in {timeout}"
        progress_at = self._progress_at(tpu_slice, connected, reports, now)
        if not failure and liveness.is_stuck(
            tpu_slice, connected, reports, progress_at, now, present
        ):
            slowest = liveness.slowest_host(reports)
            minutes = liveness.SILENT_BOOT_LIMIT // timedelta(minutes=1)
            last = slowest.text if slowest else "its hosts have reported nothing"
            failure = f"no progress in {minutes} min: {last}"
        return failure

    def _progress_at(
        self,
        tpu_slice: TpuSlice,
        connected: int,
        reports: Sequence[BootstrapReport],
        now: datetime,
    ) -> datetime:
        # Messages may change while a start-up makes no progress.
        stages = (connected, *sorted((each.host, each.stage.value) for each in reports))
        known = self._working_set.boot_progress.get(tpu_slice.id)
        if known is None or known[0] != stages:
            known = self._working_set.boot_progress[tpu_slice.id] = (stages, now)
        return known[1]

    def _contact_problem(
        self,
        tpu_slice: TpuSlice,
        connected: int,
        reports: Sequence[BootstrapReport],
        now: datetime,
    ) -> str:
        """The problem, if hosts of this provider cannot reach this server. If others can, the
        problem is with this slice alone."""
        working_set = self._working_set
        trying = liveness.connecting_host(reports) if not connected else None
        if trying is None:
            working_set.connecting_since.pop(tpu_slice.id, None)
            return ""
        since = working_set.connecting_since.setdefault(tpu_slice.id, now)
        ready = working_set.slices_by_state[SliceState.READY]
        if any(working_set.slices[each].provider == tpu_slice.provider for each in ready):
            return ""
        if not liveness.cannot_connect(since, working_set.present_since, now):
            return ""
        advice = "check `public_url` and the firewall with `tpu init check`"
        if trying.untrusted:
            advice = (
                "set `ca_file` of the server to the certificate of its CA, or use a `public_url` "
                "that its certificate covers"
            )
        return (
            f"hosts of {tpu_slice.provider} cannot reach this server at {self._server_url} "
            f"({trying.text}); {advice}"
        )

    def _explain(self, tpu_slice: TpuSlice, reason: str, now: datetime) -> None:
        """A reason of the provider's own stays."""
        working_set = self._working_set
        known = working_set.boot_reasons.get(tpu_slice.id, "")
        if not reason or reason == known or tpu_slice.reason not in ("", "booting", known):
            return
        working_set.boot_reasons[tpu_slice.id] = reason
        explained = replace(tpu_slice, reason=reason)
        working_set.put_slice(explained)
        if liveness.is_silent(tpu_slice, now) and tpu_slice.id not in working_set.silent_slices:
            working_set.silent_slices.add(tpu_slice.id)
            working_set.record_events(slice_event(explained, now))

    def _count_futile_creation(
        self, tpu_slice: TpuSlice, failure: str, now: datetime
    ) -> FutileJob | None:
        job_id = tpu_slice.job_id
        if tpu_slice.up_at is None or job_id not in self._working_set.jobs:
            return None  # nothing was paid for
        ran = self._working_set.futile_creations.setdefault(job_id, [])
        ran.append(now - tpu_slice.up_at)
        if not liveness.is_futile(len(ran), sum(ran, timedelta(0))):
            return None
        return FutileJob(
            job_id=job_id,
            reason=f"the machines of {len(ran)} slices in a row ran, but not all of their agents "
            f"connected to {self._server_url}; the last: {failure}",
            advice="check that hosts reach `public_url` of the server and can install the bundle, "
            f"then run `tpu resume {job_id}`",
        )
