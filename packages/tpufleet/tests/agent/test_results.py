"""The file `result` of a program, uploaded before its exit is reported."""

from __future__ import annotations

import pickle

import pytest

from tpufleet.agent.workload.attempt_folder import AttemptFolder
from tpufleet.agent.workload.output.results import read_result, redact_result
from tpufleet.model.fleet.hosts import Phase
from tpufleet.model.job.attempts import AttemptId
from tpufleet.model.values.redaction import Redactor

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


@pytest.mark.parametrize(
    ("data", "uploaded"),
    [
        (b"key: s3cr3t-value\n", b"key: ***\n"),
        (pickle.dumps({"key": "s3cr3t-value"}), pickle.dumps({"key": "s3cr3t-value"})),
    ],
    ids=["text", "binary"],
)
def test_secrets_are_masked_in_results_that_are_text(data, uploaded):
    assert redact_result(data, Redactor(["s3cr3t-value"])) == uploaded


def test_a_run_folder_that_became_a_link_leads_the_agent_nowhere(tmp_path):
    folder, elsewhere = AttemptFolder(tmp_path, AttemptId("j1.0")), tmp_path / "elsewhere"
    folder.create()
    elsewhere.mkdir()
    (elsewhere / "result").write_text("not the job's")
    folder.run.rmdir()
    folder.run.symlink_to(elsewhere)
    assert read_result(folder.path) is None
    folder.write_stop_file()
    assert not (elsewhere / "stop").exists()


def test_a_stop_file_that_is_a_link_creates_nothing(tmp_path):
    folder = AttemptFolder(tmp_path, AttemptId("j1.0"))
    folder.create()
    (folder.run / "stop").symlink_to(tmp_path / "created")
    folder.write_stop_file()
    assert not (tmp_path / "created").exists()
