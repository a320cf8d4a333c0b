"""Checkpoints are whole or not there, whoever dies when."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from tpufleet.errors import BadInput
from tpufleet.runtime import checkpoints
from tpufleet.runtime.checkpoints import CheckpointIncomplete, FolderCheckpoints
from tpufleet.runtime.context import Context


def writes(text: str):
    return lambda folder: (folder / "weights").write_text(text)


def steps(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.fixture
def line(tmp_path) -> FolderCheckpoints:
    return FolderCheckpoints(tmp_path)


def test_the_newest_is_found_again(line):
    assert line.latest() is None
    line.save(5, writes("five"))
    line.save(12, writes("twelve"))
    found = line.latest()
    assert found.step == 12 and found.processes == 1
    assert (found.part(0) / "weights").read_text() == "twelve"


@pytest.mark.parametrize(
    "damage",
    [
        lambda folder: (folder / "part_0" / "weights").write_text("TWELVE"),
        lambda folder: (folder / "part_0" / "weights").write_text("twelv"),
        lambda folder: (folder / "part_0" / "weights").unlink(),
        lambda folder: (folder / "COMPLETE").unlink(),
        lambda folder: (folder / "COMPLETE").write_text('{"step": 12'),
    ],
    ids=["other bytes", "cut off", "file gone", "no marker", "half a marker"],
)
def test_a_damaged_one_is_passed_over_for_the_one_before(line, tmp_path, damage):
    line.save(5, writes("five"))
    line.save(12, writes("twelve"))
    damage(tmp_path / "step_00000012")
    assert line.latest().step == 5


def test_a_damaged_one_is_replaced_when_its_step_is_reached_again(tmp_path):
    FolderCheckpoints(tmp_path, writer="j.0").save(5, writes("five"))
    (tmp_path / "step_00000005" / "part_0" / "weights").write_text("FIVE")
    again = FolderCheckpoints(tmp_path, writer="j.1")
    assert again.latest() is None
    again.save(5, writes("five again"))
    assert (again.latest().part(0) / "weights").read_text() == "five again"
    assert steps(tmp_path) == ["step_00000005"]


def test_one_that_was_being_replaced_when_all_died_is_still_found(line, tmp_path):
    line.save(5, writes("five"))
    (tmp_path / "step_00000005").rename(tmp_path / ".replaced-step_00000005")
    assert line.latest().step == 5


def test_a_writer_that_fails_leaves_nothing_that_counts(line, tmp_path):
    line.save(1, writes("one"))

    def fails(folder: Path) -> None:
        (folder / "weights").write_text("half")
        raise OSError("no space")

    with pytest.raises(OSError, match="no space"):
        line.save(2, fails)
    assert line.latest().step == 1


def test_saving_a_step_again_in_the_same_attempt_is_done_already(line, tmp_path):
    line.save(3, writes("three"))
    line.save(3, writes("three, again"))
    assert (line.latest().part(0) / "weights").read_text() == "three"


def test_pruning_keeps_the_newest_whole_ones_and_clears_what_crashes_left(tmp_path):
    line = FolderCheckpoints(tmp_path, writer="j.1")
    for step in (1, 2, 3, 4):
        line.save(step, writes(str(step)))
    (tmp_path / "step_00000004" / "part_0" / "weights").unlink()
    (tmp_path / ".saving-j.0-step_00000003" / "part_0").mkdir(parents=True)
    (tmp_path / ".saving-j.1-step_00000005" / "part_1").mkdir(parents=True)
    FolderCheckpoints(tmp_path, process_id=1, num_processes=2).prune(1)
    assert len(steps(tmp_path)) == 6
    line.prune(2)
    assert steps(tmp_path) == [
        ".saving-j.1-step_00000005", "step_00000002", "step_00000003", "step_00000004",
    ]  # fmt: skip
    with pytest.raises(BadInput):
        line.prune(0)


def test_a_step_counts_only_when_every_process_wrote_its_part(tmp_path):
    first, second = (FolderCheckpoints(tmp_path, process_id=i, num_processes=2) for i in range(2))
    with pytest.raises(CheckpointIncomplete):
        first.save(1, writes("a"), wait=0.05)
    assert first.latest() is None
    other = threading.Thread(target=lambda: second.save(1, writes("b"), wait=10))
    other.start()
    first.save(1, writes("a"), wait=10)
    other.join(60)
    found = second.latest()
    assert [(found.part(i) / "weights").read_text() for i in range(2)] == ["a", "b"]


def test_an_object_store_that_we_do_not_know_is_refused_in_words():
    with pytest.raises(BadInput, match="need a folder"):
        checkpoints.open_checkpoints(Context(checkpoint_dir="s3://bucket/x"))


def test_saving_tells_the_platform(tmp_path, monkeypatch):
    monkeypatch.setenv("TPUFLEET_RUN_DIR", str(tmp_path))
    monkeypatch.setenv("TPUFLEET_CHECKPOINT_DIR", str(tmp_path / "c"))
    checkpoints.save(7, writes("seven"))
    assert '"checkpoint_step": 7' in (tmp_path / "progress.json").read_text()
    assert checkpoints.latest().step == 7


SAVER = """
import sys
from tpufleet import runtime
first = runtime.checkpoints.latest()
start = first.step + 1 if first else 1
print("from", start, flush=True)
def write(step):
    def writer(folder):
        for name in "ab":
            (folder / name).write_bytes(str(step).encode() * 3000)
    return writer
for step in range(start, 10**6):
    runtime.checkpoints.save(step, write(step), wait=2)
    print("saved", step, flush=True)
    runtime.checkpoints.prune(3)
"""


def saver(folder: Path, attempt: int, process_id: int) -> subprocess.Popen[str]:
    environ = os.environ | {
        "TPUFLEET_CHECKPOINT_DIR": str(folder),
        "TPUFLEET_JOB_ID": "j",
        "TPUFLEET_ATTEMPT": str(attempt),
        "TPUFLEET_PROCESS_ID": str(process_id),
        "TPUFLEET_NUM_PROCESSES": "2",
    }
    return subprocess.Popen(
        [sys.executable, "-S", "-c", f"import sys; sys.path[:0] = {sys.path!r}\n{SAVER}"],
        env=environ, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip


@pytest.mark.parametrize("seed", [1, 2])
def test_kill_9_in_the_middle_of_saves_never_costs_a_committed_checkpoint(tmp_path, seed):
    dice = random.Random(seed)
    committed = 0
    for attempt in range(4):
        gang = [saver(tmp_path, attempt, index) for index in range(2)]
        started = [process.stdout.readline() for process in gang]
        assert started[0] == started[1]
        assert int(started[0].split()[1]) > committed
        threading.Event().wait(dice.uniform(0.05, 0.3))
        for process in dice.sample(gang, 2):
            process.send_signal(signal.SIGKILL)
        said = [process.communicate(timeout=60)[0].split() for process in gang]
        committed = max([committed] + [int(words[-1]) for words in said if len(words) >= 2])
        found = FolderCheckpoints(tmp_path).latest()
        assert (found.step if found else 0) >= committed
        if found:
            for index in range(2):
                expected = str(found.step).encode() * 3000
                assert (found.part(index) / "a").read_bytes() == expected
    assert committed > 0
