"""Diagnosis of a workload's exit."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from tpufleet.agent.workload import exit_diagnosis
from tpufleet.model.fleet.hosts import Exit
from tpufleet.model.job.end_reasons import EndReason

AT = datetime(2026, 1, 1, tzinfo=UTC)


@pytest.mark.parametrize(
    ("status", "signal", "kills", "tail", "expected"),
    [
        (None, 9, 1, [], True),
        (137, None, 1, [], True),
        (None, 9, 0, ["MemoryError"], True),
        (None, 9, 0, ["all fine"], False),
        (1, None, 1, ["ValueError"], False),
        (1, None, 0, ["MemoryError"], False),
        (0, None, 1, [], False),
    ],
    ids=[
        "killed and counted", "status of a shell", "killed and in the log", "only killed",
        "kill of another process", "in the log but not killed", "success",
    ],
)  # fmt: skip
def test_an_oom_kill_needs_sigkill_and_evidence(status, signal, kills, tail, expected):
    exit = exit_diagnosis.exit_of_finished(Exit(at=AT, status=status, signal=signal), kills, tail)
    assert exit.oom_killed is expected
    if expected:
        assert exit.evidence is EndReason.OUT_OF_HOST_MEMORY


def test_oom_kills_are_read_from_cgroup_v2(tmp_path):
    own = tmp_path / "cgroup"
    own.write_text("0::/agents/one\n")
    folder = tmp_path / "agents" / "one"
    folder.mkdir(parents=True)
    (folder / "memory.events").write_text("low 0\noom 4\noom_kill 3\noom_group_kill 0\n")
    events = exit_diagnosis.oom_events_file(tmp_path, own)
    assert exit_diagnosis.oom_kill_count(events) == 3


@pytest.mark.parametrize("seen_at", ["memory/k8s.io/abc", "memory"], ids=["by name", "at the top"])
def test_oom_kills_are_read_from_cgroup_v1(tmp_path, seen_at):
    own = tmp_path / "cgroup"
    own.write_text("4:memory:/k8s.io/abc\n1:cpu:/k8s.io/abc\n0::/k8s.io/abc\n")
    (tmp_path / seen_at).mkdir(parents=True)
    (tmp_path / seen_at / "memory.oom_control").write_text("under_oom 0\noom_kill 2\n")
    assert exit_diagnosis.oom_kill_count(exit_diagnosis.oom_events_file(tmp_path, own)) == 2


def test_without_cgroup_counters_there_are_no_oom_kills(tmp_path):
    assert exit_diagnosis.oom_events_file(tmp_path, tmp_path / "none") is None
    assert exit_diagnosis.oom_kill_count(None) == 0


def test_the_last_line_skips_lines_of_the_agent():
    assert exit_diagnosis.last_line(["a", "boom ", "", "[tpufleet] stopping"]) == "boom"


TRACEBACK = 'Traceback (most recent call last):\n  File "t.py", line 1, in f\nValueError: no'


@pytest.mark.parametrize(
    ("output", "line", "unexplained"),
    [
        ("step 9\nloss=0.5", "loss=0.5", True),
        ("", "", True),
        (f"{TRACEBACK}\nAborted (core dumped)", "ValueError: no", False),
        (f"{TRACEBACK}\nstep 10", "step 10", True),
    ],
    ids=["output", "nothing", "exception", "handled exception"],
)
def test_only_an_exception_or_a_signature_explains_an_exit(output, line, unexplained):
    failed = Exit(at=datetime.now(UTC), status=3)
    exit = exit_diagnosis.exit_of_finished(failed, 0, output.split("\n"))
    assert (exit.log_line, exit.unexplained) == (line, unexplained)


def test_the_last_line_is_not_one_that_every_rank_prints():
    banner = (
        "[Gloo] Rank 7 is connected to 7 peer ranks. Expected number of connected peer ranks is : 7"
    )
    assert exit_diagnosis.last_line(["loading", banner]) == "loading"
    assert exit_diagnosis.last_line([banner]) == ""
