"""New jobs: submitted, resumed or rerun. All jobs of one call are one commit."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

import msgspec

from tpufleet.errors import BadInput, Conflict, Forbidden, not_allowed, not_found
from tpufleet.model import identifiers
from tpufleet.model.api_types import ResubmitRequest
from tpufleet.model.fleet.pools import Pool
from tpufleet.model.fleet.slices import SIMULATED, SIMULATED_PROVIDERS
from tpufleet.model.inbox import InboxMessageKind
from tpufleet.model.job import job_file
from tpufleet.model.job.checkpoint_locations import location_error, spelled
from tpufleet.model.job.jobs import (
    IMAGES_REFUSED,
    TPU_VM_IMAGES_REFUSED,
    Job,
    JobId,
    JobSpec,
    JobState,
    ParentRelation,
    default_name,
    is_generated_id,
)
from tpufleet.model.people.users import Role
from tpufleet.model.tpu import type_lookup
from tpufleet.model.tpu.type_lookup import short_name
from tpufleet.model.values.encoding import from_json
from tpufleet.service.files.secrets import JobSecrets
from tpufleet.service.files.snapshots import SnapshotFiles
from tpufleet.service.hosts.assignments import HOST_FILE_PREFIX, checkpoint_location
from tpufleet.service.jobs import checkpoint_leases, checkpoint_owners, queries
from tpufleet.service.jobs.commands import CommandContext, require_ended, require_priority
from tpufleet.service.lookups import require_member
from tpufleet.service.notifications.channels import check_job_channels
from tpufleet.service.operations import archiving
from tpufleet.stores.base import ChangeSet, JobQuery, Lease, Store

MAX_JOBS_PER_CALL = 50_000  # in one call
# Of metrics, different ones in one call: each is compiled, which takes up to milliseconds.
MAX_PATTERNS_PER_CALL = 1_000
# A path there means another folder for each process, so that it cannot be checked here.
KERNEL_FOLDERS = ("/proc", "/sys", "/dev/fd")
# Of the operating system. https://refspecs.linuxfoundation.org/FHS_3.0/fhs/
SYSTEM_FOLDERS = (
    "/bin", "/boot", "/dev", "/etc", "/lib", "/lib32", "/lib64", "/libx32", "/sbin", "/usr",
)  # fmt: skip
# A job may have a folder in them, but not one of them.
SHARED_FOLDERS = (
    "/", "/dev/shm", "/home", "/media", "/mnt", "/opt", "/root", "/run", "/srv", "/tmp", "/var",
    "/var/lib", "/var/tmp",
)  # fmt: skip


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
    """Where the server keeps what jobs refer to."""

    snapshots: SnapshotFiles
    secrets: JobSecrets
    checkpoints: str  # folder or URL; each job gets a folder below it
    state: str = ""  # the server's own folder, if there is one
    providers: tuple[str, ...] = ()  # configured on this server
    # For jobs that name none. Empty: they are refused. None: not stated.
    default_provider: str | None = None
    local_containers: bool = False  # jobs on simulated slices may use images
    tpu_vm_containers: bool = True  # the same for TPU VMs and instances
    local_hosts: int | None = None  # simulated hosts at a time; None: unlimited

    def providers_for(self, spec: JobSpec, store: Store) -> set[str | None]:
        """That may run the job; None if it is not known which."""
        if spec.pool is None:
            return {*(spec.providers or (self.default_provider,))}
        pool = store.pool(spec.pool)
        return {None if pool is None else pool.provider}

    def image_problem(self, spec: JobSpec, store: Store) -> str | None:
        """Why a host that may get the job would refuse its image."""
        providers = self.providers_for(spec, store)
        if providers & SIMULATED_PROVIDERS and not self.local_containers:
            return IMAGES_REFUSED
        only_tpu_vms = providers <= {"tpu-vm", "compute"} and not self.tpu_vm_containers
        return TPU_VM_IMAGES_REFUSED if only_tpu_vms else None

    def simulates(self, spec: JobSpec, store: Store) -> bool:
        """Whether the job runs on simulated slices."""
        return self.providers_for(spec, store) <= SIMULATED_PROVIDERS


def check(context: CommandContext, storage: JobStorage, body: bytes) -> list[Job]:
    """What `submit` would submit."""
    jobs = _read(context, storage, body)
    named = [job for job in jobs.values() if job.spec.checkpoint is not None]
    _require_own_locations(context, storage, named)
    checkpoint_owners.require_owned(context.store, context.caller, named)
    checkpoint_leases.require_free(context.store, named)
    return list(jobs.values())


def submit(context: CommandContext, storage: JobStorage, body: bytes) -> list[Job]:
    """All or none. Idempotent: a job that exists with the same id and spec is left as it is."""
    jobs = _read(context, storage, body)
    named = [job for job in jobs.values() if job.spec.checkpoint is not None]
    if not named:  # each has a location of its own
        return _insert(context, jobs)
    _require_own_locations(context, storage, named)
    with checkpoint_leases.exclusive(context.store, context.now) as lease:
        fresh = [job for job in named if context.store.job(job.id) is None]
        checkpoint_owners.require_owned(context.store, context.caller, fresh)
        checkpoint_leases.require_free(context.store, fresh)
        return _insert(context, jobs, lease)


def _read(context: CommandContext, storage: JobStorage, body: bytes) -> dict[JobId, Job]:
    submission = from_json(body, RawSubmission, "request body")
    identifiers.check_range("number of jobs", len(submission.jobs), 1, MAX_JOBS_PER_CALL)
    check = _Checks(context, storage, context.caller.name)
    jobs: dict[JobId, Job] = {}
    for index, new in enumerate(submission.jobs):
        try:
            # A microsecond apart, so that jobs of one call are queued in the order given.
            moment = context.now + timedelta(microseconds=index)
            job = _new_job(context, storage, new, check, moment)
        except BadInput as error:
            raise type(error)(_located(str(error), f"jobs[{index}].")) from error
        if job.id in jobs:
            raise BadInput(f"jobs[{index}].id: duplicate id {job.id}")
        jobs[job.id] = job
    _require_unused_as_names(context, jobs.values())
    return jobs


def resubmit(
    context: CommandContext,
    storage: JobStorage,
    parent: Job,
    options: ResubmitRequest,
    relation: ParentRelation,
) -> Job:
    """A new job with the code of its parent, or with the snapshot in the request."""
    context.caller.require_job_owner(parent)
    verb = "resumed" if relation is ParentRelation.RESUME else "rerun"
    require_ended(parent, verb)
    archiving.require_files(context.store, parent, f"so it cannot be {verb}; submit a new job")
    document = {**job_file.to_document(parent.spec), **options.changes}
    base = queries.default_base(context.store, parent)
    if relation is ParentRelation.RERUN and base is not None and "name" not in options.changes:
        document["name"] = default_name(base, identifiers.parse_job_id(options.id))
    spec = job_file.parse_job(document)
    _Checks(context, storage, parent.owner).spec(spec)
    snapshot = options.snapshot or parent.snapshot
    if relation is ParentRelation.RESUME and parent.state is JobState.SUCCEEDED:
        _require_change(parent, spec, snapshot)
    if snapshot is not None:
        storage.snapshots.require(snapshot)
    job_id = identifiers.parse_job_id(options.id)
    job = Job(
        id=job_id,
        spec=spec,
        owner=parent.owner,
        submitted_at=context.now,
        snapshot=snapshot,
        checkpoint=_resubmit_checkpoint(storage, parent, job_id, spec, relation),
        parent=parent.id,
        parent_relation=relation,
        reason=SIMULATED if storage.simulates(spec, context.store) else "submitted",
    )
    known = context.store.job(job.id)
    if known is not None:
        return _require_match(known, job)
    _require_unused_as_names(context, [job])
    # Whoever chooses the id of a rerun chooses the end of its location, so that is checked as well.
    own = job.checkpoint == _default_checkpoint(storage, job_id)
    continued = job.checkpoint == checkpoint_location(parent)
    if not own and not continued:
        _require_own_locations(context, storage, [job])
    with checkpoint_leases.exclusive(context.store, context.now) as lease:
        # Under the lease: it may be cleaned, or resumed by another request, at the same time.
        archiving.require_files(context.store, parent, f"so it cannot be {verb}; submit a new job")
        if relation is ParentRelation.RESUME:
            _require_no_live_relative(context, parent)
        if not own and not _is_in_folder_of_server(job.checkpoint, storage):
            checkpoint_owners.require_owned(context.store, context.caller, [job])
        checkpoint_leases.require_free(context.store, [job])
        return _insert(context, {job.id: job}, lease)[0]


def _require_change(parent: Job, spec: JobSpec, snapshot: str | None) -> None:
    if (spec, snapshot) == (parent.spec, parent.snapshot):
        raise Conflict(
            f"job {parent.id} has already succeeded: nothing is left to resume\n"
            f"  next: `tpu rerun {parent.id}` runs it again from the beginning; to continue from "
            f"its last checkpoint, change an argument (`tpu resume {parent.id} steps=20000`)"
        )


class _Checks:
    """Checks each distinct spec, snapshot and pool once per call."""

    def __init__(self, context: CommandContext, storage: JobStorage, owner: str) -> None:
        self._context = context
        self._owner = owner
        self._storage = storage
        self._specs: dict[bytes, JobSpec] = {}
        self._snapshots: set[str] = set()
        self._pools: dict[str, Pool] | None = None
        self._secrets: frozenset[str] | None = None
        self._patterns: set[str] = set()

    def text(self, raw: bytes) -> JobSpec:
        spec = self._specs.get(raw)
        if spec is None:
            spec = job_file.parse_job(from_json(raw, object))
            self.spec(spec)
            self._specs[raw] = spec
        return spec

    def spec(self, spec: JobSpec) -> None:
        self._patterns.update(spec.metrics.values())
        count = len(self._patterns)
        identifiers.check_range("metrics: patterns in one call", count, 0, MAX_PATTERNS_PER_CALL)
        require_priority(self._context.caller, spec.priority)
        for index, name in enumerate(spec.providers):
            known = self._storage.providers
            if name not in known:
                raise not_allowed(f"providers[{index}]", name, known)
        if spec.pool is not None:
            self._pool(spec, spec.pool)
        elif not spec.providers and self._storage.default_provider == "":
            real = [name for name in self._storage.providers if name not in SIMULATED_PROVIDERS]
            raise BadInput(
                f"providers: required, because this server has {' and '.join(real)} and no default "
                f"provider; pass --provider {real[0]}, or set `provider: {real[0]}` in the config "
                "file of the server (--provider local simulates the job without TPUs)"
            )
        if spec.image and (problem := self._storage.image_problem(spec, self._context.store)):
            raise BadInput(f"image: {problem}")
        for field in ("reuse", "require_reservation"):
            if getattr(spec, field) and spec.pool is None:
                raise BadInput(f"{field}: only with a pool; add `pool: NAME`, or remove this field")
        self._local_hosts(spec)
        check_job_channels(self._context.store, self._owner, spec.notify)
        for name, reference in spec.secrets.items():
            if reference.startswith(HOST_FILE_PREFIX):
                self._host_file(spec, name)
            elif reference not in self._known_secrets():
                absent = not_found("secret", reference, "secret list", self._known_secrets())
                create = f"create it with `tpu secret set {reference}`"
                raise BadInput(f"secrets.{name}: {absent}, or {create}")

    def _local_hosts(self, spec: JobSpec) -> None:
        limit = self._storage.local_hosts
        if limit is None or not self._storage.simulates(spec, self._context.store):
            return
        hosts = spec.max_slices * type_lookup.find(spec.accelerator).hosts
        if hosts > limit:
            raise BadInput(
                f"slices: {spec.slices} of {short_name(spec.accelerator)} have {hosts} hosts, and "
                f"this server simulates at most {limit}, as processes of its machine\n"
                "  next: use fewer or smaller slices, or ask an admin to raise local_hosts"
            )

    def _host_file(self, spec: JobSpec, name: str) -> None:
        """A simulated host is the machine of the server, whose files are not for every user."""
        providers = self._storage.providers_for(spec, self._context.store)
        if providers & SIMULATED_PROVIDERS and not self._context.caller.is_admin:
            raise Forbidden(
                f"secrets.{name}: files of the server's machine require the admin role, and "
                "simulated slices run there; store the value with `tpu secret set` and use its name"
            )

    def snapshot(self, digest: str) -> None:
        if digest not in self._snapshots:
            self._storage.snapshots.require(digest)
            self._snapshots.add(digest)

    def _pool(self, spec: JobSpec, name: str) -> None:
        if self._pools is None:
            self._pools = {pool.name: pool for pool in self._context.store.pools()}
        pool = self._pools.get(name)
        if pool is None:
            raise BadInput(f"pool: {not_found('pool', name, 'pool list', self._pools)}")
        require_member(pool, self._owner, is_admin=self._owner_is_admin(), field="pool: ")
        if pool.accelerator != spec.accelerator:
            raise BadInput(f"pool: {pool.mismatch(spec.accelerator)}")
        if spec.max_slices > pool.largest:
            raise BadInput(
                f"slices: the job needs {spec.slices}, but pool {name} has at most {pool.largest}"
            )

    def _owner_is_admin(self) -> bool:
        if self._context.caller.name == self._owner:
            return self._context.caller.is_admin
        owner = self._context.store.user(self._owner)
        return owner is not None and owner.role is Role.ADMIN

    def _known_secrets(self) -> frozenset[str]:
        if self._secrets is None:
            files = self._storage.secrets
            self._secrets = frozenset((*files.names(self._owner), *files.names()))
        return self._secrets


def _new_job(
    context: CommandContext, storage: JobStorage, new: RawJob, check: _Checks, moment: datetime
) -> Job:
    job_id = identifiers.parse_job_id(new.id)
    spec = check.text(bytes(new.spec))
    if new.snapshot is not None:
        check.snapshot(new.snapshot)
    return Job(
        id=job_id,
        spec=spec,
        owner=context.caller.name,
        submitted_at=moment,
        snapshot=new.snapshot,
        checkpoint=spec.checkpoint or _default_checkpoint(storage, job_id),
        reason=SIMULATED if storage.simulates(spec, context.store) else "submitted",
    )


def _insert(
    context: CommandContext, jobs: dict[JobId, Job], fence: Lease | None = None
) -> list[Job]:
    """Optimistic: existing ids are only looked up after a conflict."""
    known: dict[JobId, Job] = {}
    while True:
        fresh = [job for job in jobs.values() if job.id not in known]
        if not fresh:
            return [known[job_id] for job_id in jobs]
        try:
            context.store.commit(_submit_change(context, fresh), fence=fence)
        except Conflict:
            taken = {job.id: row for job in fresh if (row := context.store.job(job.id))}
            if not taken:
                raise
            for job_id, row in taken.items():
                known[job_id] = _require_match(row, jobs[job_id])
            continue
        return [known.get(job_id, job) for job_id, job in jobs.items()]


def _submit_change(context: CommandContext, jobs: Sequence[Job]) -> ChangeSet:
    by = context.caller.name
    return ChangeSet(
        new_jobs=jobs,
        required_user=by,  # `delete_user` cancels what was committed before
        messages=[context.message(InboxMessageKind.SUBMITTED, job_id=job.id) for job in jobs],
        events=[
            context.job_event(job.id, job.state.value, _submit_message(job, by)) for job in jobs
        ],
    )


def _submit_message(job: Job, by: str) -> str:
    note = f"; {SIMULATED}" if job.reason == SIMULATED else ""
    if job.parent is None:
        return f"submitted by {by}{note}"
    verb = "resumed" if job.parent_relation is ParentRelation.RESUME else "rerun"
    return f"{verb} from job {job.parent} by {by}{note}"


def _require_unused_as_names(context: CommandContext, jobs: Iterable[Job]) -> None:
    """An id that a user chose must not be what others call a job of theirs."""
    for job in jobs:
        if is_generated_id(job.id):
            continue
        same_name = JobQuery(name=job.id, other_owner_than=job.owner, archived=None, limit=1)
        if context.store.jobs(same_name) and context.store.job(job.id) is None:
            raise Conflict(
                f"job id {job.id} is the name of another user's job; choose another id, or let "
                "the client generate one"
            )


def _require_match(known: Job, sent: Job) -> Job:
    """The recorded job, if it is the one that was sent; its times and states may differ."""
    if _identity(known) != _identity(sent):
        raise Conflict(f"job id {sent.id} is in use by another job; choose another id")
    return known


def _identity(job: Job) -> tuple[object, ...]:
    return (job.spec, job.owner, job.snapshot, job.parent, job.parent_relation)


def _require_no_live_relative(context: CommandContext, job: Job) -> None:
    """Jobs that share checkpoints must not run at the same time and overwrite each other's."""
    root = job
    while root.parent_relation is ParentRelation.RESUME and root.parent is not None:
        parent = context.store.job(root.parent)
        if parent is None:
            break
        root = parent
    relatives = [root]
    while relatives:
        member = relatives.pop()
        require_ended(member, "followed by another one with the same checkpoints")
        children = context.store.jobs(JobQuery(parent=member.id, archived=None, limit=10_000))
        relatives += [child for child in children if child.parent_relation is ParentRelation.RESUME]


