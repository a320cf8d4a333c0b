"""Progress of a workload, from its progress file and from checkpoint names."""

from __future__ import annotations

import json
import os
from datetime import timedelta
from pathlib import Path
from threading import Event

import psutil
import pytest

from tpufleet.agent.workload import containment
from tpufleet.agent.workload.output.log_metrics import LogMetrics
from tpufleet.agent.workload.output.logs import LogFile
from tpufleet.agent.workload.output.progress import ProgressReader, step_from_name
from tpufleet.clocks import ManualClock, SystemClock
from tpufleet.model.fleet.hosts import Progress
from tpufleet.model.values.redaction import Redactor

ORBAX = """
import jax, jax.numpy as jnp, orbax.checkpoint as ocp
from tpufleet import runtime
here = runtime.initialize()
jax.jit(lambda x: x * 2 + 1)(3.0).block_until_ready()
with MANAGER as saved:
    saved.save(PATH, args=ocp.args.StandardSave({"weights": jnp.ones(3)}))
    getattr(saved, "wait_until_finished", int)()
    saved.restore(PATH, args=ocp.args.StandardRestore())
runtime.progress(1)
"""


@pytest.mark.parametrize(
    ("manager", "path"),
    [
        ("ocp.CheckpointManager(here.checkpoint_dir)", "1"),
        ("ocp.Checkpointer(ocp.StandardCheckpointHandler())", "here.checkpoint_dir + '/1'"),
    ],
    ids=["in the background", "at once"],
)
def test_jax_and_orbax_say_how_long_they_take(harness, manager, path):
    pytest.importorskip("orbax.checkpoint", reason="needs the package orbax-checkpoint")
    harness.assign_python(ORBAX.replace("MANAGER", manager).replace("PATH", path))
    harness.start()
    assert harness.wait_for_exit(within=300).clean, harness.log()
    timings = json.loads((harness.run_dir() / "progress.json").read_text())["timings"]
    names = ("compile_seconds", "save_seconds", "restore_seconds")
    assert [name for name in names if not timings.get(name)] == []


@pytest.mark.parametrize(
    ("name", "step"),
    [
        ("120", 120), ("step_120", 120), ("checkpoint_120", 120), ("step_00000120", 120),
        ("ckpt-7.npz", 7), ("model_3.safetensors", 3), ("checkpoint12", 12),
        ("step_900.orbax-checkpoint-tmp-17", None), ("step_9.tmp", None),
        (".saving-x-step_9", None), ("from-attempt-3", None), ("run-a.step-4", 4), ("v2", None),
        ("latest", None), ("config_v2", None), ("events.out", None), ("tmp_12", None),
        (f"step_{2**53}", 2**53), (f"step_{2**53 + 1}", None), ("step_" + "9" * 200, None),
        ("9" * 5000, None), ("step_" + "0" * 200 + "7", 7),
    ],
)  # fmt: skip
def test_steps_are_parsed_from_checkpoint_names(name, step):
    assert step_from_name(name) == step


def test_steps_that_no_json_reader_holds_are_ignored(tmp_path, clock):
    for name in ("step_" + "9" * 200, "step_4"):
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
    reading = reader(tmp_path, clock)
    reading.poll()
    assert reading.latest.checkpoint_step == 4
    huge = 10**200
    point = {"at": "2026-01-01T00:00:00", "step": huge, "metrics": {"loss": 1.0}}
    file = {"step": huge, "total": huge, "checkpoint_step": huge, "recent": [point]}
    (tmp_path / "run" / "progress.json").write_text(json.dumps(file))
    reading.poll()
    latest = reading.latest
    assert (latest.step, latest.total, latest.checkpoint_step) == (None, None, 4)
    assert list(reading.points_after(None)) == []


@pytest.fixture
def clock():
    return ManualClock()


def reader(tmp_path, clock):
    (tmp_path / "run").mkdir(exist_ok=True)
    checkpoint = str(tmp_path / "checkpoints")
    return ProgressReader(tmp_path, checkpoint, clock=clock)


