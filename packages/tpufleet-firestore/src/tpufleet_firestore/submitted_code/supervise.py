"""Runs submitted code in its own process, enforces its timeout, and returns its outcome.

    python supervise.py [--user NAME] [--allow-root] request.json

Exit status 0 means that the code completed, 65 (EX_DATAERR) that it failed and need not be run
again; any other status means that the machine failed. Uses only the standard library.
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

# Beside this file on the host, not in a package.
from job_context import JobContext, Outcome  # type: ignore[import-not-found]

AUTO = "auto"  # the user nobody, if it can run this Python
SCRATCH_PREFIX = "submitted-code-"
NO_DEVICE = "TPU not available"
DEVICE_TIMEOUT = 300.0  # seconds; a large slice takes minutes to start
EXIT_TIMEOUT = 2.0  # seconds for ended code to exit
POLL_SECONDS = 0.5
STACK_DUMP_SECONDS = 0.5  # after the timeout, for the code to write its stack to the log
READ_BYTES = 1024 * 1024
MAX_MESSAGE_BYTES = 64 * 1024 * 1024
INVALID_MESSAGE = "the code wrote to the result pipe, or closed it"
# Variables that JAX and the TPU runtime need. The code gets no others.
_PASSED_VARIABLES = (
    "PATH", "LANG", "LC_", "TZ", "LD_", "PYTHON", "JAX_", "XLA_", "LIBTPU_", "TPU_", "PJRT_",
    "MEGASCALE_", "TF_CPP_", "TPUFLEET_", "LOCAL_TPU_",
)  # fmt: skip


class MachineFailure(Exception):
    """Not caused by the code: a retry may succeed."""


class RootRefused(Exception):
    """Only root could run the code, which was not allowed."""


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--user", default=AUTO)  # that runs the code, if this one is root
    parser.add_argument("--allow-root", action="store_true")  # if that user cannot
    parser.add_argument("request", type=Path)
    options = parser.parse_args(arguments)
    signal.signal(signal.SIGTERM, _exit)
    request = json.loads(options.request.read_text())
    options.request.unlink()  # it contains the key, which the code must not read
    context = JobContext(os.environ, request.pop("key"))
    outcome = context.read_outcome()
    if outcome is not None:
        print("an earlier attempt has run this code to its end; not running it again", flush=True)
    else:
        try:
            user = resolve_user(options.user, options.allow_root)
            outcome = run_code(request, context, user)
        except RootRefused as refusal:
            outcome = failed(str(refusal))
        except MachineFailure as failure:
            print(failure, flush=True)
            return 1
    if context.decides(outcome):
        context.write_result(outcome)
    if outcome["status"] == "completed":
        return 0
    # The last line of the log is the reason that users see.
    print(str(outcome["error"]).partition("\n")[0], flush=True)
    return os.EX_DATAERR


def run_code(request: dict[str, Any], context: JobContext, user: str | None) -> Outcome:
    run = CodeRun(request, context, user)
    try:
        outcome = run.outcome()
        return context.record_outcome(outcome) if context.decides(outcome) else outcome
    finally:
        run.end()


def _exit(number: int, frame: object) -> None:
    raise SystemExit(128 + number)


class CodeRun:
    def __init__(self, request: dict[str, Any], context: JobContext, user: str | None) -> None:
        self._context = context
        self._timeout = float(request["timeout"])
        self._user = user  # None for the supervisor's
        self._oom_kills = count_oom_kills()
        self._request = {
            **request,
            "platform": (context.environ.get("JAX_PLATFORMS") or "tpu").split(",")[0],
            "process_id": context.process_id,
            "num_processes": context.num_processes,
            "coordinator": context.environ.get("TPUFLEET_COORDINATOR_ADDRESS", ""),
        }
        self._started_at: float | None = None
        self._buffer = b""
        self._reported = False  # it has sent its outcome
        self._scratch: Path | None = None
        self._process: subprocess.Popen[bytes] | None = None

    def outcome(self) -> Outcome:
        reader, writer = os.pipe()
        try:
            self._scratch = self._make_scratch()
            self._process = self._start(self._scratch, writer)
        except (OSError, LookupError) as error:
            user = self._user or "the supervisor's user"
            raise MachineFailure(f"cannot run the code as {user}: {error}") from error
        finally:
            os.close(writer)
        return self._follow(self._process, reader)

    def end(self) -> None:
        """Kill the code's process group. The agent kills processes that left the group."""
        if self._process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(EXIT_TIMEOUT if self._reported else 0)
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        if self._scratch is not None:
            delete_folder(self._scratch)

    def _make_scratch(self) -> Path:
        # Other users have no access to the run folder.
        parent = None if self._user else self._context.run_dir
        if parent is None:
            delete_stale_scratch(Path(tempfile.gettempdir()))
        scratch = Path(tempfile.mkdtemp(prefix=f"{SCRATCH_PREFIX}{os.getpid()}-", dir=parent))
        if self._user:
            shutil.chown(scratch, user=self._user)
        return scratch

    def _start(self, scratch: Path, writer: int) -> subprocess.Popen[bytes]:
        program = Path(__file__).with_name("run_code.py").read_text()
        identity: dict[str, Any] = {}
        if self._user:
            group = pwd.getpwnam(self._user).pw_gid
            identity = {"user": self._user, "group": group, "extra_groups": []}
        process = subprocess.Popen(
            [sys.executable, "-c", program, str(writer), str(os.getpid())],
            env=code_environment(self._context.environ, scratch),
            cwd=scratch,
            stdin=subprocess.PIPE,
            pass_fds=[writer],
            process_group=0,  # its own group in the supervisor's session, so both end together
            **identity,
        )
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError), process.stdin:  # it may have exited already
            process.stdin.write(json.dumps(self._request).encode())
        return process

    def _follow(self, process: subprocess.Popen[bytes], reader: int) -> Outcome:
        deadline = time.monotonic() + DEVICE_TIMEOUT
        with selectors.DefaultSelector() as selector:
            selector.register(reader, selectors.EVENT_READ)
            while (remaining := deadline - time.monotonic()) > 0:
                # Its children may hold the pipe open, so its exit is polled as well.
                exited = process.poll() is not None
                if selector.select(0 if exited else min(remaining, POLL_SECONDS)):
                    data = os.read(reader, READ_BYTES)
                    outcome = self._receive(data) if data else self._outcome_of_exit(process)
                    if outcome is not None:
                        return outcome
                    if self._started_at is not None:
                        deadline = self._started_at + self._timeout + STACK_DUMP_SECONDS
                elif exited:
                    return self._outcome_of_exit(process)
        if self._started_at is None:
            print(f"no device was ready within {DEVICE_TIMEOUT:g} s", flush=True)
            return failed(NO_DEVICE)
        message = f"timeout: the code ran longer than {self._timeout:g} s and was stopped"
        return {**failed(message), "seconds": self._run_seconds()}

    def _receive(self, data: bytes) -> Outcome | None:
        *lines, self._buffer = (self._buffer + data).split(b"\n")
        try:
            for line in lines:
                message = json.loads(line)
                if message["kind"] == "started":
                    self._started_at = self._started_at or time.monotonic()
                elif message["kind"] == "no device":
                    return failed(NO_DEVICE)
                else:
                    return self._parse_outcome(message)
        except (ValueError, KeyError, TypeError):
            return failed(INVALID_MESSAGE)
        return None if len(self._buffer) <= MAX_MESSAGE_BYTES else failed(INVALID_MESSAGE)

    def _parse_outcome(self, message: dict[str, Any]) -> Outcome:
        result, error = message["result"], message["error"]
        valid_status = message["status"] in ("completed", "failed")
        if (
            not valid_status
            or not isinstance(result, str | None)
            or not isinstance(error, str | None)
        ):
            return failed(INVALID_MESSAGE)
        self._reported = True
        return {
            "status": message["status"],
            "result": result,
            "error": error,
            "seconds": self._run_seconds(),
        }

    def _run_seconds(self) -> float:
        return (
            round(time.monotonic() - self._started_at, 3) if self._started_at is not None else 0.0
        )

    def _outcome_of_exit(self, process: subprocess.Popen[bytes]) -> Outcome:
        """The pipe was closed without an outcome: the process exited, or closed the pipe itself."""
        try:
            code = process.wait(EXIT_TIMEOUT)
        except subprocess.TimeoutExpired:
            return failed(INVALID_MESSAGE)
        if self._context.stopping:
            raise MachineFailure("stopped before the code ended")
        if code >= 0:
            return failed(f"the code exited with status {code} without a result")
        name = signal.Signals(-code).name
        if count_oom_kills() > self._oom_kills:
            return failed(f"out of memory: the kernel killed the code ({name})")
        if -code == signal.SIGKILL:
            # The sender is unknown, so it counts as a machine failure and the code is retried.
            raise MachineFailure("the code was killed (SIGKILL), possibly out of memory")
        return failed(f"the code was terminated by {name}")


