"""A storm over a collection: bridges, workers and slices die by a seed while documents are run."""

from __future__ import annotations

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

from tests import server_process
from tests.bridges.harness import ENDED, ORDER, BridgeHarness
from tpufleet.errors import FleetError
from tpufleet.providers.local.processes import MARKER_VARIABLE

CODE = """
import json, os, time, uuid
nonce = uuid.uuid4().hex
def note(word):
    entry = dict(document={document!r}, nonce=nonce, pid=os.getpid(), word=word, at=time.time())
    with open({ledger!r}, 'ab', buffering=0) as file:
        file.write(json.dumps(entry).encode() + b'\\n')
note('began')
time.sleep({seconds!r})
note('done')
result = nonce
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class CodeRun:
    """One run of a document's code, as it saw itself."""

    nonce: str
    pid: int
    began: float
    done: float | None


class FaultInjector:
    def __init__(self, world: BridgeHarness, ledger: Path, seed: int) -> None:
        self._world = world
        self._ledger = ledger
        self._random = random.Random(seed)
        self._local = world.server.home / "local"
        self.names: list[str] = []
        self._struck: set[int] = set()  # processes that we killed, or whose slice we took away
        self._done: list[str] = []
        self._began = time.monotonic()

    def add(self, count: int) -> None:
        for _ in range(count):
            reference = self._world.documents.document()
            code = CODE.format(
                document=reference.id,
                ledger=str(self._ledger),
                seconds=round(self._random.uniform(0.1, 1.0), 2),
            )
            reference.set({"challenge_number": 1, "code": code, "timeout": 60, "status": "pending"})
            self.names.append(reference.id)

    # What is done to them.

    def inject(self, blows: int, gap: float) -> None:
        kinds = (self._kill_bridge, self._kill_worker, self._kill_worker, self._take_slice)
        for _ in range(blows):
            time.sleep(self._random.uniform(0.3, gap))
            if self.all_ended():
                return
            kind = self._random.choice(kinds)
            at = time.monotonic() - self._began
            self._done.append(f"{at:7.2f} s  {kind.__name__[1:]}: {kind()}")

    def _kill_bridge(self) -> str:
        bridge: subprocess.Popen[bytes] = self._random.choice(self._world.bridges)
        self._world.kill(bridge)
        self._world.start_bridge(*OPTIONS)
        return str(bridge.pid)

    def _kill_worker(self) -> str:
        """The supervisor of some code, or the code itself."""
        found = server_process.host_processes(self._local).workloads
        if not found:
            return "nobody is at work"
        pid = self._random.choice(found)
        self._note_struck(pid)
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            return f"{pid} had just ended"
        return str(pid)

    def _note_struck(self, pid: int) -> None:
        self._struck.add(pid)
        try:
            self._struck.update(child.pid for child in psutil.Process(pid).children())
        except psutil.NoSuchProcess:
            return

    def _take_slice(self) -> str:
        client = self._world.server.client
        held = [each.id for each in client.slices() if each.job_id is not None]
        if not held:
            return "no slice is in use"
        name = self._random.choice(held)
        for pid in server_process.host_processes(self._local).workloads:
            if name in _mark(pid):
                self._note_struck(pid)
        try:
            client.inject_fault(name, "preempt")
        except FleetError as error:
            return f"{name}: {error}"
        return name

    # What must hold.

    def all_ended(self) -> bool:
        """As the user's listener was told."""
        told = [self._world.statuses[name] for name in self.names]
        return all(each and each[-1] in ENDED for each in told)

    def finish(self, within: float) -> None:
        server_process.wait_until(self.all_ended, within, self._told)
        faults = list(self._faults())
        assert not faults, "\n".join([*faults, self._told()])

    def _faults(self) -> Iterator[str]:
        runs = self._runs()
        for name in self.names:
            found, told = self._world.get(name), self._world.statuses[name]
            if told != sorted(told, key=ORDER.index):
                yield f"{name} went back: {told}"
            if found["status"] != "completed":
                yield f"{name} is {found['status']}: {found['error']}"
                continue
            yield from self._run_faults(name, found["result"], runs[name])

    def _run_faults(self, name: str, result: str, runs: list[CodeRun]) -> Iterator[str]:
        whole = [run for run in runs if run.done is not None]
        counted = [run for run in whole if run.nonce == result]
        if len(counted) != 1:
            yield f"{name} has the result {result} of {len(counted)} runs"
            return
        for run in runs:
            if run.began > counted[0].done:
                yield f"{name} was run again after its success"
            # Struck after its last word and before the word got through: it did not succeed.
            if run.done and run.nonce != result and run.pid not in self._struck:
                yield f"{name} succeeded twice: {run} and {counted[0]}"

    def _runs(self) -> dict[str, list[CodeRun]]:
        entries = [json.loads(line) for line in self._ledger.read_text().splitlines()]
        done = {entry["nonce"]: entry["at"] for entry in entries if entry["word"] == "done"}
        runs: dict[str, list[CodeRun]] = defaultdict(list)
        for entry in entries:
            if entry["word"] == "began":
                nonce = entry["nonce"]
                runs[entry["document"]].append(
                    CodeRun(nonce=nonce, pid=entry["pid"], began=entry["at"], done=done.get(nonce))
                )
        return runs

    def _told(self) -> str:
        return "\n".join([*self._done, self._world.diagnostics()])


OPTIONS = ("--retries", "50", "--most", "40")


def _mark(pid: int) -> str:
    try:
        return psutil.Process(pid).environ().get(MARKER_VARIABLE, "")
    except psutil.Error:
        return ""
