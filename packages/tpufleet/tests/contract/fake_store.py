"""A store in plain Python, without SQL or JSON: fast, and thread-safe. It passes the suite that
every store passes, and SQL is compared with it."""

from __future__ import annotations

import bisect
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any, TypeVar

from tests.contract.search_matching import matches as matches_search
from tpufleet.errors import Unreachable
from tpufleet.model.events import Event
from tpufleet.model.fleet.host_commands import HostCommandResult, SentHostCommand
from tpufleet.model.fleet.hosts import Host, HostId, HostLiveness
from tpufleet.model.fleet.pools import CapacityRefusal, Pool
from tpufleet.model.fleet.slices import SliceId, SliceState, TpuSlice
from tpufleet.model.inbox import InboxMessage
from tpufleet.model.job.attempts import Attempt, AttemptId
from tpufleet.model.job.job_edits import JobEdit, apply_edit, merge_edits
from tpufleet.model.job.jobs import Job, JobId, JobState
from tpufleet.model.job.metric_points import MetricPoint, searchable_values
from tpufleet.model.people.audit import AuditEntry
from tpufleet.model.people.users import Token, User
from tpufleet.stores import invariants
from tpufleet.stores.base import (
    ChangeSet,
    EventQuery,
    FileKind,
    JobQuery,
    Lease,
    LiveState,
    StoreChange,
    StoredObject,
    Subscription,
    Usage,
)
from tpufleet.stores.sql import job_references
from tpufleet.stores.sql.database import NoNotifications

T = TypeVar("T")


def _age(job: Job) -> tuple[datetime, str]:
    return (job.submitted_at, job.id)


def _matches(job: Job, query: JobQuery) -> bool:
    return (
        (query.owner is None or job.owner == query.owner)
        and (not query.states or job.state in query.states)
        and (query.pool is None or job.spec.pool == query.pool)
        and (query.tag is None or query.tag in job.spec.tags)
        and (query.name is None or job.spec.name == query.name)
        and (query.parent is None or job.parent == query.parent)
        and (query.ids is None or job.id in query.ids)
        and (query.parents is None or job.parent in query.parents)
        and (query.other_owner_than is None or job.owner != query.other_owner_than)
    )


