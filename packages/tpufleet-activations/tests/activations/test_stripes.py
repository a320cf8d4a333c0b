"""Datasets on several disks: shards are spread, found, resumed and repaired; lost disks named."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import subprocess

import numpy as np
import pytest

from tests.activations import synthetic
from tests.activations.tiny_model import tpu
from tpufleet.errors import BadInput, Conflict, NotFound
from tpufleet.runtime.units import Units
from tpufleet_activations import plans
from tpufleet_activations.io import (
    datasets,
    dtypes,
    shard_writer,
    striped_folder,
    unit_writer,
    verification,
)
from tpufleet_activations.io.addresses import open_storage
from tpufleet_activations.io.storage import LocalFolder


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
        pool.shutdown()
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
    lost = int(victim.name[:8])
    leftover = disks[1] / f"shards/{lost:08d}-0000-001-0000.safetensors"
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
    code, text = tpu(*planned, "--shard-gb", 1e-6)
    assert code == 0, text
    if disks[1:]:
        code, text = tpu("stripe", *disks)
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
    code, text = tpu("run", out, "--quiet")
    assert code == 1 and f"no space left on device at {out}" in text, text
    assert f"tpu extract stripe {out} FOLDER" in text and f"tpu extract run {out}" in text
    code, text = tpu("stripe", out, other)
    assert code == 1 and f"no space left on device at {out}" in text, text
    assert f"the folders of {out} are unchanged" in text and not other.exists()
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
    assert code == 2 and f"not one of the folders of {disks[0]}" in text
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
    with pytest.raises(Conflict, match=r"disk1/acts holds 4 shards .* and 0 other files"):
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
    code, text = tpu("stripe", "gs://bucket/acts", disks[1])
    assert code == 2 and "expected a folder" in text


def contents(folder) -> dict[str, bytes]:
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


OTHER_PLAN = synthetic.plan(data_digest="7")
OTHER_FOLDERS = {
    "a dataset": lambda folder: synthetic.extract(LocalFolder(folder), OTHER_PLAN),
    "a plan": lambda folder: plans.write(LocalFolder(folder), OTHER_PLAN),
    "a folder of another dataset": lambda folder: striped_folder.set_folders(
        LocalFolder(folder.with_name("other")), [folder]
    ),
    "shards without a plan": lambda folder: LocalFolder(folder).replace(
        "shards/00000000-0000-000.safetensors", b"of a lost dataset"
    ),
    "other shards": lambda folder: LocalFolder(folder).replace("shards/a.bin", b"of a program"),
    "hidden shards": lambda folder: LocalFolder(folder).replace("shards/.a", b"of a program"),
    "a subfolder of shards": lambda folder: (folder / "shards/more").mkdir(parents=True),
    "inside a dataset": lambda folder: plans.write(LocalFolder(folder.parent), OTHER_PLAN),
    "inside the shards of a dataset": lambda folder: striped_folder.set_folders(
        LocalFolder(folder.parent.with_name("far")), [folder.parent]
    ),
    "a link to the dataset": lambda folder: folder.symlink_to(folder.parents[1] / "disk0/acts"),
}


@pytest.mark.parametrize("other", OTHER_FOLDERS)
def test_a_folder_with_files_that_could_be_taken_for_shards_is_refused(other, disks, tmp_path):
    storage = LocalFolder(disks[0])
    synthetic.extract(storage, synthetic.plan())
    OTHER_FOLDERS[other](disks[1])
    before = contents(tmp_path)
    code, text = tpu("stripe", disks[0], disks[2], disks[1])
    assert code != 0 and (str(disks[1]) in text or "named once" in text), text
    assert contents(tmp_path) == before and not disks[2].exists()


def test_two_folders_of_a_dataset_are_not_inside_each_other(disks):
    with pytest.raises(BadInput, match="separate folders"):
        striped_folder.set_folders(LocalFolder(disks[0]), [disks[1], disks[1] / "more"])


def test_a_new_dataset_is_not_planned_between_files_of_another(disks):
    stripe(disks)
    synthetic.extract(open_storage(disks[0]), synthetic.plan(samples=60, unit_samples=5))
    with pytest.raises(Conflict, match=r"another dataset \(stripe\.json"):
        plans.write(LocalFolder(disks[1]), OTHER_PLAN)
    (disks[0] / "plan.json").unlink()
    with pytest.raises(Conflict, match=r"another dataset \(shards/, but no plan\.json"):
        plans.write(LocalFolder(disks[0]), OTHER_PLAN)


# Named almost like files of a dataset. Unit 99 is not in the plan, token 77 was never claimed.
FOREIGN_FILES = (
    "notes.txt",
    "shards/notes.txt",
    "shards/model.safetensors",
    "shards/00000001-0000-000.safetensors.bak",
    "shards/1-0-0.safetensors",
    "shards/00000099-0000-000-0000.safetensors",
    "shards/00000001-0077-000-0000.safetensors",
    "gangs/notes.json",
    "index/part-time.txt",
    ".staging/mine/lock",
)


def test_no_command_touches_a_file_that_the_dataset_did_not_write(disks, tmp_path, model_folder):
    plan_tiny(disks, tmp_path, model_folder)
    for folder in disks:
        for name in FOREIGN_FILES:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(name.encode())
    assert tpu("run", disks[0], "--quiet")[0] == 0
    victim = next(path for path in disks[1].glob("shards/*-0000-000-0000.safetensors")
                  if "00000099" not in path.name)  # fmt: skip
    victim.write_bytes(victim.read_bytes()[:-1])
    code, text = tpu("repair", disks[0])
    assert code == 0, text
    assert f"replaced by repair: shards/{victim.name}" in text
    assert "leftover, harmless" not in text
    code, text = tpu("verify", disks[0], "--sweep")
    assert code == 0 and "deleted 1 leftovers" in text, text
    for name in FOREIGN_FILES:
        if name.startswith("shards/"):
            assert f"foreign, kept: {name}" in text
    assert not victim.exists()
    for folder in disks:
        found = contents(folder)
        assert {name: found.get(name) for name in FOREIGN_FILES} == {
            name: name.encode() for name in FOREIGN_FILES
        }


def add_by_mistake(out, folder) -> None:
    """What `tpu extract stripe` of an earlier version did with the folder of another dataset."""
    marked = LocalFolder(folder)
    hidden = folder.with_name("hidden")
    folder.rename(hidden)
    striped_folder.set_folders(LocalFolder(out), [folder])
    marked.path.joinpath(striped_folder.MARKER).rename(hidden / striped_folder.MARKER)
    folder.rmdir()
    hidden.rename(folder)


@pytest.mark.parametrize("finished", [True, False], ids=["complete", "unfinished"])
def test_a_dataset_that_was_added_by_mistake_is_kept_and_can_be_left_out(disks, finished):
    """Both have shards with the same names."""
    out, other = LocalFolder(disks[0]), LocalFolder(disks[1])
    synthetic.extract(other, synthetic.plan(samples=40, unit_samples=4, data_digest="7"))
    wanted = synthetic.plan()
    if finished:
        synthetic.extract(out, wanted)
    else:
        plans.write(out, wanted)
        Units(out, count=wanted.units, worker="a").claim()
    before = contents(disks[1])
    add_by_mistake(*disks[:2])
    if finished:  # a worker was too late with unit 0: it has another shard now
        verification.reopen(out, [0])
        synthetic.extract(out, wanted, worker="b")
    for command in (["verify", disks[0], "--sweep"], ["run", disks[0], "--quiet"]):
        code, text = tpu(*command)
        if finished or command[0] == "run":
            assert code == 1, text
            assert f"`tpu extract stripe {disks[0]} --without {disks[1]}`" in text
    assert {name: contents(disks[1])[name] for name in before} == before
    code, text = tpu("stripe", disks[0], "--without", disks[1])
    assert code == 0 and "mv" not in text, text
    assert contents(disks[1]) == before, "without the marker"
    if finished:
        assert tpu("verify", disks[0], "--sweep")[0] == 0
    assert tpu("verify", disks[1])[0] == 0


def test_a_folder_with_shards_of_its_own_and_others_says_which_to_move(disks):
    storage = stripe(disks)
    synthetic.extract(storage, synthetic.plan(samples=60, unit_samples=5))
    (disks[1] / "shards/notes.txt").write_bytes(b"")
    with pytest.raises(Conflict, match="holds 4 shards") as caught:
        striped_folder.set_folders(LocalFolder(disks[0]), [disks[2]])
    assert "and 1 other files" in str(caught.value)
    for path in disks[1].glob("shards/0*"):
        path.rename(disks[2] / "shards" / path.name)
    striped_folder.set_folders(LocalFolder(disks[0]), [disks[2]])
    assert sorted(path.name for path in disks[1].glob("[!.]*")) == ["shards"]
    assert counts([disks[1]]) == [1]


class ReadOnlyFolder(LocalFolder):
    """A folder on a disk that is mounted read-only."""

    def replace(self, name, data):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(self.path / name))


def test_a_read_only_dataset_leaves_new_folders_as_they_were(tmp_path):
    out = ReadOnlyFolder(tmp_path / "acts")
    synthetic.extract(LocalFolder(out.path), synthetic.plan())
    (tmp_path / "mine").mkdir()
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(OSError, match="Read-only"):
        striped_folder.set_folders(out, [tmp_path / "mine", tmp_path / "new/deep/acts"])
    assert sorted(tmp_path.rglob("*")) == before


def test_the_message_of_a_read_only_dataset_is_about_its_folders(small_disk, tmp_path):
    out = small_disk.folder / "acts"
    synthetic.extract(LocalFolder(out), synthetic.plan())
    remount = ["mount", "-o", "remount,ro", str(small_disk.folder)]
    if subprocess.run(remount, capture_output=True).returncode:
        pytest.skip("the disk cannot be mounted read-only")
    code, text = tpu("stripe", out, tmp_path / "new")
    assert code == 1 and "Read-only file system" in text, text
    assert f"the folders of {out} are unchanged" in text and "tpu extract run" not in text
    assert not (tmp_path / "new").exists()
