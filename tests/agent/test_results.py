"""The file `result` of a program, uploaded before its exit is reported."""

from __future__ import annotations

import pytest

from tpufleet.model.hosts import Phase

WRITE_RESULT = "import os; open(os.environ['TPUFLEET_RUN_DIR'] + '/result', 'w').write('forty-two')"


def test_the_result_is_uploaded_before_the_exit_is_reported(harness):
    harness.assign_python(WRITE_RESULT)
    harness.start()
    assert harness.wait_for_exit().clean
    assert harness.control_plane.results == {"j1.0": b"forty-two"}
    assert Phase.EXITED not in harness.control_plane.phases_before_result


def test_a_rejected_result_does_not_delay_the_exit_report(harness):
    harness.control_plane.refused_routes["results"] = 409
    harness.assign_python(WRITE_RESULT)
    harness.start()
    assert harness.wait_for_exit().clean and harness.control_plane.results == {}


@pytest.mark.parametrize("kind", ["symlink('/etc/passwd', path)", "mkfifo(path)", "mkdir(path)"])
def test_only_a_regular_file_is_uploaded(harness, kind):
    harness.assign_python(
        f"import os; path = os.environ['TPUFLEET_RUN_DIR'] + '/result'; os.{kind}"
    )
    harness.start()
    assert harness.wait_for_exit().clean and harness.control_plane.results == {}
