"""A server whose bucket cannot be used tells users why, and what repairs it."""

from __future__ import annotations

import json
import os
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
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
    """What `tpu run` and `tpu status` print when the server has a bucket and these credentials."""
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
            return tpu("run", "v5e-4", "--detach", "--", "python", "train.py"), tpu.ok("status")
        finally:
            os.chdir(before)
    finally:
        server.cleanup()


def test_without_credentials_the_user_is_told_to_log_in(tmp_path, folder):
    answer, status = submit(tmp_path, folder)
    assert answer.exit_code != 0
    assert "gs://my-bucket/fleet: no valid credentials" in status
    assert "gs://my-bucket/fleet" in answer.stderr
    assert "gcloud auth application-default login" in answer.stderr
    assert "400" not in answer.stderr and "Traceback" not in answer.stderr


def test_a_damaged_key_file_is_named(tmp_path, folder):
    file = tmp_path / "key.json"
    file.write_text(json.dumps(KEY))
    answer, _ = submit(tmp_path, folder, GOOGLE_APPLICATION_CREDENTIALS=str(file))
    assert answer.exit_code != 0
    assert "gs://my-bucket/fleet" in answer.stderr and "credentials" in answer.stderr
    assert "400" not in answer.stderr and "internal server error" not in answer.stderr


class Refusing(BaseHTTPRequestHandler):
    """A bucket that this identity may not use."""

    def do_GET(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length") or 0))
        body = b'{"error": {"code": 403, "message": "storage.objects.create is denied"}}'
        self.send_response(403)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    do_POST = do_PUT = do_GET

    def log_message(self, format: str, *args: object) -> None:
        """Not logged."""


def test_a_missing_role_is_named(tmp_path, folder):
    with ThreadingHTTPServer(("127.0.0.1", 0), Refusing) as bucket:
        threading.Thread(target=bucket.serve_forever, args=(0.02,), daemon=True).start()
        url = f"http://127.0.0.1:{bucket.server_port}"
        answer, status = submit(tmp_path, folder, STORAGE_EMULATOR_HOST=url)
        bucket.shutdown()
    assert answer.exit_code != 0
    for text in (answer.stderr, status):
        assert "storage.objects.create is denied" in text
    assert "roles/storage.objectUser" in answer.stderr
