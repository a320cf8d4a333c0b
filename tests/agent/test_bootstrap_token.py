"""An agent whose machine has only a word: it gets the token once, and nobody after it does."""

from __future__ import annotations

import subprocess

import pytest

from tests.agent.control_plane import FakeControlPlane, wait_until
from tpufleet.agent import bootstrap_token
from tpufleet.agent.settings import AgentSettings
from tpufleet.client.agents import AgentClient
from tpufleet.errors import Forbidden, Unauthorized, Unreachable
from tpufleet.model.hosts import HostId, Phase
from tpufleet.model.slices import SliceId


@pytest.fixture(autouse=True)
def open_memory(monkeypatch):
    """Other tests look into this process."""
    monkeypatch.setattr(bootstrap_token, "close_memory", lambda: None)


def given(plane: FakeControlPlane, tmp_path, **changes) -> AgentSettings:
    return AgentSettings(
        server=plane.url, slice_id=SliceId("s1"), host_index=0, num_hosts=1, token="",
        work_dir=tmp_path, address="127.0.0.1", coordinator_port=1, chips=4,
        **{"entry": plane.word, **changes},
    )  # fmt: skip


def test_the_first_agent_of_a_host_gets_the_token_and_a_second_one_does_not(plane, tmp_path):
    assert bootstrap_token.exchange(given(plane, tmp_path)) == plane.token
    with pytest.raises(Forbidden, match="another agent speaks"):
        bootstrap_token.exchange(given(plane, tmp_path))


def test_whoever_comes_with_another_word_is_not_let_in(plane, tmp_path):
    with pytest.raises(Unauthorized):
        bootstrap_token.exchange(given(plane, tmp_path, entry="guessed"))


def test_an_agent_that_comes_before_the_control_plane_waits_for_it(plane, tmp_path):
    plane.vanish()
    naps: list[float] = []

    def sleep(seconds: float) -> None:
        naps.append(seconds)
        if len(naps) == 4:
            plane.come_back()

    assert bootstrap_token.exchange(given(plane, tmp_path), sleep) == plane.token
    assert naps == [0.5, 1.0, 2.0, 4.0]


def test_a_simulated_host_does_not_wait_for_ever(plane, tmp_path):
    plane.vanish()
    with pytest.raises(Unreachable):
        bootstrap_token.exchange(given(plane, tmp_path, waits_seconds=60.0), lambda seconds: None)


def test_an_answer_that_was_lost_is_asked_for_again(plane):
    client = AgentClient(plane.url, plane.word)
    host, nonce = HostId("s1/0"), "n" * 16
    assert (
        client.exchange_bootstrap_token(host, nonce)
        == client.exchange_bootstrap_token(host, nonce)
        == plane.token
    )


# What a curious workload can read on such a machine: its own environment and files, its agent's.
# (The log shows this very text, so it must not hold what it looks for.)
SEARCH = """
part=slice; found=0
for place in /proc/$PPID/environ ../../*; do
  grep --quiet --text --recursive "$part-token" "$place" 2>/dev/null && found=$((found + 1))
done
echo "places: $found"
"""


def test_an_agent_with_a_word_runs_its_workload_which_finds_no_token(world):
    world.assign("sh", "-c", SEARCH)
    world.start_process(TPUFLEET_ENTRY=world.plane.word, TPUFLEET_TOKEN_FILE="")
    world.phase(Phase.EXITED)
    assert world.exit().clean
    wait_until(lambda: "places: 0\n" in world.log())


def test_an_agent_that_is_started_again_is_not_let_in_and_leaves(world):
    first = world.start_process(TPUFLEET_ENTRY=world.plane.word, TPUFLEET_TOKEN_FILE="")
    wait_until(lambda: world.plane.beats)
    first.kill()
    first.wait()
    second = world.start_process(TPUFLEET_ENTRY=world.plane.word, TPUFLEET_TOKEN_FILE="")
    try:
        assert second.wait(60) == 3
    except subprocess.TimeoutExpired:
        second.kill()
        raise
