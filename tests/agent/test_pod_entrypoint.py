"""The agent in a pod learns from its seat which slice it serves, and keeps its token to itself."""

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

from tests.agent.control_plane import wait_until
from tpufleet.agent import bootstrap_token, main, pods, seats
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
    """Other tests look into this process."""
    monkeypatch.setattr(bootstrap_token, "close_memory", lambda: None)


def entry(environ) -> Path:
    return Path(environ["TPUFLEET_SEATS"], environ["TPUFLEET_SEAT"])


SAID = json.dumps({"slice": "s-9", "token": "hush"})


def test_a_seat_that_is_taken_is_laid_ready_for_the_agent_alone(environ):
    entry(environ).write_text(SAID)
    assert seats.run(environ) == 0
    laid = Path(environ["TPUFLEET_SEAT_FILE"])
    assert laid.read_text() == SAID
    assert laid.stat().st_mode & 0o777 == 0o600


def test_a_free_seat_is_waited_for_and_then_taken(environ):
    later = threading.Timer(0.2, entry(environ).write_text, [SAID])
    later.start()
    assert seats.run(environ, wait_seconds=10) == 0
    assert Path(environ["TPUFLEET_SEAT_FILE"]).read_text() == SAID


def test_a_seat_that_nobody_takes_is_left_without_complaint(environ):
    assert seats.run(environ, wait_seconds=0.05) == 0
    assert pods.run(environ, lambda given: 5) == 0


@pytest.mark.skipif(sys.platform != "linux", reason="pods are Linux's")
def test_a_pod_that_waits_for_its_seat_leaves_at_once_when_it_is_told_to(environ):
    argv = [sys.executable, "-m", "tpufleet.agent.seats"]
    with subprocess.Popen(argv, env={**os.environ, **environ}) as waiting:
        wait_until(lambda: "SIGTERM" in handled(waiting.pid), what="the handler of the pod")
        waiting.send_signal(signal.SIGTERM)
        assert waiting.wait(60) == 128 + signal.SIGTERM


def handled(pid: int) -> set[str]:
    """Signals that a process has handlers for."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("SigCgt"):
            bits = int(line.split()[1], 16)
            return {one.name for one in signal.Signals if bits >> (one - 1) & 1}
    return set()


def test_the_agent_takes_its_token_and_leaves_no_file_behind(environ, tmp_path):
    Path(environ["TPUFLEET_SEAT_FILE"]).write_text(SAID)
    seen = {}
    assert pods.run(environ, lambda given: seen.update(given) or 7) == 7
    assert seen["TPUFLEET_SLICE"] == "s-9"
    assert seen[agent_settings.TOKEN_VARIABLE] == "hush"
    assert not Path(environ["TPUFLEET_SEAT_FILE"]).exists()
    assert agent_settings.TOKEN_VARIABLE not in os.environ


@pytest.mark.parametrize("said", ["{}", "[1]", "nonsense"])
def test_a_seat_that_cannot_be_read_is_a_fault_that_trying_again_does_not_heal(environ, said):
    Path(environ["TPUFLEET_SEAT_FILE"]).write_text(said)
    assert pods.run(environ, lambda given: 5) == main.EXIT_BAD_SETTINGS


# As a pod does it: the agent and the workload are processes of one user that is not root.

AGENT = """
import os, subprocess, sys
from tpufleet.agent import pods, privacy

def agent(given):
    environ = {key: value for key, value in given.items() if "TOKEN" not in key}
    command = [sys.executable, "-c", sys.argv[1], str(os.getpid()), given["TPUFLEET_TOKEN"][::-1]]
    return subprocess.run(command, env=environ).returncode

sys.exit(pods.run(os.environ, agent))
"""

# What a curious workload would try. The token is given backwards, to know it when it is found.
WORKLOAD = """
import ctypes, os, pathlib, sys
agent, token = sys.argv[1], sys.argv[2][::-1].encode()
found = []
for name in ("environ", "mem", "maps", "fd/0", "root"):
    try:
        place = pathlib.Path("/proc", agent, name)
        found.append(f"{name}: {place.readlink() if place.is_symlink() else place.open().read(1)}")
    except OSError:
        pass
if ctypes.CDLL(None).ptrace(0x4206, int(agent), 0, 0) == 0:  # PTRACE_SEIZE
    found.append("traced")
for folder, _, files in os.walk(os.environ["HERE"]):
    for name in files:
        if token in pathlib.Path(folder, name).read_bytes():
            found.append(name)
if any(token in f"{key}={value}".encode() for key, value in os.environ.items()):
    found.append("environment")
print(found or "nothing")
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


def curious(environ, agent: str, before: list[str]) -> str:
    """What a workload finds of its agent's token."""
    Path(environ["TPUFLEET_SEAT_FILE"]).write_text(SAID.replace("hush", "hush-0123456789"))
    here = Path(environ["TPUFLEET_SEAT_FILE"]).parent
    done = subprocess.run(
        [*before, sys.executable, "-c", agent, WORKLOAD],
        env={"PATH": os.environ["PATH"], **environ, "HERE": str(here)},
        capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_a_workload_of_the_same_user_finds_the_token_nowhere(environ, as_in_a_pod):
    assert curious(environ, AGENT, as_in_a_pod) == "nothing"


def test_in_an_agent_that_is_not_closed_it_would_be_found(environ, as_in_a_pod):
    """So that the test above is known to look in the right places."""
    opened = AGENT.replace("\ndef agent", "\nprivacy.close_memory = lambda: None\n\ndef agent")
    found = curious(environ, opened, as_in_a_pod)
    assert all(word in found for word in ("environ", "maps", "fd", "traced"))
