"""Checkpoints, snapshots and logs in Cloud Storage, on fake-gcs-server."""

from __future__ import annotations

import asyncio
import io
import json
import threading
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest

pytest.importorskip("google.cloud.storage", reason="pip install 'tpufleet[gcs]'")

from tests.views.cli_runner import Tpu
from tpufleet.agent.workload.output.progress import ProgressReader
from tpufleet.client import snapshots
from tpufleet.clocks import ManualClock
from tpufleet.errors import BadInput, FleetError, NotFound
from tpufleet.model.fleet.hosts import HostId
from tpufleet.model.job.attempts import AttemptId
from tpufleet.runtime import checkpoints, gcs
from tpufleet.runtime.checkpoints.buckets import BucketCheckpoints
from tpufleet.runtime.context import Context
from tpufleet.service.files.bucket_files import ArchivedLogs
from tpufleet.service.files.snapshots import SnapshotFiles, Upload


def gang(bucket, tmp_path, count=1, attempt=0):
    return [
        BucketCheckpoints(
            bucket,
            process_id=index,
            num_processes=count,
            writer=f"job.{attempt}",
            scratch=tmp_path / f"{attempt}.{index}",
        )
        for index in range(count)
    ]


def writes(text):
    return lambda folder: (folder / "state.txt").write_text(text)


def save_together(processes, step, text="x", wait=20.0):
    with ThreadPoolExecutor(len(processes)) as pool:
        return list(
            pool.map(
                lambda pair: pair[1].save(step, writes(f"{text} {pair[0]}"), wait=wait),
                enumerate(processes),
            )
        )


def test_a_checkpoint_is_restored_on_another_machine(bucket, tmp_path):
    save_together(gang(bucket, tmp_path, 2), 10)
    newest = gang(bucket, tmp_path, 2, attempt=1)[0].latest()
    assert newest is not None and (newest.step, newest.processes) == (10, 2)
    assert [(newest.part(index) / "state.txt").read_text() for index in (0, 1)] == ["x 0", "x 1"]


class CountingBucket(gcs.Bucket):
    """The official client, with the names of objects that were read."""

    def __init__(self, url):
        super().__init__(url)
        self.reads = []

    def read(self, name):
        self.reads.append(name)
        return super().read(name)

    def download(self, name, path):
        self.reads.append(name)
        super().download(name, path)


def on_host(bucket, folder, index, attempt):
    """A process whose host keeps this folder."""
    return BucketCheckpoints(
        bucket, process_id=index, num_processes=2, writer=f"job.{attempt}", scratch=folder,
        keeps=True,
    )  # fmt: skip


def test_after_a_crash_nothing_is_read_from_the_bucket(bucket, tmp_path):
    hosts = [tmp_path / "0", tmp_path / "1"]
    save_together([on_host(bucket, host, index, 0) for index, host in enumerate(hosts)], 10)
    save_together([on_host(bucket, host, index, 0) for index, host in enumerate(hosts)], 20)
    for index, host in enumerate(hosts):
        counting = CountingBucket(bucket.url)
        newest = on_host(counting, host, index, 1).latest()
        assert newest.step == 20 and (newest.part(index) / "state.txt").read_text() == f"x {index}"
        assert counting.reads == []
        assert len(list(host.glob("restored-*"))) == 1, "one checkpoint is kept"
    moved = on_host(CountingBucket(bucket.url), tmp_path / "new", 0, 1).latest()
    assert (moved.part(0) / "state.txt").read_text() == "x 0"


@pytest.mark.parametrize("damage", ["changed", "missing", "half"])
def test_a_damaged_copy_on_the_host_is_downloaded(bucket, tmp_path, damage):
    processes = [on_host(bucket, tmp_path / str(index), index, 0) for index in (0, 1)]
    saved = save_together(processes, 10)
    part = saved[0].part(0)
    if damage == "changed":
        (part / "state.txt").write_text("y 0")
    elif damage == "missing":
        (part / "state.txt").unlink()
    else:
        (part / "state.txt").unlink()
        part.rmdir()
    newest = on_host(bucket, tmp_path / "0", 0, 1).latest()
    assert (newest.part(0) / "state.txt").read_text() == "x 0"


def test_a_copy_on_the_host_that_is_older_than_the_bucket_is_not_used(bucket, tmp_path):
    """Another attempt, on other hosts, has saved since, even the same step."""
    for attempt, folder, text in ((0, "old", "x"), (1, "new", "y")):
        save_together(
            [on_host(bucket, tmp_path / f"{folder}{index}", index, attempt) for index in (0, 1)],
            10,
            text,
        )
    newest = on_host(bucket, tmp_path / "old0", 0, 2).latest()
    assert (newest.part(0) / "state.txt").read_text() == "y 0"


