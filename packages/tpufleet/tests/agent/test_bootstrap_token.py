"""The exchange of a bootstrap token for the slice token: once per host."""

from __future__ import annotations

import os
import subprocess

import pytest

from tests.agent.control_plane import FakeControlPlane
from tests.polling import wait_until
from tpufleet.agent import bootstrap_token
from tpufleet.agent.settings import AgentSettings
from tpufleet.client.agents import AgentClient
from tpufleet.errors import Forbidden, Unauthorized, Unreachable
from tpufleet.model.fleet.hosts import HostId, Phase
from tpufleet.model.fleet.slices import SliceId

BOOTSTRAP_TOKEN = FakeControlPlane.bootstrap_token


@pytest.fixture(autouse=True)
def open_memory(monkeypatch):
    """Other tests inspect this process."""
    monkeypatch.setattr(bootstrap_token, "protect_memory", lambda: None)


def agent_settings(control_plane: FakeControlPlane, tmp_path, **changes) -> AgentSettings:
    return AgentSettings(
        server=control_plane.url, slice_id=SliceId("s1"), host_index=0, num_hosts=1, token="",
        work_dir=tmp_path, address="127.0.0.1", coordinator_port=1, chips=4,
        **{"bootstrap_token": control_plane.bootstrap_token, **changes},
    )  # fmt: skip


def test_only_the_first_agent_of_a_host_gets_the_token(control_plane, tmp_path):
    assert bootstrap_token.exchange(agent_settings(control_plane, tmp_path)) == control_plane.token
    with pytest.raises(Forbidden, match="another agent is registered"):
        bootstrap_token.exchange(agent_settings(control_plane, tmp_path))


def test_an_invalid_bootstrap_token_is_rejected(control_plane, tmp_path):
    with pytest.raises(Unauthorized):
        bootstrap_token.exchange(agent_settings(control_plane, tmp_path, bootstrap_token="guessed"))


def test_the_exchange_retries_until_the_control_plane_is_up(control_plane, tmp_path):
    control_plane.stop()
    delays: list[float] = []

    def sleep(seconds: float) -> None:
        delays.append(seconds)
        if len(delays) == 4:
            control_plane.restart()

    assert (
        bootstrap_token.exchange(agent_settings(control_plane, tmp_path), sleep)
        == control_plane.token
    )
    for delay, ceiling in zip(delays, [0.5, 1.0, 2.0, 4.0], strict=True):
        assert ceiling / 2 <= delay <= ceiling


def test_the_exchange_times_out_on_a_simulated_host(control_plane, tmp_path):
    control_plane.stop()
    with pytest.raises(Unreachable):
        bootstrap_token.exchange(
            agent_settings(control_plane, tmp_path, server_timeout_seconds=60.0),
            lambda seconds: None,
        )


def test_the_exchange_can_be_repeated_with_the_same_nonce(control_plane):
    client = AgentClient(control_plane.url, control_plane.bootstrap_token)
    host, nonce = HostId("s1/0"), "n" * 16
    assert client.register(host, nonce) == client.register(host, nonce) == control_plane.token


def test_the_nonce_is_read_once(tmp_path):
    (tmp_path / "nonce").write_text("n" * 32 + "\n")
    with (tmp_path / "nonce").open() as file:
        assert bootstrap_token.read_nonce(file.fileno()) == "n" * 32
        os.lseek(file.fileno(), 0, os.SEEK_SET)
        assert os.read(file.fileno(), 1) == b"", "what it starts cannot read it again"


# What a workload can read on such a machine: its own environment and files, and its agent's.
# (The log contains this script, so the script must not contain the token.)
SEARCH = """
part=slice; matches=0
for path in /proc/$PPID/environ ../../*; do
  grep --quiet --text --recursive "$part-token" "$path" 2>/dev/null && matches=$((matches + 1))
done
echo "matches: $matches"
"""


def test_the_workload_cannot_read_the_exchanged_token(harness):
    harness.assign("sh", "-c", SEARCH)
    harness.start_process(TPUFLEET_ENTRY=BOOTSTRAP_TOKEN, TPUFLEET_TOKEN_FILE="")
    harness.wait_for_phase(Phase.EXITED)
    assert harness.wait_for_exit().clean
    wait_until(lambda: "matches: 0\n" in harness.log())


def test_a_restarted_agent_with_another_nonce_is_rejected_and_exits(harness):
    first = harness.start_process(TPUFLEET_ENTRY=BOOTSTRAP_TOKEN, TPUFLEET_TOKEN_FILE="")
    wait_until(lambda: harness.control_plane.heartbeats)
    first.kill()
    first.wait()
    second = harness.start_process(TPUFLEET_ENTRY=BOOTSTRAP_TOKEN, TPUFLEET_TOKEN_FILE="")
    try:
        assert second.wait(900) == 3
    except subprocess.TimeoutExpired:
        second.kill()
        raise


def test_a_restarted_agent_with_the_nonce_of_its_host_is_accepted(harness):
    nonce = harness.folder / "nonce"
    nonce.write_text("n" * 32)
    boots: list[str] = []
    for _ in range(2):
        with nonce.open() as file:
            agent = harness.start_process(
                stdin=file, TPUFLEET_NONCE_FD="0", TPUFLEET_ENTRY=BOOTSTRAP_TOKEN,
                TPUFLEET_TOKEN_FILE="",
            )  # fmt: skip
        wait_until(
            lambda: {each.boot for each in harness.control_plane.heartbeats} - {*boots},
        )
        boots.append(harness.control_plane.heartbeats[-1].boot)
        agent.kill()
        agent.wait()