def test_the_time_of_the_last_output_is_reported_also_without_progress(tmp_path, clock):
    log = tmp_path / "log"
    log.touch()
    size = lambda: log.stat().st_size
    reading = ProgressReader(tmp_path, "", clock=clock, log_size=size)
    reading.poll()
    assert reading.latest is None
    log.write_text("compiling")
    reading.poll()
    written_at = clock.now()
    clock.advance(timedelta(minutes=5))
    reading.poll()
    assert reading.latest == Progress(output_at=written_at)


def test_the_secrets_of_a_job_are_masked_in_its_progress(tmp_path, clock, capfd):
    reading = reader(tmp_path, clock)
    reading.redact(Redactor(["s3cr3t-value"]))
    recent = {"at": "2026-01-01T00:00:00", "metrics": {"s3cr3t-value of old": 2.0}}
    file = {"message": "msg s3cr3t-value", "metrics": {"s3cr3t-value": 1.0}, "recent": [recent]}
    (tmp_path / "run" / "progress.json").write_text(json.dumps(file))
    reading.poll()
    assert (reading.latest.message, reading.latest.metrics) == ("msg ***", {"***": 1.0})
    points = [each.metrics for each in reading.points_after(None)]
    assert points == [{"*** of old": 2.0}, {"***": 1.0}]
    (tmp_path / "run" / "progress.json").write_text('{"metrics": {"loss": "s3cr3t-value"}}')
    reading.poll()
    assert "s3cr3t" not in "".join(capfd.readouterr())


def test_only_a_new_checkpoint_counts_as_progress(tmp_path, clock):
    (tmp_path / "checkpoints" / "step_5").mkdir(parents=True)
    reading = reader(tmp_path, clock)
    reading.poll()
    assert (reading.latest.checkpoint_step, reading.latest.at) == (5, None)
    clock.advance(timedelta(seconds=9))
    (tmp_path / "checkpoints" / "step_6").mkdir()
    reading.poll()
    assert (reading.latest.checkpoint_step, reading.latest.at) == (6, clock.now())


def test_the_folder_of_a_restarted_attempt_is_not_a_checkpoint(tmp_path, clock):
    (tmp_path / "checkpoints" / "from-attempt-3").mkdir(parents=True)
    reading = reader(tmp_path, clock)
    reading.poll()
    assert reading.latest is None


def test_a_reported_checkpoint_step_overrides_checkpoint_names(tmp_path, clock):
    (tmp_path / "checkpoints" / "step_500").mkdir(parents=True)
    reading = reader(tmp_path, clock)
    file = tmp_path / "run" / "progress.json"
    file.write_text(json.dumps({"step": 12, "checkpoint_step": 10, "at": "2026-01-01T00:00:00"}))
    reading.poll()
    assert (reading.latest.step, reading.latest.checkpoint_step) == (12, 10)


def test_an_invalid_progress_file_is_ignored(tmp_path, clock, capsys):
    reading = reader(tmp_path, clock)
    file = tmp_path / "run" / "progress.json"
    for text in ("{not json", '{"step": 1, "timings": {"save_seconds": -1e300}}'):
        file.write_text(text)
        reading.poll()
        assert reading.latest is None
        assert "ignoring progress.json" in capsys.readouterr().err
    file.write_text('{"step": 3}')
    reading.poll()
    assert reading.latest.step == 3 and reading.latest.at is not None


def test_an_object_store_is_not_polled(tmp_path, clock):
    (tmp_path / "run").mkdir()
    reading = ProgressReader(tmp_path, "gs://bucket/x", clock=clock)
    reading.poll()
    assert reading.latest is None


LAYOUTS = {
    "orbax below a folder of its own": (["checkpoints/10/default/d/3", "checkpoints/20/x"], 20),
    "runs": (["runs/a/checkpoints/7/_CHECKPOINT_METADATA", "runs/b/checkpoints/5/x"], 7),
    "plain files, one folder deeper": (["ckpts/model_12.safetensors"], 12),
    "chunks inside a checkpoint are no checkpoints": (["step_4/params/0/999"], 4),
    "orbax still writing": (["c/8/x", "c/9.orbax-checkpoint-tmp-17/x"], 8),
    "nothing that looks like one": (["events/out.tfevents", "config.json"], None),
}


