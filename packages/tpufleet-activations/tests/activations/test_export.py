"""Export to Hugging Face datasets."""

from __future__ import annotations

import pytest

from tests.activations import synthetic
from tests.activations.tiny_model import tpu
from tpufleet_activations.io.addresses import open_storage
from tpufleet_activations.io.storage import LocalFolder


@pytest.mark.parametrize("name", ["README.md", "data/train-00000-of-00001.parquet", "plan.json"])
def test_an_export_needs_an_empty_folder(tmp_path, name):
    synthetic.extract(LocalFolder(tmp_path / "a"), synthetic.plan())
    other = tmp_path / "target" / name
    other.parent.mkdir(parents=True)
    other.write_text("of somebody else")
    code, text = tpu("export", tmp_path / "a", tmp_path / "target")
    assert code == 1 and "choose an empty folder" in text
    assert [path for path in (tmp_path / "target").rglob("*") if path.is_file()] == [other]
    assert other.read_text() == "of somebody else"


@pytest.mark.parametrize("existing", [True, False], ids=["existing", "new"])
@pytest.mark.parametrize(
    "command, advice",
    [
        (
            ["export", "acts", "TARGET"],
            "the export is incomplete; delete its folder",
        ),
        (["plan", "TARGET", "--model", "MODEL", "--data", "data.jsonl"], "no plan was written"),
    ],
    ids=["export", "plan"],
)
def test_a_full_disk_is_reported_as_one(
    small_disk, tmp_path, model_folder, monkeypatch, command, advice, existing
):
    monkeypatch.chdir(tmp_path)
    synthetic.extract(LocalFolder("acts"), synthetic.plan(samples=9))
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


@pytest.mark.parametrize(
    "model, name",
    [
        ("/home/someone/secret/qwen", "qwen"),
        ("gs://bucket/models/qwen/", "qwen"),
        ("Qwen/Qwen2.5-0.5B", "Qwen/Qwen2.5-0.5B"),
        ("gpt2", "gpt2"),
    ],
)
def test_the_readme_of_an_export_does_not_say_where_the_model_was(tmp_path, model, name):
    synthetic.extract(LocalFolder(tmp_path / "a"), synthetic.plan(samples=2, model=model))
    assert tpu("export", tmp_path / "a", tmp_path / "target")[0] == 0
    assert f"# Activations of {name}\n" in (tmp_path / "target/README.md").read_text()


def test_an_export_counts_the_samples_that_have_rows(tmp_path, model_folder):
    lines = ['{"text": "one"}', '{"text": ""}', '{"text": "three"}', '{"other": 1}']
    (tmp_path / "data.jsonl").write_text("\n".join(lines))
    planned = ["--model", model_folder, "--data", tmp_path / "data.jsonl", "--site", "resid_post.0"]
    assert tpu("plan", tmp_path / "a", *planned)[0] == 0
    assert tpu("run", tmp_path / "a", "--quiet")[0] == 0
    code, text = tpu("export", tmp_path / "a", tmp_path / "hf")
    assert code == 0 and "8 rows of 2 samples" in text and "; 2 samples without" in text
    assert "8 rows of 2 samples." in (tmp_path / "hf" / "README.md").read_text()


def test_an_export_to_a_bucket_is_loaded_by_its_files(cloud, tmp_path):
    """`load_dataset` takes folders, names on the Hub, and data files, but no address of a bucket;
    `hf upload` takes folders only."""
    synthetic.extract(LocalFolder(tmp_path / "a"), synthetic.plan(samples=9))
    address = f"{cloud}://activations/{tmp_path.name}-{cloud}/hf"
    code, text = tpu("export", tmp_path / "a", f"{address}/")
    assert code == 0 and "hf upload" not in text
    files = f"{address}/data/train-*.parquet"
    assert f"`datasets.load_dataset('parquet', data_files='{files}')`" in text
    assert open_storage(address).names("data/train-") == ["data/train-00000-of-00001.parquet"]
