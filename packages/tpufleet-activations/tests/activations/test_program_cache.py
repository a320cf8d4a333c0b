"""A second run takes compiled programs and findings about the device from the cache."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import threading

import jax
import numpy as np
import pytest
from jax.experimental.compilation_cache import compilation_cache

from tests.activations.test_workers import make  # noqa: F401
from tpufleet.errors import BadInput
from tpufleet.runtime.units import Units
from tpufleet_activations import plans
from tpufleet_activations.daemon_threads import DaemonThreads
from tpufleet_activations.io import verification
from tpufleet_activations.model import engines
from tpufleet_activations.model.program_cache import ProgramCache, open_cache
from tpufleet_activations.pipeline import (
    batches,
    extraction,
    gangs,
    locations,
    preparation,
    workers,
)
from tpufleet_activations.pipeline.progress_meter import Meter


@pytest.fixture(autouse=True)
def without_jax_cache():
    """That of JAX, which all tests share."""
    before = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", None)
    compilation_cache.reset_cache()
    yield
    jax.config.update("jax_compilation_cache_dir", before)
    compilation_cache.reset_cache()


@pytest.fixture
def lowered():
    """Counts the programs that are lowered: what a stored program spares."""
    count = []
    listener = lambda event, seconds, **_: "mlir" in event and count.append(event)
    jax.monitoring.register_event_duration_secs_listener(listener)
    yield count
    jax.monitoring.unregister_event_duration_listener(listener)


def batch(rows: int = 2, length: int = 16) -> batches.Batch:
    tokens = list(np.random.default_rng(0).integers(0, 61, (rows, length)).astype(np.int32))
    return next(
        batches.make_batches(
            tokens, batching="bucket", buckets=(length,), batch_tokens=rows * length
        )
    )


def engine(model_folder, folder, sites=("resid_post.1",)) -> engines.Engine:
    devices = jax.devices()[:1]
    cache = ProgramCache(folder, devices)
    return engines.open_engine(model_folder, sites, dtype="f32", devices=devices, cache=cache)


def outputs(opened: engines.Engine, given: batches.Batch) -> bytes:
    result = b"".join(values.tobytes() for values in opened.start(given)()[0].values.values())
    opened.finish_saving()
    return result


def test_the_next_run_neither_traces_nor_compiles(model_folder, tmp_path, lowered):
    first = outputs(engine(model_folder, tmp_path / "cache"), batch())
    assert lowered
    again = engine(model_folder, tmp_path / "cache")
    lowered.clear()
    assert outputs(again, batch()) == first
    assert lowered == []


@pytest.mark.slow
@pytest.mark.parametrize("change", [{"sites": ("resid_post.0",)}, {"rows": 4}, {"length": 32}])
def test_another_program_is_compiled(model_folder, tmp_path, lowered, change):
    outputs(engine(model_folder, tmp_path), batch())
    sites = {"sites": change.pop("sites")} if "sites" in change else {}
    other = engine(model_folder, tmp_path, **sites)
    lowered.clear()
    outputs(other, batch(**change))
    assert lowered


@pytest.mark.parametrize("flags", ["--xla_cpu_enable_fast_math=true"])
def test_a_program_belongs_to_the_flags_that_it_was_compiled_with(
    model_folder, tmp_path, lowered, monkeypatch, flags
):
    outputs(engine(model_folder, tmp_path), batch())
    monkeypatch.setenv("XLA_FLAGS", flags)
    other = engine(model_folder, tmp_path)
    lowered.clear()
    outputs(other, batch())
    assert lowered


def test_a_damaged_file_is_compiled_again(model_folder, tmp_path, caplog):
    first = outputs(engine(model_folder, tmp_path), batch())
    (program,) = tmp_path.glob("*.program")
    program.write_bytes(program.read_bytes()[:-100])
    assert outputs(engine(model_folder, tmp_path), batch()) == first
    assert f"{program}, a file of " in caplog.text
    assert outputs(engine(model_folder, tmp_path), batch()) == first


def test_a_file_that_others_can_write_is_not_loaded(model_folder, tmp_path, lowered, caplog):
    outputs(engine(model_folder, tmp_path), batch())
    (program,) = tmp_path.glob("*.program")
    program.chmod(0o666)
    other = engine(model_folder, tmp_path)
    lowered.clear()
    outputs(other, batch())
    assert lowered and f"chmod go-w {program}" in caplog.text


def test_a_read_only_folder_only_costs_time(model_folder, tmp_path):
    (tmp_path / "cache").write_text("a file where the folder would be")
    assert outputs(engine(model_folder, tmp_path / "cache"), batch())


def test_what_works_is_remembered_and_what_fails_is_tried_again(tmp_path):
    cache = ProgramCache(tmp_path, jax.devices()[:1])
    works = lambda finding: finding == "works"
    assert cache.finding(("kernel", 64), lambda: "fails", keep=works) == "fails"
    assert cache.finding(("kernel", 64), lambda: "works", keep=works) == "works"
    assert cache.finding(("kernel", 64), lambda: "fails", keep=works) == "works"
    assert cache.finding(("kernel", 64), lambda: "works again", renew=True) == "works again"
    assert cache.finding(("kernel", 64), lambda: "fails", keep=works) == "works again"
    assert cache.finding(("kernel", 128), lambda: "fails", keep=works) == "fails"


def test_cpus_keep_programs_only_if_asked_to(tmp_path):
    devices = jax.devices()[:1]
    assert open_cache(None, devices) is None and open_cache("", devices) is None
    assert jax.config.jax_compilation_cache_dir is None
    assert open_cache(str(tmp_path), devices) is not None


def test_a_program_whose_file_was_lost_is_stored_again(model_folder, tmp_path):
    """CPU programs that JAX has loaded from its own cache cannot be stored."""

    def run() -> bytes:
        devices = jax.devices()[:1]
        cache = open_cache(str(tmp_path), devices)
        sites = ("resid_post.1",)
        opened = engines.open_engine(model_folder, sites, dtype="f32", devices=devices, cache=cache)
        return outputs(opened, batch())

    first = run()
    for program in tmp_path.rglob("*.program"):
        program.unlink()
    assert [run(), run()] == [first, first]


def test_programs_of_cpus_are_kept_by_jax_alone_where_it_has_a_cache(tmp_path):
    jax.config.update("jax_compilation_cache_dir", str(tmp_path / "jax"))
    assert open_cache(str(tmp_path / "ours"), jax.devices()[:1]) is None
    assert jax.config.jax_compilation_cache_dir == str(tmp_path / "jax")


class NotedPreparers(preparation.PreparerPool):
    """Says when units have been prepared."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.prepared = threading.Event()

    def submit(self, unit):
        future = super().submit(unit)
        future.add_done_callback(lambda _: self.prepared.set())
        return future


