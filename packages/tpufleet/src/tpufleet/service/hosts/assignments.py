"""The assignment of each host, computed from the rows of its slice, attempt and job."""

from __future__ import annotations

import logging
import re
from dataclasses import dataclass, replace

from tpufleet.model import identifiers
from tpufleet.model.fleet.agent_protocol import Assignment
from tpufleet.model.fleet.hosts import HostId, host_id
from tpufleet.model.fleet.slices import SliceId, TpuSlice
from tpufleet.model.job import mounts
from tpufleet.model.job.attempts import Attempt, AttemptState
from tpufleet.model.job.end_reasons import END_REASONS, EndReason
from tpufleet.model.job.jobs import Job, ParentRelation
from tpufleet.model.people.users import Role
from tpufleet.model.tpu import type_lookup
from tpufleet.service.files.secrets import JobSecrets
from tpufleet.service.transport import auth
from tpufleet.service.transport.limits import BoundedDict
from tpufleet.stores.base import Store

logger = logging.getLogger(__name__)

_MAX_CACHED = 50_000  # slices
HOST_FILE_PREFIX = "file:"  # a secret that the agent reads from a file on its host


@dataclass(frozen=True, slots=True)
class _CachedAssignment:
    """The assignment of the first host of a slice, and the attempt row it was computed from."""

    attempt: Attempt
    owner: str
    assignment: Assignment
    references: dict[str, str]


class Assignments:
    """Caches the assignment of each slice for as long as the attempt's row is unchanged."""

    def __init__(self, store: Store, secrets: JobSecrets, server_secret: bytes) -> None:
        self._store = store
        self._server_secret = server_secret
        self._secrets = secrets
        self._cache = BoundedDict[SliceId, _CachedAssignment](_MAX_CACHED)

    def assignment_for(
        self, host: HostId, tpu_slice: TpuSlice, attempt: Attempt | None
    ) -> Assignment | None:
        """`attempt`: the live one of the job that holds the slice. None if it does not run here."""
        if attempt is None or tpu_slice.id not in attempt.slices:
            return None
        cached = self._cache.get(tpu_slice.id)
        if cached is None or cached.attempt != attempt:
            job = self._store.job(attempt.job_id)
            if job is None:
                return None
            cached = self._compute(tpu_slice.id, attempt, job)
            self._cache[tpu_slice.id] = cached
        first = cached.assignment
        _, index = identifiers.parse_host_id(host)
        return replace(
            first,
            worker_id=index,
            process_id=first.process_id + index,
            secrets=self._resolve(cached) if cached.references else {},
        )

    def with_token(self, assignment: Assignment) -> Assignment:
        """For an agent that starts it."""
        token = auth.job_token(self._server_secret, assignment.attempt_id)
        return replace(assignment, token=token)

    def _compute(self, slice_id: SliceId, attempt: Attempt, job: Job) -> _CachedAssignment:
        slice_index = attempt.slices.index(slice_id)
        hosts = {each.index: each for each in self._store.hosts(slice_id)}
        first = self._store.host(host_id(attempt.slices[0], 0))
        address, port = (first.address, first.coordinator_port) if first else ("", 0)
        kind = type_lookup.find(job.spec.accelerator)
        owner = self._store.user(job.owner)
        assignment = Assignment(
            attempt_id=attempt.id,
            job_id=job.id,
            number=attempt.number,
            command=self._command(job, slice_id),
            setup=job.spec.setup,
            env={**self._lineage_variables(attempt, job), **job.spec.env},
            secrets={},
            snapshot=job.snapshot,
            checkpoint=checkpoint_location(job),
            grace=job.spec.grace,
            worker_id=0,
            hostnames=tuple(hosts[at].address if at in hosts else "" for at in range(kind.hosts)),
            slice_index=slice_index,
            num_slices=len(attempt.slices),
            max_slices=job.spec.max_slices,
            process_id=slice_index * kind.hosts,
            num_processes=len(attempt.slices) * kind.hosts,
            coordinator_address=f"{address}:{port}",
            megascale_coordinator=address,
            chips=kind.chips_per_host,
            processes_per_host=job.spec.processes_per_host,
            accelerator=kind.name,
            last_step=self._last_step(attempt, job),
            stop=_stop(attempt),
            stop_message=_stop_message(attempt),
            abort=attempt.aborted,
            python=job.spec.python,
            dependencies=job.spec.dependencies,
            image=job.spec.image,
            metrics=job.spec.metrics,
            owner=job.owner,
            owned_by_admin=owner is not None and owner.role is Role.ADMIN,
        )
        return _CachedAssignment(attempt, job.owner, assignment, job.spec.secrets)

    def _last_step(self, attempt: Attempt, job: Job) -> int | None:
        if attempt.number == job.fresh_from:
            return None
        earlier = self._store.attempts(job.id)[job.fresh_from : attempt.number]
        steps = [each.last_step for each in earlier if each.last_step is not None]
        return max(steps, default=None)

    def _lineage_variables(self, attempt: Attempt, job: Job) -> dict[str, str]:
        """How often the work was continued before, over attempts and resumed jobs; and one run of
        Weights & Biases for all of it. A job that starts from scratch starts a new run."""
        stage, first = attempt.number - job.fresh_from, job
        while first.parent is not None and first.parent_relation is ParentRelation.RESUME:
            parent = self._store.job(first.parent)
            if parent is None or job.fresh_from:
                break
            stage += len(self._store.attempts(parent.id)) - parent.fresh_from
            first = parent
        run = first.id if not first.fresh_from else f"{first.id}-{first.fresh_from}"
        return {"TPUFLEET_STAGE": str(stage), "WANDB_RUN_ID": run, "WANDB_RESUME": "allow"}

    def _command(self, job: Job, slice_id: SliceId) -> tuple[str, ...]:
        """With the mounts of the job, unless the provider makes them."""
        tpu_slice = self._store.slice(slice_id) if job.spec.mounts else None
        if tpu_slice is None or tpu_slice.provider in mounts.MOUNTED_BY_PROVIDER:
            return job.spec.command
        return mounts.mounted_command(job.spec.mounts, job.spec.command)

    def _resolve(self, cached: _CachedAssignment) -> dict[str, str]:
        """Current values. They exist in memory and in the reply, nowhere else."""
        values = {}
        for name, reference in cached.references.items():
            if reference.startswith(HOST_FILE_PREFIX):
                values[name] = reference
                continue
            value = self._secrets.get(reference, cached.owner)
            if value is None:
                job_id = cached.attempt.job_id
                logger.warning("secret %s of job %s does not exist", reference, job_id)
                continue
            values[name] = value
        return values


def checkpoint_location(job: Job) -> str:
    """Where its attempts keep checkpoints. A restart from scratch uses a new location, so that
    later attempts do not see the earlier checkpoints."""
    return f"{job.checkpoint}/from-attempt-{job.fresh_from}" if job.fresh_from else job.checkpoint


def job_location(location: str) -> str:
    """The location of a job that restarts from scratch in this one."""
    return re.sub(r"(/from-attempt-\d+)+/*$", "", location)


def _stop(attempt: Attempt) -> EndReason | None:
    if attempt.stop_reason is EndReason.RESIZED:
        return EndReason.SUPERSEDED  # the same to an agent, and earlier ones know no other
    if attempt.stop_reason is not None:
        return attempt.stop_reason
    return EndReason.USER_ERROR if attempt.state is AttemptState.STOPPING else None


def _stop_message(attempt: Attempt) -> str:
    resized = attempt.stop_reason is EndReason.RESIZED
    return END_REASONS[EndReason.RESIZED].description if resized else ""
