"""`tpu extract`: plan, run, status, show, verify; and the job specs of a fleet."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import tomllib
from pathlib import Path

import click
import numpy as np
import pytest
from click.testing import CliRunner
from safetensors.numpy import load_file, save_file

from tests.activations import synthetic
from tests.activations.tiny_model import SMALL_DEVICES, tpu
from tests.repository import ROOT
from tests.server_process import wait_until
from tests.views.cli_runner import Tpu
from tpufleet.errors import BadInput, install_command
from tpufleet.model.tpu import prices, type_lookup
from tpufleet.runtime.units import Units
from tpufleet_activations import fleet, formatting, inputs, plans
from tpufleet_activations.cli.group import extract as extract_group
from tpufleet_activations.io import datasets, shards, unit_writer
from tpufleet_activations.io.storage import LocalFolder
from tpufleet_activations.pipeline import dataset_status, extraction, planning


@pytest.fixture
def prompts(tmp_path):
    path = tmp_path / "stream_000.jsonl"
    lines = (json.dumps({"text": f"prompt {n} " * (n + 1)}) for n in range(24))
    path.write_text("\n".join(lines))
    return path


def test_plan_run_status_and_verify_from_the_command_line(tmp_path, prompts, model_folder):
    out = tmp_path / "out"
    planned = ["--model", model_folder, "--data", prompts, "--kind", "jsonl", "--max-length", 512]
    planned += ["--batch-tokens", 4096]
    sites = ["--site", "resid_post.[0,1],mlp_out.2"]
    sites += ["--compute", "f32"]
    code, text = tpu("plan", out, *planned, *sites)
    assert code == 0 and "24 (0 skipped)" in text
    assert "24" in tpu("status", out)[1]
    code, text = tpu("run", out, "--worker", "me", "--quiet")
    assert code == 0, text
    code, text = tpu("verify", out)
    assert code == 0 and "OK: every sample stored exactly once" in text
    rows = json.loads(tpu("status", out, "--json")[1])
    assert rows[str(out)]["status"] == "DONE" and rows[str(out)]["samples"] == 24
    dataset = datasets.open_dataset(str(out))
    assert dataset.sites == ("resid_post.0", "resid_post.1", "mlp_out.2")
    assert dataset.metadata(9)["preview"].startswith("prompt 9 prompt 9 ")
    # Planning the same again is harmless; planning another thing there is refused.
    code, text = tpu("plan", out, *planned, *sites)
    assert code == 0 and "24 of 24 samples" in text
    code, text = tpu("plan", out, *planned, "--site", "resid_post.0")
    assert code == 1 and "sites" in text


def test_verify_fails_for_a_damaged_dataset(tmp_path):
    folder = LocalFolder(tmp_path)
    synthetic.extract(folder, synthetic.plan())
    assert tpu("verify", tmp_path)[0] == 0
    shard = datasets.Dataset(folder).files(0)[0]
    path = folder.local_path(shard.name)
    data = bytearray(path.read_bytes())
    data[shard.tensors["resid_post.0"].offset] ^= 1
    path.write_bytes(data)
    code, text = tpu("verify", tmp_path)
    assert code == 1 and "checksum mismatch in resid_post.0" in text and "FAILED" in text
    code, text = tpu("verify", tmp_path, "--quick")
    assert code == 0 and "checksums: not checked" in text
    assert "not checked" in tpu("repair", tmp_path, "--quick")[1]
    for options, checked in ([], True), (["--quick"], False):
        report = json.loads(tpu("verify", tmp_path, "--json", *options)[1])
        assert report["checksums"] is checked and report["whole"] is not checked


def test_commands_can_be_copied_whatever_the_name_of_the_folder(tmp_path, prompts, model_folder):
    out = tmp_path / "my acts"
    options = ["--model", model_folder, "--data", prompts, "--kind", "jsonl"]
    assert f"`tpu extract run '{out}'`" in tpu("plan", out, *options)[1]
    assert f"`tpu extract run '{out}'`" in tpu("verify", out)[1]


@pytest.mark.parametrize("change", [(b"[", b"("), (b'"sample"', b'"simple"'), (b'"id"', b'"\xff"')])
def test_a_damaged_table_of_samples_is_one_problem(tmp_path, change):
    folder = LocalFolder(tmp_path)
    synthetic.extract(folder, synthetic.plan(samples=8))
    shard = datasets.Dataset(folder).files(1)[0]
    path, start = folder.local_path(shard.name), shard.tensors[shards.METADATA].offset
    data = path.read_bytes()
    changed = data[start:].replace(*change, 1)
    path.write_bytes((data[:start] + changed).ljust(len(data))[: len(data)])
    code, text = tpu("verify", tmp_path, "--quick")
    assert code == 1 and text.count("problem:") == 1, text
    assert f"unit 1: {shard.name}: " in text


@pytest.mark.parametrize(
    "count, mean, row, units",
    [
        (1_000, 300.0, 1_792, 5),  # 0.5 GB of one layer: units of four batches
        (100_000, 300.0, 1_792, 51),  # 54 GB: shards of 1 GiB
        (4_000, 2_048.0, 100, 16),  # little output, much to compute
        (4_001, 2_048.0, 100, 16),  # not divisible by 16
        (10, 10.0, 1_792, 1),  # less than a batch
        (3, 40_000.0, 4_096, 3),  # long documents
    ],
)
def test_small_data_is_divided_into_units_for_several_workers(count, mean, row, units):
    size = planning.samples_per_unit(
        count, mean, row, shard_bytes=planning.SHARD_BYTES, batch_tokens=16384
    )
    assert -(-count // max(min(size, count), 1)) == units


def test_the_extra_holds_what_the_first_lines_of_its_documentation_need():
    """`pip install 'tpufleet[extract]'`, then a plan in gs://."""
    core, activations = (
        tomllib.loads((ROOT / "packages" / name / "pyproject.toml").read_text())["project"]
        for name in ("tpufleet", "tpufleet-activations")
    )
    assert set(core["optional-dependencies"]["gcs"]) <= set(activations["dependencies"])
    assert "pip install 'tpufleet[extract]'" in (ROOT / "docs/extraction.md").read_text()


