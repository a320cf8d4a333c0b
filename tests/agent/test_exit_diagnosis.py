"""Reading how a workload ended, and how far it is."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta

import pytest

from tpufleet.agent.workload import exit_diagnosis
from tpufleet.agent.workload.exit_diagnosis import ProcessExit
from tpufleet.agent.workload.progress import ProgressReader, step_from_name
from tpufleet.clocks import ManualClock
from tpufleet.model.end_reasons import EndReason

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
        "killed and counted", "a shell tells of it", "killed and said so", "only killed",
        "another's kill", "said so but not killed", "went well",
    ],
)  # fmt: skip
def test_a_kill_for_memory_needs_two_witnesses(status, signal, kills, tail, expected):
    exit = exit_diagnosis.exit_of_finished(
        ProcessExit(at=AT, status=status, signal=signal, oom_kills=kills), tail
    )
    assert exit.oom_killed is expected
    if expected:
        assert exit.evidence is EndReason.OUT_OF_HOST_MEMORY


def test_the_kernels_count_of_memory_kills_is_found_and_read(tmp_path):
    own = tmp_path / "cgroup"
    own.write_text("0::/agents/one\n")
    folder = tmp_path / "agents" / "one"
    folder.mkdir(parents=True)
    (folder / "memory.events").write_text("low 0\noom 4\noom_kill 3\noom_group_kill 0\n")
    events = exit_diagnosis.oom_events_file(tmp_path, own)
    assert exit_diagnosis.oom_kill_count(events) == 3


@pytest.mark.parametrize("seen_at", ["memory/k8s.io/abc", "memory"], ids=["by name", "at the top"])
def test_the_memory_kills_of_a_container_are_counted_in_control_groups_of_version_1(
    tmp_path, seen_at
):
    own = tmp_path / "cgroup"
    own.write_text("4:memory:/k8s.io/abc\n1:cpu:/k8s.io/abc\n0::/k8s.io/abc\n")
    (tmp_path / seen_at).mkdir(parents=True)
    (tmp_path / seen_at / "memory.oom_control").write_text("under_oom 0\noom_kill 2\n")
    assert exit_diagnosis.oom_kill_count(exit_diagnosis.oom_events_file(tmp_path, own)) == 2


def test_where_the_kernel_does_not_say_nothing_is_guessed(tmp_path):
    assert exit_diagnosis.oom_events_file(tmp_path, tmp_path / "none") is None
    assert exit_diagnosis.oom_kill_count(None) == 0


def test_the_last_line_is_the_programs_own():
    assert exit_diagnosis.last_line(["a", "boom ", "", "[tpufleet] stopping"]) == "boom"


@pytest.mark.parametrize(
    ("name", "step"),
    [
        ("120", 120), ("step_120", 120), ("checkpoint_120", 120), ("step_00000120", 120),
        ("ckpt-7.npz", 7), ("model_3.safetensors", 3), ("checkpoint12", 12),
        ("step_900.orbax-checkpoint-tmp-17", None), ("step_9.tmp", None),
        (".saving-x-step_9", None), ("from-attempt-3", None), ("run-a.step-4", 4), ("v2", None),
        ("latest", None), ("config_v2", None), ("events.out", None), ("tmp_12", None),
    ],
)  # fmt: skip
def test_steps_are_read_from_names(name, step):
    assert step_from_name(name) == step


@pytest.fixture
def clock():
    return ManualClock()


def reader(tmp_path, clock):
    (tmp_path / "run").mkdir(exist_ok=True)
    checkpoint = str(tmp_path / "checkpoints")
    return ProgressReader(tmp_path / "run", checkpoint, clock=clock)


def test_a_new_checkpoint_is_progress_but_one_that_was_there_is_not(tmp_path, clock):
    (tmp_path / "checkpoints" / "step_5").mkdir(parents=True)
    reading = reader(tmp_path, clock)
    reading.poll()
    assert (reading.latest.checkpoint_step, reading.latest.at) == (5, None)
    clock.advance(timedelta(seconds=9))
    (tmp_path / "checkpoints" / "step_6").mkdir()
    reading.poll()
    assert (reading.latest.checkpoint_step, reading.latest.at) == (6, clock.now())


def test_the_place_of_an_attempt_that_started_over_is_no_checkpoint(tmp_path, clock):
    (tmp_path / "checkpoints" / "from-attempt-3").mkdir(parents=True)
    reading = reader(tmp_path, clock)
    reading.poll()
    assert reading.latest is None


def test_what_the_program_says_of_its_checkpoints_counts_more_than_names(tmp_path, clock):
    (tmp_path / "checkpoints" / "step_500").mkdir(parents=True)
    reading = reader(tmp_path, clock)
    file = tmp_path / "run" / "progress.json"
    file.write_text(json.dumps({"step": 12, "checkpoint_step": 10, "at": "2026-01-01T00:00:00"}))
    reading.poll()
    assert (reading.latest.step, reading.latest.checkpoint_step) == (12, 10)


def test_a_progress_file_that_is_nonsense_is_passed_over(tmp_path, clock, capsys):
    reading = reader(tmp_path, clock)
    file = tmp_path / "run" / "progress.json"
    file.write_text("{not json")
    reading.poll()
    assert reading.latest is None
    assert "not understood" in capsys.readouterr().err
    file.write_text('{"step": 3}')
    reading.poll()
    assert reading.latest.step == 3 and reading.latest.at is not None


def test_an_object_store_is_not_looked_into(tmp_path, clock):
    (tmp_path / "run").mkdir()
    reading = ProgressReader(tmp_path / "run", "gs://bucket/x", clock=clock)
    reading.poll()
    assert reading.latest is None
