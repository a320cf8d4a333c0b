"""The Job that uploads metrics to Vertex AI TensorBoard: Google's uploader, and a fake of the API.

The uploader is not among the packages for tests, because it needs TensorFlow. Install it anywhere:
`pip install 'google-cloud-aiplatform[tensorboard]' tensorboard tensorflow-cpu`, and name it in
TB_GCP_UPLOADER.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
from datetime import timedelta
from pathlib import Path

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa

from tests.environment.environments import example
from tests.polling import wait_until
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
    program = os.environ.get("TB_GCP_UPLOADER") or shutil.which("tb-gcp-uploader")
    if program is None:
        pytest.skip(
            "needs tb-gcp-uploader: pip install 'google-cloud-aiplatform[tensorboard]' tensorboard "
            "tensorflow-cpu, and set TB_GCP_UPLOADER to it"
        )
    return Path(program)


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


def upload(uploader, vertex):
    """The command of the Job, with what a pod has from workload identity and the network."""
    job = example_jobsets.tensorboard_upload(
        example(), "research", resource=RESOURCE, run_name="maxtext", output=str(vertex / "bucket"),
        image="uploader",
    )  # fmt: skip
    (container,) = job["spec"]["template"]["spec"]["containers"]
    program, *options = container["command"]
    assert program == uploader.name
    key = rsa.generate_private_key(public_exponent=65537, key_size=2048).private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    account = {
        "type": "service_account", "project_id": "p", "private_key": key.decode(),
        "private_key_id": "1", "client_email": "jobs@p.iam.gserviceaccount.com", "client_id": "1",
        "token_uri": "http://127.0.0.1:9/token",
    }  # fmt: skip
    (vertex / "key.json").write_text(json.dumps(account))
    return running(
        [str(uploader), *options],
        GOOGLE_APPLICATION_CREDENTIALS=str(vertex / "key.json"),
        GRPC_DEFAULT_SSL_ROOTS_FILE_PATH=str(vertex / "ca.pem"),
        grpc_proxy=(vertex / "proxy").read_text(),
    )


def calls(vertex, method):
    file = vertex / "calls.jsonl"
    lines = file.read_text().splitlines() if file.exists() else []
    return [call for call in map(json.loads, lines) if call["method"] == method]


def losses(vertex):
    """By step, as the API received them."""
    return {
        int(point["step"]): point["scalar"]["value"]
        for call in calls(vertex, "WriteTensorboardExperimentData")
        for run in call["request"]["write_run_data_requests"]
        if run["tensorboard_run"] == RUN
        for series in run["time_series_data"]
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
