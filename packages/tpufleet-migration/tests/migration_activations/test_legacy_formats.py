"""Import and export of the formats of the older extraction scripts."""

from __future__ import annotations

import gzip
import json
import pickle
import shlex
from pathlib import Path

import numpy as np
import pytest

from tests.activations import synthetic
from tests.activations.tiny_model import task, tpu
from tpufleet.errors import BadInput, NotFound
from tpufleet.runtime.units import Units
from tpufleet_activations import plans
from tpufleet_activations.io import datasets, verification
from tpufleet_activations.io.addresses import open_storage
from tpufleet_activations.io.storage import LocalFolder
from tpufleet_activations.pipeline import planning
from tpufleet_migration.activations import importer, pickle_shards, stream_status

PICKLE = ("--format", "pickle")


def test_export_and_import_round_trip(tmp_path):
    first, second = LocalFolder(tmp_path / "a"), LocalFolder(tmp_path / "b")
    synthetic.extract(first, synthetic.plan(samples=9))
    code, text = tpu("export", tmp_path / "a", tmp_path / "old", "--shard-gb", 1e-6, *PICKLE)
    assert code == 0, text
    names = sorted(path.name for path in (tmp_path / "old").glob("shard_*"))
    assert names[0] == "shard_0001.pkl.gz" and len(names) > 1
    with gzip.open(tmp_path / "old" / names[0]) as file:
        shard = pickle.load(file)
    assert sorted(shard) == [0, 3]
    assert set(shard[0][0]) == {"sample_idx", "activation", "shape", "text_preview"}
    assert shard[0][0]["activation"].shape == shard[0][0]["shape"]
    facts = json.loads((tmp_path / "old" / "metadata.json").read_text())
    assert facts["total_unique_samples"] == 9 and facts["total_activations"] == 18
    checkpoint = json.loads((tmp_path / "old" / "checkpoint_worker_0.json").read_text())
    assert checkpoint == {
        "worker_id": 0,
        "last_processed_sample_idx": 8,
        "total_samples_processed": 9,
        "total_shards": len(names),
        "dataset_path": "/data/x.jsonl",
        "model_path": "/models/synthetic",
        "status": "completed",
    }
    code, text = tpu("import", tmp_path / "old", tmp_path / "b")
    assert code == 0 and "lost" not in text
    assert plans.load(second).model == "/models/synthetic"
    assert verification.verify(second).intact
    back = datasets.Dataset(second)
    for sample in range(9):
        for site in ("resid_post.0", "resid_post.3"):
            np.testing.assert_array_equal(
                back.read(sample, site), datasets.Dataset(first).read(sample, site)
            )


def test_an_export_needs_an_empty_folder(tmp_path):
    synthetic.extract(LocalFolder(tmp_path / "a"), synthetic.plan(samples=9))
    export = ["export", tmp_path / "a", tmp_path / "target", *PICKLE]
    assert tpu(*export)[0] == 0
    before = {path: path.read_bytes() for path in (tmp_path / "target").iterdir()}
    code, text = tpu(*export)
    assert code == 1 and "choose an empty folder" in text, text
    assert {path: path.read_bytes() for path in (tmp_path / "target").iterdir()} == before


@pytest.mark.parametrize("existing", [True, False], ids=["existing", "new"])
@pytest.mark.parametrize(
    "command, advice",
    [
        (
            ["export", "acts", "TARGET", *PICKLE],
            "the export is incomplete; delete its folder",
        ),
        (["import", "old", "TARGET"], "run the import again"),
    ],
    ids=["pickle", "import"],
)
def test_a_full_disk_is_reported_as_one(
    small_disk, tmp_path, model_folder, monkeypatch, command, advice, existing
):
    monkeypatch.chdir(tmp_path)
    synthetic.extract(LocalFolder("acts"), synthetic.plan(samples=9))
    old_shard(tmp_path / "old" / "shard_0001.pkl.gz", range(4))
    (tmp_path / "data.jsonl").write_text('{"text": "one"}')
    target = small_disk.folder / "target"
    if existing:
        target.mkdir()
    small_disk.fill([])
    command = [{"TARGET": target, "MODEL": model_folder}.get(word, word) for word in command]
    code, text = tpu(*command)
    assert code == 1 and f"at {target} (0.0 GiB free)" in text, text
    assert advice in text
    small_disk.free([])
    code, text = tpu(*command)
    assert code == 0, text