@pytest.mark.parametrize(("files", "step"), LAYOUTS.values(), ids=LAYOUTS)
def test_checkpoints_are_found_at_any_depth(tmp_path, clock, files, step):
    for name in files:
        file = tmp_path / "checkpoints" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
    reading = reader(tmp_path, clock)
    reading.poll()
    assert (reading.latest.checkpoint_step if reading.latest else None) == step


def test_a_folder_full_of_other_files_is_searched_only_in_part(tmp_path, clock):
    for number in range(500):
        (tmp_path / "checkpoints" / f"cache-{number}x" / "deep").mkdir(parents=True)
    (tmp_path / "checkpoints" / "step_3").mkdir()
    reading = reader(tmp_path, clock)
    reading.poll()
    assert reading.latest.checkpoint_step == 3


class Listing:
    """A bucket, as its listing with a delimiter shows it."""

    def __init__(self) -> None:
        self.objects: set[str] = set()

    def entries(self, path: str) -> list[str]:
        below = [name.removeprefix(path) for name in self.objects if name.startswith(path)]
        return sorted({name if "/" not in name else name.split("/")[0] + "/" for name in below})


def test_a_checkpoint_in_a_bucket_counts_once_orbax_has_committed_it(tmp_path, clock):
    bucket = Listing()
    reading = ProgressReader(tmp_path, "gs://b/run", clock=clock, open_bucket=lambda url: bucket)
    reading.poll()
    bucket.objects |= {"ck/100/_CHECKPOINT_METADATA", "ck/100/d/7", "ck/100/commit_success.txt"}
    bucket.objects |= {"ck/200/_CHECKPOINT_METADATA", "ck/200/d/9"}
    reading.poll()
    assert reading.latest is None  # a bucket is listed every 30 seconds
    clock.advance(timedelta(seconds=31))
    reading.poll()
    assert reading.latest.checkpoint_step == 100
    bucket.objects.add("ck/200/commit_success.txt")
    reading.poll(last=True)
    assert reading.latest.checkpoint_step == 200


def test_metrics_are_read_from_the_output_of_a_program_that_reports_none(tmp_path, clock):
    log = LogFile(tmp_path / "output.log")
    patterns = {"loss": r"loss[:=] ?(\S+)", "step": r"step (\d+)", "epoch": r"epoch ([\d.]+)"}
    (tmp_path / "run").mkdir()
    progress = ProgressReader(tmp_path, "", clock=clock, log_metrics=LogMetrics(log, patterns))
    progress.poll()
    assert progress.latest is None
    log.append(b"epoch 1 step 10 loss: 0.5\nepoch 2.5 step 20 loss=nan\nstep 9")
    progress.poll()
    assert progress.latest.step == 20 and progress.latest.at == clock.now()
    assert progress.latest.metrics == {"epoch": 2.5}, "an earlier loss would look healthy"
    log.append(b"9 loss: 0.25\rstep 100\r")
    clock.advance(timedelta(seconds=5))
    progress.poll()
    assert (progress.latest.step, progress.latest.metrics["loss"]) == (100, 0.25)
    (tmp_path / "run" / "progress.json").write_text('{"step": 7, "metrics": {"loss": 9.0}}')
    progress.poll()
    assert progress.latest.step == 7 and progress.latest.metrics == {"loss": 9.0, "epoch": 2.5}


def logged_points(tmp_path, clock, *outputs: bytes, patterns=None):
    log = LogFile(tmp_path / "output.log")
    patterns = patterns or {"loss": r"loss (\S+)", "step": r"step (\d+)", "acc": r"acc (\S+)"}
    reader = ProgressReader(tmp_path, "", clock=clock, log_metrics=LogMetrics(log, patterns))
    (tmp_path / "run").mkdir()
    for output in outputs:
        log.append(output)
        clock.advance(timedelta(seconds=0.5))
        reader.poll()
    clock.advance(timedelta(seconds=0.5))
    ended = Event()
    ended.set()
    reader.watch(ended)
    return reader.points_after(None)


