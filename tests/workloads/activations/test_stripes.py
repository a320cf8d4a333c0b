"""Datasets on several disks: shards are spread, found, resumed and repaired; lost disks named."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil

import numpy as np
import pytest

from tests.workloads.activations import synthetic
from tests.workloads.activations.tiny_model import tpu
from tpufleet.errors import BadInput, Conflict, NotFound
from tpufleet.runtime.units import Units
from tpufleet.workloads.activations import plans
from tpufleet.workloads.activations.io import (
    datasets,
    dtypes,
    shard_writer,
    striped_folder,
    unit_writer,
    verification,
)
from tpufleet.workloads.activations.io.storage import LocalFolder, open_storage


@pytest.fixture
def disks(tmp_path):
    folders = [tmp_path / f"disk{n}" / "acts" for n in range(3)]
    for folder in folders:
        folder.parent.mkdir()
    return folders


def stripe(disks):
    return striped_folder.set_folders(LocalFolder(disks[0]), disks[1:])


def counts(disks) -> list[int]:
    return [len(list(folder.glob("shards/*"))) for folder in disks]


def test_the_shards_of_a_unit_are_on_all_disks_at_default_sizes(disks):
    """A unit of 300 MB with rows of a real width, written as a worker writes it."""
    stripe(disks)
    storage = open_storage(disks[0])
    length, width, samples = 2048, 896, 80
    plan = plans.write(
        storage,
        plans.ExtractionPlan(
            model="m", model_digest="m", tokenizer="m", tokenizer_digest="t",
            data={"kind": "jsonl", "path": "/x"}, data_digest="d", samples=samples,
            unit_samples=samples, sites=("resid_post.8",), widths={"resid_post.8": width},
        ),
    )  # fmt: skip
    units = Units(storage, count=1, worker="a")
    claim = units.claim()
    position = np.arange(length, dtype=np.int32)
    rows = np.random.default_rng(0).normal(size=(length, width))
    rows = rows.astype(dtypes.stored_dtype("bf16"))
    stored = [
        unit_writer.StoredSample(sample=n, tokens=position, positions=position, metadata={})
        for n in range(samples)
    ]
    pools = shard_writer.WriterPool(4, 16), shard_writer.WriterPool(4, 8)
    writer = unit_writer.UnitWriter(
        storage, plan, claim, stored, executor=pools[0], uploader=pools[1]
    )
    for n in range(samples):
        writer.append("resid_post.8", np.roll(rows, n, axis=0))
    units.commit(claim, unit_writer.commit_outcome(plan, 0, writer.finish()))
    for pool in pools:
        pool.close()
    assert counts(disks) == [2, 2, 1]
    assert verification.verify(storage).intact
    data = datasets.open_dataset(str(disks[0]))
    for sample in (0, 41, 79):
        np.testing.assert_array_equal(
            data.read(sample, "resid_post.8"), np.roll(rows, sample, axis=0)
        )
    seen = sum(map(len, datasets.shuffled_rows(data, "resid_post.8", batch=4096)))
    assert seen == samples * length


def test_units_go_to_all_disks_in_turn_and_are_read_back(disks):
    stripe(disks)
    storage = open_storage(disks[0])
    wanted = synthetic.plan(samples=60, unit_samples=5)
    synthetic.extract(storage, wanted)
    assert counts(disks) == [4, 4, 4]
    assert verification.verify(storage).intact
    data = datasets.open_dataset(str(disks[0]))
    for sample in range(60):
        stored = data.read(sample, "mlp_hidden.1").astype(np.float64)
        np.testing.assert_array_equal(stored, synthetic.values(sample, "mlp_hidden.1"))


def test_a_lost_shard_is_repaired_and_leftovers_of_all_disks_are_deleted(disks):
    storage = stripe(disks)
    wanted = synthetic.plan(samples=60, unit_samples=5)
    synthetic.extract(storage, wanted)
    victim = next(disks[2].glob("shards/*"))
    victim.unlink()
    leftover = disks[1] / "shards/00000001-0009-000-0000.safetensors"
    leftover.write_bytes(b"of a dead worker")
    report = verification.verify(storage)
    assert len(report.bad_units) == 1 and "is missing" in report.problems[0]
    verification.reopen(storage, report.bad_units)
    synthetic.extract(open_storage(disks[0]), wanted, worker="b")
    assert verification.verify(storage).intact
    verification.delete_leftovers(storage)
    assert not leftover.exists() and sum(counts(disks)) == 12


def test_a_missing_disk_is_named_and_the_status_still_shown(disks):
    storage = stripe(disks)
    synthetic.extract(storage, synthetic.plan(samples=20, unit_samples=5))
    away = disks[1].with_name("unmounted")
    disks[1].rename(away)
    disks[1].mkdir()  # an empty mount point
    for command in ("verify", "run"):
        code, text = tpu(command, disks[0])
        assert code == 1 and f"{disks[1]}, which holds shards" in text, text
        assert f"`tpu extract stripe {disks[0]} --without {disks[1]}`" in text
        assert f"`tpu extract repair {disks[0]}`" in text
    with pytest.raises(NotFound, match="mount its disk"):
        datasets.open_dataset(str(disks[0])).read(1, "resid_post.0")
    assert json.loads(tpu("status", disks[0], "--json")[1])[str(disks[0])]["samples"] == 20
    code, text = tpu("stripe", disks[0])
    assert code == 0 and "missing" in text
    disks[1].rmdir()
    away.rename(disks[1])
    assert tpu("verify", disks[0])[0] == 0


def test_a_lost_disk_is_replaced_and_its_units_rebuilt(disks, tmp_path):
    storage = stripe(disks)
    wanted = synthetic.plan(samples=60, unit_samples=5)
    synthetic.extract(storage, wanted)
    shutil.rmtree(disks[1])
    spare = tmp_path / "spare"
    code, text = tpu("stripe", disks[0], disks[2], spare)
    assert code == 0, text
    storage = open_storage(disks[0])
    report = verification.verify(storage)
    assert len(report.bad_units) == 4
    verification.reopen(storage, report.bad_units)
    synthetic.extract(storage, wanted, worker="b")
    assert verification.verify(storage).intact
    assert sum(counts([disks[0], disks[2], spare])) == 12


def plan_tiny(disks, tmp_path, model_folder) -> None:
    data = tmp_path / "data.jsonl"
    data.write_text("\n".join(json.dumps({"tokens": list(range(1, 9))}) for _ in range(24)))
    planned = ["plan", disks[0], "--model", model_folder, "--data", data, "--site", "resid_post.0"]
    stripes = [option for folder in disks[1:] for option in ("--stripe", folder)]
    code, text = tpu(*planned, "--shard-gb", 1e-6, *stripes)
    assert code == 0, text


@pytest.mark.slow
def test_the_commands_that_the_message_of_a_lost_disk_names_rebuild_its_units(
    disks, tmp_path, model_folder
):
    """Also when no other folder is left."""
    plan_tiny(disks[:2], tmp_path, model_folder)
    assert tpu("run", disks[0], "--quiet")[0] == 0
    before = {
        sample: values.tobytes()
        for sample in range(24)
        for values in [datasets.open_dataset(str(disks[0])).read(sample, "resid_post.0")]
    }
    lost = counts(disks)[1]
    shutil.rmtree(disks[1])
    code, text = tpu("repair", disks[0])
    assert code == 1 and lost, text
    for command in re.findall("`tpu extract ([^`]+)`", text):
        code, printed = tpu(*command.split())
        assert code == 0, printed
    assert f"reopened {lost:,} of" in printed
    assert tpu("verify", disks[0])[0] == 0
    data = datasets.open_dataset(str(disks[0]))
    assert {n: data.read(n, "resid_post.0").tobytes() for n in range(24)} == before


def test_a_run_on_a_full_disk_continues_on_another_one(small_disk, tmp_path, model_folder):
    out, other = small_disk.folder / "acts", tmp_path / "other"
    plan_tiny([out], tmp_path, model_folder)
    small_disk.fill([])
    # Nothing can be written, neither shards nor records.
    for command in (["run", out, "--quiet"], ["stripe", out, other]):
        code, text = tpu(*command)
        assert code == 1 and f"no space left on device at {out}" in text, text
        assert f"tpu extract stripe {out} FOLDER" in text and f"tpu extract run {out}" in text
    assert not list(out.glob("*/.*"))  # drafts of records
    filler = small_disk.folder / "filler"
    os.truncate(filler, filler.stat().st_size - 2**20)
    code, text = tpu("stripe", out, other)
    assert code == 0, text
    code, text = tpu("run", out, "--quiet")
    assert code == 0, text
    assert tpu("verify", out)[0] == 0
    assert counts([out])[0] == 0 < counts([other])[0]
    # Repairing a damaged unit needs space for a record.
    next(other.glob("shards/*")).unlink()
    small_disk.free([])
    small_disk.fill([])
    code, text = tpu("repair", out)
    assert code == 1 and "no space left on device" in text, text
    small_disk.free([])
    assert tpu("repair", out)[0] == 0
    assert tpu("verify", out)[0] == 0


class BadSector(LocalFolder):
    """A disk that cannot read the shards of unit 1."""

    def read_range(self, name, start, size):
        if name.startswith("shards/00000001-0000"):
            raise OSError(errno.EIO, "Input/output error")
        return super().read_range(name, start, size)


def test_a_shard_that_the_disk_cannot_read_is_a_damaged_unit(tmp_path):
    disk, wanted = BadSector(tmp_path / "acts"), synthetic.plan(samples=20, unit_samples=5)
    synthetic.extract(LocalFolder(disk.path), wanted)
    report = verification.verify(disk)
    assert report.bad_units == (1,) and "Input/output error" in report.problems[0]
    verification.reopen(disk, report.bad_units)
    synthetic.extract(disk, wanted, worker="b")
    assert verification.verify(disk).intact


def test_a_disk_that_cannot_be_read_is_named_like_a_missing_one(disks):
    storage = stripe(disks)
    synthetic.extract(storage, synthetic.plan(samples=20, unit_samples=5))
    shutil.rmtree(disks[1])
    disks[1].write_bytes(b"")  # reading a file below it fails with another error than NotFound
    code, text = tpu("verify", disks[0])
    assert code == 1 and "Not a directory" in text and "tpu extract repair" in text
    code, text = tpu("stripe", disks[0], "--without", disks[1])
    assert code == 0, text
    assert len(verification.verify(open_storage(disks[0])).bad_units) == 1


def test_only_folders_of_the_dataset_are_left_out(disks):
    storage = stripe(disks)
    synthetic.extract(storage, synthetic.plan(samples=60, unit_samples=5))
    code, text = tpu("stripe", disks[0], "--without", disks[0].parent / "other")
    assert code == 1 and f"not one of the folders of {disks[0]}" in text
    code, text = tpu("stripe", disks[0], "--without", disks[1])
    assert code == 1 and "disk1/acts holds 4 shards" in text
    code, text = tpu("stripe", disks[0], disks[1], "--without", disks[2])
    assert code == 2 and "--without" in text


def test_disks_are_added_and_shards_moved_at_any_time(disks, tmp_path):
    plain = LocalFolder(disks[0])
    wanted = synthetic.plan(samples=60, unit_samples=5)
    plans.write(plain, wanted)
    units = Units(plain, count=wanted.units, worker="a")
    for _ in range(5):
        claim = units.claim()
        files = synthetic.record(plain, wanted, claim)
        units.commit(claim, unit_writer.commit_outcome(wanted, claim.unit, files))
    stripe(disks)
    synthetic.extract(open_storage(disks[0]), wanted, worker="b")
    assert all(counts(disks)) and sum(counts(disks)) == 12
    for shard in disks[1].glob("shards/*"):
        shard.rename(disks[2] / "shards" / shard.name)
    storage = striped_folder.set_folders(LocalFolder(disks[0]), [disks[2]])
    assert verification.verify(storage).intact


def test_folders_that_cannot_be_used_are_refused(disks, tmp_path):
    storage = stripe(disks)
    synthetic.extract(storage, synthetic.plan(samples=60, unit_samples=5))
    first, other = LocalFolder(disks[0]), LocalFolder(tmp_path / "other")
    with pytest.raises(Conflict, match=r"disk1/acts holds 4 shards .*`mv "):
        striped_folder.set_folders(first, [disks[2]])
    with pytest.raises(Conflict, match="another dataset"):
        striped_folder.set_folders(other, [disks[1]])
    for folders in ([disks[1], disks[1]], [disks[0]], [disks[0] / "more"], [tmp_path]):
        with pytest.raises(BadInput):
            striped_folder.set_folders(first, folders)
    (disks[1] / striped_folder.MARKER).write_text("{")
    with pytest.raises(BadInput, match="cannot be read"):
        open_storage(disks[0]).names("shards/")


@pytest.mark.parametrize(
    "free, chosen",
    [
        ([100, 100, 100], 1),
        ([100, 1, 100], 2),
        ([100, 1, 1], 0),
        ([1, 1, 1], 1),
    ],
)
def test_a_disk_with_little_space_is_passed_over(free, chosen):
    name = "shards/00000003-0007-000-0001.safetensors"
    assert striped_folder.choose_folder(name, [gib << 30 for gib in free]) == chosen


def test_a_plan_on_several_disks_from_the_command_line(disks, tmp_path, model_folder):
    plan_tiny(disks, tmp_path, model_folder)
    code, text = tpu("run", disks[0], "--json", "--quiet")
    assert code == 0, text
    assert json.loads(text.splitlines()[-1])["writes"] in ("direct", "buffered")
    assert all(counts(disks))
    assert tpu("verify", disks[0])[0] == 0
    stripes = json.loads(tpu("stripe", disks[0], "--json")[1])
    assert [entry["folder"] for entry in stripes] == list(map(str, disks))
    assert [entry["shards"] for entry in stripes] == counts(disks)
    planned = ["--model", model_folder, "--data", tmp_path / "data.jsonl", "--site", "resid_post.0"]
    code, text = tpu("plan", "gs://bucket/acts", *planned, "--stripe", disks[1])
    assert code == 1 and "expected a folder" in text
