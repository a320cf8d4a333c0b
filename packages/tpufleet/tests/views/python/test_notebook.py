"""In a real Jupyter kernel: a job's table appears, follows it, and ends with it."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import msgspec
import nbformat
import pytest
from nbclient import NotebookClient

from tests.providers.local.test_isolation import stop_all
from tests.server_process import Server
from tpufleet.model.api_types import JobRow
from tpufleet.model.job.job_file import FIELDS
from tpufleet.model.job.jobs import JobId, JobState
from tpufleet.views.python.job_fields import JobFields
from tpufleet.views.python.job_handle import Job
from tpufleet.views.python.notebook import keep_current

ROW = JobRow(
    id=JobId("j1"), name="train", owner="ada", state=JobState.RUNNING, reason="", pool=None,
    accelerator="v5litepod-1", slices=1, priority=0, tags=(), submitted_at=datetime.now(UTC),
    ended_at=None, attempts=1, progress=None, parent=None,
)  # fmt: skip


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    server = Server(tmp_path / "home")
    server.start()
    yield server
    stop_all(server)
    server.cleanup()


@pytest.mark.slow
def test_a_notebook_runs_a_job_and_a_function(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("TPUFLEET_HOME", str(server.home))
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    folder = tmp_path / "notebooks"
    folder.mkdir()
    cells = [
        "import tpufleet\njob = tpufleet.run('v5e-1', 'echo \"<b>hello</b>\"', name='hello')\njob",
        "import threading\n"
        "from tpufleet.views.python import notebook\n"
        "job.wait(900)\n"
        "for thread in threading.enumerate():\n"
        "    if thread.name == notebook.REFRESHER:\n"
        "        thread.join(900)\n"
        "print(job.logs())",
        "def square(x):\n    return x * x\n\nlist(tpufleet.map(square, [1, 2, 3]))",
    ]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    # The kernel of this environment, whatever kernels the machine has installed.
    client = NotebookClient(
        notebook, timeout=900, kernel_name="python3", resources={"metadata": {"path": str(folder)}}
    )
    client.execute()
    table, logs, squares = (cell.outputs for cell in notebook.cells)
    assert "succeeded" in table[0]["data"]["text/html"], table
    assert "<b>hello</b>" in logs[0]["text"]
    assert squares[-1]["data"]["text/plain"] == "[1, 4, 9]"


def test_the_last_state_is_shown_whatever_ends_between_two_questions():
    """Another thread waits for the job, and hears of its end before this one."""

    rows = [msgspec.structs.replace(ROW, state=JobState.RUNNING)]
    rows += [msgspec.structs.replace(ROW, state=JobState.FAILED)]
    shown: list[str] = []
    keep_current(iter(rows).__next__, shown.append).join(900)
    assert "running" in shown[0] and "failed" in shown[-1]


def test_text_of_users_is_escaped_in_the_table(server: Server):
    import tpufleet

    tpufleet.connect(server.url, (server.home / "token").read_text().strip())
    job = tpufleet.run("v5e-1", "echo '<script>alert(1)</script>' >&2; exit 3", workdir=None)
    assert job.wait(120, check=False).state == "failed"
    assert isinstance(job, Job)
    assert "<script>" not in job._repr_html_()
    assert "failed" in job._repr_html_()


def test_the_arguments_are_the_fields_of_a_job_file():
    assert set(JobFields.__annotations__) == {field.name for field in FIELDS} - {
        "command",
        "accelerator",
    }
