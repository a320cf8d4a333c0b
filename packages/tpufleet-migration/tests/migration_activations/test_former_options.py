"""Options of the former extraction scripts, and their way to deploy a fleet."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest

from tests.activations import synthetic
from tests.activations.tiny_model import task, tpu
from tests.repository import ROOT
from tests.service.harness import ServiceHarness
from tests.views.cli_runner import Tpu
from tests.views.conftest import cli_for_user
from tpufleet.errors import BadInput, Conflict
from tpufleet.stores.base import JobQuery
from tpufleet.stores.memory import MemoryStore
from tpufleet_activations import plans
from tpufleet_activations.inputs import sources
from tpufleet_activations.io.storage import LocalFolder
from tpufleet_migration.activations import deploy


@pytest.fixture
def arc(tmp_path):
    path = tmp_path / "tasks.jsonl"
    path.write_text("\n".join(json.dumps(task(n)) for n in range(3)))
    return path


@pytest.fixture
def world(tmp_path):
    """A server without any capacity: jobs wait."""
    (tmp_path / "server").mkdir()
    world = ServiceHarness(MemoryStore(), tmp_path / "server")
    world.start()
    yield world
    world.close()


def pairs(number: int) -> list:
    """A task as datasets write it: input and output of each pair, the last being the test."""
    new_task = task(number)
    return [[pair["input"], pair["output"]] for pair in new_task["train"] + new_task["test"]]


def write_pairs(path: Path, count: int) -> Path:
    rows = [json.dumps({"examples": pairs(number)}) for number in range(count)]
    path.write_text("\n".join([*rows, json.dumps({"examples": "nothing"})]))
    return path


def test_option_spellings_of_the_former_scripts_are_accepted(tmp_path, arc, model_folder):
    out = tmp_path / "out"
    code, text = tpu(
        "plan", out, "--model_path", model_folder, "--dataset_path", arc,
        "--activation_type", "mlp", "--layers_to_extract", "0 2", "--max_seq_length", 1600,
        "--shard_size_gb", 0.5, "--random_seed", 7, "--predictions_per_task", 2,
    )  # fmt: skip
    assert code == 0, text
    plan = plans.load(LocalFolder(out))
    assert plan.sites == ("mlp_out.0", "mlp_out.2")
    assert (plan.data["kind"], plan.max_length, plan.data["seed"]) == ("arc", 1600, "7")
    assert plan.samples == 6


# Of run_extraction_worker.sh, extract_activations.py and multihost_extract.py.
WORKER_OPTIONS = """
model gcs_bucket dataset_stream gcs_prefix batch_size shard_size_gb max_seq_length layers
activation_type output_dir checkpoint_dir max_tasks worker_id enable_checkpointing no_checkpointing
machine_id total_machines model_path dataset_path use_sharded_dataset sharded_dataset_dir
preferred_shard_id grid_encoder prompt_version predictions_per_task layers_to_extract upload_to_gcs
compress_shards no_compress_shards delete_local_after_upload multihost coordinator_address host_id
num_hosts mesh_type random_seed verbose topology fsdp_size checkpoint_gcs_bucket
checkpoint_gcs_prefix enable_barrier_sync no_barrier_sync barrier_port barrier_controller_host
is_barrier_server stream_mode stream_manifest stream_range_start stream_range_end pod_id
"""


@pytest.mark.parametrize("option", WORKER_OPTIONS.split())
def test_every_option_of_a_worker_is_on_the_page(option):
    page = (ROOT / "docs/migration/activation-extraction.md").read_text()
    assert re.search(rf"`[^`\n]*--{option}\b", page)


@pytest.mark.parametrize(
    "more, message",
    [
        (["--layers", "one"], "0 5 11"),
        (["--prompt-version", "none-v9"], "output-from-examples-v0"),
        (["--grid-encoder", "open('x')"], "GridShapeEncoder"),
        (["--data-option", "colour=1"], "arc data has the options grid_encoder"),
        (["--kind", "jsonl", "--max-tasks", "1"], "jsonl data has no such options"),
    ],
)
def test_invalid_options_are_rejected_with_a_message(tmp_path, arc, model_folder, more, message):
    options = ["--model", model_folder, "--data", arc, *more]
    code, text = tpu("plan", tmp_path / "out", *options, "--dry-run")
    assert code == 2 and message in text, text


def test_tasks_are_detected_beside_other_files(tmp_path):
    (tmp_path / "task.json").write_text(json.dumps(task(0)))
    (tmp_path / "README.txt").write_text("x")
    assert sources.detect_kind(str(tmp_path)) == "arc"
    (tmp_path / "more.txt").write_text("x")
    with pytest.raises(BadInput, match="arc and text data"):
        sources.detect_kind(str(tmp_path))


def arguments(out: str, model: Path, data: Path, *more: str) -> list[str]:
    wanted = ["--zones", "local-a,local-b", "--tpu_type", "v5e-4", "--model", str(model)]
    return ["extract", "deploy", out, *wanted, "--dataset", str(data), *more]


def test_deploy_splits_and_plans_a_dataset(world, tmp_path, model_folder):
    out, folder = f"file://{tmp_path / 'out'}", LocalFolder(tmp_path / "out")
    data = write_pairs(tmp_path / "pairs.jsonl", 5)
    tpu = cli_for_user(world, tmp_path, "mel")
    more = ("--max_samples", "4", "--stream-offset", "6", "--nohup", "--monitor")
    answer = tpu(*arguments(out, model_folder, data, *more))
    assert answer.exit_code == 0, answer.output
    assert "(0 invalid) in 2 streams; planned 32 samples" in answer.stderr
    assert sorted(folder.names("streams/")) == [f"streams/stream_{n:03d}.jsonl" for n in (6, 7)]
    assert len(world.store.jobs(JobQuery())) == 2


def test_skip_launch_submits_nothing(world, tmp_path, model_folder):
    out, folder = f"file://{tmp_path / 'out'}", LocalFolder(tmp_path / "out")
    data = write_pairs(tmp_path / "pairs.jsonl", 2)
    tpu = cli_for_user(world, tmp_path, "mel")
    assert tpu(*arguments(out, model_folder, data, "--dry-run")).exit_code == 0
    assert folder.names("plan.json") == []
    assert tpu(*arguments(out, model_folder, data, "--skip-launch")).exit_code == 0
    assert folder.names("plan.json") and world.store.jobs(JobQuery()) == []
    again = tpu(*arguments(out, model_folder, data, "--skip-launch"))
    assert again.exit_code == 1 and "--skip-dataset" in again.stderr


@pytest.mark.parametrize("more", [(), ("gs://b/x", "--gcs_bucket", "b")])
def test_deploy_needs_one_location(tmp_path, more):
    tpu = Tpu(HOME=str(tmp_path), TPUFLEET_HOME=str(tmp_path / "state"))
    answer = tpu("extract", "deploy", "--zones", "local-a", *more)
    assert answer.exit_code == 2 and "OUT or --gcs-bucket" in answer.stderr


def test_streams_of_an_interrupted_call_are_deleted(tmp_path, model_folder):
    data = write_pairs(tmp_path / "pairs.jsonl", 6)
    folder = LocalFolder(tmp_path / "out")
    folder.create("streams/stream_003.jsonl", b"left by a call for four workers")
    folder.create("streams/notes.md", b"of somebody else")
    near = os.path.relpath(model_folder)
    facts = deploy.prepare_dataset(folder, streams=2, dataset=str(data), model=near)
    assert facts["samples"] == 48
    assert Path(plans.load(folder).model).is_absolute(), "workers start in other folders"
    streams = ["streams/stream_000.jsonl", "streams/stream_001.jsonl"]
    assert folder.names("streams/") == ["streams/notes.md", *streams]


def test_a_planned_dataset_is_not_prepared_again(tmp_path):
    plans.write(LocalFolder(tmp_path), synthetic.plan())
    with pytest.raises(Conflict, match="already planned"):
        deploy.prepare_dataset(LocalFolder(tmp_path), streams=2, dataset="x")


def test_a_dataset_without_pairs_is_rejected(tmp_path):
    (tmp_path / "rows.jsonl").write_text('{"examples": 1}')
    with pytest.raises(BadInput, match="no ARC pairs"):
        deploy.prepare_dataset(
            LocalFolder(tmp_path / "out"), streams=2, dataset=str(tmp_path / "rows.jsonl")
        )
