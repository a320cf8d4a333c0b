"""`tpu profile` brings a trace of a running job; `tpu tensorboard` writes what it reported."""

from __future__ import annotations

import gzip
import io
import json
import os
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import httpx
import pytest

from tests import fake_gcs
from tests.ports import free_port
from tests.server_process import Server, wait_until
from tpufleet.agent.workload import profiles
from tpufleet.errors import FleetError
from tpufleet.model.job.jobs import JobId, JobState
from tpufleet.model.job.metric_points import MetricPoint
from tpufleet.runtime import gcs
from tpufleet.views.cli.jobs import profile, tensorboard
from tpufleet.views.tensorboard_events import EventFile

START = datetime(2026, 1, 1, tzinfo=UTC)
# Knows nothing of tpufleet.
LOOP = """
import time
import jax.numpy as jnp
x = jnp.ones((64, 64))
while True:
    x = (x @ x / 64).block_until_ready()
    time.sleep(0.01)
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    running = Server(tmp_path_factory.mktemp("profile") / "home")
    running.start()
    yield running
    running.cleanup()


def tpu(server: Server, folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    own = {"TPUFLEET_HOME": str(server.home), "TPUFLEET_SERVER": server.url}
    return subprocess.run(
        [sys.executable, "-m", "tpufleet", *arguments],
        cwd=folder, env=os.environ | own, capture_output=True, text=True, timeout=900, check=False,
    )  # fmt: skip


@pytest.mark.slow
def test_a_program_that_does_not_know_tpufleet_is_profiled_on_every_host(server, tmp_path):
    (tmp_path / "loop.py").write_text(LOOP)
    command = ("--detach", "--name", "loop", "--slices", "2", "v5e-1", "--",
               "python", "-m", "tpufleet.runtime.profiled", "loop.py")  # fmt: skip
    submitted = tpu(server, tmp_path, "run", *command)
    assert submitted.returncode == 0, submitted.stderr
    running = lambda: server.client.job("loop").job.state is JobState.RUNNING
    wait_until(running, 200, lambda: "\n".join(server.client.logs("loop")))
    done = tpu(server, tmp_path, "profile", "loop", "--seconds", "0.3", "--host", "all")
    assert done.returncode == 0, done.stderr
    assert "recording 0.3 s on 2 hosts of loop" in done.stderr
    (run,) = (tmp_path / "profiles/loop/plugins/profile").iterdir()
    assert {path.name for path in run.glob("*.xplane.pb")} == {
        "host-0.xplane.pb", "host-1.xplane.pb",
    }  # fmt: skip
    trace = json.loads(gzip.decompress((run / "host-0.trace.json.gz").read_bytes()))
    assert len(trace["traceEvents"]) > 10
    assert running(), "the job goes on"
    assert (
        "has hosts 0 to 1, not 7" in tpu(server, tmp_path, "profile", "loop", "--host", "7").stderr
    )
    server.client.cancel("loop")


@pytest.fixture
def attempt(tmp_path: Path) -> Path:
    (tmp_path / "run").mkdir()
    return tmp_path


SECOND = timedelta(seconds=1)


def test_a_program_that_does_not_answer_is_named_with_the_remedy(attempt):
    with pytest.raises(profiles.ProfileFailed, match=r"python -m tpufleet\.runtime\.profiled"):
        profiles.capture(attempt, "p1", SECOND, accept_seconds=0.0)
    request = json.loads((attempt / "run/profile-request.json").read_text())
    assert request == {"id": "p1", "seconds": 1.0}


def test_the_error_of_a_program_reaches_the_user(attempt):
    (attempt / "run/profile-p1.accepted").touch()
    (attempt / "run/profile-p1.json").write_text('{"error": "RuntimeError: one is running"}')
    with pytest.raises(profiles.ProfileFailed, match="RuntimeError: one is running"):
        profiles.capture(attempt, "p1", SECOND)


def test_a_link_instead_of_an_archive_is_not_followed(attempt):
    (attempt / "run/profile-p1.accepted").touch()
    (attempt / "run/profile-p1.json").write_text('{"error": ""}')
    (attempt / "secret").write_text("secret")
    (attempt / "run/profile-p1.tar.gz").symlink_to(attempt / "secret")
    with pytest.raises(profiles.ProfileFailed, match="record fewer seconds"):
        profiles.capture(attempt, "p1", SECOND)


def test_no_program_yet_is_said():
    with pytest.raises(profiles.ProfileFailed, match="no program is running"):
        profiles.capture(None, "p1", SECOND)


def test_files_of_an_archive_cannot_be_written_elsewhere(tmp_path):
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        for name in ("../../x.xplane.pb", "plugins/profile/r/vm.trace.json.gz", "/etc/passwd"):
            info = tarfile.TarInfo(name)
            info.size = 1
            archive.addfile(info, io.BytesIO(b"x"))
        link = tarfile.TarInfo("l.xplane.pb")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        archive.addfile(link)
    target = tmp_path / "out"
    list(profile.unpack(buffer.getvalue(), target, "r", "host-0"))
    written = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()}
    folder = "out/plugins/profile/r"
    assert written == {f"{folder}/host-0.xplane.pb", f"{folder}/host-0.trace.json.gz"}


def test_an_archive_that_unpacks_to_more_than_a_trace_writes_nothing(tmp_path):
    member = tarfile.TarInfo("host.xplane.pb")
    member.size = profile.MAX_UNPACKED + 1
    packed = gzip.compress(member.tobuf() + bytes(1024))
    with pytest.raises(FleetError, match="record fewer seconds"):
        list(profile.unpack(packed, tmp_path, "r", "host-0"))
    assert not list(tmp_path.iterdir())


# TensorBoard


def points(*losses: float) -> list[MetricPoint]:
    return [
        MetricPoint(
            job_id=JobId("a"), at=START + timedelta(seconds=step), step=step, values={"loss": loss}
        )
        for step, loss in enumerate(losses)
    ]


@pytest.mark.slow
def test_tensorboard_reads_the_event_files(tmp_path):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    file = EventFile(tmp_path, START)
    assert file.append(points(3.0, 2.0)) == 2
    assert file.append(points(3.0, 2.0, 1.5)) == 1  # those that are new
    events = accumulator.EventAccumulator(str(tmp_path))
    events.Reload()
    read = [(event.step, event.value, event.wall_time) for event in events.Scalars("loss")]
    assert read == [(step, loss, START.timestamp() + step)
                    for step, loss in enumerate((3.0, 2.0, 1.5))]  # fmt: skip


@pytest.mark.slow
def test_tensorboard_shows_each_step_once_after_a_preemption(tmp_path):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    file = EventFile(tmp_path, START)
    events = accumulator.EventAccumulator(str(tmp_path))

    def shown() -> list[tuple[int, float]]:
        events.Reload()
        return [(event.step, event.value) for event in events.Scalars("loss")]

    def again(at: int, step: int, loss: float) -> MetricPoint:
        moment = START + timedelta(seconds=at)
        return MetricPoint(job_id=JobId("a"), at=moment, step=step, values={"loss": loss})

    before = points(4.0, 3.0, 2.0, 1.0)
    file.append(before)
    assert shown() == [(0, 4.0), (1, 3.0), (2, 2.0), (3, 1.0)]
    resumed = [*before[:2], again(9, 2, 2.5)]
    file.append(resumed)
    file.append([*resumed, again(10, 3, 1.5)])
    assert shown() == [(0, 4.0), (1, 3.0), (2, 2.5), (3, 1.5)]
    file.append([*resumed, again(10, 3, 1.5), again(11, 0, 1.2)])
    assert len(shown()) == 5, "a program that counts anew replaces nothing"


@pytest.mark.slow
def test_tensorboard_reads_the_folders_of_several_jobs_in_a_bucket(tmp_path, monkeypatch):
    """The program itself, with the arguments of `tpu tensorboard`, and the emulator of a bucket."""
    pytest.importorskip("tensorboard")
    pytest.importorskip("gcsfs", reason="pip install 'tpufleet[tensorboard]'")
    folder = tmp_path / "local"
    EventFile(folder, START).append(points(2.0))
    EventFile(tmp_path / "remote", START).append(points(3.0))
    (file,) = (tmp_path / "remote").iterdir()
    with fake_gcs.server() as url:
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", url)
        bucket = gcs.connect().create_bucket("runs")
        bucket.blob(f"train/{file.name}").upload_from_filename(file)
        runs = {"train-files": "gs://runs/train", "other": str(folder)}
        port = free_port()
        command = [
            *tensorboard.PROGRAM,
            *tensorboard.location_options(runs),
            "--port",
            str(port),
        ]
        with subprocess.Popen(command, stderr=subprocess.DEVNULL) as process:
            try:
                wait_until(
                    lambda: served_runs(port) == ["other/.", "train-files/."],
                    90,
                    lambda: f"{served_runs(port)}",
                )
            finally:
                process.terminate()


def served_runs(port: int) -> list[str]:
    try:
        response = httpx.get(f"http://127.0.0.1:{port}/data/runs", timeout=900)
    except httpx.TransportError:
        return []
    return sorted(response.json()) if response.status_code == 200 else []
