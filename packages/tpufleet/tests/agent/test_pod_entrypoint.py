"""The entrypoints of a pod: waiting for the slice, and protecting its token."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from tests.polling import wait_until
from tpufleet.agent import bootstrap_token, main, pod_entrypoint
from tpufleet.agent import settings as agent_settings


@pytest.fixture
def environ(tmp_path):
    (tmp_path / "seats").mkdir()
    return {
        "TPUFLEET_SEATS": str(tmp_path / "seats"),
        "TPUFLEET_SEAT": "1",
        "TPUFLEET_SEAT_FILE": str(tmp_path / "seat"),
        "TPUFLEET_WORK": str(tmp_path / "work"),
    }


@pytest.fixture(autouse=True)
def open_memory(monkeypatch):
    """Other tests inspect this process."""
    monkeypatch.setattr(bootstrap_token, "protect_memory", lambda: None)


def entry(environ) -> Path:
    return Path(environ["TPUFLEET_SEATS"], environ["TPUFLEET_SEAT"])


ENTRY = json.dumps({"slice": "s-9", "token": "hush"})


def test_the_assignment_is_copied_to_a_private_file(environ):
    entry(environ).write_text(ENTRY)
    assert pod_entrypoint.wait_for_assignment(environ) == 0
    copied = Path(environ["TPUFLEET_SEAT_FILE"])
    assert copied.read_text() == ENTRY
    assert copied.stat().st_mode & 0o777 == 0o600


def test_the_init_container_waits_for_the_assignment(environ):
    draft = entry(environ).with_name("..draft")  # Kubernetes replaces files as a whole, too
    draft.write_text(ENTRY)
    timer = threading.Timer(0.2, draft.rename, [entry(environ)])
    timer.start()
    assert pod_entrypoint.wait_for_assignment(environ, timeout=900) == 0
    assert Path(environ["TPUFLEET_SEAT_FILE"]).read_text() == ENTRY


def test_a_pod_without_assignment_exits_successfully(environ):
    assert pod_entrypoint.wait_for_assignment(environ, timeout=0.05) == 0
    assert pod_entrypoint.run_agent(environ, lambda env: 5) == 0


@pytest.mark.skipif(sys.platform != "linux", reason="pods run on Linux")
def test_a_waiting_init_container_exits_on_sigterm(environ):
    argv = [sys.executable, "-m", "tpufleet.agent.pod_entrypoint", "wait"]
    with subprocess.Popen(argv, env={**os.environ, **environ}) as waiting:
        wait_until(lambda: "SIGTERM" in handled(waiting.pid), describe="the handler of the pod")
        waiting.send_signal(signal.SIGTERM)
        assert waiting.wait(900) == 128 + signal.SIGTERM


def handled(pid: int) -> set[str]:
    """Signals that a process has handlers for."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("SigCgt"):
            bits = int(line.split()[1], 16)
            return {one.name for one in signal.Signals if bits >> (one - 1) & 1}
    return set()


def test_the_agent_deletes_the_token_file(environ, tmp_path):
    Path(environ["TPUFLEET_SEAT_FILE"]).write_text(ENTRY)
    seen = {}
    assert pod_entrypoint.run_agent(environ, lambda env: seen.update(env) or 7) == 7
    assert seen["TPUFLEET_SLICE"] == "s-9"
    assert seen[agent_settings.TOKEN_VARIABLE] == "hush"
    assert not Path(environ["TPUFLEET_SEAT_FILE"]).exists()
    assert agent_settings.TOKEN_VARIABLE not in os.environ


@pytest.mark.parametrize("content", ["{}", "[1]", "nonsense"])
def test_an_invalid_assignment_file_is_a_settings_error(environ, content):
    Path(environ["TPUFLEET_SEAT_FILE"]).write_text(content)
    assert pod_entrypoint.run_agent(environ, lambda env: 5) == main.EXIT_BAD_SETTINGS


# As in a pod: the agent and the workload are processes of one user that is not root.

AGENT = """
import os, subprocess, sys
from tpufleet.agent import bootstrap_token, pod_entrypoint

def agent(env):
    environ = {key: value for key, value in env.items() if "TOKEN" not in key}
    command = [sys.executable, "-c", sys.argv[1], str(os.getpid()), env["TPUFLEET_TOKEN"][::-1]]
    return subprocess.run(command, env=environ).returncode

sys.exit(pod_entrypoint.run_agent(os.environ, agent))
"""

# What a malicious workload would try. It gets the token reversed, to recognize it.
WORKLOAD = """
import ctypes, os, pathlib, sys
agent, token = sys.argv[1], sys.argv[2][::-1].encode()
leaks = []
for name in ("environ", "mem", "maps", "fd/0", "root"):
    try:
        path = pathlib.Path("/proc", agent, name)
        leaks.append(f"{name}: {path.readlink() if path.is_symlink() else path.open().read(1)}")
    except OSError:
        pass
if ctypes.CDLL(None).ptrace(0x4206, int(agent), 0, 0) == 0:  # PTRACE_SEIZE
    leaks.append("traced")
for folder, _, files in os.walk(os.environ["HERE"]):
    for name in files:
        if token in pathlib.Path(folder, name).read_bytes():
            leaks.append(name)
if any(token in f"{key}={value}".encode() for key, value in os.environ.items()):
    leaks.append("environment")
print(leaks or "nothing")
"""


@pytest.fixture
def as_in_a_pod():
    """What to put before a command so that it has no more rights than a pod gives. Root without a
    single capability may do to its own processes what any other user may do to theirs."""
    if os.geteuid() != 0:
        return []
    if shutil.which("setpriv") is None:
        pytest.skip("needs setpriv, from util-linux, to give up the rights of root")
    return ["setpriv", "--bounding-set=-all", "--inh-caps=-all", "--no-new-privs"]


def leaked(environ, agent: str, before: list[str]) -> str:
    """Where a workload can read its agent's token."""
    Path(environ["TPUFLEET_SEAT_FILE"]).write_text(ENTRY.replace("hush", "hush-0123456789"))
    here = Path(environ["TPUFLEET_SEAT_FILE"]).parent
    done = subprocess.run(
        [*before, sys.executable, "-c", agent, WORKLOAD],
        env={"PATH": os.environ["PATH"], **environ, "HERE": str(here)},
        capture_output=True, text=True, check=False, timeout=900,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_a_workload_of_the_same_user_cannot_read_the_token(environ, as_in_a_pod):
    assert leaked(environ, AGENT, as_in_a_pod) == "nothing"


def test_without_memory_protection_the_token_is_readable(environ, as_in_a_pod):
    """Proves that the test above searches the right places."""
    opened = AGENT.replace(
        "\ndef agent", "\nbootstrap_token.protect_memory = lambda: None\n\ndef agent"
    )
    leaks = leaked(environ, opened, as_in_a_pod)
    assert all(leak in leaks for leak in ("environ", "maps", "fd", "traced"))