@pytest.mark.parametrize(
    ("outputs", "points"),
    [
        ([b"step 5 loss 5\nstep 10 loss 4\nstep 15 loss 3\n", b"step 20 loss 2\n"],
         [(5, {"loss": 5}), (10, {"loss": 4}), (15, {"loss": 3}), (20, {"loss": 2})]),
        ([b"step 5\nloss 5\nstep 10\n", b"loss 4\nstep 10\n"],
         [(5, {"loss": 5}), (10, {"loss": 4})]),
        ([b"loss 5\nstep 5\nloss 4\nstep 10\n"], [(5, {"loss": 5}), (10, {"loss": 4})]),
        ([b"step 5 loss 5\nstep 5 acc 1\nstep 6 loss 4\n"],
         [(5, {"loss": 5, "acc": 1}), (6, {"loss": 4})]),
        ([b"loss 5\nloss 4\n"], [(None, {"loss": 5}), (None, {"loss": 4})]),
        ([b"step 5 loss 5\n", b"", b"", b"done\n"], [(5, {"loss": 5})]),
    ],
    ids=["one line", "lines of a step", "step last", "rare metric", "no step", "once"],
)  # fmt: skip
def test_every_match_in_the_output_becomes_a_point(tmp_path, clock, outputs, points):
    logged = logged_points(tmp_path, clock, *outputs)
    assert [(each.step, each.metrics) for each in logged] == points
    times = [each.at for each in logged]
    assert times == sorted(set(times)) and times[-1] <= clock.now()


def test_points_of_a_fast_program_are_thinned_and_the_last_one_is_kept(tmp_path, clock):
    output = b"".join(b"step %d loss 1\n" % step for step in range(1000))
    logged = logged_points(tmp_path, clock, output)
    assert 100 <= len(logged) <= 200 and logged[-1].step == 999


def test_a_log_that_the_job_has_replaced_is_not_read(tmp_path):
    log = LogFile(tmp_path / "output.log")
    metrics = LogMetrics(log, {"digit": r"token=(\d)"})
    (tmp_path / "token").write_text("token=7\n")
    log.append(b"the job starts\n")
    (tmp_path / "output.log").unlink()
    (tmp_path / "output.log").symlink_to(tmp_path / "token")
    assert not metrics.poll() and metrics.values == {}
    assert log.tail(5) == ["the job starts", ""]
    log.append(b"token=3\n")
    assert metrics.poll() and metrics.values == {"digit": 3.0}
    log.close()
    assert not metrics.poll()


def test_a_pattern_that_takes_too_long_is_switched_off_with_a_line_in_the_log(tmp_path):
    log = LogFile(tmp_path / "output.log")
    patterns = {"loss": r"loss=(\S+)", "slow": r"((a+)+)b", "step": r"step (\d+)"}
    metrics = LogMetrics(log, patterns, pattern_seconds=3.0)
    log.append(b"step 1 loss=0.5 " + b"a" * 60 + b"\n")
    assert metrics.poll() and metrics.values == {"loss": 0.5, "step": 1.0}
    (note,) = [line for line in log.tail(3) if "metrics: slow is switched off" in line]
    assert "took more than 3 s" in note
    log.append(b"step 2 loss=0.25 " + b"a" * 60 + b"\n")
    assert metrics.poll() and metrics.values == {"loss": 0.25, "step": 2.0}
    metrics.close()


def test_the_process_that_searches_for_metrics_ends_with_the_attempt(tmp_path, clock):
    (tmp_path / "run").mkdir()
    log = LogFile(tmp_path / "output.log")
    metrics = LogMetrics(log, {"step": r"step (\d+)"})
    reading = ProgressReader(tmp_path, "", clock=clock, log_metrics=metrics)
    log.append(b"step 3\n")
    before = set(psutil.Process().children())
    ended = Event()
    ended.set()
    reading.watch(ended)
    assert reading.latest.step == 3
    assert not set(psutil.Process().children()) - before


def replace_with_link(folder, secret):
    (folder / "run" / "progress.json").symlink_to(secret)


