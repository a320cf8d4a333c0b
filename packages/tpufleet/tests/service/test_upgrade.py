"""An upgrade with a running job: the server of an earlier release is stopped, this one is started
on its state, and the attempt goes on, with agents of the earlier release."""

from __future__ import annotations

import io
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from tests.polling import wait_until
from tests.repository import ROOT
from tests.server_process import Server
from tpufleet.model.api_types import NewJob
from tpufleet.model.job.attempts import AttemptState
from tpufleet.model.job.jobs import JobId, JobState
from tpufleet.stores.sql import schema_migrations

# The last release without it is the earlier one.
ADDED = "packages/tpufleet/src/tpufleet/stores/sql/migrations/0009_token_scopes.sql"


def git(*arguments: str) -> bytes:
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True)
    if done.returncode != 0:
        pytest.skip(f"needs the history of the repository: {done.stderr.decode()[:200]}")
    return done.stdout


@pytest.fixture(scope="module")
def earlier_release(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The source folder of the version before the last change of the schema."""
    commits = git("log", "--format=%H", "--diff-filter=A", "--", ADDED).decode().split()
    if not commits:
        pytest.skip("needs the history of the repository")
    folder = tmp_path_factory.mktemp("earlier")
    archive = git("archive", "--format=tar", f"{commits[-1]}^", "src")
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        tar.extractall(folder)
    return folder / "src"


def test_a_running_job_goes_on_when_the_server_is_upgraded(earlier_release, tmp_path):
    home, finish = tmp_path / "home", tmp_path / "finish"
    script = (
        "import pathlib, time, tpufleet\n"
        "print('from', tpufleet.__file__, flush=True)\n"
        f"while not pathlib.Path({str(finish)!r}).exists(): time.sleep(0.1)"
    )
    old, new = Server(home, PYTHONPATH=str(earlier_release)), Server(home)
    try:
        old.start()
        spec = {"name": "job", "command": [sys.executable, "-c", script], "accelerator": "v5e-8"}
        old.client.put_secret("wandb", "key-of-ada")
        old.client.submit([NewJob(id=JobId("job-1"), spec=spec)])
        wait_until(lambda: old.client.job("job-1").job.state is JobState.RUNNING, 90, old.log_tail)
        token = old.client.me()
        assert old.stop() == 0
        new.start()
        assert new.client.me().name == token.name
        assert any((home / "backups").glob("schema-*.tar.gz"))
        assert schema_migrations.newest_version() >= 9
        detail = new.client.job("job-1")
        assert [attempt.state for attempt in detail.attempts] == [AttemptState.RUNNING]
        new.client.submit([NewJob(id=JobId("job-2"), spec={**spec, "command": ["true"]})])
        finish.touch()
        for job in ("job-1", "job-2"):
            wait_until(lambda job=job: new.client.job(job).job.ended_at, 90, new.log_tail)
            detail = new.client.job(job)
            assert detail.job.state is JobState.SUCCEEDED, detail
            assert len(detail.attempts) == 1
        assert str(earlier_release) in "".join(new.client.logs("job-1"))
        assert new.client.secrets().own == ("wandb",)
        assert "key-of-ada" not in "".join(
            path.read_text() for path in (home / "secrets").rglob("*") if path.is_file()
        )
    finally:
        new.cleanup()
        old.cleanup()
