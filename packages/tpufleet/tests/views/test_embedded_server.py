"""The embedded server: started once, in its own session, stopped by command."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.journeys.faulty_store import FaultyStore
from tests.polling import wait_until
from tests.service.harness import ServiceHarness
from tests.views.cli_runner import Tpu
from tpufleet import config
from tpufleet.client import snapshots
from tpufleet.errors import FleetError
from tpufleet.stores.memory import MemoryStore
from tpufleet.views.cli import embedded_server


@pytest.fixture
def alone_with_cleanup(alone: Tpu):
    yield alone
    alone.ok("serve", "--stop")


def terminal(tpu: Tpu, *args: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "tpufleet", *args],
        env={**os.environ, **tpu.environ},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        umask=0,
    )


def test_two_terminals_that_start_a_server_concurrently_start_one(alone_with_cleanup, tmp_path):
    tpu = alone_with_cleanup
    both = [terminal(tpu, "pool", "create", name, "v5e-4") for name in ("one", "two")]
    printed = [process.communicate(timeout=900)[1] for process in both]
    assert [process.returncode for process in both] == [0, 0], printed
    started = [stderr for stderr in printed if "started a server at http://127.0.0.1:" in stderr]
    assert len(started) == 1
    home = tmp_path / "state"
    assert f"(state in {home}; " in started[0]
    assert [pool["name"] for pool in tpu.json("pool", "list")["pools"]] == ["one", "two"]
    server = psutil.Process(int(subprocess.check_output(
        [sys.executable, "-c", "import json,sys; print(json.load(open(sys.argv[1]))['pid'])",
         home / "server.json"]
    )))  # fmt: skip
    assert os.getsid(server.pid) == server.pid  # no terminal's end is its end
    for name in ("token", "server.json", "server.log", "secret"):
        assert (home / name).stat().st_mode & 0o077 == 0, name
    assert not [path for path in home.rglob("*") if path.lstat().st_mode & 0o022]
    packed = [entry.path for entry in snapshots.scan(tmp_path).entries]
    assert not [path for path in packed if path.startswith("state/")], "no secret goes along"
    assert tpu.json("serve", "--stop") == {"stopped": True}
    assert config.embedded_server_url(home) is None
    assert tpu("jobs").exit_code == 1


def test_a_server_that_fails_to_start_reports_its_log(tmp_path: Path):
    fails = (sys.executable, "-c", "print('the disk is on fire'); raise SystemExit(3)")
    with pytest.raises(FleetError) as caught:
        embedded_server.start(tmp_path, lambda url: True, fails)
    assert str(caught.value) == (
        "the server failed to start (exit status 3)\n  the disk is on fire\n"
        f"  next: read {tmp_path / 'server.log'}"
    )


def test_a_server_that_does_not_respond_is_replaced(alone_with_cleanup, tmp_path):
    """After a crash its number may belong to another program."""
    home = tmp_path / "state"
    home.mkdir(mode=0o700)
    (home / "server.json").write_text(f'{{"url": "http://127.0.0.1:1", "pid": {os.getpid()}}}')
    answer = alone_with_cleanup("pool", "create", "lab", "v5e-4")
    assert answer.exit_code == 0, answer.output
    assert "started a server" in answer.stderr


def test_a_running_server_without_its_database_is_not_started_again(alone, tmp_path):
    """It must not be stopped either: it continues with the database."""
    store = FaultyStore(MemoryStore())
    server = ServiceHarness(store, tmp_path)
    server.start()
    home = tmp_path / "state"
    home.mkdir(mode=0o700)
    (home / "server.json").write_text(json.dumps({"url": server.url, "pid": os.getpid()}))
    config.write_token(home / "token", server.tokens["ada"])
    store.fails = lambda name, number: "before"
    try:
        answer = alone("pool", "create", "lab", "v5e-4")
    finally:
        store.fails = lambda name, number: None
        server.close()
    assert answer.exit_code == 1 and "the database does not respond" in answer.stderr
    assert "started" not in answer.stderr and "failed to start" not in answer.stderr
    assert not (home / "server.log").exists()


def test_a_running_server_is_used(tmp_path: Path):
    (tmp_path / "server.json").write_text(f'{{"url": "http://127.0.0.1:1", "pid": {os.getpid()}}}')
    fails = (sys.executable, "-c", "raise SystemExit(3)")
    assert embedded_server.start(tmp_path, lambda url: True, fails) == ("http://127.0.0.1:1", False)


def test_an_interrupted_start_leaves_no_server(tmp_path):
    command = (sys.executable, "-c", "import time; time.sleep(99)")

    def interrupted(_: str) -> bool:
        raise KeyboardInterrupt

    record = {"url": "http://127.0.0.1:1", "pid": os.getpid()}
    before = set(psutil.Process().children())

    def ready_later(url: str) -> bool:
        """The first question is about a server that ran before."""
        (tmp_path / "server.json").write_text(json.dumps(record))
        return interrupted(url) if set(psutil.Process().children()) - before else False

    (tmp_path / "server.json").write_text(json.dumps(record))
    with pytest.raises(KeyboardInterrupt):
        embedded_server.start(tmp_path, ready_later, command)
    assert not set(psutil.Process().children()) - before


@pytest.mark.parametrize(
    ("written", "warning"),
    [
        pytest.param("sever: x\nlisten: 80\n", "sever: unknown field", id="a typo"),
        pytest.param("listen: [\n", "not valid YAML", id="no YAML", marks=pytest.mark.slow),
        pytest.param(
            None, "", id="the file that the variable names is gone", marks=pytest.mark.slow
        ),
    ],
)
@pytest.mark.parametrize(
    "everything",
    [pytest.param(False, id="server", marks=pytest.mark.slow), pytest.param(True, id="slices too")],
)
def test_a_server_is_stopped_also_when_its_config_file_is_invalid(
    alone_with_cleanup: Tpu, tmp_path: Path, written: str | None, warning: str, everything: bool
):
    data = tmp_path / "data"
    file = tmp_path / "fleet.yaml"
    file.write_text(f"data: {data}\n")
    tpu = alone_with_cleanup
    environ = {**os.environ, **tpu.environ, "TPUFLEET_CONFIG": str(file)}

    def run(*args: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "tpufleet", *args]
        return subprocess.run(command, env=environ, capture_output=True, text=True, timeout=900)

    try:
        assert run("pool", "create", "lab", "v5e-1", "--smallest", "1").returncode == 0
        wait_until(lambda: '"ready"' in run("slices", "--json").stdout, 300.0)
        if written is None:
            file.unlink()
        else:
            file.write_text(written)
        stopped = run("serve", "--stop", "--json", *(["--all"] if everything else []))
    finally:
        file.write_text(f"data: {data}\n")
        left = run("serve", "--stop", "--all", "--json")
    slices = {"slices": 1} if everything else {}
    assert (stopped.returncode, json.loads(stopped.stdout)) == (0, {"stopped": True, **slices})
    assert warning in stopped.stderr
    assert json.loads(left.stdout) == {"stopped": False, "slices": 0 if everything else 1}