def _require_own_locations(
    context: CommandContext, storage: JobStorage, jobs: Sequence[Job]
) -> None:
    """Below the server's own folder, each job has a folder that belongs to its owner."""
    root = storage.checkpoints.rstrip("/")
    real_root = checkpoint_leases.normalized(root)
    for job in jobs:
        if error := location_error(job.checkpoint):
            raise BadInput(f"checkpoint: {job.checkpoint[:200]!r} {error}")
        _refuse_system_folder(job)
        location = checkpoint_leases.normalized(job.checkpoint)
        if not _is_in_folder_of_server(job.checkpoint, storage):
            _refuse_state_folder(job, storage.state)
            continue
        parts = location.removeprefix(real_root).strip("/").split("/")
        owner = context.store.job(JobId(parts[0])) if parts[0] else None
        if owner is None or not _is_below(location, real_root):
            raise BadInput(
                f"checkpoint: {job.checkpoint} is not the location of a job; leave it out to get "
                "one, or use a location outside the server's folder"
            )
        context.caller.require_owner(owner.owner, f"checkpoint: {job.checkpoint}")
        _refuse_links(job, root, real_root)


def _is_below(location: str, root: str) -> bool:
    return f"{location}/".startswith(f"{root}/")


def _paths(job: Job) -> set[str]:
    """Its location on disk, as it is written and with links resolved."""
    if "://" in job.checkpoint:
        return set()
    return {spelled(job.checkpoint), checkpoint_leases.normalized(job.checkpoint)}