def quantized(weights: dict) -> dict:
    name = "model.layers.1.mlp.up_proj.weight"
    scale = name.replace("weight", "weight_scale_inv")
    return {**weights, name: weights[name].astype("float8_e4m3fn"), scale: np.ones(1, np.float32)}


def eight_bit(weights: dict) -> dict:
    name = "model.layers.0.self_attn.q_proj.weight"
    return {**weights, name: weights[name].astype(np.int8)}


def without(name: str):
    def change(weights: dict) -> dict:
        return {key: value for key, value in weights.items() if key != name}

    return change


def reshaped(weights: dict) -> dict:
    name = "model.layers.1.mlp.down_proj.weight"
    return {**weights, name: np.ascontiguousarray(weights[name].T)}


WEIGHT_FAULTS = [
    (quantized, "up_proj.weight_scale_inv has shape [1], expected [1, 1]"),
    (eight_bit, "q_proj.weight is stored as I8"),
    (without("model.layers.1.input_layernorm.weight"), "layers.1.input_layernorm.weight"),
    (without("model.embed_tokens.weight"), "embed_tokens.weight"),
    (without("model.norm.weight"), "norm.weight"),
    (reshaped, "down_proj.weight has shape"),
    (lambda weights: {**weights, "model.layers.0.extra.weight": np.ones(1)}, "extra.weight"),
]


@pytest.mark.parametrize("change, message", WEIGHT_FAULTS, ids=[text for _, text in WEIGHT_FAULTS])
def test_a_fault_of_the_weights_is_found_by_the_plan(tmp_path, model_folder, change, message):
    model = tmp_path / "model"
    shutil.copytree(model_folder, model)
    save_file(change(load_file(model / "model.safetensors")), model / "model.safetensors")
    (tmp_path / "data.jsonl").write_text('{"text": "one"}\n')
    sites = ["--site", "resid_post.2", "--site", "final_norm"]
    code, text = tpu(
        "plan", tmp_path / "out", "--model", model, "--data", tmp_path / "data.jsonl", *sites
    )
    assert code == 2 and message in text
    assert not (tmp_path / "out" / "plan.json").exists()


@pytest.mark.parametrize(
    "lines, message",
    [
        (['{"text": ""}'] * 3, "all 3 samples of .* would be skipped, mostly .3.: no tokens"),
        (['{"other": 1}'] * 3_000, "all 600 checked samples .*no text field"),
        (['{"text": null}'] * 3, "mostly .3.: field 'text' is null instead of text"),
        (['{"text": ["a"]}'] * 3, "mostly .3.: field 'text' is of type list instead of text"),
        (
            ['{"text": "long enough"}'] * 2,
            "mostly .2.: longer than --max-length 4; pass",
        ),
        ([], "has no samples"),
    ],
    ids=["empty", "fields", "null", "list", "too-long", "nothing"],
)
def test_a_plan_that_would_skip_every_sample_fails(tmp_path, model_folder, lines, message):
    (tmp_path / "data.jsonl").write_text("\n".join(lines))
    planned = ["--model", model_folder, "--data", tmp_path / "data.jsonl", "--max-length", 4]
    code, text = tpu("plan", tmp_path / "out", *planned)
    assert code == 2 and re.search(message, text)
    assert not (tmp_path / "out" / "plan.json").exists()


def test_a_plan_counts_kinds_of_reasons_for_skipped_samples(tmp_path, model_folder):
    """Each length, and each position of an error in JSON, has a reason of its own."""
    lines = [json.dumps({"text": "x" * (20 + n)}) for n in range(6)]
    lines += ['{"text": 1}'] * 3 + [f'{{"text": {" " * n}x' for n in range(4)]
    lines += ['{"text": "short"}'] * 2
    path, out = tmp_path / "data.jsonl", tmp_path / "out"
    path.write_text("\n".join(lines))
    planned = [out, "--model", model_folder, "--data", path]
    code, text = tpu("plan", *planned, "--max-length", 8, "--dry-run")
    wanted = "15 (13 skipped, mostly (6): longer than --max-length 8; pass --too-long cut or split"
    assert code == 0 and wanted in text
    code, text = tpu("plan", *planned)
    assert code == 0 and "15 (7 skipped, mostly (4): not JSON" in text
    assert json.loads((out / "plan.json").read_bytes())["estimate"]["skipped_most"] == 4


