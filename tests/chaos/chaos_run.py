"""A chaos_run: real jobs on a real server, and from a seed, things that are killed."""

from __future__ import annotations

import contextlib
import io
import itertools
import os
import random
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tests import server_process
from tests.chaos import ledger
from tests.polling import Patience
from tests.server_process import Server
from tpufleet.client import snapshots
from tpufleet.client.fleet import FleetClient
from tpufleet.errors import Conflict, FleetError, Unreachable
from tpufleet.model.api_types import NewJob
from tpufleet.model.fleet.hosts import Phase, host_id
from tpufleet.model.job.attempts import Attempt, AttemptId
from tpufleet.model.job.end_reasons import EndReason
from tpufleet.model.job.jobs import JobId, JobState
from tpufleet.model.tpu import type_lookup
from tpufleet.service.files.logs import LogFiles
from tpufleet.stores.base import EventQuery, Store

if TYPE_CHECKING:
    from tests.chaos.machine import Machine

WORKLOAD = Path(__file__).parent / "workload"
PLENTY = {"failure": 60, "setup": 60, "memory": 60, "hang": 60, "infrastructure": 60}
HIT_WITHIN = 45.0  # seconds in which a fault waits for something to hit
MISSED = "(missed)"
CLEARED_WITHIN = 90.0  # seconds from the end of the last job until nothing of it is left


