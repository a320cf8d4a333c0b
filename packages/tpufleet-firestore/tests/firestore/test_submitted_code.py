"""Submitted code on a host: its environment, every way it can end, and its isolation."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.polling import wait_until
from tests.ports import free_port
from tpufleet_firestore import submitted_code

FOLDER = Path(submitted_code.__file__).parent


@dataclass(frozen=True, kw_only=True)
class Host:
    """A host's folders and environment, as an agent passes them to a workload."""

    folder: Path
    environ: dict[str, str]

    @property
    def run_dir(self) -> Path:
        return self.folder / "run"

    def start(
        self,
        code: str,
        *,
        timeout: float = 60,
        challenge: int = 7,
        options: tuple[str, ...] = ("--allow-root",),
        **environ: str,
    ) -> subprocess.Popen[bytes]:
        request = {"code": code, "challenge_number": challenge, "timeout": timeout, "key": "k"}
        request_file = self.folder / f"request{time.monotonic_ns()}.json"
        request_file.write_text(json.dumps(request))
        return subprocess.Popen(
            [sys.executable, FOLDER / "supervise.py", *options, request_file],
            env={**self.environ, **environ},
            stdout=(self.folder / "output").open("ab"),
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def outcome(self, code: str, **options: Any) -> dict[str, Any]:
        process = self.start(code, **options)
        status, outcome = process.wait(900), self.result()
        assert status == (0 if outcome["status"] == "completed" else os.EX_DATAERR), self.output()
        if outcome["error"]:
            assert self.output().splitlines()[-1] == outcome["error"].partition("\n")[0]
        return outcome

    def result(self) -> dict[str, Any]:
        return json.loads((self.run_dir / "result").read_text())

    def output(self) -> str:
        return (self.folder / "output").read_text()

    def next_attempt(self) -> None:
        for file in self.run_dir.iterdir():
            file.unlink()


@pytest.fixture
def host(tmp_path: Path) -> Host:
    (tmp_path / "run").mkdir()
    kept = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
    return Host(
        folder=tmp_path,
        environ={
            **kept,
            "JAX_PLATFORMS": "cpu",
            "TPUFLEET_RUN_DIR": str(tmp_path / "run"),
            "TPUFLEET_CHECKPOINT_DIR": str(tmp_path / "checkpoints"),
        },
    )


def test_code_has_the_documented_names_and_its_result_is_returned_as_text(host):
    outcome = host.outcome(
        "logger.info('hello from %s', challenge_number)\n"
        "print('printed')\n"
        "result = float(jnp.sum(jax.numpy.ones((2, challenge_number))))\n"
    )
    assert (outcome["status"], outcome["result"], outcome["error"]) == ("completed", "14.0", None)
    assert "INFO - hello from 7" in host.output() and "printed" in host.output()


ENDINGS = {
    "no-result": ("x = 1", "completed", None, None),
    "exit-0": ("import sys\nresult = 5\nsys.exit(0)", "completed", "5", None),
    "exit-3": ("import sys; sys.exit(3)", "failed", None, "SystemExit: 3"),
    "exception": ("def f():\n    return [][4]\nf()", "failed", None, "IndexError: list index out"),
    "syntax": ("def f(:", "failed", None, "SyntaxError: invalid syntax"),
    "interrupt": ("raise KeyboardInterrupt", "failed", None, "KeyboardInterrupt"),
    "hard-exit": ("import os; os._exit(9)", "failed", None, "the code exited with status 9"),
    "crash": ("import os; os.kill(os.getpid(), 11)", "failed", None, "the code was terminated"),
    "memory": ("result = bytearray(1 << 60)", "failed", None, "MemoryError"),
    "no-text": (
        "class R:\n def __str__(self): raise ValueError('shy')\nresult = R()",
        "failed", None, "ValueError: shy",
    ),
    "not-unicode": (r"result = '\ud800 ok'", "completed", "? ok", None),
    "too-long": ("result = 'x' * (11 << 20)", "failed", None, "ValueError: result: larger than"),
    "invalid-message": (
        "import os, sys\n"
        "for number in range(3, 30):\n"
        "    try: os.write(number, b'{]\\n')\n"
        "    except OSError: pass\n"
        "import time; time.sleep(30)",
        "failed", None, "the code wrote to the result pipe",
    ),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(("code", "status", "result", "error"), ENDINGS.values(), ids=ENDINGS)
def test_every_ending_gives_an_outcome(host, code, status, result, error):
    outcome = host.outcome(code)
    assert (outcome["status"], outcome["result"]) == (status, result)
    assert outcome["error"] == error or outcome["error"].startswith(error)


def test_an_exceptions_traceback_contains_only_the_code(host):
    error = host.outcome("def divide(x):\n    return 1 / x\n\ndivide(0)\n")["error"]
    first, _, rest = error.partition("\n\n")
    assert first == "ZeroDivisionError: division by zero"
    assert rest.startswith('Traceback (most recent call last):\n  File "<submitted code>", line 4')
    assert "return 1 / x" in rest and "run_code.py" not in rest


def test_after_the_timeout_the_code_and_its_children_are_stopped(host):
    process = host.start(
        "import subprocess, time\n"
        "print('child', subprocess.Popen(['sleep', '600']).pid, flush=True)\n"
        "time.sleep(600)",
        timeout=5,
    )
    wait_until(lambda: "child " in host.output(), 60)
    assert process.wait(900) == os.EX_DATAERR
    assert host.result()["error"] == "timeout: the code ran longer than 5 s and was stopped"
    child = int(host.output().partition("child ")[2].split()[0])
    wait_until(lambda: not psutil.pid_exists(child) or _zombie(child), 60)
    assert "time.sleep(600)" not in host.result()["error"]
    assert 'File "<submitted code>", line 3' in host.output()  # the stack of the code


def _zombie(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def test_without_a_tpu_the_code_does_not_run(host):
    environ = {name: value for name, value in host.environ.items() if name != "JAX_PLATFORMS"}
    bare = Host(folder=host.folder, environ=environ)
    outcome = bare.outcome("print('it ran')\nresult = 1")
    assert (outcome["status"], outcome["error"]) == ("failed", "TPU not available")
    assert "it ran" not in bare.output()


LEDGER = "open({path!r}, 'a').write('ran\\n')\nresult = 'first'"


def test_the_next_attempt_does_not_rerun_ended_code(host, ledger):
    code = LEDGER.format(path=str(ledger))
    first = host.outcome(code)
    host.next_attempt()
    assert host.outcome(code) == first
    assert ledger.read_text() == "ran\n"


@pytest.mark.slow
def test_an_outcome_without_a_signature_is_ignored(host):
    forged = host.folder / "checkpoints" / "outcome.json"
    forged.parent.mkdir()
    text = '{"status": "completed", "result": "forged", "error": null}'
    for contents in (text, f"{'0' * 64}\n{text}", ""):
        forged.write_text(contents)
        assert host.outcome("raise ValueError('true')")["error"].startswith("ValueError: true")
        forged.unlink()


def test_a_killed_process_is_a_machine_failure_without_an_outcome(host):
    process = host.start("import os\nos.kill(os.getpid(), 9)")
    assert process.wait(900) == 1
    assert not (host.run_dir / "result").exists()
    assert "was killed (SIGKILL)" in host.output().splitlines()[-1]


def test_the_code_dies_with_its_supervisor(host):
    process = host.start("import os, time\nprint('pid', os.getpid(), flush=True)\ntime.sleep(600)")
    wait_until(lambda: "pid " in host.output(), 60)
    pid = int(host.output().partition("pid ")[2].split()[0])
    process.send_signal(signal.SIGKILL)
    process.wait()
    wait_until(lambda: not psutil.pid_exists(pid) or _zombie(pid), 60)


def test_the_scratch_folder_of_a_killed_supervisor_is_deleted_by_the_next(host, ledger):
    scratch = ledger.parent / "tmp"  # instead of the machine's own
    scratch.mkdir()
    scratch.chmod(0o777)
    environ = {name: value for name, value in host.environ.items() if "RUN_DIR" not in name}
    bare = Host(folder=host.folder, environ={**environ, "TMPDIR": str(scratch)})
    process = bare.start("print('running', flush=True)\nimport time; time.sleep(600)")
    wait_until(lambda: "running" in bare.output().splitlines(), 60)
    process.kill()
    process.wait()
    (stale,) = scratch.iterdir()
    assert bare.start("result = 1").wait(900) == 0
    assert not stale.exists() and list(scratch.iterdir()) == []


def test_a_stopped_supervisor_stops_the_code_without_an_outcome(host):
    process = host.start("print('running', flush=True)\nimport time; time.sleep(600)")
    wait_until(lambda: "running" in host.output().splitlines(), 60)
    (host.run_dir / "stop").touch()
    process.terminate()
    assert process.wait(900) == 128 + signal.SIGTERM
    assert not (host.run_dir / "result").exists()


SNOOP = """
import os, pathlib
found = {name: value for name, value in os.environ.items() if 'sesame' in value}
for pid in os.listdir('/proc'):
    if pid.isdecimal():
        try:
            if b'sesame' in pathlib.Path('/proc', pid, 'environ').read_bytes():
                found[pid] = 'environ'
        except OSError:
            pass
result = found
"""


def test_code_has_no_access_to_credentials_of_the_host(host):
    outcome = host.outcome(
        "import os\nresult = sorted(v for v in os.environ.values() if 'sesame' in v)"
        " + [os.path.expanduser('~/key.json')]",
        GOOGLE_APPLICATION_CREDENTIALS="/sesame.json",
        FIRESTORE_EMULATOR_HOST="sesame:1",
        SOME_TOKEN="sesame",
        HOME=str(host.folder),
    )
    assert "sesame" not in outcome["result"]
    assert str(host.folder / "key.json") not in outcome["result"]


def can_run_as_nobody() -> bool:
    if os.geteuid() != 0:
        return False
    try:
        return subprocess.run([sys.executable, "-S", "-c", ""], user="nobody").returncode == 0
    except OSError:
        return False


@pytest.mark.skipif(
    not can_run_as_nobody(),
    reason="needs root, and a Python that the user nobody can run, such as the system's",
)
def test_code_cannot_read_other_processes_or_write_outcomes(host):
    outcome = host.outcome(SNOOP, SOME_TOKEN="sesame")
    assert (outcome["status"], outcome["result"]) == ("completed", "{}")
    (host.folder / "checkpoints" / "outcome.json").unlink()
    host.next_attempt()
    for folder in ("run", "checkpoints"):
        code = f"open({str(host.folder / folder / 'result')!r}, 'w').write('forged')"
        outcome = host.outcome(code)
        assert outcome["error"].startswith("PermissionError: ")
        (host.folder / "checkpoints" / "outcome.json").unlink()
        host.next_attempt()


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
@pytest.mark.parametrize("user", ["root", "no-such-user"])
def test_code_runs_as_root_only_when_that_is_allowed(host, user):
    code = "import os\nresult = os.getuid()"
    outcome = host.outcome(code, options=("--user", user))
    assert outcome["status"] == "failed"
    assert outcome["error"].startswith("refused to run the code as root: ")
    assert outcome["error"].endswith("or with --allow-root")
    assert host.outcome(code, options=("--user", user, "--allow-root"))["result"] == "0"
    assert "running the code as root: " in host.output()


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_by_default_code_of_a_root_agent_runs_as_nobody_or_not_at_all(host):
    outcome = host.outcome("import getpass\nresult = getpass.getuser()", options=(), LOGNAME="")
    if can_run_as_nobody():
        assert outcome["result"] == "nobody"
    else:
        assert outcome["error"].startswith(
            "refused to run the code as root: user nobody cannot run Python: "
        )


def gang(host: Host, code: str) -> list[subprocess.Popen[bytes]]:
    """Two hosts of one slice, which share only the checkpoint folder."""
    address = f"127.0.0.1:{free_port()}"
    started = []
    for number in range(2):
        (host.folder / f"run{number}").mkdir()
        started.append(
            host.start(
                code,
                JAX_NUM_CPU_DEVICES="2",
                TPUFLEET_RUN_DIR=str(host.folder / f"run{number}"),
                TPUFLEET_PROCESS_ID=str(number),
                TPUFLEET_NUM_PROCESSES="2",
                TPUFLEET_COORDINATOR_ADDRESS=address,
            )
        )
    return started


@pytest.mark.slow
def test_on_several_hosts_the_result_is_that_of_process_0(host):
    # Process 0 ends last.
    code = (
        "import time\n"
        "result = (jax.process_index(), jax.device_count())\n"
        "time.sleep(0 if jax.process_index() else 1.5)"
    )
    assert [process.wait(900) for process in gang(host, code)] == [0, 0], host.output()
    assert json.loads((host.folder / "run0" / "result").read_text())["result"] == "(0, 4)"
    assert not (host.folder / "run1" / "result").exists()


@pytest.mark.slow
def test_on_several_hosts_the_first_failure_is_the_outcome(host):
    code = (
        "import time\n"
        "if jax.process_index() == 1:\n    raise ValueError('the second host')\n"
        "time.sleep(600)"
    )
    first, second = gang(host, code)
    assert second.wait(900) == os.EX_DATAERR  # so that the agents stop the others
    assert "the second host" in json.loads((host.folder / "run1" / "result").read_text())["error"]
    first.terminate()
    first.wait(900)
    host.next_attempt()
    assert "the second host" in host.outcome(code)["error"]
