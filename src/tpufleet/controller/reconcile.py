"""From the world as it is to the world as it should be: steps for jobs that have news, then
placement for those that lack slices. Pure decisions come from policy; this applies them."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime

from tpufleet.controller.placement_inputs import ControllerSettings, PlacementInputs
from tpufleet.controller.working_set import WorkingSet
from tpufleet.model.attempts import AttemptState
from tpufleet.model.end_reasons import EndReason
from tpufleet.model.events import Event, EventKind
from tpufleet.model.jobs import JobState
from tpufleet.model.records import replace
from tpufleet.model.slices import LossReason, SliceId, SliceState, TpuSlice
from tpufleet.policy import capacity, job_step, liveness, placement, pool_scaling


class Reconciler:
    def __init__(
        self, world: WorkingSet, settings: ControllerSettings, new_name: Callable[[], str]
    ) -> None:
        self._world = world
        self._settings = settings
        self._new_name = new_name
        self._supplies = PlacementInputs(world, settings)
        self.next_placement_at: datetime | None = None  # when placement may succeed next

    def run(self, now: datetime) -> None:
        world = self._world
        self._check_boots(now)
        self._step_dirty(now)
        if self.next_placement_at is not None and self.next_placement_at <= now:
            world.placement_due = True
        if world.placement_due:
            world.placement_due = False
            self.next_placement_at = None
            self._keep_pools(now)
            self._place(now)
            self._step_dirty(now)

    # Steps.
    def _step_dirty(self, now: datetime) -> None:
        world = self._world
        while world.dirty_jobs:
            job_id = world.dirty_jobs.pop()
            if job_id not in world.jobs:
                continue
            view = world.job_view(job_id)
            self._apply(job_step.next_step(view, now), view, now)

    def _apply(self, step: job_step.Step, view: job_step.JobView, now: datetime) -> None:
        world = self._world
        job_id = step.job.id
        if step.attempt is not None:
            world.put_attempt(step.attempt)
            if not step.attempt.live:
                world.placement_due = True
        world.put_job(step.job)
        for tpu_slice in step.slices:
            world.put_slice(tpu_slice)
        world.record_events(*step.events)
        world.schedule(job_id, step.wake_at)
        world.dirty_jobs.discard(job_id)
        if step.attempt is not None and not step.attempt.live and not step.job.ended:
            world.dirty_jobs.add(job_id)  # its next gang may be waiting already
        if step.job.ended and not world.slices_by_job.get(job_id):
            world.drop_job(job_id)
            world.placement_due = True
            return
        # Whatever changes this makes the job dirty, so it holds until the next step.
        if not step.changes_nothing(view):
            view = world.job_view(job_id)
        lacking = job_step.missing_slices(view, now)
        world.put_need(job_id, self._supplies.need(view, lacking) if lacking else None)

    def _check_boots(self, now: datetime) -> None:
        world = self._world
        for slice_id in list(world.slices_by_state[SliceState.BOOTING]):
            tpu_slice = world.slices[slice_id]
            since = world.last_queued_at.get(slice_id, tpu_slice.requested_at)
            limits = self._settings.boot_timeout_by_provider
            limit = limits.get(tpu_slice.provider, self._settings.boot_timeout)
            if liveness.boot_failed(tpu_slice, since, now, limit):
                hosts = world.hosts.get(slice_id, {})
                words = f"only {len(hosts)} hosts came up in {limit}"
                lost = job_step.release_slice(tpu_slice, LossReason.BOOT_FAILED, words, now)
                world.record_refusal(tpu_slice, words, now)
                world.put_slice(lost)
                world.record_events(job_step.slice_event(lost, now))

    # Placement.
    def _place(self, now: datetime) -> None:
        world = self._world
        needs = world.needs()
        if not needs:
            return
        pools = {need.job.spec.pool for need in needs if need.job.spec.pool}
        for decision in placement.place(needs, self._supplies.supply(pools), world.refusals, now):
            self._carry_out(decision, now)

    def _carry_out(self, decision: placement.PlacementDecision, now: datetime) -> None:
        match decision:
            case placement.Wait():  # by far the commonest, so it comes first
                self._wait(decision, now)
            case placement.AssignSlices():
                for slice_id in decision.slices:
                    tpu_slice = self._world.slices[slice_id]
                    self._world.put_slice(
                        replace(tpu_slice, job_id=decision.job_id, idle_since=None, reason="taken")
                    )
            case placement.RequestSlices():
                self._ask(decision, now)
            case placement.ReleaseGang():
                self._give_back(decision, now)
            case placement.Supersede():
                self._supersede(decision, now)

    def _ask(self, ask: placement.RequestSlices, now: datetime) -> None:
        world = self._world
        order = self._new_name()
        stem = str(ask.job_id or ask.pool)[:40].rstrip("-")
        where = f"{ask.source} for {ask.job_id or f'pool {ask.pool}'}"
        for index in range(ask.count):
            suffix = f"-{index}" if ask.count > 1 else ""
            tpu_slice = TpuSlice(
                id=SliceId(f"tpf-{stem}-{order}{suffix}"),
                provider=ask.source.provider,
                accelerator=ask.accelerator,
                zone=ask.source.zone,
                capacity=ask.source.capacity,
                request_group=order,
                requested_at=now,
                pool=ask.pool,
                job_id=ask.job_id,
                reason=f"asked for in {where}",
            )
            world.put_slice(tpu_slice)
            world.record_events(job_step.slice_event(tpu_slice, now))

    def _wait(self, wait: placement.Wait, now: datetime) -> None:
        world = self._world
        job = world.jobs[wait.job_id]
        if wait.unsatisfiable:
            view = world.job_view(job.id)
            if view.attempt is None:
                self._apply(
                    job_step.fail_job(
                        view,
                        f"it can never start: {wait.reason}",
                        "change the job or the pool, then submit again",
                        now,
                    ),
                    view,
                    now,
                )
            return
        self._look_again(wait.until)
        if job.reason == wait.reason:
            return
        waiting = job.state in (JobState.QUEUED, JobState.WAITING, JobState.RECOVERING)
        if waiting and world.live_attempt(job.id) is None:
            world.put_job(replace(job, reason=wait.reason))
            if wait.until is not None:
                world.record_events(
                    Event(
                        at=now,
                        kind=EventKind.JOB,
                        state=job.state,
                        message=wait.reason,
                        job_id=job.id,
                    )
                )

    def _give_back(self, decision: placement.ReleaseGang, now: datetime) -> None:
        attempt = self._world.live_attempt(decision.job_id)
        for tpu_slice in self._world.job_view(decision.job_id).usable_slices:
            if attempt is not None and tpu_slice.id in attempt.slices:
                continue  # its processes may still run; it is let go when they are gone
            lost = job_step.release_slice(tpu_slice, LossReason.RELEASED, decision.reason, now)
            self._world.put_slice(lost)
            self._world.record_events(job_step.slice_event(lost, now))

    def _supersede(self, decision: placement.Supersede, now: datetime) -> None:
        world = self._world
        attempt = world.live_attempt(decision.job_id)
        if attempt is None or attempt.state is AttemptState.STOPPING:
            return
        words = f"makes way for {decision.for_job}, which has a higher priority"
        world.put_attempt(
            replace(
                attempt,
                state=AttemptState.STOPPING,
                stopping_at=now,
                stop_reason=EndReason.SUPERSEDED,
            )
        )
        world.put_job(replace(world.jobs[decision.job_id], state=JobState.RECOVERING, reason=words))
        world.dirty_jobs.add(decision.job_id)
        world.record_events(
            Event(
                at=now,
                kind=EventKind.ATTEMPT,
                state=EndReason.SUPERSEDED,
                message=words,
                job_id=decision.job_id,
                attempt_id=attempt.id,
            )
        )

    # Pools.
    def _keep_pools(self, now: datetime) -> None:
        world = self._world
        for name in set(world.pools) | set(world.slices_by_pool):
            pool = world.pools.get(name)
            slices = world.pool_slices(name)
            for slice_id in pool_scaling.surplus_slices(pool, slices, now):
                lost = job_step.release_slice(
                    world.slices[slice_id],
                    world.slices[slice_id].loss or LossReason.RELEASED,
                    f"pool {name} no longer needs it",
                    now,
                )
                world.put_slice(lost)
                world.record_events(job_step.slice_event(lost, now))
            if pool is None:
                continue
            missing = pool_scaling.shortfall(pool, world.pool_slices(name))
            choice = capacity.choose_source(
                self._supplies.places_of(pool), pool.accelerator, world.refusals, now
            )
            if missing and choice.source:
                for _ in range(missing):
                    self._ask(
                        placement.RequestSlices(
                            source=choice.source,
                            accelerator=pool.accelerator,
                            count=1,
                            pool=name,
                        ),
                        now,
                    )
            elif missing:
                self._look_again(choice.until)
            self._look_again(pool_scaling.next_surplus_at(pool, world.pool_slices(name)))

    def _look_again(self, at: datetime | None) -> None:
        if at is not None and (self.next_placement_at is None or at < self.next_placement_at):
            self.next_placement_at = at