class FakeStore:
    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._users: dict[str, User] = {}
        self._tokens: dict[str, Token] = {}
        self._audit: list[AuditEntry] = []
        self._metadata: dict[str, str] = {}
        self._objects: dict[str, tuple[StoredObject, bytes]] = {}
        self._host_commands: dict[str, SentHostCommand] = {}
        self._host_command_results: dict[str, dict[HostId, HostCommandResult]] = {}
        self._jobs: dict[JobId, Job] = {}
        self._documents: dict[tuple[type, str], Any] = {}
        self._edits: dict[JobId, JobEdit] = {}
        self._metrics: dict[JobId, dict[str, float]] = {}  # last values
        self._points: dict[tuple[JobId, datetime], MetricPoint] = {}
        self._archived: set[JobId] = set()
        self._files_deleted: dict[JobId, datetime] = {}
        self._deleted: dict[FileKind, set[JobId]] = {kind: set() for kind in FileKind}
        self._attempts: dict[AttemptId, Attempt] = {}
        self._attempts_of: dict[JobId, dict[AttemptId, int]] = {}
        self._slices: dict[SliceId, TpuSlice] = {}
        self._hosts: dict[HostId, Host] = {}
        self._hosts_of: dict[SliceId, dict[HostId, int]] = {}
        self._pools: dict[str, Pool] = {}
        self._refusals: dict[str, CapacityRefusal] = {}
        self._events: list[Event] = []  # in order of their numbers
        self._last_event = 0
        self._inbox: dict[int, InboxMessage] = {}
        self._last_message = 0
        self._heartbeats: dict[HostId, HostLiveness] = {}
        self._registrations: dict[HostId, str] = {}
        self._leases: dict[str, tuple[str | None, int, datetime]] = {}

    # Jobs and attempts.

    def job(self, job_id: JobId) -> Job | None:
        return self._jobs.get(job_id)

    def _newest(
        self, wanted: Callable[[Job], bool], limit: int, *, oldest_first: bool = False
    ) -> list[Job]:
        with self._lock:
            matching = [job for job in self._jobs.values() if wanted(job)]
        return sorted(matching, key=_age, reverse=not oldest_first)[:limit]

    def find_jobs(self, jobs: Sequence[JobId]) -> dict[JobId, Job]:
        return {job_id: job for job_id in jobs if (job := self.job(job_id)) is not None}

    def jobs(self, query: JobQuery) -> list[Job]:
        def matches(job: Job) -> bool:
            return (
                query.archived in (None, job.id in self._archived)
                and (query.having is None or job.id not in self._deleted[query.having])
                and _matches(job, query)
                and (
                    query.search is None
                    or matches_search(job, query.search, self._metrics.get(job.id, {}))
                )
            )

        if query.before is None:
            return self._newest(matches, query.limit, oldest_first=query.oldest_first)
        last = self.job(query.before)
        if last is None:
            return []
        oldest_first, age = query.oldest_first, _age(last)
        return self._newest(
            lambda job: (_age(job) > age if oldest_first else _age(job) < age) and matches(job),
            query.limit,
            oldest_first=oldest_first,
        )

    def jobs_like(self, prefix: str, limit: int = 10) -> list[Job]:
        return self._newest(
            lambda job: job.id.startswith(prefix) or job.spec.name.startswith(prefix), limit
        )

    def count_jobs(self) -> dict[JobState, int]:
        with self._lock:
            return dict(Counter(job.state for job in self._jobs.values()))

    def files_deleted_at(self, job_id: JobId) -> datetime | None:
        return self._files_deleted.get(job_id)

    def archive(self, jobs: Sequence[JobId]) -> None:
        with self._lock:
            self._archived.update(jobs)

    def unarchive(self, jobs: Sequence[JobId]) -> None:
        with self._lock:
            self._archived.difference_update(jobs)

    def mark_files_deleted(self, jobs: Sequence[JobId], at: datetime) -> None:
        with self._lock:
            for job_id in jobs:
                self._files_deleted.setdefault(job_id, at)
            self._archived.update(jobs)
            self._deleted[FileKind.FILES].update(jobs)
            self._deleted[FileKind.LOGS].update(jobs)

    def mark_deleted(self, jobs: Sequence[JobId], kind: FileKind) -> None:
        with self._lock:
            self._deleted[kind].update(jobs)

    def referring_jobs(
        self, references: Sequence[str], *, with_files: bool = False
    ) -> dict[str, set[JobId]]:
        found: dict[str, set[JobId]] = {each: set() for each in references}
        with self._lock:
            for job in self._jobs.values():
                if with_files and job.id in self._files_deleted:
                    continue
                for reference in job_references.references(job, self._jobs.keys()):
                    if reference in found:
                        found[reference].add(job.id)
        return found

    def referred(self, references: Sequence[str]) -> set[str]:
        return {each for each, jobs in self.referring_jobs(references).items() if jobs}

    def attempt(self, attempt_id: AttemptId) -> Attempt | None:
        return self._attempts.get(attempt_id)

    def attempts(self, job_id: JobId) -> list[Attempt]:
        with self._lock:
            known = self._attempts_of.get(job_id, {})
            return [self._attempts[attempt_id] for attempt_id in sorted(known, key=known.get)]  # type: ignore[arg-type]

    def attempts_of(self, jobs: Sequence[JobId]) -> dict[JobId, list[Attempt]]:
        return {job_id: found for job_id in jobs if (found := self.attempts(job_id))}

    def live_attempts(self, jobs: Sequence[JobId]) -> dict[JobId, Attempt]:
        newest = self.newest_attempts(jobs)
        return {job_id: attempt for job_id, attempt in newest.items() if attempt.live}

    def newest_attempts(self, jobs: Sequence[JobId]) -> dict[JobId, Attempt]:
        with self._lock:
            known = {job_id: self._attempts_of.get(job_id) for job_id in jobs}
            return {
                job_id: self._attempts[max(numbers, key=numbers.get)]  # type: ignore[arg-type]
                for job_id, numbers in known.items()
                if numbers
            }

    # Slices and hosts.

    def slice(self, slice_id: SliceId) -> TpuSlice | None:
        return self._slices.get(slice_id)

    def slices(
        self, *, live_only: bool = True, pool: str | None = None, job_id: JobId | None = None
    ) -> list[TpuSlice]:
        with self._lock:
            matching = [
                tpu_slice
                for tpu_slice in self._slices.values()
                if not (live_only and tpu_slice.state is SliceState.GONE)
                and (pool is None or tpu_slice.pool == pool)
                and (job_id is None or tpu_slice.job_id == job_id)
            ]
        return sorted(matching, key=lambda tpu_slice: (tpu_slice.requested_at, tpu_slice.id))

    def first_slice_at(self) -> datetime | None:
        with self._lock:
            return min((each.requested_at for each in self._slices.values()), default=None)

    def usage(self, since: datetime | None, until: datetime) -> Usage:
        def lasted(ended_at: datetime | None) -> bool:
            return since is None or ended_at is None or ended_at >= since

        with self._lock:
            slices = [
                each
                for each in self.slices(live_only=False)
                if each.requested_at <= until and lasted(each.gone_since)
            ]
            attempts = [
                each
                for each in self._attempts.values()
                if each.created_at <= until and lasted(each.ended_at)
            ]
        attempts.sort(key=lambda each: (each.created_at, each.id))
        return Usage(slices=slices, attempts=attempts)

    def find_slices(self, slices: Sequence[SliceId]) -> dict[SliceId, TpuSlice]:
        with self._lock:
            return {each: self._slices[each] for each in slices if each in self._slices}

    def host(self, host_id: HostId) -> Host | None:
        return self._hosts.get(host_id)

    def find_hosts(self, hosts: Sequence[HostId]) -> dict[HostId, Host]:
        with self._lock:
            return {each: self._hosts[each] for each in hosts if each in self._hosts}

    def hosts(self, slice_id: SliceId) -> list[Host]:
        with self._lock:
            known = self._hosts_of.get(slice_id, {})
            return [self._hosts[host_id] for host_id in sorted(known, key=known.get)]  # type: ignore[arg-type]

    # Events and messages.

    def events(self, query: EventQuery) -> list[Event]:
        with self._lock:
            start = bisect.bisect_right(self._events, query.after, key=lambda event: event.seq)
            matching = self._events[start:]
        if query.job_id is not None:
            matching = [event for event in matching if event.job_id == query.job_id]
        if query.slice_id is not None:
            matching = [event for event in matching if event.slice_id == query.slice_id]
        if query.pool is not None:
            matching = [event for event in matching if event.pool == query.pool]
        if query.by is not None:
            matching = [event for event in matching if event.by == query.by]
        if query.reservation is not None:
            matching = [event for event in matching if event.reservation == query.reservation]
        return (
            matching[max(0, len(matching) - query.limit) :]
            if query.newest
            else matching[: query.limit]
        )

    def last_event(self) -> int:
        return self._last_event

    def delete_events(self, before: datetime) -> int:
        with self._lock:
            live = {job.id for job in self._jobs.values() if not job.ended}
            kept = [event for event in self._events if event.at >= before or event.job_id in live]
            deleted, self._events = len(self._events) - len(kept), kept
            return deleted

    def inbox(self, after: int = 0, limit: int = 10_000) -> list[InboxMessage]:
        with self._lock:
            return [message for seq, message in self._inbox.items() if seq > after][:limit]

    # Pools, and the live state.

    def pools(self) -> list[Pool]:
        return self._listed(self._pools.values(), lambda pool: pool.name)

    def pool(self, name: str) -> Pool | None:
        return self._pools.get(name)

    def refusals(self) -> list[CapacityRefusal]:
        return self._listed(self._refusals.values(), lambda refusal: refusal.key)

    def live(self) -> LiveState:
        with self._lock:
            jobs = sorted((job for job in self._jobs.values() if not job.ended), key=_age)
            slices = self.slices()
            return LiveState(
                jobs=jobs,
                attempts=[
                    each for job in sorted(job.id for job in jobs) for each in self.attempts(job)
                ],
                slices=slices,
                hosts=[
                    each
                    for slice_id in sorted(tpu_slice.id for tpu_slice in slices)
                    for each in self.hosts(slice_id)
                ],
                pools=self.pools(),
                refusals=self.refusals(),
            )

    # Writing.

    def commit(self, change: ChangeSet, *, fence: Lease | None = None) -> None:
        with self._lock:
            self._check_fence(fence)
            invariants.check_required_user(
                change.required_user, change.required_user in self._users
            )
            invariants.check_new_job_ids(change.new_jobs, self._jobs.keys())
            invariants.check_transitions(
                "job",
                ((job.id, job.state) for job in change.jobs),
                ((job.id, self._jobs[job.id].state) for job in change.jobs if job.id in self._jobs),
            )
            attempts = invariants.attempts_to_write(
                change.attempts,
                {
                    attempt.id: self._attempts[attempt.id]
                    for attempt in change.attempts
                    if attempt.id in self._attempts
                },
            )
            invariants.check_transitions(
                "slice",
                ((each.id, each.state) for each in change.slices),
                (
                    (each.id, self._slices[each.id].state)
                    for each in change.slices
                    if each.id in self._slices
                ),
            )
            # Nothing below can fail.
            self._jobs.update((job.id, job) for job in change.new_jobs)
            for job in change.jobs:
                edit = self._edits.get(job.id)
                self._jobs[job.id] = job if edit is None else apply_edit(job, edit)
            for edit in change.edits:
                self._edit(edit)
            for attempt in attempts:
                if not attempt.live:
                    self._metrics.setdefault(attempt.job_id, {}).update(
                        searchable_values(attempt.last_step, attempt.metrics)
                    )
                self._attempts[attempt.id] = attempt
                self._attempts_of.setdefault(attempt.job_id, {})[attempt.id] = attempt.number
            self._slices.update((tpu_slice.id, tpu_slice) for tpu_slice in change.slices)
            for host in change.hosts:
                self._hosts[host.id] = host
                self._hosts_of.setdefault(host.slice_id, {})[host.id] = host.index
            self._refusals.update((refusal.key, refusal) for refusal in change.refusals)
            self._pools.update((pool.name, pool) for pool in change.pools)
            for name in change.deleted_pools:
                self._pools.pop(name, None)
            for seq in change.consumed:
                self._inbox.pop(seq, None)
            for message in change.messages:
                self._last_message += 1
                self._inbox[self._last_message] = replace(message, seq=self._last_message)
            for event in change.events:
                self._last_event += 1
                self._events.append(replace(event, seq=self._last_event))

    def subscribe(self, on_change: Callable[[StoreChange], None]) -> Subscription:
        return NoNotifications()

    def _edit(self, edit: JobEdit) -> None:
        if edit.job_id in self._jobs:
            earlier = self._edits.get(edit.job_id)
            merged = edit if earlier is None else merge_edits(earlier, edit)
            self._edits[edit.job_id] = merged
            self._jobs[edit.job_id] = apply_edit(self._jobs[edit.job_id], merged)

    # Metrics.

    def record_metrics(self, points: Sequence[MetricPoint]) -> None:
        with self._lock:
            for point in points:
                self._points[point.job_id, point.at] = point
                self._metrics.setdefault(point.job_id, {}).update(
                    searchable_values(point.step, point.values)
                )

    def metric_points(self, job_id: JobId) -> list[MetricPoint]:
        with self._lock:
            points = [point for point in self._points.values() if point.job_id == job_id]
        return sorted(points, key=lambda point: point.at)

    def delete_metric_points(self, points: Sequence[MetricPoint]) -> None:
        with self._lock:
            for point in points:
                self._points.pop((point.job_id, point.at), None)

    # Heartbeats and registrations.

    def record_heartbeats(self, reports: Sequence[HostLiveness]) -> None:
        with self._lock:
            for report in reports:
                known = self._heartbeats.get(report.host_id)
                if known and report.progress is None and report.attempt_id == known.attempt_id:
                    report = replace(report, progress=known.progress)
                self._heartbeats[report.host_id] = report

    def last_heartbeats(self, hosts: Sequence[HostId]) -> dict[HostId, HostLiveness]:
        with self._lock:
            return {host: self._heartbeats[host] for host in hosts if host in self._heartbeats}

    def heartbeats_outside(self, start: datetime, end: datetime) -> dict[HostId, datetime]:
        with self._lock:
            return {
                host: report.seen_at
                for host, report in self._heartbeats.items()
                if not start <= report.seen_at <= end and self._may_report(host)
            }

    def _may_report(self, host_id: HostId) -> bool:
        host = self._hosts.get(host_id)
        tpu_slice = self._slices.get(host.slice_id) if host else None
        return tpu_slice is not None and tpu_slice.state is not SliceState.GONE

    def count_seen_hosts(self, since: datetime) -> int:
        with self._lock:
            return sum(report.seen_at >= since for report in self._heartbeats.values())

    def register_agent(self, host_id: HostId, digest: str) -> str:
        with self._lock:
            return self._registrations.setdefault(host_id, digest)

    def delete_heartbeats(self, hosts: Sequence[HostId]) -> None:
        with self._lock:
            for host in hosts:
                self._heartbeats.pop(host, None)
                self._registrations.pop(host, None)

    # Documents.

    def document(self, kind: type[T], key: str) -> T | None:
        return self._documents.get((kind, key))

    def documents(self, kind: type[T]) -> list[T]:
        with self._lock:
            return [self._documents[each] for each in sorted(
                (each for each in self._documents if each[0] is kind), key=lambda each: each[1]
            )]  # fmt: skip

    def update_document(
        self,
        kind: type[T],
        key: str,
        change: Callable[[T | None], T | None],
        *,
        fence: Lease | None = None,
        required_user: str = "",
    ) -> T | None:
        with self._lock:
            self._check_fence(fence)
            invariants.check_required_user(required_user, required_user in self._users)
            changed = change(self._documents.get((kind, key)))
            self._documents.pop((kind, key), None)
            if changed is not None:
                self._documents[kind, key] = changed
            return changed

    # Leases.

    def time(self) -> datetime | None:
        return None

    def _check_fence(self, fence: Lease | None) -> None:
        if fence is not None:
            holder, token, _ = self._leases.get(fence.name, (None, 0, fence.expires_at))
            invariants.check_fence(fence, holder, token)

    def acquire_lease(self, name: str, holder: str, ttl: timedelta, now: datetime) -> Lease | None:
        with self._lock:
            before, token, expires_at = self._leases.get(name, (None, 0, now))
            if before not in (None, holder) and now < expires_at:
                return None
            token = token if before == holder else token + 1
            self._leases[name] = (holder, token, now + ttl)
            return Lease(name=name, holder=holder, token=token, expires_at=now + ttl)

    def release_lease(self, lease: Lease) -> None:
        with self._lock:
            holder, token, expires_at = self._leases.get(lease.name, (None, 0, lease.expires_at))
            if (holder, token) == (lease.holder, lease.token):
                self._leases[lease.name] = (None, token, expires_at)

    def _listed(self, values: Iterable[T], by: Callable[[T], object]) -> list[T]:
        with self._lock:
            return sorted(values, key=by)  # type: ignore[arg-type]  # keys are comparable

    # Host commands.

    def put_host_command(self, sent: SentHostCommand) -> SentHostCommand:
        with self._lock:
            return self._host_commands.setdefault(sent.host_command.id, sent)

    def host_command(self, command_id: str) -> SentHostCommand | None:
        return self._host_commands.get(command_id)

    def host_commands(self) -> list[SentHostCommand]:
        return self._listed(
            self._host_commands.values(), lambda sent: (sent.sent_at, sent.host_command.id)
        )

    def put_host_command_result(self, command_id: str, result: HostCommandResult) -> None:
        with self._lock:
            self._host_command_results.setdefault(command_id, {}).setdefault(result.host_id, result)

    def host_command_results(
        self, command_ids: Sequence[str]
    ) -> dict[str, list[HostCommandResult]]:
        with self._lock:
            matching = {each: self._host_command_results.get(each) for each in command_ids}
            return {
                each: [results[host] for host in sorted(results)]
                for each, results in matching.items()
                if results
            }

    def delete_host_commands(self, command_ids: Sequence[str]) -> None:
        with self._lock:
            for each in command_ids:
                self._host_commands.pop(each, None)
                self._host_command_results.pop(each, None)

    # Users, tokens and metadata.

    def put_user(self, user: User) -> None:
        with self._lock:
            self._users[user.name] = user

    def user(self, name: str) -> User | None:
        return self._users.get(name)

    def users(self) -> list[User]:
        return self._listed(self._users.values(), lambda user: user.name)

    def delete_user(self, name: str) -> None:
        with self._lock:
            self._users.pop(name, None)
            self._tokens = {key: token for key, token in self._tokens.items() if token.user != name}

    def put_token(
        self, token: Token, *, check: Callable[[Sequence[Token]], None] | None = None
    ) -> None:
        with self._lock:
            invariants.check_required_user(token.user, token.user in self._users)
            if check is not None:
                check(self.tokens(token.user))
            self._tokens[token.id] = token

    def token_by_hash(self, digest: str) -> Token | None:
        with self._lock:
            return next((token for token in self._tokens.values() if token.hash == digest), None)

    def token_and_user(self, digest: str) -> tuple[Token, User | None] | None:
        with self._lock:
            token = self.token_by_hash(digest)
            return None if token is None else (token, self.user(token.user))

    def tokens(self, user: str | None = None) -> list[Token]:
        with self._lock:
            tokens = [token for token in self._tokens.values() if user in (None, token.user)]
        return sorted(tokens, key=lambda token: (token.created_at, token.id))

    def update_token(self, token_id: str, change: Callable[[Token], Token]) -> Token | None:
        with self._lock:
            before = self._tokens.get(token_id)
            if before is None:
                return None
            self._tokens[token_id] = changed = change(before)
            return changed

    def delete_token(self, token_id: str) -> None:
        with self._lock:
            self._tokens.pop(token_id, None)

    def append_audit(self, entry: AuditEntry) -> None:
        with self._lock:
            self._audit.append(replace(entry, seq=len(self._audit) + 1))

    def audit(
        self,
        *,
        actor: str | None = None,
        token: str | None = None,
        before: int | None = None,
        limit: int = 100,
    ) -> list[AuditEntry]:
        with self._lock:
            entries = [
                entry for entry in reversed(self._audit)
                if actor in (None, entry.actor) and (before is None or entry.seq < before)
                and token in (None, entry.token_id, entry.target)
            ]  # fmt: skip
        return entries[:limit]

    def objects(self, prefix: str, since: str | None = None) -> list[StoredObject]:
        with self._lock:
            names = sorted(name for name in self._objects if name.startswith(prefix))
            first = 0 if since is None else max(0, bisect.bisect_right(names, since) - 1)
            return [self._objects[name][0] for name in names[first:]]

    def read_objects(self, names: Sequence[str]) -> dict[str, bytes]:
        with self._lock:
            return {name: self._objects[name][1] for name in names if name in self._objects}

    def put_object(
        self,
        name: str,
        data: bytes,
        at: datetime,
        *,
        replace: bool = False,
        required_user: str = "",
        limit: tuple[str, int] | None = None,
    ) -> bool:
        with self._lock:
            invariants.check_required_user(required_user, required_user in self._users)
            if name in self._objects and not replace:
                return False
            if limit is not None and name not in self._objects:
                prefix, most = limit
                if sum(each.startswith(prefix) for each in self._objects) >= most:
                    return False
            self._objects[name] = (StoredObject(name=name, size=len(data), at=at), data)
            return True

    def delete_objects(self, names: Sequence[str]) -> None:
        with self._lock:
            for name in names:
                self._objects.pop(name, None)

    def metadata(self, name: str) -> str | None:
        return self._metadata.get(name)

    def put_metadata(self, name: str, value: str, *, replace: bool = True) -> None:
        with self._lock:
            if replace or name not in self._metadata:
                self._metadata[name] = value

    def write_error(self) -> Unreachable | None:
        return None

    def close(self) -> None:
        """Nothing to close: the object may be shared."""
