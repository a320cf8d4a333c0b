"""Simulated hosts: boot, notices, stalls and deaths. Callers hold the lock of the records."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Collection, Mapping, Sequence
from datetime import datetime, timedelta
from pathlib import Path

from msgspec.structs import replace

from tpufleet.errors import BadRequest, no_such_host
from tpufleet.linux import cgroups
from tpufleet.linux.cgroups import Cgroup
from tpufleet.model.fleet.hosts import NoticeKind
from tpufleet.providers.base import Fault
from tpufleet.providers.local import processes
from tpufleet.providers.local.processes import Processes, ProcessId
from tpufleet.providers.local.slice_records import SliceRecord, SliceRecords, write_atomic

log = logging.getLogger(__name__)

# No cloud deletes a simulated host whose server never comes back; its agent exits.
AGENT_WAIT_SECONDS = 1800
NOTICE_KINDS = {
    Fault.PREEMPT_NOTICE: NoticeKind.PREEMPTED,
    Fault.MAINTENANCE: NoticeKind.MAINTENANCE,
}


# What agents, and so jobs, get of the server's environment. Not the rest: a password of the
# database or a key of a cloud may be in it.
INHERITED = (
    "PATH", "HOME", "USER", "LOGNAME", "SHELL", "TERM", "LANG", "LANGUAGE", "TZ", "TMPDIR",
    "LD_LIBRARY_PATH", "SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE", "TPUFLEET_CA_FILE",
    "STORAGE_EMULATOR_HOST", "GOOGLE_CLOUD_PROJECT", "XDG_CACHE_HOME",
    "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY", "http_proxy", "https_proxy", "all_proxy",
    "no_proxy", "UV_CACHE_DIR", "UV_DEFAULT_INDEX", "UV_INDEX_URL", "UV_EXTRA_INDEX_URL",
)  # fmt: skip
INHERITED_PREFIXES = ("LC_", "PYTHON", "PIP_", "JAX_", "XLA_")
URL_WITH_PASSWORD = re.compile(r"://[^/@\s]*:[^/@\s]+@")


class SimulatedHosts:
    def __init__(
        self,
        records: SliceRecords,
        agent: Sequence[str],
        notice_period: timedelta,
        hidden: Sequence[Path] = (),
        job_user: str | None = None,
        member_job_user: str | None = None,
        *,
        containers: bool = False,
        inherit: Collection[str] = (),
    ) -> None:
        users = {"TPUFLEET_JOB_USER": job_user, "TPUFLEET_MEMBER_JOB_USER": member_job_user}
        # Docker gives root on the server's own machine to whoever may talk to it.
        self._images = {} if containers else {"TPUFLEET_IMAGES": "refused"}
        self._users = {variable: name for variable, name in users.items() if name}
        self._chosen = frozenset(inherit)
        self._records = records
        self._agent = tuple(agent)
        self._notice_period = notice_period
        self._hidden = tuple(hidden)
        self._processes = Processes()

    def dead_hosts(self, record: SliceRecord) -> tuple[int, ...]:
        """Hosts whose agent ran and no longer does. Read-only; needs no lock."""
        dead = set(record.killed)
        for index, agent in record.agents.items():
            if index not in dead and not self._processes.alive(agent, self._marker(record, index)):
                dead.add(index)
        return tuple(sorted(dead))

    def advance(self, record: SliceRecord, now: datetime) -> None:
        """Do what is due for a slice: boot, planned faults, the end of its notice period."""
        if not record.booted and now >= record.boot_at:
            record = self._boot(record)
        while record.planned and not record.over and now >= _next_fault_at(record):
            record = self._inject_next(record, now)
        if record.taken_at is not None and now >= record.taken_at and not record.over:
            self._records.save(replace(record, taken=True, swept=False))

    def inject(
        self, record: SliceRecord, fault: Fault, host: int | None, now: datetime
    ) -> SliceRecord:
        """Record the fault; `sweep` then kills the processes."""
        if record.over:
            raise BadRequest(f"slice {record.id} has already ended")
        if fault in NOTICE_KINDS:
            return self._give_notice(record, NOTICE_KINDS[fault], now)
        if fault is Fault.PREEMPT:
            return self._save(replace(record, taken=True, swept=False))
        if host is None or not 0 <= host < record.hosts:
            raise BadRequest(str(no_such_host(f"slice {record.id}", record.hosts, host)))
        if fault is Fault.KILL_HOST:
            killed = tuple(sorted({*record.killed, host}))
            return self._save(replace(record, killed=killed, swept=False))
        marker = self._marker(record, host)
        if not self._processes.suspend(lambda other: other == marker):
            raise BadRequest(f"host {host} of slice {record.id} is not running; cannot stall it")
        return record

    def sweep(self) -> None:
        """Kill every process that must not run, in one scan over all slices; then remove released
        slices."""
        self._processes.reap()
        due = [record for record in self._records.all() if not record.swept]
        if not due:
            return
        self._processes.kill_cgroups([group for item in due for group in _dead_cgroups(item)])
        whole = {self._slice_marker(record) for record in due if record.over}
        single = {self._marker(record, host) for record in due for host in record.killed}
        left = self._processes.kill(lambda marker: marker in single or _slice_of(marker) in whole)
        for record in due:
            alive = [each for each in left if _slice_of(each) == self._slice_marker(record)]
            alive += [str(group.path) for group in _dead_cgroups(record) if group.populated]
            if alive:
                log.warning("processes of slice %s are still alive: %s", record.id, alive)
            elif record.released:
                self._records.remove(record.id)
            else:
                self._save(replace(record, swept=True))

    def _boot(self, record: SliceRecord) -> SliceRecord:
        """Start one agent per host. `booting` is recorded first: after a crash in between, the
        unrecorded agents are killed before new ones start."""
        marker = self._slice_marker(record)
        if record.booting:
            groups = [Cgroup(Path(path)) for path in record.cgroups.values()]
            left_in_groups = self._processes.kill_cgroups(groups)
            if left_in_groups or self._processes.kill(lambda other: _slice_of(other) == marker):
                return record  # retry at the next pass
        record = self._save(replace(record, booting=True, cgroups=self._new_cgroups(record)))
        try:
            agents = {index: self._start(record, index) for index in record.hosts_to_boot}
        except OSError as error:
            failure = f"cannot start an agent: {error}"
            return self._save(replace(record, booting=False, failed=failure, swept=False))
        return self._save(replace(record, booting=False, agents=agents))

    def _new_cgroups(self, record: SliceRecord) -> dict[int, str]:
        """Named before they are created, so that none is forgotten after a crash."""
        parent = cgroups.writable_cgroup()
        if parent is None:
            return {}
        prefix = f"tpufleet-{processes.root_marker(self._records.root)}-{record.id}"
        return {index: str(parent.path / f"{prefix}-{index}") for index in record.hosts_to_boot}

    def _start(self, record: SliceRecord, index: int) -> ProcessId:
        folder = self._records.folder(record.id, index)
        environment = {
            **{name: value for name, value in os.environ.items() if self._inherits(name, value)},
            **_environment(record, index, folder, self._marker(record, index)),
        }
        if self._hidden:
            environment["TPUFLEET_HIDDEN"] = os.pathsep.join(map(str, self._hidden))
        environment |= self._users | self._images
        path = record.cgroups.get(index)
        cgroup = Cgroup(Path(path)).create() if path else None
        return self._processes.start(self._agent, environment, folder, folder / "agent.log", cgroup)

    def _inherits(self, name: str, value: str) -> bool:
        if name in self._chosen:
            return True
        usual = name in INHERITED or name.startswith(INHERITED_PREFIXES)
        return usual and not URL_WITH_PASSWORD.search(value)

    def _inject_next(self, record: SliceRecord, now: datetime) -> SliceRecord:
        """The next planned fault. Removed from the plan first, so that it happens at most once."""
        planned, *rest = record.planned
        record = self._save(replace(record, planned=tuple(rest)))
        try:
            return self.inject(record, planned.fault, planned.host, now)
        except BadRequest as error:
            log.warning("skipped a planned fault: %s", error)
            return record

    def _give_notice(self, record: SliceRecord, kind: NoticeKind, now: datetime) -> SliceRecord:
        for index in range(record.hosts):
            write_atomic(self._records.folder(record.id, index) / "notice", kind.value.encode())
        return self._save(replace(record, notice=kind, taken_at=now + self._notice_period))

    def _save(self, record: SliceRecord) -> SliceRecord:
        self._records.save(record)
        return record

    def _marker(self, record: SliceRecord, index: int) -> str:
        return processes.host_marker(self._records.root, record.id, index)

    def _slice_marker(self, record: SliceRecord) -> str:
        return processes.slice_marker(self._records.root, record.id)


def _dead_cgroups(record: SliceRecord) -> list[Cgroup]:
    """Of hosts on which nothing may run."""
    hosts = record.cgroups if record.over else record.killed
    return [Cgroup(Path(record.cgroups[host])) for host in hosts if host in record.cgroups]


def _slice_of(marker: str) -> str:
    return marker[: marker.rfind("/") + 1]


def _next_fault_at(record: SliceRecord) -> datetime:
    return record.boot_at + record.planned[0].after


def _environment(record: SliceRecord, index: int, folder: Path, marker: str) -> Mapping[str, str]:
    return {
        processes.MARKER_VARIABLE: marker,
        "TPUFLEET_SERVER": record.server_url,
        "TPUFLEET_SLICE": record.id,
        "TPUFLEET_HOST_INDEX": str(index),
        "TPUFLEET_HOSTS": str(record.hosts),
        "TPUFLEET_TOKEN_FILE": str(folder / "token"),
        "TPUFLEET_WORK": str(folder / "work"),
        "TPUFLEET_ADDRESS": "127.0.0.1",
        "TPUFLEET_COORDINATOR_PORT": str(record.port),
        "TPUFLEET_CHIPS": str(record.chips_per_host),
        "TPUFLEET_NOTICE_FILE": str(folder / "notice"),
        "TPUFLEET_PLATFORM": "cpu",
        "TPUFLEET_WAITS_SECONDS": str(AGENT_WAIT_SECONDS),
    }