def cut_in_half(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def emptied(path: Path) -> None:
    path.write_bytes(b"")


def one_bit_flipped(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) * 2 // 3] ^= 1
    path.write_bytes(data)


# A missing record is no damage: the unit is then not committed, and extracted by the next run. One
# flipped bit of a record may give another valid record.
DAMAGE = [
    pytest.param("shard", cut_in_half, marks=pytest.mark.slow),
    pytest.param("shard", emptied, marks=pytest.mark.slow),
    ("shard", one_bit_flipped),
    pytest.param("shard", Path.unlink, marks=pytest.mark.slow),
    ("record", cut_in_half),
    pytest.param("record", emptied, marks=pytest.mark.slow),
]


@pytest.mark.parametrize("target, change", DAMAGE)
def test_repair_rebuilds_damaged_units_and_no_others(tmp_path, model_folder, target, change):
    out, data = tmp_path / "out", tmp_path / "data.jsonl"
    data.write_text("".join(f'{{"text": "sample number {n}"}}\n' for n in range(6)))
    planned = ["--model", model_folder, "--data", data, "--shard-gb", 1e-9, "--max-length", 64]
    planned += ["--site", "resid_post.0", "--batch-tokens", 64]
    assert tpu("plan", out, *planned)[0] == 0
    assert tpu("run", out, "--quiet")[0] == 0
    folder = LocalFolder(out)
    before = {name: folder.read(name) for name in folder.names("shards/")}
    dataset = datasets.Dataset(folder)
    values = [dataset.read(n, "resid_post.0").tobytes() for n in range(6)]
    unit = 3
    token = dataset.commits[unit].token
    names = {
        "shard": dataset.files(unit)[0].name,
        "record": f"units/{unit:08d}-{token + 1:04d}.json",
    }
    del dataset
    change(folder.path / names[target])

    code, text = tpu("verify", out)
    assert code == 1 and f"tpu extract repair {out}" in text
    assert names[target] in text, "the damaged file is named"
    if target == "record":
        everything = [("stats", out), ("export", out, tmp_path / "x")]
        for command in (("run", out, "--quiet"), ("show", out, 3), *everything):
            code, text = tpu(*command)
            assert code == 1 and names["record"] in text and "tpu extract repair" in text
        assert tpu("show", out, 0)[0] == 0, "other units are read"
        code, text = tpu("status", out)
        assert code == 0 and "5/6" in text, text
        assert names["record"] in text and f"`tpu extract repair {out}`" in text
        status = json.loads(tpu("status", out, "--json")[1])[str(out)]
        assert status["samples"] == 5 and names["record"] in status["damaged"][0]
    code, text = tpu("repair", out)
    assert code == 0, text
    assert "reopened 1 of 6 units" in text and "OK: every sample stored exactly once" in text
    assert tpu("verify", out)[0] == 0
    dataset = datasets.Dataset(folder)
    assert [dataset.read(n, "resid_post.0").tobytes() for n in range(6)] == values
    others = {name: data for name, data in before.items() if not name.startswith("shards/00000003")}
    assert all(folder.read(name) == data for name, data in others.items())
    assert tpu("verify", out, "--sweep")[0] == 0
    assert len(folder.names("shards/")) == 6
    assert "OK: " in tpu("repair", out)[1]


def test_repair_can_leave_the_work_to_other_workers(tmp_path):
    folder = LocalFolder(tmp_path)
    wanted = synthetic.plan()
    synthetic.extract(folder, wanted)
    one_bit_flipped(folder.path / datasets.Dataset(folder).files(1)[0].name)
    code, text = tpu("repair", tmp_path, "--reopen-only")
    assert code == 0 and f"tpu extract run {tmp_path}" in text
    assert 1 not in datasets.Dataset(folder).commits
    synthetic.extract(folder, wanted, worker="another")
    assert tpu("verify", tmp_path)[0] == 0


def test_show_prints_a_stored_sample(tmp_path):
    synthetic.extract(LocalFolder(tmp_path), synthetic.plan(samples=6))
    code, text = tpu("show", tmp_path, 3)
    assert code == 0 and "'synthetic-3'" in text
    assert f"resid_post.3  {synthetic.length(3)} × 8 bfloat16" in text
    facts = json.loads(tpu("show", tmp_path, 3, "--json")[1])
    assert facts["token_ids"] == synthetic.tokens(3).tolist()
    wanted = synthetic.values(3, "resid_post.0")
    assert facts["sites"]["resid_post.0"]["mean"] == pytest.approx(wanted.mean())
    code, text = tpu("show", tmp_path, 6)
    assert code == 1 and "the dataset has 6 samples" in text


@pytest.mark.parametrize("bits, largest", [(b"\xff\xff", "nan"), (b"\x80\x7f", "inf")])
def test_values_that_are_not_finite_are_null_in_json(tmp_path, bits, largest):
    folder = LocalFolder(tmp_path)
    synthetic.extract(folder, synthetic.plan(samples=4))
    shard = datasets.Dataset(folder).files(0)[0]
    path = folder.local_path(shard.name)
    data = bytearray(path.read_bytes())
    start = shard.tensors["resid_post.0"].offset
    data[start : start + 2] = bits  # of the longest sample, which is stored first
    path.write_bytes(data)

    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is not JSON")

    facts = json.loads(tpu("show", tmp_path, 2, "--json")[1], parse_constant=refuse)
    site = facts["sites"]["resid_post.0"]
    assert site["mean"] is None and site["largest"] is None
    assert facts["sites"]["resid_post.3"]["mean"] is not None
    assert f"largest {largest}" in tpu("show", tmp_path, 2)[1]


def test_statistics_without_committed_units_say_so(tmp_path):
    plans.write(LocalFolder(tmp_path), synthetic.plan())
    code, text = tpu("stats", tmp_path)
    assert code == 0 and "0 of 3 units" in text


def test_one_sample_and_one_unit_are_not_plural(tmp_path):
    synthetic.extract(LocalFolder(tmp_path), synthetic.plan(samples=1))
    assert "1 of 1 unit, 1 sample, " in tpu("verify", tmp_path)[1]


def test_adjacent_missing_units_are_one_problem_and_nothing_is_deleted(tmp_path):
    folder = LocalFolder(tmp_path)
    wanted = plans.write(folder, synthetic.plan(samples=4_000, unit_samples=2))
    units = Units(folder, count=wanted.units, worker="a")
    claim = units.claim()
    files = synthetic.record(folder, wanted, claim)
    units.commit(claim, unit_writer.commit_outcome(wanted, claim.unit, files))
    code, text = tpu("verify", tmp_path, "--sweep")
    assert code == 1 and text.count("are not committed") in (1, 2)
    assert "1,999 (samples" in text and "deleted 0 leftovers" in text


@pytest.mark.slow
def test_ctrl_c_stops_a_run_and_prints_how_to_resume(tmp_path, model_folder):
    out, data = tmp_path / "out", tmp_path / "data.jsonl"
    data.write_text("".join(f'{{"text": "{n}"}}\n' for n in range(2_000)))
    small = ["--max-length", 64, "--batch-tokens", 64, "--shard-gb", 1e-9]
    assert tpu("plan", out, "--model", model_folder, "--data", data, *small)[0] == 0
    flags = SMALL_DEVICES["XLA_FLAGS"].replace("count=8", "count=1")
    process = subprocess.Popen(
        [sys.executable, "-m", "tpufleet", "extract", "run", str(out)],
        env={**os.environ, **SMALL_DEVICES, "XLA_FLAGS": flags, "TPUFLEET_HOME": str(tmp_path)},
        stderr=subprocess.PIPE,
        text=True,
    )
    assert "2,000 samples in 2,000 units; loading" in process.stderr.readline()
    wait_until(lambda: any((out / "shards").glob("*")), 120, lambda: "it has begun to write")
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=900)
    assert process.returncode == 130 and "Traceback" not in errors
    assert f"Resume with `tpu extract run {out}`" in errors
    # It released its units, so the next worker can claim them at once.
    assert dataset_status.DatasetMonitor(LocalFolder(out)).status()["healthy"] == 0