def _refuse_system_folder(job: Job) -> None:
    for path in _paths(job):
        below = any(_is_below(path, folder) for folder in (*KERNEL_FOLDERS, *SYSTEM_FOLDERS))
        if path in SHARED_FOLDERS or (below and not _is_below(path, "/dev/shm")):
            raise BadInput(
                f"checkpoint: {job.checkpoint} is a system folder; use another one, such as "
                "/data/checkpoints/NAME"
            )


def _refuse_state_folder(job: Job, state: str) -> None:
    """It has the secrets of the server, and the folders above it have it."""
    folders = {state, checkpoint_leases.normalized(state)} if state else set[str]()
    for path in _paths(job):
        for folder in folders:
            if _is_below(path, folder) or _is_below(folder, path):
                raise BadInput(
                    f"checkpoint: {job.checkpoint} overlaps the state folder of the server; leave "
                    "checkpoint out, or use another location"
                )


def _refuse_links(job: Job, root: str, real_root: str) -> None:
    """A link may lead to the folder of another job by the time that the job runs."""
    if "://" in job.checkpoint:
        return
    location = checkpoint_leases.normalized(job.checkpoint)
    name = location.removeprefix(real_root)
    if spelled(job.checkpoint) not in (location, root + name):
        raise BadInput(f"checkpoint: {job.checkpoint} is a link; use {location}")


def _resubmit_checkpoint(
    storage: JobStorage, parent: Job, job_id: JobId, spec: JobSpec, relation: ParentRelation
) -> str:
    if spec.checkpoint != parent.spec.checkpoint and spec.checkpoint is not None:
        return spec.checkpoint
    if relation is ParentRelation.RESUME:
        return checkpoint_location(parent)
    if spec.checkpoint is None or _is_in_folder_of_server(spec.checkpoint, storage):
        return _default_checkpoint(storage, job_id)
    # Next to the location in the job file, which has the checkpoints of the parent.
    return f"{spelled(spec.checkpoint)}-{job_id}"


def _default_checkpoint(storage: JobStorage, job_id: JobId) -> str:
    return f"{storage.checkpoints}/{job_id}"


def _is_in_folder_of_server(location: str, storage: JobStorage) -> bool:
    """Whether each job has a folder of its own there, which others cannot name."""
    root = storage.checkpoints.rstrip("/")
    real_root, real = (checkpoint_leases.normalized(each) for each in (root, location))
    return any(_is_below(each, above) for each in (location, real) for above in (root, real_root))


def _located(message: str, prefix: str) -> str:
    return "\n".join(prefix + line for line in message.split("\n"))
