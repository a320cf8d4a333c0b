"""Workers store correct activations for any mesh, queue sizes and interruptions."""

from __future__ import annotations

import errno
import json
import math
import os
import queue
import re
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path

import jax
import numpy as np
import pytest

from tests.activations.test_decoder import FIXTURES, QWEN
from tests.activations.test_decoder import run as forward_pass
from tests.activations.tiny_model import SMALL_DEVICES, write_tokenizer
from tests.ports import free_port
from tpufleet.errors import BadInput, Conflict, FleetError
from tpufleet.runtime.units import Units
from tpufleet_activations import plans
from tpufleet_activations.cli import output
from tpufleet_activations.cli.output import progress_line
from tpufleet_activations.io import datasets, staging, unit_writer, verification
from tpufleet_activations.io.storage import DiskFull, LocalFolder
from tpufleet_activations.model import devices, engines, meshes
from tpufleet_activations.pipeline import (
    batches,
    calibration,
    extraction,
    gangs,
    locations,
    planning,
    workers,
)
from tpufleet_activations.pipeline.progress_meter import Meter

SITES = ["resid_post.[0,2]", "mlp_hidden.1", "final_norm"]
TEXT = "the quick brown fox jumps over the lazy dog 0123456789 again and again and again "


def write_data(path: Path, count: int = 23) -> dict:
    chance = np.random.default_rng(5)
    lines = [
        json.dumps({"id": f"line-{n}", "text": TEXT[: int(chance.integers(1, 60))]})
        for n in range(count)
    ]
    lines[4] = "broken"
    path.write_text("\n".join(lines))
    return {"kind": "jsonl", "path": str(path)}


@pytest.fixture
def make(tmp_path, model_folder):
    """Plan an extraction into a folder of its own."""

    def build(name: str, **settings) -> LocalFolder:
        folder = LocalFolder(tmp_path / name)
        if not (tmp_path / "data.jsonl").exists():
            write_data(tmp_path / "data.jsonl")
        options = {
            "choices": SITES,
            "unit_samples": 5,
            "max_length": 64,
            "batch_tokens": 256,
            "dtype": "f32",
            "compute": "f32",
            "model": str(model_folder),
            **settings,
        }
        data = {"kind": "jsonl", "path": str(tmp_path / "data.jsonl")}
        plan = planning.make_plan(data=data, **options)
        plans.write(folder, plan)
        return folder

    return build


def settings(**more) -> extraction.ExtractionSettings:
    base = {"poll": 0.02, "mesh": {"data": 8}}
    return extraction.ExtractionSettings(**{**base, **more})


def drafts_in(folder) -> list[Path]:
    return [path for path in folder.path.glob(".staging/*/*") if path.name != staging.LOCK_FILE]


def contents(folder) -> dict:
    dataset = datasets.Dataset(folder)
    return {
        (sample, site): dataset.read(sample, site).tobytes()
        for sample in dataset
        for site in dataset.sites
    }


def test_heads_patterns_and_chosen_experts_are_stored(make, tmp_path):
    model = tmp_path / "experts"
    shutil.copytree(FIXTURES / "qwen3-moe", model)
    write_tokenizer(model)
    choices = ["experts.1", "top_tokens.3", "attn_pattern.2.[0,3]", "k.0.1", "attn_scale.0"]
    folder = make("a", choices=choices, model=str(model))
    extraction.run(folder, settings())
    data = datasets.Dataset(folder)
    expected = forward_pass(model, choices, data.tokens(0)[None])
    assert data.read(0, "experts.1").dtype == data.read(0, "top_tokens.3").dtype == np.int32
    for site in data.sites:
        stored, values = data.read(0, site), expected[site][0]
        np.testing.assert_allclose(stored[:, : values.shape[1]], values, rtol=1e-4, atol=1e-5)
        assert not stored[:, values.shape[1] :].any()  # of a pattern, behind the sample


def test_stored_activations_equal_a_forward_pass_of_the_sample(make, model_folder):
    folder = make("a")
    meter = extraction.run(folder, settings())
    report = verification.verify(folder)
    assert report.intact, report.problems
    dataset = datasets.Dataset(folder)
    assert (meter.samples, meter.skipped, meter.units) == (23, 1, 5)
    assert dataset.metadata(4)["skipped"].startswith("not JSON")
    assert dataset.metadata(7)["id"] == "line-7"
    for sample in (0, 7, 22):
        tokens = dataset.tokens(sample)
        alone = forward_pass(model_folder, SITES, tokens[None].astype(np.int32))
        for site in dataset.sites:
            np.testing.assert_allclose(
                dataset.read(sample, site), alone[site][0], rtol=2e-4, atol=2e-5
            )