@contextlib.contextmanager
def interrupted_while_reading(path: Path):
    """Replace a file by a pipe, and send SIGINT to the process that reads it."""
    path.unlink(missing_ok=True)
    os.mkfifo(path)
    done = threading.Event()

    def interrupt() -> None:
        with path.open("wb"):  # waits for the reader
            os.kill(os.getpid(), signal.SIGINT)
            # A signal between the last bytecode and read() does not end read(); the end of the file
            # does, and then the signal is handled.
            done.wait(5)

    thread = threading.Thread(target=interrupt)
    thread.start()
    yield
    done.set()
    thread.join()


@pytest.mark.parametrize(
    "command, state",
    [
        (["verify", "acts"], "the dataset is unchanged"),
        (["stats", "acts"], "the dataset is unchanged"),
        (["export", "acts", "target"], "incomplete; delete its folder"),
        (
            ["plan", "acts", "--model", "acts", "--data", "acts/plan.json", "--kind", "jsonl"],
            "again",
        ),
    ],
    ids=["verify", "stats", "export", "plan"],
)
def test_ctrl_c_says_what_state_is_left(tmp_path, monkeypatch, command, state):
    monkeypatch.chdir(tmp_path)
    synthetic.extract(LocalFolder("acts"), synthetic.plan())
    Path("acts/config.json").symlink_to("plan.json")
    with interrupted_while_reading(Path("acts/plan.json")):
        code, text = tpu(*command)
    assert code == 130 and "interrupted; " in text and state in text, text


def test_a_plan_over_budget_is_rejected_and_not_written(tmp_path, prompts, model_folder):
    common = [tmp_path / "out", "--model", model_folder, "--data", prompts, "--kind", "jsonl"]
    code, text = tpu("plan", *common, "--max-gb", 0.000001)
    assert code == 1 and "allowed 1.0 kB" in text
    chips = ["--chips", "v5e-8", "--max-cost", 1e-12]
    code, text = tpu("plan", *common, *chips)
    assert code == 1 and "dollars" in text
    for limit in ("--max-cost", "--max-hours"):
        code, text = tpu("plan", *common, limit, 1)
        assert code == 2 and "pass --chips" in text
    assert not (tmp_path / "out" / "plan.json").exists()
    paid = ["--chips", "v5e-8", "--max-cost", 5]
    code, text = tpu("plan", *common, "--dry-run", *paid)
    assert code == 0 and not (tmp_path / "out" / "plan.json").exists()