def test_export_pads_when_asked(tmp_path):
    folder = LocalFolder(tmp_path / "a")
    synthetic.extract(folder, synthetic.plan(samples=2))
    old = LocalFolder(tmp_path / "old")
    pickle_shards.export_shards(datasets.Dataset(folder), old, pad_to=16, compress=False)
    shard = pickle_shards.read_shard(tmp_path / "old" / "shard_0001.pkl")
    assert {record["shape"] for record in shard[0]} == {(16, 8)}
    with pytest.raises(NotFound, match="attn_out"):
        pickle_shards.export_shards(datasets.Dataset(folder), old, site="attn_out")
    with pytest.raises(BadInput, match="pad-to 1"):
        pickle_shards.export_shards(datasets.Dataset(folder), old, pad_to=1)


class Evil:
    def __reduce__(self):
        return (eval, ("open('/tmp/owned', 'w')",))


def test_a_pickle_that_would_run_code_is_rejected(tmp_path):
    with gzip.open(tmp_path / "shard_0001.pkl.gz", "wb") as file:
        pickle.dump({0: [Evil()]}, file)
    with pytest.raises(BadInput, match=r"eval"):
        pickle_shards.read_shard(tmp_path / "shard_0001.pkl.gz")


def test_samples_with_missing_layers_are_reported(tmp_path):
    record = {"sample_idx": 5, "activation": np.zeros((2, 4), np.float32), "shape": (2, 4)}
    shard = {0: [record, {**record, "sample_idx": 6}], 1: [record]}
    (tmp_path / "shard_0001.pkl").write_bytes(pickle.dumps(shard))
    out = LocalFolder(tmp_path / "out")
    with pytest.raises(BadInput, match="missing layers: 6; pass --skip-torn"):
        importer.import_shards(str(tmp_path), out)
    plan, legacy = importer.import_shards(str(tmp_path), out, skip_incomplete=True)
    assert plan.samples == 1 and len(legacy.incomplete) == 1
    assert verification.verify(out).intact and datasets.Dataset(out).metadata(0)["id"] == "5"


def test_the_legacy_checkpoint_is_derived_from_the_commits(tmp_path):
    folder = LocalFolder(tmp_path)
    wanted = synthetic.plan(samples=9)
    synthetic.extract(folder, wanted)
    checkpoint = pickle_shards.build_checkpoint(datasets.Dataset(folder))
    assert checkpoint["last_processed_sample_idx"] == 8
    assert checkpoint["total_samples_processed"] == 9
    assert checkpoint["status"] == "completed"


def test_the_streams_command_splits_a_dataset(tmp_path):
    pair = [[[1]], [[2]]]
    path = tmp_path / "pairs.jsonl"
    path.write_text("\n".join(json.dumps({"examples": [pair, pair]}) for _ in range(5)))
    code, text = tpu("streams", path, tmp_path / "streams", "--streams", 2)
    assert code == 0 and json.loads(text) == {"streams": 2, "tasks": 5, "invalid": 0}
    assert len((tmp_path / "streams" / "stream_001.jsonl").read_text().splitlines()) == 2
    code, text = tpu("streams", path, tmp_path / "streams", "--num_streams", 1)
    assert code == 1 and "--overwrite" in text
    foreign = [tmp_path / "streams" / name for name in ("stream_mine.jsonl", "notes.txt")]
    for file in foreign:
        file.write_text("of somebody else")
    assert tpu("streams", path, tmp_path / "streams", "--streams", 1, "--overwrite")[0] == 0
    assert [file.read_text() for file in foreign] == ["of somebody else"] * 2
    streams = sorted(one for one in (tmp_path / "streams").iterdir() if one not in foreign)
    assert [one.name for one in streams] == ["stream_000.jsonl"]


def test_streams_are_uploaded_to_a_bucket(tmp_path, cloud):
    pair = [[[1]], [[2]]]
    path = tmp_path / "pairs.jsonl"
    path.write_text("\n".join(json.dumps({"examples": [pair, pair]}) for _ in range(5)))
    address = f"{cloud}://activations/dataset_streams"
    storage = open_storage(address)
    for count in (3, 2):
        code, text = tpu("streams", path, address, "--streams", count, "--overwrite")
        assert code == 0, text
    assert storage.names("") == ["stream_000.jsonl", "stream_001.jsonl"]
    code, text = tpu("streams", path, address, "--streams", 2)
    assert code == 1 and "--overwrite" in text


QUICK_START = """
streams pairs.jsonl data/streams --num_streams 2
plan out --model_path MODEL --dataset_path data/streams --activation_type mlp \
  --layers_to_extract "0 2" --max_seq_length 1600 --predictions_per_task 2 --random_seed 42
run out --quiet
status out
manifest out
verify out
export out shards --format pickle
import shards again
verify again
"""


