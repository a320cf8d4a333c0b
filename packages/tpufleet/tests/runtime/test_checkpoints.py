"""Checkpoints are atomic, whichever process dies and whenever."""

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
from tpufleet.runtime.checkpoints import CheckpointIncomplete, buckets, folders
from tpufleet.runtime.checkpoints.folders import FolderCheckpoints
from tpufleet.runtime.context import Context


def writes(text: str):
    return lambda folder: (folder / "weights").write_text(text)


def steps(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_the_parts_of_a_process_that_is_gone_are_not_awaited(tmp_path, monkeypatch):
    """The agent says so. Those of the others may still come."""
    monkeypatch.setenv("TPUFLEET_RUN_DIR", str(tmp_path))
    (tmp_path / "peer-gone").touch()
    first = FolderCheckpoints(tmp_path / "checkpoints", process_id=0, num_processes=2)
    with pytest.raises(CheckpointIncomplete):
        first.save(5, writes("five"), wait=900)
    assert first.latest() is None
    assert list(tmp_path.glob("saving*")) == []


@pytest.fixture
def store(tmp_path) -> FolderCheckpoints:
    return FolderCheckpoints(tmp_path)


def test_the_newest_checkpoint_is_the_latest(store):
    assert store.latest() is None
    store.save(5, writes("five"))
    store.save(12, writes("twelve"))
    latest = store.latest()
    assert latest.step == 12 and latest.processes == 1
    assert (latest.part(0) / "weights").read_text() == "twelve"


@pytest.mark.parametrize(
    "damage",
    [
        lambda folder: (folder / "part_0" / "weights").write_text("TWELVE"),
        lambda folder: (folder / "part_0" / "weights").write_text("twelv"),
        lambda folder: (folder / "part_0" / "weights").unlink(),
        lambda folder: (folder / "COMPLETE").unlink(),
        lambda folder: (folder / "COMPLETE").write_text('{"step": 12'),
    ],
    ids=["other content", "truncated", "missing file", "no marker", "truncated marker"],
)
def test_a_damaged_checkpoint_is_skipped(store, tmp_path, damage):
    store.save(5, writes("five"))
    store.save(12, writes("twelve"))
    damage(tmp_path / "step_00000012")
    assert store.latest().step == 5


def test_a_damaged_checkpoint_is_replaced_by_the_next_attempt(tmp_path):
    FolderCheckpoints(tmp_path, writer="j.0").save(5, writes("five"))
    (tmp_path / "step_00000005" / "part_0" / "weights").write_text("FIVE")
    again = FolderCheckpoints(tmp_path, writer="j.1")
    assert again.latest() is None
    again.save(5, writes("five again"))
    assert (again.latest().part(0) / "weights").read_text() == "five again"
    assert steps(tmp_path) == ["step_00000005"]


def test_a_crash_during_replacement_keeps_the_old_checkpoint(store, tmp_path):
    store.save(5, writes("five"))
    (tmp_path / "step_00000005").rename(tmp_path / ".replaced-step_00000005")
    assert store.latest().step == 5


@pytest.mark.parametrize("digits", ["9" * 16, "9" * 200, "9" * 5000])
def test_a_number_that_no_step_reaches_is_not_a_step(digits):
    assert not folders._is_step(f"step_{digits}")
    committed = {f"step_{digits}/COMPLETE": None, "step_00000007/COMPLETE": None}
    assert buckets._committed_steps(committed) == {7}


def test_a_failed_writer_leaves_no_checkpoint(store, tmp_path):
    store.save(1, writes("one"))

    def fails(folder: Path) -> None:
        (folder / "weights").write_text("half")
        raise OSError("no space")

    with pytest.raises(OSError, match="no space"):
        store.save(2, fails)
    assert store.latest().step == 1


def test_saving_a_step_again_in_the_same_attempt_does_nothing(store, tmp_path):
    store.save(3, writes("three"))
    store.save(3, writes("three, again"))
    assert (store.latest().part(0) / "weights").read_text() == "three"


def test_prune_keeps_the_newest_and_deletes_remains_of_crashes(tmp_path):
    store = FolderCheckpoints(tmp_path, writer="j.1")
    for step in (1, 2, 3, 4):
        store.save(step, writes(str(step)))
    (tmp_path / "step_00000004" / "part_0" / "weights").unlink()
    (tmp_path / ".saving-j.0-step_00000003" / "part_0").mkdir(parents=True)
    (tmp_path / ".saving-j.1-step_00000005" / "part_1").mkdir(parents=True)
    FolderCheckpoints(tmp_path, process_id=1, num_processes=2).prune(1)
    assert len(steps(tmp_path)) == 6
    store.prune(2)
    assert steps(tmp_path) == [
        ".saving-j.1-step_00000005", "step_00000002", "step_00000003", "step_00000004",
    ]  # fmt: skip
    with pytest.raises(BadInput):
        store.prune(0)


def test_a_checkpoint_is_complete_only_with_the_parts_of_all_processes(tmp_path):
    first, second = (FolderCheckpoints(tmp_path, process_id=i, num_processes=2) for i in range(2))
    with pytest.raises(CheckpointIncomplete):
        first.save(1, writes("a"), wait=0.05)
    assert first.latest() is None
    other = threading.Thread(target=lambda: second.save(1, writes("b"), wait=10))
    other.start()
    first.save(1, writes("a"), wait=10)
    other.join(900)
    latest = second.latest()
    assert [(latest.part(i) / "weights").read_text() for i in range(2)] == ["a", "b"]


def test_an_unsupported_object_store_is_rejected():
    with pytest.raises(BadInput, match="use a folder or gs://"):
        checkpoints.open_checkpoints(Context(checkpoint_dir="s3://bucket/x"))


def test_saving_reports_the_checkpoint_step(tmp_path, monkeypatch):
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
def test_sigkill_during_a_save_never_loses_a_committed_checkpoint(tmp_path, seed):
    rng = random.Random(seed)
    committed = 0
    for attempt in range(4):
        gang = [saver(tmp_path, attempt, index) for index in range(2)]
        started = [process.stdout.readline() for process in gang]
        assert started[0] == started[1]
        assert int(started[0].split()[1]) > committed
        threading.Event().wait(rng.uniform(0.05, 0.3))
        for process in rng.sample(gang, 2):
            process.send_signal(signal.SIGKILL)
        outputs = [process.communicate(timeout=900)[0].split() for process in gang]
        committed = max([committed] + [int(output[-1]) for output in outputs if len(output) >= 2])
        latest = FolderCheckpoints(tmp_path).latest()
        assert (latest.step if latest else 0) >= committed
        if latest:
            for index in range(2):
                expected = str(latest.step).encode() * 3000
                assert (latest.part(index) / "a").read_bytes() == expected
    assert committed > 0
