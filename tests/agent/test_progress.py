"""Progress of a workload, from its progress file and from checkpoint names."""

from __future__ import annotations

import json
from datetime import timedelta

import pytest

from tpufleet.agent.workload.progress import ProgressReader, step_from_name
from tpufleet.clocks import ManualClock


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
def test_steps_are_parsed_from_checkpoint_names(name, step):
    assert step_from_name(name) == step


@pytest.fixture
def clock():
    return ManualClock()


def reader(tmp_path, clock):
    (tmp_path / "run").mkdir(exist_ok=True)
    checkpoint = str(tmp_path / "checkpoints")
    return ProgressReader(tmp_path / "run", checkpoint, clock=clock)


def test_only_a_new_checkpoint_counts_as_progress(tmp_path, clock):
    (tmp_path / "checkpoints" / "step_5").mkdir(parents=True)
    reading = reader(tmp_path, clock)
    reading.poll()
    assert (reading.latest.checkpoint_step, reading.latest.at) == (5, None)
    clock.advance(timedelta(seconds=9))
    (tmp_path / "checkpoints" / "step_6").mkdir()
    reading.poll()
    assert (reading.latest.checkpoint_step, reading.latest.at) == (6, clock.now())


def test_the_folder_of_a_restarted_attempt_is_not_a_checkpoint(tmp_path, clock):
    (tmp_path / "checkpoints" / "from-attempt-3").mkdir(parents=True)
    reading = reader(tmp_path, clock)
    reading.poll()
    assert reading.latest is None


def test_a_reported_checkpoint_step_overrides_checkpoint_names(tmp_path, clock):
    (tmp_path / "checkpoints" / "step_500").mkdir(parents=True)
    reading = reader(tmp_path, clock)
    file = tmp_path / "run" / "progress.json"
    file.write_text(json.dumps({"step": 12, "checkpoint_step": 10, "at": "2026-01-01T00:00:00"}))
    reading.poll()
    assert (reading.latest.step, reading.latest.checkpoint_step) == (12, 10)


def test_an_invalid_progress_file_is_ignored(tmp_path, clock, capsys):
    reading = reader(tmp_path, clock)
    file = tmp_path / "run" / "progress.json"
    file.write_text("{not json")
    reading.poll()
    assert reading.latest is None
    assert "ignoring progress.json" in capsys.readouterr().err
    file.write_text('{"step": 3}')
    reading.poll()
    assert reading.latest.step == 3 and reading.latest.at is not None


def test_an_object_store_is_not_polled(tmp_path, clock):
    (tmp_path / "run").mkdir()
    reading = ProgressReader(tmp_path / "run", "gs://bucket/x", clock=clock)
    reading.poll()
    assert reading.latest is None