@pytest.mark.slow
def test_units_are_tokenized_while_the_engine_opens(make, model_folder):  # noqa: F811
    folder = make("a")
    plan = plans.load(folder)
    found = locations.resolve_plan(plan)
    preparers = NotedPreparers(plan, found)

    def open_late() -> workers.OpenedEngine:
        assert preparers.prepared.wait(900)
        engine = engines.open_engine(
            model_folder, plan.sites, dtype="f32", compute="f32", devices=jax.devices()[:1]
        )
        return workers.OpenedEngine(engine)

    units = Units(folder, count=plan.units, worker="a")
    coordinator = gangs.SoloCoordinator(units, lambda: False)
    with DaemonThreads(1, "engine") as thread:
        opening = thread.submit(open_late)
    workers.Worker(
        folder, plan, found, opening, coordinator, meter=Meter(plan), preparers=preparers
    ).run()
    assert verification.verify(folder).intact


def test_a_model_that_cannot_be_opened_ends_the_run_with_its_error(make):  # noqa: F811
    folder = make("a")
    with pytest.raises(BadInput, match="needs 3 devices"):
        extraction.run(folder, extraction.ExtractionSettings(poll=0.02, mesh={"data": 3}))


def test_the_library_that_kernels_call_is_found_before_a_program_is_loaded(tmp_path):
    """JAX finds it once a module was imported, which only tracing a kernel does by itself."""
    script = textwrap.dedent(
        """
        import pickle, sys
        from pathlib import Path
        from types import SimpleNamespace
        from jax.experimental import serialize_executable
        from tpufleet_activations.model.program_cache import ProgramCache

        client = SimpleNamespace(platform_version="12")
        device = SimpleNamespace(platform="gpu", client=client, id=0, device_kind="H200")
        cache = ProgramCache(Path(sys.argv[1]), [device])
        cache._write(cache._path("parts", ".program"), pickle.dumps(("", "", "")))
        found = lambda *_, **__: "jax.experimental.mosaic.gpu" in sys.modules
        before = found()
        serialize_executable.deserialize_and_load = found
        print(before, cache.load("parts"))
        """
    )
    command = [sys.executable, "-c", script, str(tmp_path / "programs")]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    assert result.stdout.split() == ["False", "True"], result.stderr