@pytest.mark.parametrize("lost", [404, 410])
def test_a_checkpoint_is_saved_although_google_loses_an_upload(bucket, tmp_path, monkeypatch, lost):
    """https://cloud.google.com/storage/docs/performing-resumable-uploads#handling_errors"""
    from google.api_core import exceptions
    from google.cloud.storage import Blob

    upload, sessions = Blob.upload_from_filename, []

    def lose_first(blob, path, **options):
        sessions.append(options["retry"])
        if len(sessions) == 1:
            raise exceptions.from_http_status(lost, "no such session")
        upload(blob, path, **options)

    monkeypatch.setattr(Blob, "upload_from_filename", lose_first)
    [alone] = gang(bucket, tmp_path)
    alone.save(7, writes("saved"))
    assert alone.latest().step == 7
    assert len(sessions) == 2 and all(sessions)  # older clients have no policy of their own


def test_a_checkpoint_without_all_parts_is_incomplete(bucket, tmp_path):
    first, _ = gang(bucket, tmp_path, 2)
    with pytest.raises(checkpoints.CheckpointIncomplete):
        first.save(5, writes("alone"), wait=0.0)
    assert first.latest() is None


def test_damaged_checkpoints_are_skipped(bucket, tmp_path):
    [alone] = gang(bucket, tmp_path)
    for step in (1, 2, 3):
        alone.save(step, writes(str(step)))
    bucket.delete(["step_00000003/job.0/part_0/state.txt"])
    bucket.write("step_00000002/job.0/part_0/state.txt", b"shorter or longer")
    assert alone.latest().step == 1


def test_a_checkpoint_with_changed_content_of_the_same_size_is_skipped(bucket, tmp_path):
    [alone] = gang(bucket, tmp_path)
    alone.save(1, writes("abc"))
    alone.save(2, writes("abc"))
    bucket.write("step_00000002/job.0/part_0/state.txt", b"abd")
    [other] = gang(bucket, tmp_path, attempt=1)
    assert other.latest().step == 1


def test_content_that_changes_before_the_download_is_rejected(bucket, tmp_path):
    [alone] = gang(bucket, tmp_path)
    alone.save(1, writes("abc"))
    [other] = gang(bucket, tmp_path, attempt=1)
    latest = other.latest()
    bucket.write("step_00000001/job.0/part_0/state.txt", b"abd")
    with pytest.raises(FleetError, match="damaged"):
        latest.part(0)


def test_a_part_with_many_files_is_restored(bucket, tmp_path):
    def write(folder):
        for number in range(40):
            below = folder / f"layer{number % 4}"
            below.mkdir(exist_ok=True)
            (below / f"{number}.bin").write_bytes(bytes([number]) * number)

    gang(bucket, tmp_path)[0].save(1, write)
    part = gang(bucket, tmp_path, attempt=1)[0].latest().part(0)
    read = {path.name: path.read_bytes() for path in part.rglob("*.bin")}
    assert read == {f"{number}.bin": bytes([number]) * number for number in range(40)}


def test_a_later_attempt_replaces_the_checkpoint_of_a_step(bucket, tmp_path):
    gang(bucket, tmp_path)[0].save(1, writes("old"))
    [later] = gang(bucket, tmp_path, attempt=1)
    later.save(1, writes("new"))
    assert (later.latest().part(0) / "state.txt").read_text() == "new"
    assert later.save(1, writes("never written")).step == 1
    assert (later.latest().part(0) / "state.txt").read_text() == "new"


def test_prune_keeps_the_newest(bucket, tmp_path):
    [alone] = gang(bucket, tmp_path)
    for step in range(1, 5):
        alone.save(step, writes(str(step)))
    alone.prune(2)
    assert {name.split("/")[0] for name in bucket.names()} == {
        "step_00000003",
        "step_00000004",
    }


def test_the_runtime_uses_the_bucket_of_the_context(bucket, tmp_path):
    here = Context(checkpoint_dir=bucket.url, job_id="j", log_dir=tmp_path / "a/logs",
                   run_dir=tmp_path / "a/run")  # fmt: skip
    checkpoints.open_checkpoints(here).save(7, writes("seven"))
    there = Context(checkpoint_dir=bucket.url, job_id="j", attempt=1)
    assert (
        checkpoints.open_checkpoints(there).latest().part(0) / "state.txt"
    ).read_text() == "seven"


def test_an_invalid_location_is_rejected_and_a_missing_object_is_not_found(bucket):
    with pytest.raises(BadInput, match="gs://bucket/folder"):
        gcs.Bucket("s3://x/y")
    with pytest.raises(NotFound, match="nothing"):
        bucket.read("nothing")