def test_a_plan_is_written_although_its_output_is_not_read(tmp_path, prompts, model_folder):
    """As with `tpu extract plan … | head -1`."""
    out = tmp_path / "out"
    command = [sys.executable, "-m", "tpufleet", "extract", "plan", str(out)]
    command += ["--model", str(model_folder), "--data", str(prompts)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    process.stdout.close()
    process.wait(60)
    assert (out / "plan.json").exists()


def test_the_cost_estimate_uses_the_configured_prices(tmp_path, prompts, model_folder):
    whole = Tpu(HOME=str(tmp_path), TPUFLEET_HOME=str(tmp_path / "state"))
    asked = ["extract", "plan", str(tmp_path / "out"), "--model", str(model_folder), "--dry-run"]
    asked += ["--data", str(prompts), "--kind", "jsonl", "--chips", "v5litepod-8"]
    for capacity in ("on-demand", "spot"):
        facts = whole.json(*asked, "--capacity", capacity)
        price = prices.price_table()["v5e", capacity].usd
        assert facts["cost"] == pytest.approx(facts["hours"] * 8 * price)
    (tmp_path / "config.yaml").write_text("prices: {v5e: {spot: 5.0}}\n")
    own = Tpu(**whole.environ, TPUFLEET_CONFIG=str(tmp_path / "config.yaml"))
    facts = own.json(*asked, "--capacity", "spot")
    assert facts["cost"] == pytest.approx(facts["hours"] * 8 * 5.0)


def test_the_older_default_job_is_estimated_at_141_terabytes(tmp_path, model_folder):
    """200,000 tasks, eight augmentations, 24 layers of 896 numbers, all padded to 2,048."""
    row = 24 * 896 * 2
    estimate = planning.Estimate(
        samples=1_600_000,
        tokens=0,
        exact=False,
        skipped=0,
        bytes=0,
        bytes_if_padded=1_600_000 * 2048 * row,
        units=1,
        operations=0.0,
    )
    assert formatting.format_bytes(estimate.bytes_if_padded) == "140.9 TB"


def test_a_sampled_estimate_is_close_to_the_exact_count(tmp_path, model_folder, monkeypatch):
    path = tmp_path / "a.jsonl"
    chance = np.random.default_rng(0)
    path.write_text(
        "\n".join(json.dumps({"text": "a" * int(chance.integers(1, 200))}) for _ in range(3000))
    )
    data = {"kind": "jsonl", "path": str(path)}
    common = {"model": str(model_folder), "data": data, "choices": ["resid_post.1"]}
    exact = planning.make_plan(**common, exact=True).estimate
    rough = planning.make_plan(**common).estimate
    assert exact["exact"] and not rough["exact"]
    assert rough["tokens"] == pytest.approx(exact["tokens"], rel=0.1)
    assert exact["bytes"] == exact["tokens"] * 16 * 2


def test_hours_and_cost_follow_from_the_chips():
    base = planning.Estimate(
        samples=1,
        tokens=3_600_000,
        exact=True,
        skipped=0,
        bytes=0,
        bytes_if_padded=0,
        units=1,
        operations=197e12 * 0.4 * 3600 * 8,
    )
    timed = planning.with_cost(base, chips=("v5e", 8), price=1.2)
    assert timed.hours == pytest.approx(1.0) and timed.cost == pytest.approx(8 * 1.2)
    assert planning.with_cost(base, chips=("v5e", 8), price=None).cost is None


def test_the_peak_of_every_generation_is_known():
    assert {type_lookup.find(name).generation for name in type_lookup.spellings()} == {
        *planning.PEAKS
    }


@pytest.mark.parametrize(
    "more, message",
    [
        (["--dtype", "f8"], "'f8' is not one of"),
        (["--max-length", "0"], "0 is not in the range"),
        (["--shard-gb", "-1"], "not in the range"),
        (["--max-samples", "-3"], "not in the range"),
        (["--chips", "v9-8"], "unknown TPU type"),
        (["--site", "resid_middle.1"], "resid_post"),
        (["--site", "resid_post.99"], "layers 0 to"),
        (["--site", "resid_post.2-0"], "layers 0 to"),
        (["--kind", "text"], "no data|skipped|samples"),
        (["--data-option", "seed=1"], "jsonl data has no such options"),
        (["--model", "nowhere"], "no model at nowhere"),
        (["--tokenizer", "nowhere"], "no tokenizer at nowhere"),
        (["--site", "resid_post.[2,"], r"invalid site 'resid_post\.\[2,'"),
        (["--site", "attn_pattern.*.*", "--max-length", "40000"], "patterns of 40,000 positions"),
        (["--data", "nowhere.jsonl"], "no data at"),
        (["--data", "gs:///x"], "gs://bucket"),
    ],
)
def test_invalid_plan_options_are_rejected_with_a_message(
    tmp_path, prompts, model_folder, more, message
):
    options = ["--model", model_folder, "--data", prompts, *more]
    code, text = tpu("plan", tmp_path / "out", *options, "--dry-run")
    assert re.search(message, text), text
    missing = "nowhere" in more[1] or more[0] == "--kind"
    assert code == 2 or missing, "invalid input"
    assert "Traceback" not in text and (code != 0 or more[0] == "--kind")
    assert not (tmp_path / "out").exists()


def float_options() -> list[tuple[str, str]]:
    """Of all commands of the group: (command, option)."""
    context = click.Context(extract_group)
    commands = {name: extract_group.get_command(context, name) for name in
                extract_group.list_commands(context)}  # fmt: skip
    return [
        (name, option.opts[0])
        for name, command in commands.items()
        for option in command.params
        if isinstance(option.type, click.types.FloatParamType)
    ]


@pytest.mark.parametrize("value", ["nan", "inf", "-inf", "-1", "-1e-9"])
def test_numbers_that_are_negative_or_not_finite_are_rejected(value):
    assert len(float_options()) >= 9
    for command, option in float_options():
        result = CliRunner().invoke(extract_group, [command, option, value])
        assert result.exit_code == 2 and f"'{option}'" in result.output, (command, option)


@pytest.mark.parametrize("option", ["--lease", "--steal-after"])
def test_a_lease_that_no_date_can_hold_is_rejected(tmp_path, option):
    code, text = tpu("run", tmp_path, option, "1e300")
    assert code == 2 and option in text


def test_invalid_options_of_a_run_are_invalid_input(tmp_path):
    synthetic.extract(LocalFolder(tmp_path), synthetic.plan())
    code, text = tpu("run", tmp_path, "--mesh", "data=x", "--quiet")
    assert code == 2 and "is not a mesh" in text


@pytest.mark.parametrize(
    "name, split, message",
    [
        ("a.jsonl", "train", "has no split 'train'; omit --split"),
        ("a.jsonl", "file", "has no split 'file'"),
        ("a.parquet", "train", "has no split 'train'"),
        ("a.txt", "train", "has no split 'train'"),
        ("a.txt", "file", None),
    ],
)
def test_a_split_of_data_without_splits_is_refused(tmp_path, model_folder, name, split, message):
    (tmp_path / name).write_text('{"text": "one"}')
    planned = ["--model", model_folder, "--data", tmp_path / name, "--split", split]
    code, text = tpu("plan", tmp_path / "out", *planned)
    assert code == (2 if message else 0) and re.search(message or "samples", text), text
    assert (tmp_path / "out").exists() is (message is None)


@pytest.mark.parametrize(
    "splits, split, message",
    [
        (["train", "test"], None, "using the split train; choose another with --split: test"),
        (["train", "test"], "test", "samples"),
        (["dev", "held"], None, "has no split 'train'; choose one with --split: dev, held"),
        (["dev"], None, "samples"),
        ([], "dev", "has no split 'dev'; choose one with --split: all"),
        ([], "all", "samples"),
        ([], None, "samples"),
    ],
)
def test_the_split_of_a_saved_dataset_is_never_guessed(
    tmp_path, model_folder, splits, split, message
):
    datasets_ = pytest.importorskip("datasets")
    rows = {"text": ["one", "two"]}
    if splits:
        saved = datasets_.DatasetDict({name: datasets_.Dataset.from_dict(rows) for name in splits})
    else:
        saved = datasets_.Dataset.from_dict(rows, split="all")
    saved.save_to_disk(tmp_path / "data")
    chosen = [] if split is None else ["--split", split]
    planned = ["--model", model_folder, "--data", tmp_path / "data", *chosen]
    code, text = tpu("plan", tmp_path / "out", *planned)
    assert message in text and (code == 0) is (tmp_path / "out").exists(), text
    assert code == (2 if "--split" in message and "using" not in message else 0)


def test_missing_data_is_said_to_be_missing(tmp_path, model_folder):
    out, data = tmp_path / "out", tmp_path / "data.jsonl"
    for missing in ("nowhere", "no*where", "a/b.jsonl"):
        code, text = tpu("plan", out, "--model", model_folder, "--data", tmp_path / missing)
        assert code == 1 and f"no data at {tmp_path / missing}" in text, text
    data.write_text('{"text": "one"}\n' * 3)
    assert tpu("plan", out, "--model", model_folder, "--data", data, "--max-length", 64)[0] == 0
    data.rename(tmp_path / "moved.jsonl")
    code, text = tpu("run", out, "--quiet")
    assert code == 1 and "no data at" in text and "with --model or --data" in text


INVALID_PLANS = [
    ["--stride", "8"],
    ["--too-long", "split", "--stride", "100", "--max-length", "64"],
    ["--site", "foo.1"],
    ["--site", "resid_post.9"],
    ["--site", "resid_post.-1"],
    ["--chips", "v9-1"],
]


@pytest.mark.parametrize("more", INVALID_PLANS, ids=" ".join)
def test_the_exit_status_of_the_program_says_that_a_plan_is_invalid(
    tmp_path, prompts, model_folder, monkeypatch, more
):
    """`tpu` itself, which handles the errors of its command groups."""
    monkeypatch.chdir(tmp_path)
    planned = ["plan", "out", "--model", str(model_folder), "--data", str(prompts), *more]
    result = Tpu()("extract", *planned)
    assert result.exit_code == 2, result.output


@pytest.mark.parametrize(
    "command", [["run", "acts", "--mesh", "data=two"], ["run", "acts", "--mesh", "x=1"]]
)
def test_the_exit_status_of_the_program_says_that_an_option_is_invalid(
    tmp_path, monkeypatch, command
):
    monkeypatch.chdir(tmp_path)
    plans.write(LocalFolder("acts"), synthetic.plan())
    result = Tpu()("extract", *command)
    assert result.exit_code == 2, result.output


@pytest.mark.parametrize(
    "more, message",
    [
        (["--chips", "v5e-17"], "the nearest size is v5e-16"),
        (["--chips", "v5e-17"], "the nearest size is v5e-16"),
        (["--chips", "v5e-16", "--capacity", "free"], "'free' is not one of"),
    ],
)
def test_a_plan_names_types_and_capacities_like_every_command(
    tmp_path, prompts, model_folder, more, message
):
    options = ["--model", model_folder, "--data", prompts, "--dry-run", *more]
    code, text = tpu("plan", "out", *options)
    assert code == 2 and message in text


def test_a_missing_package_is_reported_with_the_install_command(
    tmp_path, model_folder, monkeypatch
):
    (tmp_path / "a.parquet").write_bytes(b"")
    # Import it again: an earlier test may have, with the package.
    monkeypatch.delitem(sys.modules, "tpufleet_activations.inputs.tables", raising=False)
    monkeypatch.delattr(inputs, "tables", raising=False)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    asked = ["--model", model_folder, "--data", tmp_path / "a.parquet"]
    code, text = tpu("plan", tmp_path / "out", *asked)
    assert code == 1 and "pyarrow is not installed" in text
    assert f"next: {install_command('tpufleet[extract]')}" in text


def test_status_reports_healthy_and_lost_workers(tmp_path):
    folder, now = LocalFolder(tmp_path), 10_000.0
    wanted = plans.write(folder, synthetic.plan(samples=12, unit_samples=4))
    assert dataset_status.DatasetMonitor(folder).status(now)["status"] == "WAITING"
    Units(folder, count=3, worker="lost", clock=lambda: now - 100).claim()
    assert dataset_status.DatasetMonitor(folder).status(now)["status"] == "STOPPED"
    alive = Units(folder, count=3, worker="alive", clock=lambda: now - 5)
    claim = alive.claim()
    facts = dataset_status.DatasetMonitor(folder).status(now)
    assert (facts["status"], facts["healthy"], facts["lost"]) == ("RUNNING", 1, 1)
    assert facts["workers"] == ["alive"]
    files = synthetic.record(folder, wanted, claim)
    alive.commit(claim, unit_writer.commit_outcome(wanted, claim.unit, files))
    assert dataset_status.DatasetMonitor(folder).status(now)["samples"] == 4


@pytest.mark.parametrize(
    "count, text", [(0, "0 B"), (999, "999 B"), (1_500, "1.5 kB"), (2.5e12, "2.5 TB")]
)
def test_bytes_are_formatted(count, text):
    assert formatting.format_bytes(count) == text


@pytest.mark.slow
def test_progress_is_reported_to_the_platform(tmp_path, prompts, model_folder, monkeypatch):
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    monkeypatch.setenv("TPUFLEET_RUN_DIR", str(run_dir))
    monkeypatch.setenv("TPUFLEET_JOB_ID", "job-7")
    out = LocalFolder(tmp_path / "out")
    data = {"kind": "jsonl", "path": str(prompts)}
    plans.write(
        out, planning.make_plan(model=str(model_folder), data=data, choices=["resid_post.0"])
    )
    extraction.run(out, extraction.ExtractionSettings(poll=0.02))
    progress = json.loads((run_dir / "progress.json").read_text())
    assert (progress["step"], progress["total"]) == (24, 24)
    workers = {commit.worker for commit in datasets.Dataset(out).commits.values()}
    assert workers == {"job-7-0-0"}


# -- a fleet ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "zone, number, name",
    [
        ("us-central1-a", 0, "tpu-us-central1-a-0"),
        ("europe-west4-a", 1, "tpu-europe-west4-a-1"),
        ("us-central1-f", 12, "tpu-us-central1-f-12"),
    ],
)
def test_worker_names_match_the_older_scripts(zone, number, name):
    assert fleet.worker_name(zone, number) == name


