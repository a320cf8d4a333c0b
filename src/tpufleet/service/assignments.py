"""What each host is to run, worked out from the rows of its slice, attempt and job."""

from __future__ import annotations

import logging
from collections import OrderedDict
from dataclasses import dataclass, replace

from tpufleet.model import topology
from tpufleet.model.agent_protocol import Assignment
from tpufleet.model.attempts import Attempt, AttemptId, AttemptState
from tpufleet.model.end_reasons import EndReason
from tpufleet.model.hosts import HostId, host_id
from tpufleet.model.jobs import Job, JobId
from tpufleet.model.slices import TpuSlice
from tpufleet.service import identifiers
from tpufleet.service.files.secrets import SecretFiles
from tpufleet.stores.base import Store

logger = logging.getLogger(__name__)

_REMEMBERED = 50_000
HOST_FILE_PREFIX = "file:"  # a reference that the agent reads on its own disk


@dataclass(frozen=True, slots=True)
class _Worked:
    """An assignment, and the attempt row it was worked out from."""

    attempt: Attempt
    owner: str
    assignment: Assignment
    references: dict[str, str]


class Assignments:
    """Remembers what it worked out for as long as the attempt's row stays the same."""

    def __init__(self, store: Store, secrets: SecretFiles) -> None:
        self._store = store
        self._secrets = secrets
        self._worked: OrderedDict[HostId, _Worked] = OrderedDict()
        self._live: OrderedDict[JobId, AttemptId] = OrderedDict()

    def assignment_for(self, host: HostId, tpu_slice: TpuSlice) -> Assignment | None:
        """None when the slice's job has no live attempt on this slice."""
        attempt = self._live_attempt(tpu_slice.job_id) if tpu_slice.job_id else None
        if attempt is None or tpu_slice.id not in attempt.slices:
            return None
        worked = self._worked.get(host)
        if worked is None or worked.attempt != attempt:
            job = self._store.job(attempt.job_id)
            if job is None:
                return None
            worked = self._work_out(host, attempt, job)
            _keep(self._worked, host, worked)
        if not worked.references:
            return worked.assignment
        return replace(worked.assignment, secrets=self._resolve(worked))

    def _live_attempt(self, job_id: JobId) -> Attempt | None:
        """A job has at most one live attempt, so one that still lives is the one."""
        known = self._live.get(job_id)
        if known is not None:
            attempt = self._store.attempt(known)
            if attempt is not None and attempt.live:
                return attempt
        attempt = self._store.newest_attempts([job_id]).get(job_id)
        if attempt is None or not attempt.live:
            self._live.pop(job_id, None)
            return None
        _keep(self._live, job_id, attempt.id)
        return attempt

    def _work_out(self, host: HostId, attempt: Attempt, job: Job) -> _Worked:
        slice_id, index = identifiers.parse_host_id(host)
        slice_index = list(attempt.slices).index(slice_id)  # type: ignore[arg-type]
        hosts = {each.index: each for each in self._store.hosts(attempt.slices[slice_index])}
        first = self._store.host(host_id(attempt.slices[0], 0))
        address, port = (first.address, first.coordinator_port) if first else ("", 0)
        kind = topology.find(job.spec.accelerator)
        assignment = Assignment(
            attempt_id=attempt.id,
            job_id=job.id,
            number=attempt.number,
            command=job.spec.command,
            setup=job.spec.setup,
            env=job.spec.env,
            secrets={},
            snapshot=job.snapshot,
            checkpoint=checkpoint_location(job),
            grace=job.spec.grace,
            worker_id=index,
            hostnames=tuple(hosts[at].address if at in hosts else "" for at in range(kind.hosts)),
            slice_index=slice_index,
            num_slices=len(attempt.slices),
            process_id=slice_index * kind.hosts + index,
            num_processes=len(attempt.slices) * kind.hosts,
            coordinator_address=f"{address}:{port}",
            megascale_coordinator=address,
            chips=kind.chips_per_host,
            accelerator=kind.name,
            stop=_stop(attempt),
        )
        return _Worked(attempt, job.owner, assignment, job.spec.secrets)

    def _resolve(self, worked: _Worked) -> dict[str, str]:
        """Values of this moment. They live in memory and in the reply, nowhere else."""
        found = {}
        for name, reference in worked.references.items():
            if reference.startswith(HOST_FILE_PREFIX):
                found[name] = reference
                continue
            value = self._secrets.get(reference, worked.owner)
            if value is None:
                job_id = worked.attempt.job_id
                logger.warning("job %s wants the secret %s, which was dropped", job_id, reference)
                continue
            found[name] = value
        return found


def checkpoint_location(job: Job) -> str:
    """Where its attempts keep checkpoints. One that starts over begins a new place, so that
    neither it nor those after it see what the attempts before left."""
    return f"{job.checkpoint}/from-attempt-{job.fresh_from}" if job.fresh_from else job.checkpoint


def _stop(attempt: Attempt) -> EndReason | None:
    if attempt.stop_reason is not None:
        return attempt.stop_reason
    return EndReason.USER_ERROR if attempt.state is AttemptState.STOPPING else None


def _keep(memory: OrderedDict, key: object, value: object) -> None:
    memory[key] = value
    memory.move_to_end(key)
    while len(memory) > _REMEMBERED:
        memory.popitem(last=False)
