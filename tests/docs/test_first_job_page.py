"""The page "First job on Google Cloud", word for word: every command of it runs in a shell, against
the emulator. Only gcloud and pip are stand-ins, and addresses point to this machine."""

from __future__ import annotations

import os
import socket
import stat
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("google.cloud.tpu_v2", reason="pip install 'tpufleet[tpu-vm]'")

from tests import fake_gcs
from tests.docs import markdown
from tpufleet.providers.local import processes
from tpufleet.testbed.cloud_tpu.emulator import Emulator
from tpufleet.testbed.cloud_tpu.locations import Latencies

PAGE = "first-job-on-google-cloud.md"
# Creates buckets on the storage emulator; what else it is asked for succeeds.
GCLOUD = f"""#!{sys.executable}
import json, os, sys, urllib.request
words = sys.argv[1:]
with open(os.environ["CALLS"], "a") as calls:
    calls.write(" ".join(words) + "\\n")
if words[:3] == ["storage", "buckets", "create"]:
    name = words[3].removeprefix("gs://")
    url = os.environ["STORAGE_EMULATOR_HOST"] + "/storage/v1/b?project=my-project"
    body = json.dumps({{"name": name}}).encode()
    headers = {{"Content-Type": "application/json"}}
    urllib.request.urlopen(urllib.request.Request(url, body, headers))
"""


def script_of_the_page() -> str:
    """Every line of every shell block, in order."""
    blocks = [block for block in markdown.blocks("sh") if block.where.startswith(f"docs/{PAGE}")]
    assert len(blocks) >= 7
    return "\n".join(block.text for block in blocks)


def executable(path: Path, text: str) -> None:
    path.write_text(text)
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


def test_a_newcomer_follows_the_page_to_a_finished_job(tmp_path, monkeypatch):
    programs, home, work = tmp_path / "bin", tmp_path / "home", tmp_path / "work"
    for folder in (programs, home, work):
        folder.mkdir()
    executable(programs / "gcloud", GCLOUD)
    executable(programs / "pip", "#!/bin/sh\n")
    executable(programs / "tpu", f'#!/bin/sh\nexec {sys.executable} -P -m tpufleet "$@"\n')
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    with fake_gcs.server() as storage:
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", storage)
        emulator = Emulator(
            agents_folder=tmp_path / "machines", latencies=Latencies().divided_by(100)
        )
        with emulator:
            environ = {
                **{key: value for key, value in os.environ.items() if "TPUFLEET" not in key},
                "PATH": f"{programs}:{Path(sys.executable).parent}:{os.environ['PATH']}",
                "HOME": str(home),
                "CALLS": str(tmp_path / "calls"),
                "TPUFLEET_HOME": str(home / "state"),
                "TPUFLEET_TPU_VM_ENDPOINT": emulator.endpoint,
                "TPUFLEET_LISTEN": address,
                "TPUFLEET_PUBLIC_URL": f"http://{address}",
            }
            # A person waits for the server to respond before the next command.
            ready = "until curl -s -o /dev/null $TPUFLEET_PUBLIC_URL; do sleep 0.1; done"
            text = script_of_the_page().replace("tpu serve &", f"tpu serve &\n{ready}")
            # Files, not pipes: the server in the background would keep a pipe open.
            printed, status = tmp_path / "printed", tmp_path / "status"
            try:
                with printed.open("w") as out, status.open("w") as err:
                    ran = subprocess.run(
                        ["bash", "-ex", "-c", text], env=environ, cwd=work, timeout=240,
                        stdin=subprocess.DEVNULL, stdout=out, stderr=err,
                    )  # fmt: skip
            finally:
                tpu = [sys.executable, "-P", "-m", "tpufleet"]
                subprocess.run([*tpu, "serve", "--stop"], env=environ, capture_output=True)
            stdout, stderr = printed.read_text(), status.read_text()
            assert ran.returncode == 0, stdout + stderr
            assert "hello from a TPU host" in stdout and "succeeded" in stdout
            assert "estimate: $1.92 per hour" in stderr
            assert "everything is set up" in stderr
            with emulator.cloud.lock:
                emulator.cloud.run_due()
                assert not emulator.cloud.ledger.running(), "nothing is left to pay for"
    assert processes.leftovers(tmp_path / "machines") == []
    calls = (tmp_path / "calls").read_text()
    assert "services enable tpu.googleapis.com" in calls