@pytest.mark.parametrize(
    "mesh",
    [
        pytest.param({"data": 2, "tensor": 2}, marks=pytest.mark.slow),
        pytest.param({"data": 1, "fsdp": 4}, marks=pytest.mark.slow),
        {"fsdp": 2, "tensor": 2},
    ],
    ids=lambda mesh: ",".join(mesh),
)
def test_every_mesh_gives_the_same_activations(make, model_folder, mesh):
    folder = make("mesh")
    plan = plans.load(folder)
    size = int(np.prod(list(mesh.values())))
    engine = engines.open_engine(
        model_folder,
        plan.sites,
        dtype="f32",
        compute="f32",
        mesh_sizes=mesh,
        devices=jax.devices()[:size],
    )
    units = Units(folder, count=plan.units, worker="a")
    coordinator = gangs.SoloCoordinator(units, lambda: False)
    workers.Worker(
        folder, plan, locations.resolve_plan(plan), workers.OpenedEngine(engine), coordinator
    ).run()
    dataset = datasets.Dataset(folder)
    assert verification.verify(folder).intact
    longest = max(dataset, key=lambda sample: len(dataset.tokens(sample)))
    alone = forward_pass(model_folder, SITES, dataset.tokens(longest)[None].astype(np.int32))
    for site in dataset.sites:
        np.testing.assert_allclose(
            dataset.read(longest, site), alone[site][0], rtol=2e-4, atol=2e-5
        )


@pytest.mark.slow
@pytest.mark.parametrize("kernel", [None, "varlen"])
def test_packed_and_bucketed_runs_agree(make, kernel):
    """The GPU's kernel for packed rows runs in JAX's interpreter."""
    bucketed, packed = make("bucketed"), make("packed", batching="pack")
    extraction.run(bucketed, settings())
    meter = extraction.run(packed, settings(kernel=kernel))
    assert meter.programs == 1
    for folder in (bucketed, packed):
        assert verification.verify(folder).intact
    left, right = datasets.Dataset(bucketed), datasets.Dataset(packed)
    for sample in left:
        for site in left.sites:
            np.testing.assert_allclose(
                left.read(sample, site), right.read(sample, site), rtol=2e-4, atol=2e-5
            )


@pytest.mark.slow
def test_stored_formats_are_within_their_error_bounds(make):
    exact = make("f32")
    extraction.run(exact, settings())
    truth = datasets.Dataset(exact)
    for compression in ("none", "zstd"):
        folder = make(f"bf16-{compression}", dtype="bf16", compression=compression)
        extraction.run(folder, settings())
        assert verification.verify(folder).intact
        stored = datasets.Dataset(folder)
        for site in truth.sites:
            want = np.concatenate([truth.read(n, site) for n in truth])
            have = np.concatenate([stored.read(n, site) for n in stored]).astype(np.float32)
            assert np.linalg.norm(have - want) < 0.01 * np.linalg.norm(want)


class Killed(BaseException):
    pass


class Dies(LocalFolder):
    def __init__(self, path, steps):
        super().__init__(path)
        self.steps = steps

    def upload(self, draft, name):
        self._die()
        super().upload(draft, name)

    def create(self, name, data):
        self._die()
        return super().create(name, data)

    def _die(self):
        self.steps -= 1
        if self.steps == 0:
            raise Killed


@pytest.mark.slow
def test_a_run_killed_at_any_step_resumes_to_identical_bytes(make):
    calm = make("calm", unit_samples=12)
    extraction.run(calm, settings(name="w"))
    for steps in range(1, 7):
        folder = make(f"killed-{steps}", unit_samples=12)
        with pytest.raises(Killed):
            extraction.run(Dies(folder.path, steps), settings(name="victim"))
        extraction.run(folder, settings(name="heir"))
        assert verification.verify(folder).intact
        assert contents(folder) == contents(calm)


@pytest.mark.parametrize("shared, enough", [(1, 6), (64, 1)], ids=["alone", "shared"])
def test_a_requested_stop_leaves_no_drafts_and_releases_its_units(make, shared, enough):
    folder = make("stopped", unit_samples=1)
    stop = threading.Event()

    def after_a_while(meter):
        if meter.batches >= enough:
            stop.set()

    options = workers.WorkerOptions(shared_units=shared)
    patient = settings(lease=timedelta(hours=1), options=options)
    extraction.run(folder, patient, should_stop=stop.is_set, on_progress=after_a_while)
    dataset = datasets.Dataset(folder)
    assert len(dataset.commits) < 23
    assert drafts_in(folder) == []
    # It released its units: the next run need not wait for the lease of an hour.
    extraction.run(folder, patient)
    assert verification.verify(folder).intact