def replace_with_linked_folder(folder, secret):
    (folder / "run").rmdir()
    (folder / "run").symlink_to(secret.parent)


def replace_with_pipe(folder, secret):
    os.mkfifo(folder / "run" / "progress.json")


def replace_with_large_file(folder, secret):
    (folder / "run" / "progress.json").write_text('{"step": 1}' + " " * 70_000)


@pytest.mark.parametrize(
    "trick",
    [replace_with_link, replace_with_linked_folder, replace_with_pipe, replace_with_large_file],
)
def test_a_progress_file_that_is_not_a_small_regular_file_is_ignored(
    tmp_path, clock, capsys, trick
):
    (tmp_path / "run").mkdir()
    (tmp_path / "secret").mkdir()
    secret = tmp_path / "secret" / "progress.json"
    secret.write_text('{"step": 42}')
    reading = ProgressReader(tmp_path, "", clock=clock)
    trick(tmp_path, secret)
    reading.poll()
    reading.poll()
    assert reading.latest is None
    assert capsys.readouterr().err.count("ignoring progress.json") == 1


@pytest.mark.skipif(os.geteuid() != 0, reason="only root has more rights than the user of a job")
def test_only_what_the_job_may_list_is_searched_for_checkpoints(reachable_folder):
    nobody, tmp_path = (65534, 65534), reachable_folder
    state, secret, own = tmp_path / "state", tmp_path / "secret", tmp_path / "own"
    job = state / "checkpoints" / "job"
    for folder in (state / "other", secret, own, job):
        (folder / "step_32765").mkdir(parents=True)
    for folder in (state, secret, own):
        folder.chmod(0o700)
    for folder in (own, job):
        os.chown(folder, *nobody)
    (own / "secret").symlink_to(secret)
    contained = containment.Containment(
        mechanism=containment.Mechanism.MARKS, work_dir=tmp_path, hidden=(state,),
        user=containment.JobUser(name="nobody", uid=nobody[0], gid=nobody[1]),
    )  # fmt: skip

    def step(checkpoint: Path) -> int | None:
        reader = ProgressReader(
            tmp_path, str(checkpoint), clock=SystemClock(),
            list_folder=lambda path: contained.list_folder(path, str(checkpoint)),
        )  # fmt: skip
        reader.poll()
        return reader.latest.checkpoint_step if reader.latest else None

    assert step(own) == step(job) == 32765
    for hidden in (secret, own / "secret", state, state / "other", Path("/proc")):
        assert step(hidden) is None
    job.rename(state / "checkpoints" / "moved")
    job.symlink_to(secret)  # as another job may, a moment later
    assert step(job) is None


def test_the_checkpoint_that_was_there_at_the_start_is_remembered(tmp_path, clock):
    reading = ProgressReader(tmp_path, str(tmp_path / "checkpoints"), clock=clock)
    for step in (20, 30):
        (tmp_path / "checkpoints" / str(step)).mkdir(parents=True)
        reading.poll()
    assert reading.latest.checkpoint_step == 30
    assert reading.checkpoint_at_start == 20


def test_the_first_step_and_the_first_new_one_are_remembered(tmp_path, clock):
    (tmp_path / "run").mkdir()
    checkpoints = tmp_path / "checkpoints"
    (checkpoints / "step_20").mkdir(parents=True)
    reading = ProgressReader(tmp_path, str(checkpoints), clock=clock, last_step=22)

    def report(step: int, compiled: float) -> None:
        at = (clock.now() + timedelta(seconds=step)).isoformat()
        file = {"step": step, "at": at, "timings": {"compile_seconds": compiled}}
        (tmp_path / "run" / "progress.json").write_text(json.dumps(file))
        reading.poll()

    for start in (0, 20):  # before it compiles
        report(start, 0.0)
        assert (reading.first, reading.advanced_at) == (None, None)
    report(21, 1.5)
    assert (reading.first.step, reading.advanced_at) == (21, None)
    report(23, 4.0)
    assert (reading.first.step, reading.timings_at_first.compile_seconds) == (21, 1.5)
    report(24, 4.0)
    assert reading.advanced_at == clock.now() + timedelta(seconds=23)