def failed(error: str) -> Outcome:
    return {"status": "failed", "result": None, "error": error}


def resolve_user(user: str, allow_root: bool) -> str | None:
    """The user that runs the code; None for the current one. Only root can choose another."""
    if os.geteuid() != 0:
        return None
    name = "nobody" if user == AUTO else user
    try:
        if name == "root":
            raise PermissionError("--user is root")
        subprocess.run([sys.executable, "-S", "-c", ""], user=name, check=True)
        return name
    except (OSError, LookupError, subprocess.CalledProcessError) as error:
        reason = str(error) if name == "root" else f"user {name} cannot run Python: {error}"
    if not allow_root:
        raise RootRefused(
            f"refused to run the code as root: {reason}; start the bridge with --user NAME, a user "
            "that can run Python on the hosts, or with --allow-root"
        )
    print(f"running the code as root: {reason}", flush=True)
    return None


def delete_stale_scratch(folder: Path) -> None:
    """Delete scratch folders of supervisors that were killed."""
    for scratch in folder.glob(f"{SCRATCH_PREFIX}*"):
        pid = scratch.name.removeprefix(SCRATCH_PREFIX).partition("-")[0]
        if pid.isdecimal() and not _is_running(int(pid)):
            delete_folder(scratch)


def delete_folder(folder: Path) -> None:
    """By `rm`: the code may have nested folders deeper than Python can recurse."""
    subprocess.run(["rm", "-rf", "--", str(folder)], stderr=subprocess.DEVNULL, check=False)


def _is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def code_environment(environ: Mapping[str, str], scratch: Path) -> dict[str, str]:
    """Without credentials, and with an empty home."""
    passed = {name: value for name, value in environ.items() if name.startswith(_PASSED_VARIABLES)}
    return {**passed, "HOME": str(scratch), "TMPDIR": str(scratch), "PYTHONUNBUFFERED": "1"}


def count_oom_kills() -> int:
    """How many processes the kernel has OOM-killed in this control group."""
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