def run_worker(
    folder: LocalFolder,
    model_folder: Path,
    peak: float | None = 1e30,
    kernel: str | None = None,
    mesh: Mapping[str, int] | None = None,
    **options,
) -> Meter:
    """One worker on one device, or a mesh of some, assumed to be very fast."""
    plan = plans.load(folder)
    engine = engines.open_engine(
        model_folder,
        plan.sites,
        dtype=plan.dtype,
        compute="f32",
        mesh_sizes=mesh,
        devices=jax.devices()[: math.prod((mesh or {}).values())],
        kernel=kernel,
    )
    units = Units(folder, count=plan.units, worker="w")
    worker = workers.Worker(
        folder,
        plan,
        locations.resolve_plan(plan),
        workers.OpenedEngine(engine),
        gangs.SoloCoordinator(units, lambda: False, poll=0.02),
        meter=Meter(plan, peak=peak),
        options=workers.WorkerOptions(**options),
    )
    return worker.run()


@pytest.mark.parametrize(
    "compression, batching, kernel",
    [
        pytest.param("none", "bucket", None, marks=pytest.mark.slow),
        pytest.param("zstd", "bucket", None, marks=pytest.mark.slow),
        ("none", "auto", "varlen"),
    ],
)
def test_units_that_share_batches_have_the_same_files_as_alone(
    make, model_folder, compression, batching, kernel
):
    """Fewer batches are incomplete, and nothing that is stored changes."""
    runs = {}
    for most in (1, 3, 64):
        folder = make(f"{most}-units", unit_samples=2, compression=compression, batching=batching)
        meter = run_worker(folder, model_folder, kernel=kernel, shared_units=most)
        assert verification.verify(folder).intact
        # Compressed frames follow the batches; what they contain does not.
        files = (
            {path: (folder.path / path).read_bytes() for path in folder.names("shards/")}
            if compression == "none"
            else contents(folder)
        )
        runs[most] = meter, files
    assert runs[1][1] == runs[3][1] == runs[64][1]
    padding = [runs[most][0].snapshot()["padding"] for most in (1, 3, 64)]
    assert padding == sorted(padding, reverse=True)
    assert runs[64][0].batches < runs[3][0].batches < runs[1][0].batches
    # One program for each length, however the units are grouped.
    assert len({meter.programs for meter, _ in runs.values()}) == 1


def test_small_units_share_batches_on_slow_devices_too(make, model_folder):
    """Else most of each batch would be padding, however little is lost with a worker."""
    batches_run = {
        most: run_worker(make(f"{most}", unit_samples=1), model_folder, None, shared_units=most)
        for most in (1, 64)
    }
    assert batches_run[64].batches < batches_run[1].batches / 3
    assert batches_run[64].padding() < batches_run[1].padding()


def test_two_workers_share_the_units(make):
    calm, shared = make("calm"), make("shared")
    extraction.run(calm, settings())
    with ThreadPoolExecutor(2) as threads:
        list(threads.map(lambda n: extraction.run(shared, settings(name=f"worker-{n}")), range(2)))
    assert verification.verify(shared).intact
    assert contents(shared) == contents(calm)


def test_a_failing_stage_stops_the_run_with_its_own_error(make):
    class Full(LocalFolder):
        def upload(self, draft, name):
            raise OSError(28, "No space left on device")

    folder = make("full")
    with pytest.raises(DiskFull, match=r"no space left on device at .*tpu extract run"):
        extraction.run(Full(folder.path), settings())
    assert datasets.Dataset(folder).commits == {}