def test_create_does_not_overwrite(bucket, tmp_path):
    file = tmp_path / "file"
    file.write_text("one")
    assert bucket.create("a", file)
    file.write_text("two")
    assert not bucket.create("a", file)
    assert bucket.read("a") == b"one"


def test_snapshots_survive_the_loss_of_the_servers_disk(bucket, tmp_path):
    work = tmp_path / "work"
    work.mkdir()
    (work / "train.py").write_text("print('hello')")
    scanned = snapshots.scan(work)
    packed = io.BytesIO()
    snapshots.pack(scanned, packed)

    async def chunks() -> AsyncIterator[bytes]:
        yield packed.getvalue()

    first = SnapshotFiles(tmp_path / "one", 2**20, bucket)
    assert not first.has(scanned.digest)
    asyncio.run(first.put(scanned.digest, Upload(chunks=chunks(), user="mel")))
    second = SnapshotFiles(tmp_path / "two", 2**20, bucket)
    assert second.has(scanned.digest)
    assert second.require(scanned.digest).read_bytes() == packed.getvalue()
    with pytest.raises(NotFound, match="upload it first"):
        second.require("0" * 64)
    second.delete(scanned.digest)
    assert not second.has(scanned.digest)
    assert bucket.names() == {}


def test_logs_survive_the_loss_of_the_servers_disk_and_continue(bucket, tmp_path):
    attempt, host = AttemptId("job.0"), HostId("slice-a/0")
    first = ArchivedLogs(tmp_path / "one", bucket)
    first.append(attempt, host, 0, b"hello\n")
    ended = threading.Event()
    ended.set()
    first.upload_until(ended)
    assert first.upload_changes() == 0
    second = ArchivedLogs(tmp_path / "two", bucket)
    assert second.size(attempt, host) == 6
    assert second.append(attempt, host, 6, b"again\n") == 12
    assert b"".join(second.text(attempt, host, 0, "")) == b"hello\nagain\n"


@pytest.mark.slow
def test_a_job_on_simulated_slices_keeps_everything_in_the_bucket(bucket, tmp_path, storage_url):
    """Run a job, restart the server, and read everything back from the bucket."""
    from tests.providers.tpu_vm.emulated_fleet import WORKLOAD

    person = Tpu(
        HOME=str(tmp_path),
        TPUFLEET_HOME=str(tmp_path / "state"),
        TPUFLEET_BUCKET=bucket.url,
        STORAGE_EMULATOR_HOST=storage_url,
    )
    try:
        job = tmp_path / "job.yaml"
        job.write_text(
            json.dumps(
                {
                    "command": ["python", "count.py", "8", "0.05"],
                    "accelerator": "v5e-4",
                    "workdir": str(WORKLOAD),
                }
            )
        )
        [row] = person.json("submit", str(job))["jobs"]
        person.ok("logs", "-f", row["id"])
        assert "counted 8" in person.ok("logs", row["id"])
        person.ok("serve", "--stop")
        objects = bucket.names()
        assert f"checkpoints/{row['id']}/step_00000008/COMPLETE" in objects
        assert any(name.startswith("snapshots/") for name in objects)
        assert any(name.startswith(f"logs/{row['id']}/0/") for name in objects)
        person.ok("run", "v5e-1", "--name", "another", "--", "true")  # starts the server again
        person.ok("archive", "purge", row["id"], "--checkpoints", "--yes")
        assert not [name for name in bucket.names() if row["id"] in name]
        assert any(name.startswith("snapshots/") for name in bucket.names()), "of the other job"
    finally:
        person("serve", "--stop")


def test_progress_is_read_from_orbax_checkpoints_in_a_bucket(bucket, tmp_path):
    """Orbax in a bucket writes under the final name, and `commit_success.txt` last."""
    clock = ManualClock()
    reader = ProgressReader(tmp_path, bucket.url, clock=clock)
    reader.poll()
    assert reader.latest is None
    for name in ("_CHECKPOINT_METADATA", "default/d/7", "commit_success.txt"):
        bucket.write(f"checkpoints/100/{name}", b"x")
    bucket.write("checkpoints/200/_CHECKPOINT_METADATA", b"x")
    reader.poll()
    assert reader.latest is None  # listed every 30 seconds
    clock.advance(timedelta(seconds=31))
    reader.poll()
    assert reader.latest.checkpoint_step == 100
    bucket.write("checkpoints/200/commit_success.txt", b"x")
    reader.poll(last=True)
    assert reader.latest.checkpoint_step == 200
