"""Host commands on a host: a few at a time, and none that has expired or was withdrawn."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
from msgspec.structs import replace

from tests.polling import wait_until
from tpufleet.agent.host_commands import MAX_CONCURRENT, HostCommandRunner
from tpufleet.clocks import ManualClock
from tpufleet.errors import Unreachable
from tpufleet.model.fleet.host_commands import HostCommand, HostCommandKind, HostCommandResult
from tpufleet.model.fleet.hosts import HostId

TIMEOUT = timedelta(minutes=1)


class AgentHost:
    """Its commands write their id to a file, and end when the test allows it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.clock = ManualClock()
        self.results: dict[str, HostCommandResult] = {}
        self.failures = 0  # of reports, still to come
        self.reached = threading.Event()
        self.reached.set()
        self.runner = HostCommandRunner(
            HostId("s1/0"),
            folder,
            {"PATH": "/usr/bin:/bin"},
            self.clock,
            self._send_result,
            lambda *part: None,
            lambda: None,
        )

    def _send_result(self, command_id: str, result: HostCommandResult) -> None:
        self.reached.wait(60)
        if self.failures:
            self.failures -= 1
            raise Unreachable("no connection")
        self.results[command_id] = result

    def command(self, name: str, timeout: timedelta = TIMEOUT) -> HostCommand:
        script = f"echo {name} >> started; while [ ! -e end ]; do sleep 0.02; done"
        return HostCommand(
            id=name, kind=HostCommandKind.COMMAND, command=("sh", "-c", script), timeout=timeout
        )

    @property
    def started(self) -> list[str]:
        file = self.folder / "started"
        return file.read_text().split() if file.exists() else []

    def end_commands(self) -> None:
        (self.folder / "end").touch()


@pytest.fixture
def host(tmp_path: Path) -> Iterator[AgentHost]:
    host = AgentHost(tmp_path)
    yield host
    host.reached.set()
    host.end_commands()


def test_few_commands_run_at_once_and_all_run_in_the_end(host):
    commands = [host.command(f"c{number}") for number in range(3 * MAX_CONCURRENT)]
    host.runner.start_new(commands)
    wait_until(lambda: len(host.started) == MAX_CONCURRENT)
    host.runner.start_new(commands)  # the next heartbeat lists them again
    assert sorted(host.started) == [f"c{number}" for number in range(MAX_CONCURRENT)]
    host.end_commands()
    wait_until(lambda: len(host.results) == len(commands))
    assert sorted(host.started) == sorted(command.id for command in commands)
    assert {result.status for result in host.results.values()} == {0}
    host.runner.start_new(commands)  # of a server that has not seen the results
    host.runner.start_new([host.command("last")])
    wait_until(lambda: "last" in host.results)
    assert len(host.started) == len(commands) + 1


def test_no_more_than_the_limit_run_at_the_same_time(host):
    script = "echo 1 >> started; sleep 0.1; echo -1 >> started"
    commands = [
        replace(host.command(f"c{number}"), command=("sh", "-c", script)) for number in range(16)
    ]
    host.runner.start_new(commands)
    wait_until(lambda: len(host.results) == len(commands))
    running = list(itertools.accumulate(int(change) for change in host.started))
    assert len(running) == 2 * len(commands) and max(running) <= MAX_CONCURRENT


def test_a_command_that_expired_while_it_waited_is_answered_and_not_run(host):
    running = [host.command(f"c{number}") for number in range(MAX_CONCURRENT)]
    late = host.command("late", timedelta(seconds=20))
    host.runner.start_new([*running, late])
    wait_until(lambda: len(host.started) == MAX_CONCURRENT)
    host.clock.advance(timedelta(seconds=21))
    host.runner.start_new([*running, late])
    result = wait_until(lambda: host.results.get("late"))  # while the others still run
    assert result.status is None
    assert result.message == f"not run: waited 21 s for {MAX_CONCURRENT} other host commands"
    host.end_commands()
    wait_until(lambda: len(host.results) == MAX_CONCURRENT + 1)
    assert "late" not in host.started


def test_a_command_that_expired_since_the_last_heartbeat_is_not_run(host):
    running = [host.command(f"c{number}") for number in range(MAX_CONCURRENT)]
    host.runner.start_new([*running, host.command("late")])
    wait_until(lambda: len(host.started) == MAX_CONCURRENT)
    host.clock.advance(TIMEOUT + timedelta(seconds=1))
    host.end_commands()
    wait_until(lambda: len(host.results) == MAX_CONCURRENT + 1)
    assert host.results["late"].status is None and "late" not in host.started


def test_a_waiting_command_that_was_withdrawn_is_not_run(host):
    """The slice may have been given to the job of another user meanwhile."""
    running = [host.command(f"c{number}") for number in range(MAX_CONCURRENT)]
    host.runner.start_new([*running, host.command("withdrawn")])
    wait_until(lambda: len(host.started) == MAX_CONCURRENT)
    host.runner.start_new(running)
    host.end_commands()
    wait_until(lambda: len(host.results) == MAX_CONCURRENT)
    host.runner.start_new([host.command("last")])
    wait_until(lambda: "last" in host.results)
    assert "withdrawn" not in host.started


def test_a_result_that_cannot_be_sent_does_not_delay_the_agent(host):
    host.reached.clear()
    host.end_commands()
    commands = [host.command(f"c{number}") for number in range(MAX_CONCURRENT + 1)]
    host.runner.start_new(commands)  # returns, although no result can be sent
    host.clock.advance(TIMEOUT + timedelta(seconds=1))
    host.runner.start_new(commands)  # nor that of the expired one
    host.reached.set()
    wait_until(lambda: len(host.results) == len(commands))


def test_a_command_whose_result_was_not_received_runs_again_when_it_is_listed_again(host):
    host.failures = 1
    host.end_commands()
    command = host.command("c0")
    host.runner.start_new([command])
    wait_until(lambda: host.failures == 0)

    def received() -> bool:
        host.runner.start_new([command])
        return "c0" in host.results

    wait_until(received)
    assert host.started == ["c0", "c0"]
