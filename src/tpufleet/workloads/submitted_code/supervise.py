"""Runs submitted code in a process of its own, minds its time, and hands over how it ended.

    python supervise.py [--user NAME] request.json

Exit status 0 means that an outcome was handed over, whatever it says about the code; anything else
means that the machine failed, so that the code may be run again. Only the standard library here.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import pwd
import selectors
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from places import Outcome, Place

AUTO = "auto"  # nobody, where that user can run this Python
SCRATCH = "submitted-code-"
NO_DEVICE = "TPU not available"
DEVICE_SECONDS = 300.0  # a large slice takes minutes to come up; one that hangs is not there
LEAVE_SECONDS = 2.0  # for code that has ended to clear up after itself
LOOK_SECONDS = 0.5
READ_BYTES = 1024 * 1024
LONGEST_MESSAGE = 64 * 1024 * 1024
NONSENSE = "the code wrote nonsense to the pipe that its result is handed back by"
# What JAX and the TPU runtime need. Nothing else of this environment is for submitted code.
_KEPT = (
    "PATH", "LANG", "LC_", "TZ", "LD_", "PYTHON", "JAX_", "XLA_", "LIBTPU_", "TPU_", "PJRT_",
    "MEGASCALE_", "TF_CPP_", "TPUFLEET_", "LOCAL_TPU_",
)  # fmt: skip


class MachineFault(Exception):
    """It was not the code: another try may do better."""


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--user", default=AUTO, help="who runs the code when we are root")
    parser.add_argument("request", type=Path)
    given = parser.parse_args(arguments)
    signal.signal(signal.SIGTERM, _leave)
    request = json.loads(given.request.read_text())
    given.request.unlink()  # it holds the key, which is not for the code
    place = Place.from_environment(os.environ, request.pop("key"))
    outcome = place.settled()
    if outcome is not None:
        print("this code has run before, so it is not run again", flush=True)
    else:
        run = Run(request, place, given.user)
        try:
            outcome = run.outcome()
            if place.has_a_say(outcome):
                outcome = place.settle(outcome)
        except MachineFault as fault:
            print(fault, flush=True)
            return 1
        finally:
            run.end()
    if place.has_a_say(outcome):
        place.hand_over(outcome)
    return 0 if place.process_id == 0 or outcome["status"] == "completed" else 1


def _leave(number: int, frame: object) -> None:
    raise SystemExit(128 + number)


class Run:
    """One run of the code."""

    def __init__(self, request: dict[str, Any], place: Place, user: str) -> None:
        self._place = place
        self._timeout = float(request["timeout"])
        self._user = runs_as(user)
        self._memory_kills = memory_kills()
        self._request = {
            **request,
            "platform": (place.environ.get("JAX_PLATFORMS") or "tpu").split(",")[0],
            "process_id": place.process_id,
            "num_processes": place.num_processes,
            "coordinator": place.environ.get("TPUFLEET_COORDINATOR_ADDRESS", ""),
        }
        self._began: float | None = None
        self._unread = b""
        self._leaves = False  # it has said how it ended
        self._scratch: Path | None = None
        self._process: subprocess.Popen[bytes] | None = None

    def outcome(self) -> Outcome:
        reader, writer = os.pipe()
        try:
            self._scratch = self._make_scratch()
            self._process = self._start(self._scratch, writer)
        except (OSError, LookupError) as error:
            who = self._user or "us"
            raise MachineFault(f"the code cannot be run as {who}: {error}") from error
        finally:
            os.close(writer)
        return self._follow(self._process, reader)

    def end(self) -> None:
        """What the code started in its group ends with it; the agent ends what left the group."""
        if self._process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(LEAVE_SECONDS if self._leaves else 0)
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        if self._scratch is not None:
            shutil.rmtree(self._scratch, ignore_errors=True)

    def _make_scratch(self) -> Path:
        # Below the run folder nobody else may look, which a user of its own must.
        below = None if self._user or self._place.run is None else self._place.run
        if below is None:
            clear_scratch(Path(tempfile.gettempdir()))
        scratch = Path(tempfile.mkdtemp(prefix=f"{SCRATCH}{os.getpid()}-", dir=below))
        if self._user:
            shutil.chown(scratch, user=self._user)
        return scratch

    def _start(self, scratch: Path, writer: int) -> subprocess.Popen[bytes]:
        program = Path(__file__).with_name("inside.py").read_text()
        identity: dict[str, Any] = {}
        if self._user:
            group = pwd.getpwnam(self._user).pw_gid
            identity = {"user": self._user, "group": group, "extra_groups": []}
        process = subprocess.Popen(
            [sys.executable, "-c", program, str(writer), str(os.getpid())],
            env=environment(self._place.environ, scratch),
            cwd=scratch,
            stdin=subprocess.PIPE,
            pass_fds=[writer],
            process_group=0,  # its own, yet in our session: who ends us ends it
            **identity,
        )
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError), process.stdin:  # it may be dead already
            process.stdin.write(json.dumps(self._request).encode())
        return process

    def _follow(self, process: subprocess.Popen[bytes], reader: int) -> Outcome:
        deadline = time.monotonic() + DEVICE_SECONDS
        with selectors.DefaultSelector() as selector:
            selector.register(reader, selectors.EVENT_READ)
            while (left := deadline - time.monotonic()) > 0:
                # What it forked may hold the pipe open, so its death is looked for as well.
                dead = process.poll() is not None
                if selector.select(0 if dead else min(left, LOOK_SECONDS)):
                    data = os.read(reader, READ_BYTES)
                    outcome = self._hear(data) if data else self._ended_without_a_word(process)
                    if outcome is not None:
                        return outcome
                    if self._began is not None:
                        deadline = self._began + self._timeout
                elif dead:
                    return self._ended_without_a_word(process)
        if self._began is None:
            print(f"no device answered within {DEVICE_SECONDS:g} s", flush=True)
            return failed(NO_DEVICE)
        words = f"timeout: the code ran longer than {self._timeout:g} s and was stopped"
        return {**failed(words), "seconds": self._seconds()}

    def _hear(self, data: bytes) -> Outcome | None:
        *lines, self._unread = (self._unread + data).split(b"\n")
        try:
            for line in lines:
                message = json.loads(line)
                if message["kind"] == "began":
                    self._began = self._began or time.monotonic()
                elif message["kind"] == "no device":
                    return failed(NO_DEVICE)
                else:
                    return self._told(message)
        except (ValueError, KeyError, TypeError):
            return failed(NONSENSE)
        return None if len(self._unread) <= LONGEST_MESSAGE else failed(NONSENSE)

    def _told(self, message: dict[str, Any]) -> Outcome:
        result, error = message["result"], message["error"]
        known = message["status"] in ("completed", "failed")
        if not known or not isinstance(result, str | None) or not isinstance(error, str | None):
            return failed(NONSENSE)
        self._leaves = True
        return {
            "status": message["status"],
            "result": result,
            "error": error,
            "seconds": self._seconds(),
        }

    def _seconds(self) -> float:
        """That the code has run."""
        return round(time.monotonic() - self._began, 3) if self._began is not None else 0.0

    def _ended_without_a_word(self, process: subprocess.Popen[bytes]) -> Outcome:
        """The pipe is closed: it is dead, or does not want to speak to us any more."""
        try:
            code = process.wait(LEAVE_SECONDS)
        except subprocess.TimeoutExpired:
            return failed("the code closed the pipe that its result is handed back by")
        if self._place.stopping:
            raise MachineFault("stopped before the code had ended")
        if code >= 0:
            return failed(f"the code ended its process with status {code}, without a result")
        name = signal.Signals(-code).name
        if memory_kills() > self._memory_kills:
            return failed(f"out of memory: the kernel ended the code with {name}")
        if -code == signal.SIGKILL:
            # Nobody can say who sent it, so the machine gets the blame and the code another try.
            raise MachineFault("the process of the code was killed (SIGKILL); out of memory?")
        return failed(f"the code's process was ended by {name}")


def failed(error: str) -> Outcome:
    return {"status": "failed", "result": None, "error": error}


def runs_as(user: str) -> str | None:
    """Who runs the code; None: we do. Only root can choose, and by itself chooses `nobody`."""
    if os.geteuid() != 0 or user == "root":
        return None
    if user != AUTO:
        return user
    try:
        subprocess.run([sys.executable, "-S", "-c", ""], user="nobody", check=True)
    except (OSError, LookupError, subprocess.CalledProcessError) as error:
        print(f"the code runs as root, for nobody else can run this Python: {error}", flush=True)
        return None
    return "nobody"


def clear_scratch(folder: Path) -> None:
    """Take away what supervisors left that were killed."""
    for left in folder.glob(f"{SCRATCH}*"):
        pid = left.name.removeprefix(SCRATCH).partition("-")[0]
        if pid.isdecimal() and not _lives(int(pid)):
            shutil.rmtree(left, ignore_errors=True)


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def environment(environ: Mapping[str, str], scratch: Path) -> dict[str, str]:
    """No credentials, and a home without any."""
    kept = {name: value for name, value in environ.items() if name.startswith(_KEPT)}
    return {**kept, "HOME": str(scratch), "TMPDIR": str(scratch), "PYTHONUNBUFFERED": "1"}


def memory_kills() -> int:
    """How many processes the kernel has killed for memory in this control group."""
    try:
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            if line.startswith("0::"):
                events = Path("/sys/fs/cgroup", line[3:].lstrip("/"), "memory.events").read_text()
                counts = dict(entry.split() for entry in events.splitlines())
                return int(counts.get("oom_kill", 0))
    except (OSError, ValueError):
        return 0
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
