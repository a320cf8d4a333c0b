"""Metrics uploaded to Vertex AI TensorBoard, by the Job on GKE and by the commands for other jobs:
Google's uploader, and a fake of the API.

The uploader has an environment of its own, because it needs TensorFlow.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa

from tests import cached_environments
from tests.docs import markdown
from tests.environment.environments import example
from tests.polling import wait_until
from tests.server_process import Server
from tpufleet.clocks import SystemClock
from tpufleet.model.job.jobs import JobId
from tpufleet.model.job.metric_points import MetricPoint
from tpufleet.views.tensorboard_events import EventFile
from tpufleet_gke.environment.addons import example_jobsets

SERVER = Path(__file__).with_name("vertex_server.py")
RESOURCE = "projects/p/locations/us-central1/tensorboards/123"
RUN = f"{RESOURCE}/experiments/maxtext/runs/default"
WAIT = 120.0  # seconds; TensorFlow alone takes many to start

pytestmark = pytest.mark.slow


@pytest.fixture
def uploader():
    return cached_environments.programs("uploader") / "tb-gcp-uploader"


@pytest.fixture
def vertex(uploader, tmp_path):
    """A folder with the CA, the proxy and the calls of the fake."""
    with running([str(uploader.with_name("python")), str(SERVER), str(tmp_path)]):
        wait_until((tmp_path / "proxy").exists, WAIT)
        yield tmp_path


@contextlib.contextmanager
def running(command, **environment):
    process = subprocess.Popen(command, env={**os.environ, **environment})
    try:
        yield process
    finally:
        process.terminate()
        process.wait(900)


def credentials(vertex):
    """What the uploader has on a machine that is logged in, and the network to the fake."""
    key = rsa.generate_private_key(public_exponent=65537, key_size=2048).private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    account = {
        "type": "service_account", "project_id": "p", "private_key": key.decode(),
        "private_key_id": "1", "client_email": "jobs@p.iam.gserviceaccount.com", "client_id": "1",
        "token_uri": "http://127.0.0.1:9/token",
    }  # fmt: skip
    (vertex / "key.json").write_text(json.dumps(account))
    return {
        "GOOGLE_APPLICATION_CREDENTIALS": str(vertex / "key.json"),
        "GRPC_DEFAULT_SSL_ROOTS_FILE_PATH": str(vertex / "ca.pem"),
        "grpc_proxy": (vertex / "proxy").read_text(),
    }


def upload(uploader, vertex):
    """The command of the Job, with what a pod has from workload identity and the network."""
    job = example_jobsets.tensorboard_upload(
        example(), "research", resource=RESOURCE, run_name="maxtext", output=str(vertex / "bucket"),
        image="uploader",
    )  # fmt: skip
    (container,) = job["spec"]["template"]["spec"]["containers"]
    program, *options = container["command"]
    assert program == uploader.name
    return running([str(uploader), *options], **credentials(vertex))


def calls(vertex, method):
    file = vertex / "calls.jsonl"
    lines = file.read_text().splitlines() if file.exists() else []
    return [call for call in map(json.loads, lines) if call["method"] == method]


def losses(vertex, run=RUN):
    """By step, as the API received them."""
    return {
        int(point["step"]): point["scalar"]["value"]
        for call in calls(vertex, "WriteTensorboardExperimentData")
        for data in call["request"]["write_run_data_requests"]
        if data["tensorboard_run"] == run
        for series in data["time_series_data"]
        for point in series["values"]
    }


def test_the_job_uploads_metrics_as_they_come_and_goes_on_after_a_restart(uploader, vertex):
    start = SystemClock().now()

    def points(steps):
        return [
            MetricPoint(
                job_id=JobId("j"), at=start + timedelta(seconds=step), step=step,
                values={"loss": 8.0 - step},
            )
            for step in steps
        ]  # fmt: skip

    file = EventFile(vertex / "bucket" / "maxtext" / "tensorboard", start)
    file.append(points(range(3)))
    with upload(uploader, vertex):
        wait_until(lambda: losses(vertex) == {0: 8.0, 1: 7.0, 2: 6.0}, WAIT)
        file.append(points(range(3, 5)))
        wait_until(lambda: losses(vertex).get(4) == 4.0, WAIT)
    file.append(points([5]))
    with upload(uploader, vertex):
        wait_until(lambda: losses(vertex).get(5) == 3.0, WAIT)
    (created,) = calls(vertex, "CreateTensorboardRun")
    assert created["request"]["parent"] == f"{RESOURCE}/experiments/maxtext"
    refused = [
        call["error"]
        for line in (vertex / "calls.jsonl").read_text().splitlines()
        if (call := json.loads(line))["error"] and "NOT_FOUND" not in call["error"]
    ]
    assert refused == []


PROGRAM = """
from tpufleet import runtime
for step in range(4):
    runtime.progress(step, total=3, loss=8.0 - step)
"""


def test_the_commands_of_the_page_upload_the_metrics_of_an_ordinary_job(uploader, vertex):
    [block] = [each for each in markdown.blocks("sh") if "tb-gcp-uploader" in each.text]
    commands = block.text.replace("projects/PROJECT/locations/REGION/tensorboards/NUMBER", RESOURCE)
    (vertex / "tpu").write_text(f'#!/bin/sh\nexec {sys.executable} -P -m tpufleet "$@"\n')
    (vertex / "tpu").chmod(0o755)
    server = Server(vertex / "home")
    server.start()
    try:
        environ = {
            **os.environ, **credentials(vertex), "TPUFLEET_HOME": str(server.home),
            "TPUFLEET_SERVER": server.url,
            "PATH": f"{vertex}:{uploader.parent}:{os.environ['PATH']}",
        }  # fmt: skip
        job = [vertex / "tpu", "run", "v5e-4", "--name", "train", "--", "python", "-c", PROGRAM]
        subprocess.run(job, env=environ, cwd=vertex, check=True, timeout=900)
        done = subprocess.run(
            ["bash", "-ec", commands], env=environ, cwd=vertex, timeout=900, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout
    finally:
        server.cleanup()
    runs = {
        data["tensorboard_run"]
        for call in calls(vertex, "WriteTensorboardExperimentData")
        for data in call["request"]["write_run_data_requests"]
    }
    [run] = runs
    assert run.startswith(f"{RESOURCE}/experiments/train/runs/"), runs
    assert losses(vertex, run)[3] == 5.0
