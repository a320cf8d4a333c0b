"""A server whose bucket cannot be used tells users why, and what repairs it."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

pytest.importorskip("google.cloud.storage", reason="pip install 'tpufleet[gcs]'")

from tests.server_process import Server
from tests.views.cli_runner import Tpu

KEY = {
    "type": "service_account", "project_id": "p", "private_key_id": "1", "private_key": "none",
    "client_email": "x@p.iam.gserviceaccount.com", "token_uri": "http://127.0.0.1:1/token",
}  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    work = tmp_path / "work"
    work.mkdir()
    (work / "train.py").write_text("print('hello')\n")
    return work


def submit(tmp_path: Path, folder: Path, **environ: str):
    """What `tpu run` prints when the server has a bucket and these credentials."""
    home = tmp_path / "home"
    without = {"HOME": str(tmp_path), "CLOUDSDK_CONFIG": str(tmp_path / "gcloud"),
               "NO_GCE_CHECK": "true", **environ}  # fmt: skip
    server = Server(home, TPUFLEET_BUCKET="gs://my-bucket/fleet", **without)
    try:
        server.start()
        tpu = Tpu(HOME=str(tmp_path), TPUFLEET_HOME=str(home))
        before = os.getcwd()
        os.chdir(folder)
        try:
            return tpu("run", "v5e-4", "--detach", "--", "python", "train.py")
        finally:
            os.chdir(before)
    finally:
        server.cleanup()


def test_without_credentials_the_user_is_told_to_log_in(tmp_path, folder):
    answer = submit(tmp_path, folder)
    assert answer.exit_code != 0
    assert "gs://my-bucket/fleet" in answer.stderr
    assert "gcloud auth application-default login" in answer.stderr
    assert "400" not in answer.stderr and "Traceback" not in answer.stderr


def test_a_damaged_key_file_is_named(tmp_path, folder):
    file = tmp_path / "key.json"
    file.write_text(json.dumps(KEY))
    answer = submit(tmp_path, folder, GOOGLE_APPLICATION_CREDENTIALS=str(file))
    assert answer.exit_code != 0
    assert "gs://my-bucket/fleet" in answer.stderr and "credentials" in answer.stderr
    assert "400" not in answer.stderr and "internal server error" not in answer.stderr
