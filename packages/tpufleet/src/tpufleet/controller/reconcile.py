"""Reconcile the working set: step the jobs that changed, scale pools, place jobs that lack slices.

Decisions come from `policy`; this module applies them.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime, timedelta

from tpufleet.controller import server_contact
from tpufleet.controller.boot_monitor import BootMonitor
from tpufleet.controller.placement_inputs import ControllerSettings, PlacementInputs
from tpufleet.controller.working_set import WorkingSet
from tpufleet.model.fleet.pools import Pool, RefusalKind
from tpufleet.model.fleet.slices import LossReason, SliceId, TpuSlice
from tpufleet.model.job.attempts import AttemptState
from tpufleet.model.job.end_reasons import EndReason
from tpufleet.model.job.jobs import JobState
from tpufleet.model.values.records import replace
from tpufleet.policy.events import attempt_event, job_event, slice_event
from tpufleet.policy.recovery import job_step
from tpufleet.policy.scheduling import fair_share, placement, pool_scaling, source_choice

USAGE_INTERVAL = timedelta(seconds=30)


class Reconciler:
    def __init__(
        self,
        working_set: WorkingSet,
        settings: ControllerSettings,
        new_name: Callable[[], str],
        server_url: str,
        usage: fair_share.UsageLedger | None = None,
        slice_settings: Callable[[Pool], str] = lambda pool: "",
    ) -> None:
        self._working_set = working_set
        self._settings = settings
        self._new_name = new_name
        self._boots = BootMonitor(working_set, settings, server_url)
        self._inputs = PlacementInputs(working_set, settings, slice_settings)
        self.usage = usage  # of chips, by user; None: none yet
        working_set.set_usage_steps(fair_share.usage_steps(usage))
        self.next_placement_at: datetime | None = None  # when placement may succeed next

    def run(self, now: datetime) -> None:
        working_set = self._working_set
        self._fail_futile_jobs(now)
        self._retry_now(now)
        self.step_dirty_jobs(now)
        self._account_usage(now)
        if self.next_placement_at is not None and self.next_placement_at <= now:
            working_set.placement_due = True
        if working_set.placement_due:
            working_set.placement_due = False
            self.next_placement_at = None
            self._scale_pools(now)
            for decision in self.decide_placement(now):
                self._apply_placement(decision, now)
            self.step_dirty_jobs(now)

    def _account_usage(self, now: datetime) -> None:
        half_life = self._settings.fair_share_half_life
        if half_life is None:
            return
        if self.usage is None:
            self.usage = fair_share.UsageLedger(at=now)
        elif now - self.usage.at < USAGE_INTERVAL:
            return
        else:
            chips = self._inputs.chips_by_owner()
            self.usage = fair_share.advance(self.usage, chips, now, half_life)
        self._working_set.set_usage_steps(fair_share.usage_steps(self.usage))

    def _retry_now(self, now: datetime) -> None:
        """End the backoff of what these jobs wait for. A streak stays: if the next request is
        refused too, the backoff goes on where it was."""
        working_set = self._working_set
        for job_id in sorted(working_set.retries & working_set.jobs.keys()):
            job = working_set.jobs[job_id]
            if job.not_before is not None:
                working_set.put_job(replace(job, not_before=None))
            working_set.rejections.pop(job_id, None)
            accelerator, sources = self._inputs.sources_of(job.spec)
            for refusal in working_set.refusals.holding(sources, accelerator, now):
                # One slice at a time tries whether hosts can reach the server.
                if refusal.kind is RefusalKind.UNREACHABLE and (
                    refusal.provider in working_set.probes
                ):
                    continue
                working_set.put_refusal(replace(refusal, until=now))
            working_set.dirty_jobs.add(job_id)
            working_set.placement_due = True
        working_set.retries.clear()

    # Steps.
    def step_dirty_jobs(self, now: datetime) -> None:
        """Apply the next step of every job that changed."""
        working_set = self._working_set
        while working_set.dirty_jobs:
            job_id = working_set.dirty_jobs.pop()
            if job_id not in working_set.jobs:
                continue
            view = working_set.job_view(job_id)
            self._apply_step(job_step.next_step(view, now), view, now)

    def _apply_step(self, step: job_step.Step, view: job_step.JobView, now: datetime) -> None:
        working_set = self._working_set
        job_id = step.job.id
        if step.attempt is not None:
            working_set.put_attempt(step.attempt)
            if not step.attempt.live:
                working_set.placement_due = True
        working_set.put_job(step.job)
        for tpu_slice in step.slices:
            given_back = step.job.ended and tpu_slice.job_id is None and tpu_slice.pool is not None
            if given_back:
                failed = step.job.state is JobState.FAILED
                tpu_slice = replace(tpu_slice, last_owner=step.job.owner, last_failed=failed)
            working_set.put_slice(self._held_after_failure(tpu_slice, step, now))
        working_set.record_events(*step.events)
        working_set.schedule(job_id, step.wake_at)
        working_set.dirty_jobs.discard(job_id)
        if step.attempt is not None and not step.attempt.live and not step.job.ended:
            working_set.dirty_jobs.add(job_id)  # its next gang may be ready already
        if step.job.ended and not working_set.slices_by_job.get(job_id):
            working_set.drop_job(job_id)
            working_set.placement_due = True
            return
        # Anything that changes this marks the job dirty, so it is valid until the next step.
        if not step.changes_nothing(view):
            view = working_set.job_view(job_id)
        missing = job_step.missing_slices(view, now)
        pending = self._inputs.pending_job(view, missing) if missing else None
        working_set.put_pending_job(job_id, pending)

    def _held_after_failure(
        self, tpu_slice: TpuSlice, step: job_step.Step, now: datetime
    ) -> TpuSlice:
        """A slice that a failed job gives back stays for its owner, if the pool says so."""
        pool = self._working_set.pools.get(tpu_slice.pool or "")
        failed = step.job.state is JobState.FAILED and tpu_slice.job_id is None
        if pool is None or not failed or not pool.hold_after_failure or not tpu_slice.live:
            return tpu_slice
        until = now + pool.hold_after_failure
        self._place_again_at(until)
        return replace(
            tpu_slice,
            reserved_for=step.job.owner,
            reserved_until=until,
            reason=f"held for {step.job.owner} after job {step.job.id} failed",
        )

    def _fail_futile_jobs(self, now: datetime) -> None:
        for futile in self._boots.check(now):
            view = self._working_set.job_view(futile.job_id)
            if view.attempt is None and not view.has_enough and not view.job.ended:
                step = job_step.fail_job(view, futile.reason, futile.advice, now)
                self._apply_step(step, view, now)

    # Placement.
    def decide_placement(self, now: datetime) -> list[placement.PlacementDecision]:
        """One decision for each job that lacks slices. Changes nothing."""
        pending = self._working_set.pending_jobs()
        if not pending:
            return []
        pools = {each.job.spec.pool for each in pending if each.job.spec.pool}
        supply = self._inputs.supply(pools, now)
        for reservation in self._working_set.reservations:
            if reservation.pool in pools:
                for moment in (reservation.starts_at, reservation.ends_at):
                    self._place_again_at(moment if moment > now else None)
        return placement.place(pending, supply, self._working_set.refusals, now)

    def _apply_placement(self, decision: placement.PlacementDecision, now: datetime) -> None:
        match decision:
            case placement.Wait():  # by far the most frequent, so it comes first
                self._wait(decision, now)
            case placement.AssignSlices():
                self._assign_slices(decision, now)
            case placement.RequestSlices():
                self._request_slices(decision, now)
            case placement.ReleaseGang():
                self._release_gang(decision, now)
            case placement.Supersede():
                self._supersede(decision, now)

    def _assign_slices(self, decision: placement.AssignSlices, now: datetime) -> None:
        for slice_id in decision.slices:
            self._working_set.put_slice(
                replace(
                    self._working_set.slices[slice_id],
                    job_id=decision.job_id,
                    assigned_at=now,
                    idle_since=None,
                    reserved_for=None,
                    reserved_until=None,
                    reason=f"assigned to job {decision.job_id}",
                )
            )

    def _request_slices(self, request: placement.RequestSlices, now: datetime) -> None:
        group = self._new_name()
        provider = request.source.provider
        limit = self._settings.boot_timeout
        if not server_contact.may_request(self._working_set, provider, group, now, limit):
            return
        stem = str(request.job_id or request.pool)[:40].rstrip("-")
        owner = f"job {request.job_id}" if request.job_id else f"pool {request.pool}"
        pool = self._working_set.pools.get(request.pool or "")
        for index in range(request.count):
            suffix = f"-{index}" if request.count > 1 else ""
            tpu_slice = TpuSlice(
                id=SliceId(f"tpf-{stem}-{group}{suffix}"),
                provider=request.source.provider,
                accelerator=request.accelerator,
                zone=request.source.zone,
                capacity=request.source.capacity,
                request_group=group,
                requested_at=now,
                pool=request.pool,
                job_id=request.job_id,
                assigned_at=now if request.job_id is not None else None,
                reason=f"requested from {request.source} for {owner}",
                settings="" if pool is None else self._inputs.slice_settings(pool),
            )
            self._working_set.put_slice(tpu_slice)
            self._working_set.record_events(slice_event(tpu_slice, now))

    def _wait(self, wait: placement.Wait, now: datetime) -> None:
        working_set = self._working_set
        job = working_set.jobs[wait.job_id]
        if job.spec.min_slices < job.spec.max_slices and working_set.job_view(job.id).has_enough:
            self._place_again_at(wait.until)  # it waits for nothing that it needs
            return
        if wait.unsatisfiable:
            view = working_set.job_view(job.id)
            if view.attempt is None:
                failed = job_step.fail_job(
                    view,
                    f"cannot be placed: {wait.reason}",
                    "change the job, its pool or the settings of the server, then run "
                    f"`tpu rerun {job.id}`",
                    now,
                )
                self._apply_step(failed, view, now)
            return
        self._place_again_at(wait.until)
        if job.reason == wait.reason:
            return
        if wait.asking and working_set.waits_since_refusal(job):
            return
        waiting = job.state in (JobState.QUEUED, JobState.WAITING, JobState.RECOVERING)
        if waiting and working_set.live_attempt(job.id) is None:
            job = replace(job, reason=wait.reason)
            working_set.put_job(job)
            if wait.until is not None and working_set.is_news(job.id, wait.reason):
                working_set.record_events(job_event(job, now))

    def _release_gang(self, decision: placement.ReleaseGang, now: datetime) -> None:
        attempt = self._working_set.live_attempt(decision.job_id)
        for tpu_slice in self._working_set.job_view(decision.job_id).usable_slices:
            if attempt is not None and tpu_slice.id in attempt.slices:
                continue  # its processes may still run; it is released when they have exited
            self._working_set.release_slice(tpu_slice, LossReason.RELEASED, decision.reason, now)

    def _supersede(self, decision: placement.Supersede, now: datetime) -> None:
        working_set = self._working_set
        attempt = working_set.live_attempt(decision.job_id)
        if attempt is None or attempt.state is AttemptState.STOPPING:
            return
        reason = f"preempted by job {decision.for_job}, which has a higher priority"
        working_set.put_attempt(
            replace(
                attempt,
                state=AttemptState.STOPPING,
                stopping_at=now,
                stop_reason=EndReason.SUPERSEDED,
            )
        )
        job = working_set.jobs[decision.job_id]
        working_set.put_job(replace(job, state=JobState.RECOVERING, reason=reason))
        working_set.dirty_jobs.add(decision.job_id)
        working_set.record_events(attempt_event(attempt, EndReason.SUPERSEDED, reason, now))

    # Pools.
    def _scale_pools(self, now: datetime) -> None:
        working_set = self._working_set
        for name in set(working_set.pools) | set(working_set.slices_by_pool):
            pool = working_set.pools.get(name)
            settings = "" if pool is None else self._inputs.slice_settings(pool)
            slices = working_set.pool_slices(name)
            for slice_id in pool_scaling.surplus_slices(pool, slices, now, settings):
                tpu_slice = working_set.slices[slice_id]
                loss = tpu_slice.loss or LossReason.RELEASED
                changed = pool is not None and not pool.provides(tpu_slice, settings)
                why = "was changed and has no such slices" if changed else "does not need it"
                reason = f"pool {name} {why} any more"
                working_set.release_slice(tpu_slice, loss, reason, now)
            if pool is None:
                continue
            missing = pool_scaling.shortfall(pool, working_set.pool_slices(name), settings)
            choice = source_choice.choose_source(
                self._inputs.pool_sources(pool), pool.accelerator, working_set.refusals, now
            )
            if missing and choice.source:
                request = placement.RequestSlices(
                    source=choice.source, accelerator=pool.accelerator, count=1, pool=name
                )
                for _ in range(missing):
                    self._request_slices(request, now)
            elif missing:
                self._place_again_at(choice.until)
            slices = working_set.pool_slices(name)
            self._place_again_at(pool_scaling.next_surplus_at(pool, slices, settings))

    def _place_again_at(self, at: datetime | None) -> None:
        if at is not None and (self.next_placement_at is None or at < self.next_placement_at):
            self.next_placement_at = at
