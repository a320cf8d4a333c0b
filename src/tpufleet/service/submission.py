"""New jobs: submitted, resumed, run again. All jobs of one call are one commit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from tpufleet.errors import BadInput, Conflict, Forbidden
from tpufleet.model import job_file
from tpufleet.model.api_types import ResubmitRequest
from tpufleet.model.encoding import from_json
from tpufleet.model.events import Event, EventKind
from tpufleet.model.inbox import InboxMessage, InboxMessageKind
from tpufleet.model.jobs import Job, JobId, JobSpec, ParentRelation
from tpufleet.model.pools import Pool
from tpufleet.service import cleaning, identifiers
from tpufleet.service.assignments import HOST_FILE_PREFIX, checkpoint_location
from tpufleet.service.commands import CommandContext
from tpufleet.service.files.secrets import SecretFiles
from tpufleet.service.files.snapshots import SnapshotFiles
from tpufleet.stores.base import ChangeSet, JobQuery

MAX_JOBS_PER_CALL = 50_000  # in one call


@dataclass(frozen=True, kw_only=True, slots=True)
class RawJob:
    """A `views.NewJob` whose spec is still text: equal texts are read once."""

    id: JobId
    spec: msgspec.Raw
    snapshot: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class RawSubmission:
    jobs: tuple[RawJob, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class JobStorage:
    """Where what a job refers to is kept."""

    snapshots: SnapshotFiles
    secrets: SecretFiles
    checkpoints: str  # folder or URL below which jobs get their own
    providers: tuple[str, ...] = ()  # that this server has


def submit(act: CommandContext, shelves: JobStorage, body: bytes) -> list[Job]:
    """All or nothing. A job that is already here with the same id and spec is left as it is."""
    submission = from_json(body, RawSubmission)
    if not 0 < len(submission.jobs) <= MAX_JOBS_PER_CALL:
        raise BadInput(
            f"jobs: from 1 to {MAX_JOBS_PER_CALL} in one call, not {len(submission.jobs)}"
        )
    check = _Checks(act, shelves, act.caller.name)
    jobs: dict[JobId, Job] = {}
    for index, new in enumerate(submission.jobs):
        try:
            job = _new_job(act, shelves, new, check)
        except BadInput as error:
            raise type(error)(_located(str(error), f"jobs[{index}].")) from error
        if job.id in jobs:
            raise BadInput(f"jobs[{index}].id: {job.id} is there twice; take one out")
        jobs[job.id] = job
    return _insert(act, jobs)


def resubmit(
    act: CommandContext,
    shelves: JobStorage,
    parent: Job,
    options: ResubmitRequest,
    kinship: ParentRelation,
) -> Job:
    """A new job of the same family with the very same code."""
    act.caller.require_owner(parent.owner, f"job {parent.id}")
    verb = "resumed" if kinship is ParentRelation.RESUME else "run again"
    if not parent.ended:
        raise Conflict(
            f"job {parent.id} is still {parent.state}; it can be {verb} once it has ended, "
            f"so `tpu cancel {parent.id}` first"
        )
    cleaning.require_not_cleaned(act.store, parent, f"so it cannot be {verb}; submit it anew")
    spec = job_file.parse_job({**job_file.to_document(parent.spec), **options.changes})
    _Checks(act, shelves, parent.owner).spec(spec)
    if parent.snapshot is not None:
        shelves.snapshots.require(parent.snapshot)
    job_id = identifiers.parse_job_id(options.id)
    job = Job(
        id=job_id,
        spec=spec,
        owner=parent.owner,
        submitted_at=act.now,
        snapshot=parent.snapshot,
        checkpoint=_checkpoint_again(shelves, parent, job_id, spec, kinship),
        parent=parent.id,
        parent_relation=kinship,
    )
    known = act.store.job(job.id)
    if known is not None:
        return _must_match(known, job)
    if kinship is ParentRelation.RESUME:
        _must_be_alone(act, parent)
    return _insert(act, {job.id: job})[0]


class _Checks:
    """Held against each distinct spec, snapshot and pool once a call."""

    def __init__(self, act: CommandContext, shelves: JobStorage, owner: str) -> None:
        self._act = act
        self._owner = owner
        self._shelves = shelves
        self._specs: dict[bytes, JobSpec] = {}
        self._snapshots: set[str] = set()
        self._pools: dict[str, Pool] | None = None
        self._secrets: frozenset[str] | None = None

    def text(self, raw: bytes) -> JobSpec:
        spec = self._specs.get(raw)
        if spec is None:
            spec = job_file.parse_job(from_json(raw, object))
            self.spec(spec)
            self._specs[raw] = spec
        return spec

    def spec(self, spec: JobSpec) -> None:
        for index, name in enumerate(spec.providers):
            known = self._shelves.providers
            if name not in known:
                raise BadInput(
                    f"providers[{index}]: this server has no {name!r}; it has {', '.join(known)}"
                )
        if spec.pool is not None:
            self._pool(spec, spec.pool)
        for name, reference in spec.secrets.items():
            if (
                not reference.startswith(HOST_FILE_PREFIX)
                and reference not in self._known_secrets()
            ):
                near = identifiers.suggestion(reference, self._known_secrets())
                raise BadInput(
                    f"secrets.{name}: no secret is called {reference!r}{near}; "
                    f"`tpu secret set {reference}` makes it"
                )

    def snapshot(self, digest: str) -> None:
        if digest not in self._snapshots:
            self._shelves.snapshots.require(digest)
            self._snapshots.add(digest)

    def _pool(self, spec: JobSpec, name: str) -> None:
        if self._pools is None:
            self._pools = {pool.name: pool for pool in self._act.store.pools()}
        pool = self._pools.get(name)
        if pool is None:
            near = identifiers.suggestion(name, self._pools) or "; `tpu pool create` makes one"
            raise BadInput(f"pool: none is called {name!r}{near}")
        caller = self._act.caller
        if pool.members and caller.name not in pool.members and not caller.is_admin:
            raise Forbidden(f"pool: {caller.name} is not a member of {name}; ask an admin")
        if pool.accelerator != spec.accelerator:
            raise BadInput(
                f"pool: {name} holds {pool.accelerator}, and the job wants {spec.accelerator}"
            )
        if spec.slices > pool.largest:
            raise BadInput(
                f"slices: pool {name} never has more than {pool.largest}, and the job wants "
                f"{spec.slices}"
            )

    def _known_secrets(self) -> frozenset[str]:
        if self._secrets is None:
            files = self._shelves.secrets
            self._secrets = frozenset((*files.names(self._owner), *files.names()))
        return self._secrets


def _new_job(act: CommandContext, shelves: JobStorage, new: RawJob, check: _Checks) -> Job:
    job_id = identifiers.parse_job_id(new.id)
    spec = check.text(bytes(new.spec))
    if new.snapshot is not None:
        check.snapshot(new.snapshot)
    return Job(
        id=job_id,
        spec=spec,
        owner=act.caller.name,
        submitted_at=act.now,
        snapshot=new.snapshot,
        checkpoint=spec.checkpoint or f"{shelves.checkpoints}/{job_id}",
    )


def _insert(act: CommandContext, jobs: dict[JobId, Job]) -> list[Job]:
    """Optimistic: only when an id is taken do we look which ones are."""
    known: dict[JobId, Job] = {}
    while True:
        fresh = [job for job in jobs.values() if job.id not in known]
        if not fresh:
            return [known[job_id] for job_id in jobs]
        try:
            act.store.commit(_arrival(act, fresh))
        except Conflict:
            taken = {job.id: found for job in fresh if (found := act.store.job(job.id))}
            if not taken:
                raise
            for job_id, found in taken.items():
                known[job_id] = _must_match(found, jobs[job_id])
            continue
        return [known.get(job_id, job) for job_id, job in jobs.items()]


def _arrival(act: CommandContext, jobs: Sequence[Job]) -> ChangeSet:
    by = act.caller.name
    return ChangeSet(
        new_jobs=jobs,
        messages=[
            InboxMessage(kind=InboxMessageKind.SUBMITTED, at=act.now, by=by, job_id=job.id)
            for job in jobs
        ],
        events=[
            Event(
                at=act.now,
                kind=EventKind.JOB,
                state=job.state.value,
                message=_arrival_words(job, by),
                job_id=job.id,
                by=by,
            )
            for job in jobs
        ],
    )


def _arrival_words(job: Job, by: str) -> str:
    if job.parent is None:
        return f"{by} submitted it"
    verb = "resumed" if job.parent_relation is ParentRelation.RESUME else "ran again"
    return f"{by} {verb} {job.parent}"


def _must_match(known: Job, sent: Job) -> Job:
    """The recorded job, when it is what was sent; times and states may have moved on."""
    same = ("spec", "owner", "snapshot", "parent", "kinship")
    if any(getattr(known, name) != getattr(sent, name) for name in same):
        raise Conflict(f"job id {sent.id} is taken by another job; choose another id")
    return known


def _must_be_alone(act: CommandContext, job: Job) -> None:
    """Jobs that share checkpoints must not run side by side: they would overwrite each other."""
    root = job
    while root.parent_relation is ParentRelation.RESUME and root.parent is not None:
        parent = act.store.job(root.parent)
        if parent is None:
            break
        root = parent
    family = [root]
    while family:
        member = family.pop()
        if not member.ended:
            raise Conflict(
                f"job {member.id} already goes on from these checkpoints and is {member.state}; "
                f"`tpu cancel {member.id}` first"
            )
        children = act.store.jobs(JobQuery(parent=member.id, limit=10_000))
        family += [child for child in children if child.parent_relation is ParentRelation.RESUME]


def _checkpoint_again(
    shelves: JobStorage, parent: Job, job_id: JobId, spec: JobSpec, kinship: ParentRelation
) -> str:
    if spec.checkpoint != parent.spec.checkpoint and spec.checkpoint is not None:
        return spec.checkpoint
    if kinship is ParentRelation.RESUME:
        return checkpoint_location(parent)
    if spec.checkpoint is None:
        return f"{shelves.checkpoints}/{job_id}"
    # Beside the one that the job file names, for that one holds the old checkpoints.
    return f"{spec.checkpoint.rstrip('/')}-{job_id}"


def _located(words: str, prefix: str) -> str:
    return "\n".join(prefix + line for line in words.split("\n"))