class Missed(Exception):
    """There was nothing that the fault could hit."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ChaosJob:
    """One job of a chaos_run."""

    id: JobId
    accelerator: str = "v5litepod-4"
    slices: int = 1
    capacity: str = "spot"
    least: int = 0  # slices on which it goes on when others are lost; 0: all of them
    steps: int = 20
    step_seconds: float = 0.15
    delay: float = 0.0  # seconds after the chaos_run began
    fork_bomb: bool = False  # leaves processes behind that replicate
    units: int = 0  # instead of steps: so many units, of which each is done once
    cancelled: bool = False  # by a fault, before it can finish

    @property
    def processes(self) -> int:
        """That there are in every attempt."""
        return type_lookup.find(self.accelerator).hosts * (self.least or self.slices)


class ChaosRun:
    """Jobs that run while things die, and the rules that hold all the while."""

    def __init__(
        self,
        seed: int,
        folder: Path,
        store: Store,
        servers: Sequence[Server],
        machine: Machine | None = None,
    ) -> None:
        self.random = random.Random(seed)
        self.seed = seed
        self.servers = list(servers)  # those that run; a client speaks to the first
        self._ever = tuple(servers)
        self.local = servers[0].data / "local"
        self.logs = servers[0].data / "logs"
        self.folder = folder
        self.store = store
        self._work: list[ChaosJob] = []
        self._ended: dict[AttemptId, Attempt] = {}
        self._ended_at: dict[JobId, float] = {}  # when the job was first seen ended
        self._done: list[str] = []  # what was done to them
        self._began = time.monotonic()
        self._senders: list[threading.Thread] = []
        self._machine = machine
        self.counts: Counter[str] = Counter()  # of faults, by name
        self.longest_pause = float("inf")  # seconds
        self.patience = 60.0  # seconds in which a job is sent again and again

    @property
    def machine(self) -> Machine:
        assert self._machine is not None, "this fault needs a machine of its own"
        return self._machine

    # The jobs.

    def submit(self, *works: ChaosJob) -> None:
        """Each is sent after its delay, again and again until it was taken."""
        for work in works:
            self._work.append(work)
            sender = threading.Thread(target=self._send, args=(work,), daemon=True)
            sender.start()
            self._senders.append(sender)

    def _send(self, work: ChaosJob) -> None:
        time.sleep(work.delay)
        scanned = snapshots.scan(WORKLOAD)
        packed = io.BytesIO()
        snapshots.pack(scanned, packed)
        new = NewJob(id=work.id, spec=self._spec(work), snapshot=scanned.digest)

        def send(client: FleetClient) -> None:
            if not client.has_snapshot(scanned.digest):
                client.put_snapshot(scanned.digest, packed.getvalue())
            client.submit([new])

        self.call(send, self.patience)

    def _spec(self, work: ChaosJob) -> dict[str, object]:
        return {
            "name": work.id,
            "command": [sys.executable, "units.py" if work.units else "count.py"],
            "accelerator": work.accelerator,
            "capacity": [work.capacity],
            "slices": {"min": work.least, "max": work.slices} if work.least else work.slices,
            "env": {
                "LEDGER": str(self.ledger_folder(work)),
                "STEPS": str(work.steps),
                "STEP_SECONDS": str(work.step_seconds),
                "FORK_BOMB": "1" if work.fork_bomb else "",
                "UNITS": str(work.units),
            },
            "retries": PLENTY,
            "crash_loop": 1000,
            "grace": "3s",
        }

    @property
    def works(self) -> tuple[ChaosJob, ...]:
        return tuple(self._work)

    def ledger_folder(self, work: ChaosJob) -> Path:
        """Jobs may run as another user."""
        path = self.folder / "ledgers" / work.id
        for folder in (path.parent, path):
            folder.mkdir(exist_ok=True)
            if folder.stat().st_uid == os.geteuid():
                folder.chmod(0o777)
        return path

    def cancel(self, work: ChaosJob) -> None:
        """Returns when it is acknowledged: from then on, the job must not start again."""

        def cancel(client: FleetClient) -> None:
            with contextlib.suppress(Conflict):  # it has ended: the first response was lost
                client.cancel(work.id)

        self.call(cancel, self.patience)

    def cancel_soon(self, work: ChaosJob, delay: float) -> None:
        """Meanwhile, whatever else happens."""

        def cancel() -> None:
            time.sleep(delay)
            self.cancel(work)
            self._note(f"the cancellation of {work.id} is acknowledged")

        self._senders.append(threading.Thread(target=cancel, daemon=True))
        self._senders[-1].start()

    def call(self, request: Callable[[FleetClient], object], within: float) -> None:
        """Send a request to any of the servers, again and again until it was answered."""
        patience = Patience(within)
        for number in itertools.count():
            try:
                request(self.servers[number % len(self.servers)].client)
                return
            except (Unreachable, RuntimeError) as error:  # RuntimeError: this client was closed
                assert not patience.is_over, self.failure_report(f"no answer: {error}")
                time.sleep(0.1)
            except FleetError as error:
                self._note(f"refused: {error}")
                assert not patience.is_over, self.failure_report(f"refused: {error}")
                time.sleep(0.5)

    # What is done to them.

    def inject_faults(
        self, faults: Sequence[Callable[[ChaosRun], str]], count: int, gap: float
    ) -> None:
        """So many faults, chosen and spaced by the seed, while there is something to hit."""
        for _ in range(count):
            self.watch(self.random.uniform(0.2, gap))
            if self._all_ended():
                return
            self.inject(self.random.choice(faults))

    def inject(self, fault: Callable[[ChaosRun], str]) -> None:
        """Waits for something to hit: a blow into the void tests nothing."""
        patience = Patience(HIT_WITHIN)
        while True:
            self._note(f"{fault.__name__} …")
            try:
                message = fault(self)
            except Missed as missed:
                self._note(f"{fault.__name__} missed: {missed}")
                if patience.is_over:
                    self.counts[MISSED] += 1
                    self.counts[f"{fault.__name__} {MISSED}"] += 1
                    return
                self.watch(0.5)
            else:
                self.count(fault)
                self._note(f"{fault.__name__}: {message}")
                return

    def count(self, fault: Callable[[ChaosRun], str]) -> None:
        self.counts[fault.__name__] += 1

    def pause(self, shortest: float, longest: float) -> str:
        """Watch for some time, and say how long."""
        seconds = min(self.random.uniform(shortest, longest), self.longest_pause)
        self.watch(seconds)
        return f"for {seconds:.1f} s"

    def watch(self, seconds: float) -> None:
        """Let time pass, and look whether the rules hold meanwhile."""
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0:
            with contextlib.suppress(Unreachable):  # the database is away
                self.check_attempts()
            time.sleep(max(0.0, min(left, 0.2)))

    def watch_until(self, condition: Callable[[], object], otherwise: str) -> None:
        patience = Patience(self.patience)
        while not condition():
            assert not patience.is_over, self.failure_report(otherwise)
            self.watch(0.5)

    def _note(self, message: str) -> None:
        self._done.append(f"{time.monotonic() - self._began:7.2f} s  {message}")

    # What must hold.

    def check_attempts(self) -> None:
        for work in self._work:
            job = self.store.job(work.id)
            if job is not None and job.ended:
                self._ended_at.setdefault(work.id, time.monotonic())
            attempts = self.store.attempts(work.id)
            live = [attempt.number for attempt in attempts if attempt.live]
            assert len(live) <= 1, self.failure_report(f"{work.id} has the live attempts {live}")
            for attempt in attempts:
                if not attempt.live:
                    known = self._ended.setdefault(attempt.id, attempt)
                    assert known == attempt, self.failure_report(
                        f"{known} was changed to {attempt}"
                    )

    def finish(self, within: float) -> None:
        """Wait until every job has ended and nothing is left, then check all that was promised."""
        for sender in self._senders:
            sender.join(within)
        patience = Patience(within)
        while not self._all_ended():
            self.watch(0.1)
            assert not patience.is_over, self.failure_report(
                f"not all ended within {within:g} s: {self._running()}"
            )
        self._note("every job has ended")
        patience = Patience(CLEARED_WITHIN)
        while left := self._left():
            assert not patience.is_over, self.failure_report(f"still there: {left}")
            time.sleep(0.5)
        for server in self.servers:
            status = server.stop()
            assert status == 0, self.failure_report(f"the server left with status {status}")
            found = server_process.server_processes(server.home, server.data)
            assert not found, self.failure_report(
                f"left running: {server_process.describe_processes(found)}"
            )
        self.check_attempts()
        found = [fault for work in self._work for fault in self._faults(work)]
        assert not found, self.failure_report("\n".join(found))

    def _all_ended(self) -> bool:
        return not self._running()

    def _running(self) -> list[str]:
        """Jobs that have not ended. A database that is away says nothing."""
        try:
            jobs = {work.id: self.store.job(work.id) for work in self._work}
        except Unreachable as error:
            return [str(error)]
        return [
            f"{name}: {'not known' if job is None else f'{job.state}: {job.reason}'}"
            for name, job in jobs.items()
            if job is None or not job.ended
        ]

    def _left(self) -> str:
        """What should be gone by now."""
        slices = [f"{item.id} {item.state}" for item in self.store.slices()]
        marked = [f"{item.pid} {item.command}" for item in server_process.leftovers(self.local)]
        alive = [name for work in self._work for name in ledger.alive(self.ledger_folder(work))]
        outside = [] if self._machine is None else self._machine.leftovers()
        return "; ".join(
            [*slices, *server_process.slices_in(self.local), *marked, *alive, *outside]
        )

    def _faults(self, work: ChaosJob) -> list[str]:
        job = self.store.job(work.id)
        attempts = self.store.attempts(work.id)
        found = []
        if work.cancelled:
            if job is None or job.state is not JobState.CANCELLED:
                found.append(f"it was cancelled, and is {job and job.state}: {job and job.reason}")
            found += ledger.cancelled_violations(
                ledger.read(self.ledger_folder(work)), self._ended_at[work.id]
            )
            return [f"{work.id}: {fault}" for fault in found]
        if job is None or job.state is not JobState.SUCCEEDED:
            found.append(f"it is {job and job.state}: {job and job.reason}")
        if [attempt.number for attempt in attempts] != list(range(len(attempts))):
            found.append(f"its attempts are numbered {[item.number for item in attempts]}")
        finished = [a.number for a in attempts if a.end_reason is EndReason.FINISHED]
        if finished != [len(attempts) - 1]:
            found.append(f"of {len(attempts)} attempts these finished: {finished}")
        folder = self.ledger_folder(work)
        runs = ledger.read(folder)
        if work.units:
            found += ledger.unit_violations(runs, folder, units=work.units)
            return [f"{work.id}: {fault}" for fault in found]
        found += ledger.violations(runs, folder, steps=work.steps, processes=work.processes)
        found += [f for run in runs if (f := self._log_fault(work, run, attempts))]
        return [f"{work.id}: {fault}" for fault in found]

    def _log_fault(
        self, work: ChaosJob, run: ledger.Run, attempts: Sequence[Attempt]
    ) -> str | None:
        who = f"process {run.process} of attempt {run.attempt}"
        if run.attempt >= len(attempts):
            return f"{who} ran, and no such attempt is recorded"
        attempt = attempts[run.attempt]
        index, host_index = divmod(run.process, type_lookup.find(work.accelerator).hosts)
        name = host_id(attempt.slices[index], host_index)
        path = LogFiles(self.logs).path(attempt.id, name)
        text = path.read_bytes() if path.exists() else b""
        host = self.store.host(name)
        # An agent that said how it ended has first sent all that was written.
        exited = host is not None and host.phase is Phase.EXITED and host.attempt_id == attempt.id
        fault = ledger.log_violation(text, run, whole=exited)
        return f"the log of {who} {fault}" if fault else None

    # Telling what happened.

    def failure_report(self, fault: str) -> str:
        events = self.store.events(EventQuery(limit=60, newest=True))
        lines = [
            f"{item.at:%H:%M:%S.%f} {item.kind} {item.state}: {item.message}" for item in events
        ]
        logs = [f"--- {server.home}/server.log\n{server.log_tail()}" for server in self._ever]
        parts = [f"seed {self.seed}: {fault}", "--- done to it", *self._done]
        return "\n".join([*parts, "--- events", *lines, *logs])