def test_a_fleet_has_one_job_per_worker_on_one_shared_dataset():
    jobs = fleet.worker_jobs(
        "gs://bucket/run",
        zones=["us-central1-a", "europe-west4-b"],
        workers_per_zone=2,
        accelerator="v5e-8",
    )
    assert [job["name"] for job in jobs] == [
        "tpu-us-central1-a-0",
        "tpu-us-central1-a-1",
        "tpu-europe-west4-b-0",
        "tpu-europe-west4-b-1",
    ]
    assert {tuple(job["tags"]) for job in jobs} == {(fleet.fleet_tag("gs://bucket/run"),)}
    assert {tuple(job["command"]) for job in jobs} == {("tpu", "extract", "run", "gs://bucket/run")}
    yaml = pytest.importorskip("yaml")
    assert list(yaml.safe_load_all(fleet.to_job_file(jobs))) == jobs


@pytest.mark.parametrize(
    "change, message",
    [
        ({"out": "/tmp/here"}, "gs://"),
        ({"zones": []}, "zone"),
        ({"zones": ["a", "a"]}, "different zones"),
    ],
)
def test_invalid_fleet_settings_are_rejected(change, message):
    asked = {
        "out": "gs://b/r",
        "zones": ["a"],
        "workers_per_zone": 1,
        "accelerator": "v5e-8",
        **change,
    }
    with pytest.raises(BadInput, match=message):
        fleet.worker_jobs(asked.pop("out"), **asked)