def test_the_quick_start_of_the_former_scripts(tmp_path, model_folder, monkeypatch):
    """From pairs to shards of the former format and back, line by line."""
    monkeypatch.chdir(tmp_path)
    rows = [[[pair["input"], pair["output"]] for pair in (*one["train"], *one["test"])]
            for one in map(task, range(3))]  # fmt: skip
    Path("pairs.jsonl").write_text("\n".join(json.dumps({"examples": row}) for row in rows))
    script = QUICK_START.replace("MODEL", str(model_folder)).replace("\\\n", " ")
    for line in script.strip().splitlines():
        code, text = tpu(*shlex.split(line))
        assert code == 0, f"$ tpu extract {line}\n{text}"
    assert [name.name for name in sorted(Path("shards").glob("shard_*"))] == ["shard_0001.pkl.gz"]
    assert datasets.Dataset(LocalFolder(Path("again"))).plan.samples == 6


def test_rows_without_pairs_make_no_streams(tmp_path):
    path = tmp_path / "texts.jsonl"
    path.write_text('{"examples": "a text"}\n{"text": "another"}\n')
    code, text = tpu("streams", path, tmp_path / "streams", "--streams", 2)
    assert code == 2 and "none of 2 rows" in text and "column 'examples'" in text
    assert list((tmp_path / "streams").glob("*")) == []


def old_shard(path, samples, layers=(0, 1), value=0.0):
    """A shard in the format of the older scripts."""
    path.parent.mkdir(parents=True, exist_ok=True)
    shard = {
        layer: [
            {
                "sample_idx": sample,
                "activation": np.full((3, 4), value + sample + 100 * layer, "bfloat16"),
                "shape": (3, 4),
                "text_preview": f"Task: t{sample}",
            }
            for sample in samples
        ]
        for layer in layers
    }
    with gzip.open(path, "wb", 1) as file:
        pickle.dump(shard, file)


def test_folders_of_several_workers_are_imported_with_distinct_ids(tmp_path):
    for worker in (0, 2, 10):
        for number in (1, 2):
            path = tmp_path / "old" / f"tpu_{worker}" / f"shard_{number:04d}.pkl.gz"
            old_shard(path, range(2 * number, 2 * number + 2), value=worker)
    plan, _ = importer.import_shards(str(tmp_path / "old"), LocalFolder(tmp_path / "new"))
    dataset = datasets.Dataset(LocalFolder(tmp_path / "new"))
    assert plan.samples == 12 and verification.verify(dataset.storage).intact
    ids = [dataset.metadata(sample)["id"] for sample in dataset]
    assert ids == [f"tpu_{worker}/{sample}" for worker in (0, 2, 10) for sample in range(2, 6)]
    at = ids.index("tpu_2/5")
    assert dataset.read(at, "resid_post.1").astype(float).tolist() == [[107.0] * 4] * 3


def test_the_later_copy_of_a_duplicate_sample_is_imported(tmp_path):
    old_shard(tmp_path / "shard_9999.pkl.gz", [0], value=1)
    old_shard(tmp_path / "shard_10000.pkl.gz", [0], value=2)
    importer.import_shards(str(tmp_path), LocalFolder(tmp_path / "new"))
    dataset = datasets.Dataset(LocalFolder(tmp_path / "new"))
    assert len(dataset) == 1 and dataset.read(0, "resid_post.0")[0, 0] == 2


def test_an_interrupted_import_is_resumed(tmp_path):
    class Killed(BaseException):
        pass

    class Dies(LocalFolder):
        left = 2

        def upload(self, draft, name):
            Dies.left -= 1
            if not Dies.left:
                raise Killed
            super().upload(draft, name)

    for number in (1, 2, 3):
        path = tmp_path / "old" / f"shard_{number:04d}.pkl.gz"
        old_shard(path, range(20 * number, 20 * number + 20))
    with pytest.raises(Killed):
        importer.import_shards(str(tmp_path / "old"), Dies(tmp_path / "new"))
    folder = LocalFolder(tmp_path / "new")
    assert len(datasets.Dataset(folder).commits) == 1
    importer.import_shards(str(tmp_path / "old"), folder)
    report = verification.verify(folder)
    assert report.intact and report.samples == 60 and report.leftovers == ()


