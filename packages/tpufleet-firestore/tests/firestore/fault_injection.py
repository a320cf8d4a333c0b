"""Kills bridges, workers and slices at random, from a seed, while documents run."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
from google.api_core.exceptions import AlreadyExists

from tests import server_process
from tests.firestore.harness import ENDED, ORDER, PATIENCE, BridgeHarness
from tpufleet.errors import FleetError
from tpufleet.providers.local.processes import MARKER_VARIABLE

CODE = """
import json, os, time, uuid
nonce = uuid.uuid4().hex
def note(event):
    entry = dict(document={document!r}, nonce=nonce, pid=os.getpid(), event=event, at=time.time())
    with open({ledger!r}, 'ab', buffering=0) as file:
        file.write(json.dumps(entry).encode() + b'\\n')
note('started')
time.sleep({seconds!r})
note('done')
result = nonce
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class CodeRun:
    """One run of a document's code, as the code recorded it."""

    nonce: str
    pid: int
    started: float
    done: float | None


class FaultInjector:
    def __init__(self, harness: BridgeHarness, ledger: Path, seed: int) -> None:
        self._harness = harness
        self._ledger = ledger
        self._random = random.Random(seed)
        self._local = harness.server.home / "local"
        self.names: list[str] = []
        self._killed: set[int] = set()  # processes that were killed, or whose slice was preempted
        self._injected: list[str] = []
        self._started_at = time.monotonic()

    def add(self, count: int) -> None:
        for _ in range(count):
            reference = self._harness.documents.document()
            code = CODE.format(
                document=reference.id,
                ledger=str(self._ledger),
                seconds=round(self._random.uniform(0.1, 1.0), 2),
            )
            with contextlib.suppress(AlreadyExists):  # an earlier try did it
                reference.create(
                    {"challenge_number": 1, "code": code, "timeout": 600, "status": "pending"},
                    retry=PATIENCE,
                )
            self.names.append(reference.id)

    # Faults

    def inject(self, faults: int, max_gap: float) -> None:
        kinds = (self._kill_bridge, self._kill_worker, self._kill_worker, self._preempt_slice)
        for _ in range(faults):
            time.sleep(self._random.uniform(0.3, max_gap))
            if self.all_ended():
                return
            kind = self._random.choice(kinds)
            at = time.monotonic() - self._started_at
            self._injected.append(f"{at:7.2f} s  {kind.__name__[1:]}: {kind()}")

    def _kill_bridge(self) -> str:
        bridge: subprocess.Popen[bytes] = self._random.choice(self._harness.bridges)
        self._harness.kill(bridge)
        self._harness.start_bridge(*OPTIONS)
        return str(bridge.pid)

    def _kill_worker(self) -> str:
        """The supervisor of some code, or the code itself."""
        found = server_process.host_processes(self._local).workloads
        if not found:
            return "no worker is running"
        pid = self._random.choice(found)
        self._record_killed(pid)
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            return f"{pid} had just ended"
        return str(pid)

    def _record_killed(self, pid: int) -> None:
        self._killed.add(pid)
        try:
            self._killed.update(child.pid for child in psutil.Process(pid).children())
        except psutil.NoSuchProcess:
            return

    def _preempt_slice(self) -> str:
        client = self._harness.server.client
        held = [each.id for each in client.slices() if each.job_id is not None]
        if not held:
            return "no slice is in use"
        name = self._random.choice(held)
        for pid in server_process.host_processes(self._local).workloads:
            if name in _marker_of(pid):
                self._record_killed(pid)
        try:
            client.inject_fault(name, "preempt")
        except FleetError as error:
            return f"{name}: {error}"
        return name

    # Invariants

    def all_ended(self) -> bool:
        """As the user's listener observed it."""
        self._harness.keep_listening()
        observed = [self._harness.statuses[name] for name in self.names]
        return all(statuses and statuses[-1] in ENDED for statuses in observed)

    def finish(self, timeout: float) -> None:
        server_process.wait_until(self.all_ended, timeout, self._diagnostics)
        violations = list(self._violations())
        assert not violations, "\n".join([*violations, self._diagnostics()])

    def _violations(self) -> Iterator[str]:
        runs = self._runs()
        for name in self.names:
            document, statuses = self._harness.get(name), self._harness.statuses[name]
            if statuses != sorted(statuses, key=ORDER.index):
                yield f"{name} went back: {statuses}"
            if document["status"] != "completed":
                yield f"{name} is {document['status']}: {document['error']}"
                continue
            yield from self._run_violations(name, document["result"], runs[name])

    def _run_violations(self, name: str, result: str, runs: list[CodeRun]) -> Iterator[str]:
        counted = [run for run in runs if run.done is not None and run.nonce == result]
        if len(counted) != 1:
            yield f"{name} has the result {result} of {len(counted)} runs"
            return
        for run in runs:
            if run.started > counted[0].done:
                yield f"{name} was run again after its success"
            # Killed after its last note and before its result was recorded: it did not succeed.
            if run.done and run.nonce != result and run.pid not in self._killed:
                yield f"{name} succeeded twice: {run} and {counted[0]}"

    def _runs(self) -> dict[str, list[CodeRun]]:
        entries = [json.loads(line) for line in self._ledger.read_text().splitlines()]
        done = {entry["nonce"]: entry["at"] for entry in entries if entry["event"] == "done"}
        runs: dict[str, list[CodeRun]] = defaultdict(list)
        for entry in entries:
            if entry["event"] == "started":
                nonce = entry["nonce"]
                runs[entry["document"]].append(
                    CodeRun(
                        nonce=nonce, pid=entry["pid"], started=entry["at"], done=done.get(nonce)
                    )
                )
        return runs

    def _diagnostics(self) -> str:
        return "\n".join([*self._injected, self._harness.diagnostics()])


OPTIONS = ("--retries", "50", "--most", "40")


def _marker_of(pid: int) -> str:
    try:
        return psutil.Process(pid).environ().get(MARKER_VARIABLE, "")
    except psutil.Error:
        return ""
