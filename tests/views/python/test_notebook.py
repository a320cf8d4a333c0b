"""In a real Jupyter kernel: a job's table appears, follows it, and ends with it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

from tests.providers.local.test_isolation import stop_all
from tests.server_process import Server
from tpufleet.model.job_file import FIELDS
from tpufleet.views.python.job_fields import JobFields


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    server = Server(tmp_path / "home")
    server.start()
    yield server
    stop_all(server)
    server.cleanup()


def test_a_notebook_runs_a_job_and_a_function(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("TPUFLEET_HOME", str(server.home))
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    folder = tmp_path / "notebooks"
    folder.mkdir()
    cells = [
        "import tpufleet\njob = tpufleet.run('v5e-1', 'echo \"<b>hello</b>\"', name='hello')\njob",
        "import time\n"
        "job.wait(120)\n"
        "time.sleep(3)\n"  # the table is refreshed every second
        "print(job.logs())",
        "def square(x):\n    return x * x\n\nlist(tpufleet.map(square, [1, 2, 3]))",
    ]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    # The kernel of this environment, whatever kernels the machine has installed.
    client = NotebookClient(
        notebook, timeout=180, kernel_name="python3", resources={"metadata": {"path": str(folder)}}
    )
    client.execute()
    table, logs, squares = (cell.outputs for cell in notebook.cells)
    assert "succeeded" in table[0]["data"]["text/html"], table
    assert "<b>hello</b>" in logs[0]["text"]
    assert squares[-1]["data"]["text/plain"] == "[1, 4, 9]"


def test_text_of_users_is_escaped_in_the_table(server: Server):
    import tpufleet
    from tpufleet.views.python.job_handle import Job

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