def test_samples_reported_by_checkpoints_but_not_in_shards_cause_a_warning(tmp_path):
    old_shard(tmp_path / "old" / "shard_0001.pkl.gz", range(4))
    checkpoint = {"worker_id": 0, "last_processed_sample_idx": 6, "total_samples_processed": 7,
            "total_shards": 1, "dataset_path": "gs://b/stream_000.jsonl",
            "model_path": "Qwen/Qwen2.5-0.5B"}  # fmt: skip
    (tmp_path / "old" / "checkpoint_worker_0.json").write_text(json.dumps(checkpoint))
    (tmp_path / "old" / "checkpoint_worker_1.json").write_text('{"worker_id": 1, "las')  # torn
    code, text = tpu("import", tmp_path / "old", tmp_path / "new")
    assert code == 0
    assert "the shards contain 4" in " ".join(text.split())
    plan = plans.load(LocalFolder(tmp_path / "new"))
    assert plan.model == "Qwen/Qwen2.5-0.5B"
    assert plan.data["dataset"] == "gs://b/stream_000.jsonl"


@pytest.mark.parametrize("place", range(0, 100, 7))
def test_a_damaged_pickle_shard_is_rejected_with_a_message(tmp_path, place):
    path = tmp_path / "shard_0001.pkl.gz"
    old_shard(path, range(3))
    data = bytearray(path.read_bytes())
    data[place * len(data) // 100] ^= 0x55
    path.write_bytes(data)
    try:
        assert pickle_shards.read_shard(path)  # a changed file name or time in the gzip header
    except BadInput as error:
        assert "shard_0001" in str(error) or "pickle refers" in str(error)
    path.write_bytes(data[: len(data) // 2])
    with pytest.raises(BadInput):
        pickle_shards.read_shard(path)


@pytest.mark.parametrize("content", [[], {"layer_0": []}, {0: [{"sample_idx": 1}]}, {0: [1]}])
def test_a_pickle_that_is_not_a_shard_is_rejected(tmp_path, content):
    (tmp_path / "shard_0001.pkl").write_bytes(pickle.dumps(content))
    with pytest.raises(BadInput, match="not lists of activation records"):
        pickle_shards.read_shard(tmp_path / "shard_0001.pkl")


def test_pickle_shards_are_exported_to_and_imported_from_a_bucket(cloud, tmp_path, monkeypatch):
    from tpufleet_activations.io.addresses import open_storage

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    synthetic.extract(LocalFolder(tmp_path / "a"), synthetic.plan(samples=9))
    address = f"{cloud}://activations/{tmp_path.name}-{cloud}/tpu_0"
    code, text = tpu("export", tmp_path / "a", address, "--shard-gb", 1e-6, *PICKLE)
    assert code == 0, text
    facts = json.loads(open_storage(address).read("metadata.json"))
    assert facts["gcs_bucket"] == "activations" and facts["upload_to_gcs"]
    assert facts["shards"][0]["gcs_path"] == f"{address}/shard_0001.pkl.gz"
    code, text = tpu("import", address.rpartition("/")[0], tmp_path / "b")
    assert code == 0, text
    assert datasets.Dataset(LocalFolder(tmp_path / "b")).metadata(3)["id"] == "tpu_0/3"


def test_the_manifest_has_the_progress_of_each_stream(tmp_path, model_folder):
    data = tmp_path / "streams"
    data.mkdir()
    for number, names in enumerate(((0, 3), (1, 4), (2,))):
        lines = (json.dumps(task(name)) for name in names)
        (data / f"stream_{number:03d}.jsonl").write_text("\n".join(lines))
    folder = LocalFolder(tmp_path / "out")
    wanted = plans.write(
        folder,
        planning.make_plan(
            model=str(model_folder),
            data={"kind": "arc", "path": str(data)},
            choices=["resid_post.0"],
            unit_samples=8,
        ),
    )
    assert {s["status"] for s in stream_status.stream_manifest(folder)["streams"].values()} == {
        "pending"
    }
    units = Units(folder, count=wanted.units, worker="pod-1")
    claims = {claim.unit: claim for claim in (units.claim() for _ in range(wanted.units))}
    for unit in (0, 1, 4):
        units.commit(claims[unit], {"files": []})
    code, text = tpu("manifest", tmp_path / "out")
    manifest = json.loads(text)
    assert code == 0 and manifest["total_streams"] == 3 and manifest["created_at"]
    entries = manifest["streams"]
    assert [entries[n]["status"] for n in "012"] == ["completed", "in_progress", "completed"]
    assert entries["0"]["pod_id"] == "pod-1" and entries["0"]["completed_at"]
    assert entries["1"]["started_at"] and entries["1"]["completed_at"] is None


def test_an_export_that_cannot_pad_its_samples_leaves_nothing(tmp_path):
    synthetic.extract(LocalFolder(tmp_path / "acts"), synthetic.plan())
    code, text = tpu("export", tmp_path / "acts", tmp_path / "export", "--pad-to", 2,
                     *PICKLE)  # fmt: skip
    assert code == 2 and "more than --pad-to 2" in text
    assert not (tmp_path / "export").exists()