def test_the_example_runs_and_verifies_its_dataset():
    script = ROOT / "examples" / "extract" / "small.py"
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr
    assert "30 samples, 120 tokens, 4 units" in done.stdout
    assert "whole: True - tokens stored: 120" in done.stdout


@pytest.mark.parametrize("command", ["run", "status", "verify", "stats"])
def test_commands_import_jax_only_where_a_model_runs(tmp_path, command):
    """Importing it takes a second: a missing plan is reported before, and reading needs none."""
    if command != "run":
        synthetic.extract(LocalFolder(tmp_path), synthetic.plan(samples=4))
    code = (
        "import sys; from tpufleet.__main__ import run; "
        f"status = run(['extract', {command!r}, {str(tmp_path)!r}]); "
        "print('jax' in sys.modules); sys.exit(status)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == (1 if command == "run" else 0), done.stderr
    assert done.stdout.splitlines()[-1] == "False"


def test_a_run_ends_with_its_status_and_all_of_its_output(tmp_path):
    """Although the interpreter is not torn down."""
    command = [sys.executable, "-m", "tpufleet", "extract", "run", str(tmp_path / "typo")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1 and "has no plan.json" in done.stderr
    assert not (tmp_path / "typo").exists()


def long_and_short_texts(tmp_path: Path) -> Path:
    data = tmp_path / "data.jsonl"
    data.write_text('{"text": "short"}\n' + json.dumps({"text": "x" * 300}) + "\n")
    return data


@pytest.mark.parametrize(
    ("arguments", "warned"),
    [
        (("--max-length", 257), "--max-length 257"),
        (("--max-length", 256), ""),
        ((), "--max-length 2,048"),  # the default, with a sample beyond the limit
        (("--max-samples", 1), ""),  # the default, with short samples alone
    ],
)
def test_a_plan_beyond_the_positions_of_the_model_is_warned_of(
    tmp_path, model_folder, arguments, warned
):
    data = long_and_short_texts(tmp_path)
    command = ("plan", tmp_path / "out", "--model", model_folder, "--data", data, "--dry-run")
    code, text = tpu(*command, *arguments)
    assert code == 0
    limit = "is beyond the model's limit of 256 tokens (max_position_embeddings)"
    assert (f"warning: {warned} {limit}" in text) == bool(warned), text
    assert ("next: pass --max-length 256" in text) == bool(warned)


@pytest.mark.parametrize(
    ("rope", "limit"),
    [
        ({"rope_type": "yarn"}, 1024),
        ({"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}, 256),
    ],
    ids=["YaRN extends them", "Llama 3 states the extended ones"],
)
def test_positions_of_scaled_embeddings(tmp_path, model_folder, rope, limit):
    model = tmp_path / "model"
    shutil.copytree(model_folder, model)
    config = json.loads((model / "config.json").read_text())
    config["rope_parameters"] |= {
        **rope, "factor": 4.0, "original_max_position_embeddings": 256,
    }  # fmt: skip
    (model / "config.json").write_text(json.dumps(config))
    data = long_and_short_texts(tmp_path)
    command = ("plan", tmp_path / "out", "--model", model, "--data", data, "--dry-run")
    assert "warning" not in tpu(*command, "--max-length", limit)[1]
    assert f"limit of {limit:,} tokens" in tpu(*command, "--max-length", limit + 1)[1]


def test_a_run_of_a_complete_dataset_loads_nothing(tmp_path):
    plan = synthetic.plan(samples=4, model="/nowhere")
    synthetic.extract(LocalFolder(tmp_path), plan)
    code, text = tpu("run", tmp_path)
    assert code == 0 and "loading" not in text, text
    assert "nothing to run" in text
    code, text = tpu("run", tmp_path, "--json")
    assert code == 0 and json.loads(text)["samples"] == json.loads(text)["total"] == 4


def test_a_run_says_which_model_it_loads(tmp_path, model_folder):
    (tmp_path / "data.jsonl").write_text('{"text": "one"}')
    shutil.copytree(model_folder, tmp_path / "moved")
    planned = ["--model", model_folder, "--data", tmp_path / "data.jsonl"]
    assert tpu("plan", tmp_path / "out", *planned, "--site", "resid_post.0")[0] == 0
    code, text = tpu("run", tmp_path / "out", "--model", tmp_path / "moved")
    assert code == 0 and f"loading {tmp_path / 'moved'} and" in text, text


def test_a_run_of_a_complete_dataset_on_a_read_only_disk_has_nothing_to_do(small_disk):
    out = small_disk.folder / "acts"
    plan = synthetic.plan(samples=4)
    synthetic.extract(LocalFolder(out), plan)
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk.folder)], check=True)
    code, text = tpu("run", out)
    assert code == 0, text
    assert f"4 samples in {plan.units} unit" in text
    code, text = tpu("run", out, "--json", "--quiet")
    assert code == 0 and json.loads(text)["samples"] == 4


def test_a_run_of_an_incomplete_dataset_on_a_read_only_disk_fails(small_disk):
    out = small_disk.folder / "acts"
    plans.write(LocalFolder(out), synthetic.plan(samples=4))
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk.folder)], check=True)
    code, text = tpu("run", out)
    assert code == 1 and "cannot read or write" in text and "Read-only" in text