@pytest.mark.parametrize(
    "code",
    [
        errno.ENOSPC,
        pytest.param(errno.EDQUOT, marks=pytest.mark.slow),
        pytest.param(errno.EROFS, marks=pytest.mark.slow),
        pytest.param(errno.EIO, marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("operation", ["staging", "upload", "create", "replace"])
def test_a_full_or_broken_disk_ends_a_run_with_a_message(
    make, operation, code, model_folder, monkeypatch
):
    class Broken(LocalFolder):
        """Fails once the model is loaded."""

        def __getattribute__(self, name):
            if name == operation and runs:
                raise OSError(code, os.strerror(code))
            return super().__getattribute__(name)

    runs: list[bool] = []
    folder = make(f"{operation}-{code}")
    again = r"continue with `tpu extract run .*`"
    with monkeypatch.context() as patch, pytest.raises(FleetError, match=again):
        run = workers.Worker.run
        patch.setattr(workers.Worker, "run", lambda *args: (runs.append(True), run(*args))[1])
        extraction.run(Broken(folder.path), settings())
    extraction.run(folder, settings(lease=timedelta(seconds=0.1)))
    assert verification.verify(folder).intact


def test_changed_data_is_rejected(make, tmp_path):
    folder = make("changed")
    write_data(tmp_path / "data.jsonl", 24)
    with pytest.raises(Conflict, match="data"):
        extraction.run(folder, settings())


def rewritten(path: Path) -> None:
    """Other texts of the same sizes, in the same file, which claims the same modification time."""
    before = path.stat()
    text = path.read_text().replace("fox", "cat").replace("the", "one")
    with open(path, "r+") as file:
        file.write(text)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def replaced(path: Path) -> None:
    other = path.with_name("other")
    other.write_text(path.read_text().replace("the", "one"))
    os.replace(other, path)


def shortened(path: Path) -> None:
    write_data(path, 5)


@pytest.mark.parametrize("preparers", [0, 1], ids=["thread", "process"])
@pytest.mark.parametrize(
    "change",
    [
        rewritten,
        pytest.param(replaced, marks=pytest.mark.slow),
        pytest.param(shortened, marks=pytest.mark.slow),
        pytest.param(Path.unlink, marks=pytest.mark.slow),
    ],
)
def test_data_that_changes_during_a_run_is_never_stored(make, tmp_path, change, preparers):
    calm, folder = make("calm", unit_samples=1), make("changing", unit_samples=1)
    extraction.run(calm, settings())
    changed = []

    def disturb(meter):
        if meter.batches >= 2 and not changed:
            changed.append(change(tmp_path / "data.jsonl"))

    # Few units at a time: what has been read before the change is stored, and is right.
    options = workers.WorkerOptions(preparers=preparers, shared_units=1, prefetch_units=1)
    with pytest.raises(Conflict, match=r"data .*(changed|missing)"):
        extraction.run(folder, settings(options=options), on_progress=disturb)
    stored, truth = contents(folder), contents(calm)
    assert len(datasets.Dataset(folder).commits) < 23
    assert all(truth[key] == value for key, value in stored.items())


def test_data_that_is_only_touched_during_a_run_is_read_on(make, tmp_path):
    folder = make("touched", unit_samples=2)

    def disturb(meter):
        os.utime(tmp_path / "data.jsonl")

    extraction.run(folder, settings(), on_progress=disturb)
    assert verification.verify(folder).intact


def test_model_and_data_may_have_other_locations_than_planned(make, tmp_path, model_folder):
    folder = make("moved")
    shutil.copytree(model_folder, tmp_path / "elsewhere")
    shutil.move(tmp_path / "data.jsonl", tmp_path / "moved.jsonl")
    extraction.run(
        folder,
        settings(),
        model=str(tmp_path / "elsewhere"),
        data=str(tmp_path / "moved.jsonl"),
    )
    assert verification.verify(folder).intact


def test_a_changed_tokenizer_is_rejected(make, tmp_path, model_folder):
    folder = make("tokenizer")
    shutil.copytree(model_folder, tmp_path / "elsewhere")
    (tmp_path / "elsewhere" / "tokenizer_config.json").write_text("{}")
    with pytest.raises(Conflict, match="tokenizer"):
        extraction.run(folder, settings(), model=str(tmp_path / "elsewhere"))


def test_the_compute_dtype_belongs_to_the_plan(make):
    folder = make("planned", compute="f32")
    plan = plans.load(folder)
    extraction.run(folder, settings())
    other = replace(plan, compute="bf16")
    assert other.identity != plan.identity
    with pytest.raises(Conflict, match='compute is "f32", requested "bf16"'):
        plans.write(folder, other)


def test_page_locked_memory_does_not_change_the_result(make):
    calm, pinned = make("calm"), make("pinned")
    extraction.run(calm, settings())
    extraction.run(pinned, settings(memory="pinned"))
    assert contents(pinned) == contents(calm)


def test_the_number_of_writers_does_not_change_the_files(make):
    def files(name: str, **options) -> dict[str, bytes]:
        folder = make(name)
        extraction.run(folder, settings(options=workers.WorkerOptions(**options)))
        return {path: (folder.path / path).read_bytes() for path in folder.names("shards/")}

    alone = files("alone", writers=1, backlog=1, committers=1)
    assert files("many", writers=8, committers=3) == alone


@pytest.mark.parametrize("gigabytes, tasks", [(4, 64), (64, 122), (128, 245), (1440, 256)])
def test_more_rows_wait_for_writers_on_a_machine_with_more_memory(gigabytes, tasks):
    assert workers.default_backlog(gigabytes << 30) == tasks


def test_memory_for_the_first_batches_is_allocated_ahead(make, monkeypatch):
    """As many outputs as are on the host at a time, but no more than the run has."""
    plan = plans.load(make("reserved"))
    options = workers.WorkerOptions(batches_in_flight=3, batches_fetched=3)
    row = calibration.token_bytes(plan)
    size = plan.batch_tokens * row
    stored = plan.estimate["stored_tokens"] * row
    assert workers.outputs_on_host(plan, options) == [size] * min(8, stored // size)
    many = replace(plan, estimate={**plan.estimate, "stored_tokens": 10**9})
    assert workers.outputs_on_host(many, options) == [size] * 8
    monkeypatch.setattr(calibration, "host_memory", lambda: 25.0 * size)
    assert workers.outputs_on_host(many, options) == [size] * 2


def test_a_failed_upload_leaves_no_drafts(make):
    folder = make("full")

    class Full(LocalFolder):
        def upload(self, draft, name):
            raise OSError("no space left")

    with pytest.raises(OSError, match="no space left"):  # an error without a number: not ours
        extraction.run(Full(folder.path), settings())
    assert drafts_in(folder) == []
    extraction.run(folder, settings(name="heir", lease=timedelta(seconds=0.1)))
    assert verification.verify(folder).intact


def test_tokenizing_in_subprocesses_does_not_change_the_result(make):
    calm, apart = make("calm"), make("apart")
    extraction.run(calm, settings())
    extraction.run(apart, settings(options=workers.WorkerOptions(preparers=1)))
    assert contents(apart) == contents(calm)


@pytest.mark.slow
def test_devices_wait_for_a_slow_disk_only_when_the_queues_are_full(make):
    """Writing is held back until all batches that fit the queues have been computed."""
    folder = make("slow", unit_samples=23, batch_tokens=64)
    gate = threading.Event()

    class Slow(LocalFolder):
        def staging(self):
            gate.wait(900)
            return super().staging()

    def on_progress(meter):
        if meter.batches == 2 + 2 + 1:  # in flight, fetched, and one being written
            gate.set()

    extraction.run(
        Slow(folder.path),
        settings(
            mesh={"tensor": 2},
            options=workers.WorkerOptions(batches_in_flight=2, batches_fetched=2),
        ),
        on_progress=on_progress,
    )
    assert gate.is_set(), "the devices waited for the disk although the queues had room"
    assert verification.verify(folder).intact


def test_progress_has_the_bottleneck_and_the_time_left(make):
    seen = []
    meter = extraction.run(make("p"), settings(), on_progress=lambda m: seen.append(m.snapshot()))
    assert seen[-1]["samples"] == seen[-1]["total"] == 23
    assert meter.tokens_per_second() > 0
    assert seen[-1]["limit"] in {"compute", "prepare", "fetch", "write", "commit"}
    assert 0 < seen[-1]["padding"] < 1 and seen[-1]["programs"] >= 1
    line = output.progress_line(seen[-1])
    assert "padding" in line and "limited by" in line
    assert set(seen[-1]["queues"]) == {"ready", "computed", "fetched", "written"}


def test_no_rate_is_shown_before_it_is_known(make):
    clock = ManualClock()
    meter = Meter(plans.load(make("p")), clock=clock, peak=1e9)
    [batch] = batches.make_batches(
        [np.ones(20, np.int32)], batching="bucket", buckets=(32,), batch_tokens=64, row_multiple=1
    )
    lines = []

    def see() -> str:
        lines.append(output.progress_line(meter.snapshot()))
        return lines[-1]

    assert see() == "0/23 samples (0%)"
    for _ in range(3):  # they are given to the devices at once, whatever time these need
        meter.started(batch)
    clock.now += 0.01
    see()
    clock.now += 2
    meter.arrived(batch, 1e6)
    see()
    for line in lines:
        assert not re.search(r"tokens/s|MFU|limited by| left|nan|inf", line), line
    clock.now += 2
    meter.arrived(batch, 1e6)
    assert meter.tokens_per_second() == pytest.approx(20 / 2)
    assert " · 10 tokens/s · MFU " in see() and "left" not in lines[-1]


@pytest.mark.parametrize("columns", [20, 40, 79, 119, 200])
def test_the_progress_line_fits_the_terminal(make, columns):
    seen = []
    extraction.run(
        make("p"),
        settings(),
        on_progress=lambda m: seen.append({**m.snapshot(), "mfu": 0.5, "calibration": CALIBRATED}),
    )
    for snapshot in seen:
        line = progress_line(snapshot, columns)
        assert len(line) <= columns and line.startswith(progress_line(snapshot)[:10])
    if columns >= 79:
        running = {**seen[-1], "samples": 20, "seconds_left": 3661.0}
        line = progress_line(running, columns)
        assert "tokens/s · 1:01:01 left" in line
        assert "left" not in progress_line({**running, "samples": 23}, columns)


CALIBRATED = {"batch_tokens": 32_768, "batches_in_flight": 4}


@pytest.mark.parametrize(("samples", "rate"), [(1, False), (12, True)])
def test_a_run_reports_a_rate_from_the_second_batch_on(
    tmp_path, model_folder, capsys, samples, rate
):
    data = tmp_path / "short.jsonl"
    data.write_text("".join(json.dumps({"text": f"sample {n}"}) + "\n" for n in range(samples)))
    folder = LocalFolder(tmp_path / "out")
    plan = planning.make_plan(
        model=str(model_folder), data={"kind": "jsonl", "path": str(data)}, choices=SITES,
        unit_samples=12, max_length=64, batch_tokens=64, dtype="f32", compute="f32",
    )  # fmt: skip
    plans.write(folder, plan)
    reports: list[tuple[int, str]] = []
    meter = extraction.run(
        folder,
        settings(mesh={"tensor": 2, "data": 4}),
        on_progress=lambda m: reports.append((m.tokens, progress_line(m.snapshot()))),
    )
    assert all("tokens/s" not in line for tokens, line in reports if not tokens)
    assert (meter.tokens_per_second() is not None) == rate
    output.show_end(meter)
    end = capsys.readouterr().err
    assert f"this worker committed 1 unit{' at ' if rate else ';'}" in end
    assert ("tokens/s" in end) == rate


SCRIPT = """
import sys
import jax
jax.config.update("jax_cpu_collectives_implementation", "gloo")
address, process, folder = sys.argv[1], int(sys.argv[2]), sys.argv[3]
jax.distributed.initialize(address, 2, process)
from tpufleet_activations.pipeline import extraction
from tpufleet_activations.io.storage import LocalFolder
sizes = dict(data=4, fsdp=2)
settings = extraction.ExtractionSettings(poll=0.02, scope="global", mesh=sizes)
extraction.run(LocalFolder(folder), settings)
print("done", process, len(jax.devices()), flush=True)
"""


@pytest.mark.slow
def test_two_processes_with_four_devices_each_equal_one_process(make, tmp_path):
    alone, together = make("alone"), make("together")
    extraction.run(alone, settings(mesh={"data": 4, "fsdp": 2}))
    address = f"127.0.0.1:{free_port()}"
    flags = SMALL_DEVICES["XLA_FLAGS"].replace("count=8", "count=4")
    environment = {**os.environ, **SMALL_DEVICES, "XLA_FLAGS": flags}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", SCRIPT, address, str(n), str(together.path)],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for n in range(2)
    ]
    outputs = [process.communicate(timeout=900)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], outputs
    assert "done 0 8" in outputs[0]
    report = verification.verify(together)
    assert report.intact, report.problems
    names = {file.name[-15:-12] for file in datasets.Dataset(together).files(0)}
    assert names == {"000", "001"}, "both processes wrote their own rows"
    assert contents(together) == contents(alone)


@pytest.mark.slow
def test_a_process_killed_with_sigkill_is_replaced_with_the_same_result(make, tmp_path):
    calm, killed = make("calm", unit_samples=1), make("killed", unit_samples=1)
    extraction.run(calm, settings(mesh={"data": 1, "fsdp": 8}))
    script = (
        "import sys, time; from tpufleet_activations.pipeline import extraction\n"
        "from tpufleet_activations.io.storage import LocalFolder\n"
        "from tpufleet_activations.pipeline import workers\n"
        "mesh, options = dict(data=1, fsdp=8), workers.WorkerOptions(shared_units=1)\n"
        "settings = extraction.ExtractionSettings(mesh=mesh, poll=0.02, options=options)\n"
        "def stay(meter):  # until it is killed, with units in every stage\n"
        "    if meter.units >= 2:\n"
        "        print('there', flush=True)\n"
        "        time.sleep(600)\n"
        "extraction.run(LocalFolder(sys.argv[1]), settings, on_progress=stay)\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", script, str(killed.path)],
        env={**os.environ, **SMALL_DEVICES},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout.readline() == "there\n"
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert 2 <= len(datasets.Dataset(killed).commits) < plans.load(killed).units
    lease = timedelta(seconds=0.2)
    extraction.run(killed, settings(mesh={"data": 1, "fsdp": 8}, lease=lease))
    assert verification.verify(killed).intact
    assert contents(killed) == contents(calm)


@pytest.mark.parametrize("own", [0, 1, 2], ids=["none", "some", "most"])
def test_the_end_of_a_run_counts_what_other_workers_committed_meanwhile(make, own):
    """Another worker holds units until this one waits for them, and then commits them."""
    folder = make("shared", unit_samples=8)
    plan = plans.load(folder)
    other = Units(folder, count=plan.units, worker="other")
    held = [other.claim() for _ in range(plan.units - own)]

    def finish_others(meter: Meter) -> None:
        while meter.waiting_for and held:
            outcome = unit_writer.commit_outcome(plan, held[-1].unit, [])
            other.commit(held.pop(), outcome)

    reported = []
    meter = extraction.run(
        folder, settings(), on_progress=lambda meter: (finish_others(meter), reported.append(meter))
    )
    assert plan.units > 2 and not held
    snapshot = meter.snapshot()
    assert (snapshot["units"], snapshot["samples"]) == (own, plan.samples)
    assert reported


def test_a_worker_that_waits_for_a_dead_one_says_for_how_long_and_why(make):
    folder = make("dead", unit_samples=12)
    plan, clock = plans.load(folder), ManualClock()
    dead = Units(folder, count=plan.units, worker="dead-worker", clock=clock)
    assert dead.claim() is not None
    clock.now += 20
    units = Units(folder, count=plan.units, worker="heir", clock=clock)
    meter = Meter(plan)
    own = units.claim()
    assert own is not None and units.claim() is None

    def waits(coordinator) -> str:
        assert next(coordinator) is None
        return progress_line(meter.snapshot())

    def on_wait(held):
        meter.waiting_for = held

    claims = gangs.SoloCoordinator(units, lambda: False, 0.0, on_wait).claims()
    line = waits(claims)
    assert "waiting for unit" in line and "held by dead-worker" in line
    assert "last heartbeat 20 s ago, taken over in 40 s" in line and " left" not in line
    meter.claimed += 1
    assert "waiting" not in progress_line(meter.snapshot()), "it computes a unit of its own"
    meter.fenced += 1
    clock.now += 30
    units.heartbeat()
    assert "last heartbeat 50 s ago, taken over in 10 s" in waits(claims)
    clock.now += 11
    assert next(claims) is not None, "the dead worker's unit"
    assert "waiting" not in progress_line(meter.snapshot())


def test_a_run_ends_with_its_last_commit_and_not_at_the_next_poll(make):
    folder = make("ends", unit_samples=12)
    plan = plans.load(folder)
    units = Units(folder, count=plan.units, worker="alone")
    coordinator = gangs.SoloCoordinator(units, lambda: False, poll=600.0)
    found: queue.Queue = queue.Queue()

    def run() -> None:
        for claim in coordinator.claims():
            found.put(claim)
        found.put("ended")

    threading.Thread(target=run, daemon=True).start()
    claimed = [found.get(timeout=60) for _ in range(plan.units)]
    assert found.get(timeout=60) is None, "it waits, since no unit is left to claim"
    for claim in claimed:
        coordinator.commit(
            claim, [], lambda files, unit=claim.unit: unit_writer.commit_outcome(plan, unit, files)
        )
    assert found.get(timeout=60) == "ended"


@dataclass
class ManualClock:
    now: float = 1_000.0

    def __call__(self) -> float:
        return self.now


def test_records_that_a_killed_worker_was_writing_are_deleted_later(make):
    folder = make("drafts", unit_samples=12)
    name = ".00000001-0001.json." + "5b" * 16
    old, new = (folder.path / kind / name for kind in ("units", "workers"))
    for draft in (old, new):
        draft.parent.mkdir(exist_ok=True)
        draft.write_text("{")
    hours_ago = old.stat().st_mtime - 7200
    os.utime(old, (hours_ago, hours_ago))
    extraction.run(folder, settings())
    assert not old.exists()
    assert new.exists(), "another worker may be writing it"


def test_progress_is_reported_while_waiting(make):
    """A run whose units are held by another worker does not look finished."""
    folder = make("held", unit_samples=12)
    plan = plans.load(folder)
    other = Units(folder, count=plan.units, worker="other")
    assert [other.claim() is not None for _ in range(plan.units)] == [True, True]
    lines: list[str] = []

    def report(meter: Meter) -> None:
        lines.append(progress_line(meter.snapshot()))
        if "held by other" in lines[-1]:
            other.leave()

    extraction.run(folder, settings(), on_progress=report)
    assert verification.verify(folder).intact
    assert any("held by other" in line and " left" not in line for line in lines)


def test_an_impossible_mesh_is_rejected_with_the_numbers(make):
    with pytest.raises(BadInput, match="needs 3 devices; there are 8"):
        meshes.build_mesh(jax.devices(), {"data": 3}, QWEN)
    with pytest.raises(BadInput, match="key-value heads 2"):
        meshes.build_mesh(jax.devices(), {"tensor": 8}, QWEN)
    with pytest.raises(BadInput, match="data=2"):
        meshes.parse_mesh("date=2")
    assert meshes.parse_mesh("data=2, tensor=4") == {"data": 2, "tensor": 4}


def test_parameters_are_transferred_once_and_not_with_each_batch(model_folder):
    """Each step runs under a guard that refuses every transfer but that of the tokens."""
    engine = engines.open_engine(model_folder, ("resid_post.1",), dtype="bf16")
    tokens = [np.ones(20, np.int32)] * 8
    cut = batches.make_batches(
        tokens, batching="bucket", buckets=(32,), batch_tokens=64, row_multiple=8
    )
    batch = next(cut)
    assert sum(len(block.values["resid_post.1"]) for block in engine.start(batch)()) == 8
    on_the_host = jax.tree.map(np.asarray, engine.params)
    careless = engines.Engine(engine.forward, on_the_host, engine.mesh)
    with pytest.raises(Exception, match="Disallowed host-to-device transfer"):
        careless.start(batch)


CORES = """
import json, sys, jax
from pathlib import Path
from tpufleet_activations.model import devices, engines
devices.start()
engine = engines.open_engine(Path(sys.argv[1]), ("resid_post.1",), dtype="f32")
copies = [
    {shard.data.unsafe_buffer_pointer() for shard in leaf.addressable_shards}
    for leaf in jax.tree.leaves(engine.params)
]
print(json.dumps([len(jax.devices()), engine.row_multiple, max(map(len, copies))]))
"""


@pytest.mark.parametrize(
    "weight_bytes, given, expected",
    [
        (1e9, {}, {"PREALLOCATE": "false"}),
        (16e9, {}, {}),
        (0, {}, {}),
        (1e9, {"MEM_FRACTION": "0.5"}, {"MEM_FRACTION": "0.5"}),
        (1e9, {"PREALLOCATE": "true"}, {"PREALLOCATE": "true"}),
    ],
    ids=["small", "large", "unknown", "fraction", "asked for"],
)
def test_a_small_model_does_not_take_the_whole_gpu(weight_bytes, given, expected, monkeypatch):
    prefix = "XLA_PYTHON_CLIENT_"
    for name in devices.MEMORY_OPTIONS:
        monkeypatch.delenv(name, raising=False)
    for name, value in given.items():
        monkeypatch.setenv(prefix + name, value)
    devices.start(weight_bytes=weight_bytes).join()
    set_now = {name: value for name, value in os.environ.items() if name.startswith(prefix)}
    for name in devices.MEMORY_OPTIONS:
        monkeypatch.delenv(name, raising=False)
    assert set_now == {prefix + name: value for name, value in expected.items()}


@pytest.mark.parametrize(
    "cores, mesh, expected",
    [
        (2, {}, 2),
        (1, {}, 1),
        (64, {}, 4),
        (2, {"data": 1}, 1),
        (2, {"data": 8}, 8),
        (2, {"tensor": 4}, 4),
        (4, {"fsdp": 2}, 4),
    ],
)
def test_a_cpu_has_as_many_devices_as_the_mesh_needs(cores, mesh, expected):
    assert devices.cpu_devices(cores, mesh) == expected


@pytest.mark.slow
@pytest.mark.parametrize(
    "flags, expected",
    [
        ("", min(len(os.sched_getaffinity(0)), 4)),
        ("--xla_force_host_platform_device_count=3", 3),
    ],
)
def test_the_cores_of_a_cpu_are_devices_that_share_one_copy_of_the_weights(
    model_folder, flags, expected
):
    environment = {**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    result = subprocess.run(
        [sys.executable, "-c", CORES, str(model_folder)],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    assert json.loads(result.stdout) == [expected, expected, 1]
