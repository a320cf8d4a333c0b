"""What a program keeps on the disk of its host is there for the next attempt of the same job."""

from __future__ import annotations

import pytest

KEEP = ("sh", "-c", 'echo kept > "$TPUFLEET_LOCAL_DIR/checkpoint"; exit 1')
SHOW = ("sh", "-c", 'echo "found: $(ls "$TPUFLEET_LOCAL_DIR")"; exit 1')


def found(harness, attempt: str, **changes: object) -> str:
    harness.assign(*SHOW, attempt_id=attempt, **changes)
    harness.wait_for_exit(attempt)
    lines = harness.log(attempt).splitlines()
    return next(line for line in lines if line.startswith("found: ")).removeprefix("found: ")


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ({"checkpoint": "gs://lab/run"}, "checkpoint"),
        ({"checkpoint": "gs://lab/run/from-attempt-1"}, "checkpoint"),
        ({"checkpoint": "gs://lab/other"}, ""),
        ({"checkpoint": "gs://lab/run", "owner": "ann"}, ""),
    ],
    ids=["next-attempt", "started-over", "another-job", "another-owner"],
)
def test_the_next_attempt_of_the_job_finds_it(harness, changes, names):
    harness.assign(*KEEP, checkpoint="gs://lab/run")
    harness.start()
    harness.wait_for_exit()
    assert found(harness, "j1.1", **changes) == names


def test_another_job_on_the_host_deletes_it(harness):
    harness.assign(*KEEP, checkpoint="gs://lab/run")
    harness.start()
    harness.wait_for_exit()
    found(harness, "j2.0", checkpoint="gs://lab/other")
    assert not list(harness.work.glob("local/*/*/checkpoint"))


def test_a_program_that_has_finished_leaves_nothing(harness):
    harness.assign("sh", "-c", 'echo kept > "$TPUFLEET_LOCAL_DIR/checkpoint"')
    harness.start()
    harness.wait_for_exit()
    assert not list(harness.work.glob("local/*/*/checkpoint"))


def test_each_process_of_a_host_has_its_own(harness):
    show = ("sh", "-c", 'echo "folder: $TPUFLEET_LOCAL_DIR"; exit 1')
    harness.assign(*show, checkpoint="gs://lab/run", processes_per_host=2)
    harness.start()
    harness.wait_for_exit()
    folders = {line for line in harness.log().splitlines() if line.startswith("folder: ")}
    assert {line.rpartition("/")[2] for line in folders} <= {"0", "1"}
    assert sorted(path.name for path in harness.work.glob("local/*/[01]")) == ["0", "1"]
