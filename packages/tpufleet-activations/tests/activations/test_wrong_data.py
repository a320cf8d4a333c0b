"""What would store activations of other weights or other data than planned is refused."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import replace

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from tests.activations import synthetic
from tests.activations.test_workers import make, settings  # noqa: F401
from tests.activations.tiny_model import tpu
from tpufleet.errors import BadInput, Conflict, NotFound
from tpufleet_activations import plans
from tpufleet_activations.inputs import sources
from tpufleet_activations.io import datasets, file_digests, remote_files, verification
from tpufleet_activations.io.storage import LocalFolder, ShortRead
from tpufleet_activations.model.weights import ModelCheckpoint
from tpufleet_activations.pipeline import extraction, locations, planning, preparation


@pytest.fixture
def own_model(tmp_path, model_folder, monkeypatch):
    """A copy of the model that a test may change."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return shutil.copytree(model_folder, tmp_path / "own")


def change_byte(path, offset):
    content = bytearray(path.read_bytes())
    content[offset] ^= 0x80
    before = path.stat()
    path.write_bytes(content)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def large_model(folder, rows=3 << 20):
    """A checkpoint with a tensor of many bytes, most of them zero."""
    from safetensors.numpy import save_file

    (folder / "config.json").write_text("{}")
    table = np.zeros((rows, 8), np.float32)
    save_file({"model.embed_tokens.weight": table}, folder / "model.safetensors")
    return folder


def test_every_byte_of_the_weights_counts(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = large_model(tmp_path)
    digests = {ModelCheckpoint(folder).digest()}
    for offset in (-1, 1 << 20, 70 << 20):
        change_byte(folder / "model.safetensors", offset)
        digests.add(ModelCheckpoint(folder).digest())
    assert len(digests) == 4


def test_weights_that_change_after_planning_are_refused(tmp_path, own_model):
    (tmp_path / "data.jsonl").write_text('{"text": "one two"}\n')
    data = {"kind": "jsonl", "path": str(tmp_path / "data.jsonl")}
    plan = planning.make_plan(
        model=str(own_model), data=data, choices=["resid_post.0"], max_length=64
    )
    storage = LocalFolder(tmp_path / "out")
    plans.write(storage, plan)
    change_byte(next(own_model.glob("*.safetensors")), -1)
    with pytest.raises(Conflict, match="the model has changed"):
        extraction.run(storage, settings())


class Replacing(LocalFolder):
    """Replaces a model's weights when a worker looks for units, so after it has checked them."""

    model = None

    def names(self, prefix, start="", end=""):
        if self.model is not None:
            change_byte(next(self.model.glob("*.safetensors")), -1)
            self.model = None
        return super().names(prefix, start, end)


def planned(folder, model, **options):
    """A plan of one sample in a storage."""
    (folder.path.parent / "data.jsonl").write_text('{"text": "one two"}\n')
    data = {"kind": "jsonl", "path": str(folder.path.parent / "data.jsonl")}
    choices = {"choices": ["resid_post.0"], "max_length": 64, **options}
    return plans.write(folder, planning.make_plan(model=str(model), data=data, **choices))


def test_weights_that_are_replaced_before_they_are_loaded_are_refused(tmp_path, own_model):
    storage = Replacing(tmp_path / "out")
    planned(storage, own_model)
    storage.model = own_model
    with pytest.raises(Conflict, match="the model has changed"):
        extraction.run(storage, settings())
    assert not datasets.Dataset(LocalFolder(tmp_path / "out")).commits


def test_other_special_tokens_are_refused(tmp_path, own_model):
    """They are in prompts, and between the documents of --too-long concat."""
    special, storage = own_model / "special_tokens_map.json", LocalFolder(tmp_path / "out")
    special.write_text('{"bos_token": "?"}')
    planned(storage, own_model, too_long="concat")
    special.write_text('{"bos_token": " "}')
    with pytest.raises(Conflict, match="the tokenizer has changed"):
        extraction.run(storage, settings())


def test_a_tokenizer_that_changes_during_a_run_is_refused(tmp_path, own_model):
    plan = planned(LocalFolder(tmp_path / "out"), own_model)
    preparer = preparation.UnitPreparer(plan, locations.resolve_plan(plan))
    settings_file = own_model / "tokenizer_config.json"
    settings_file.write_text(settings_file.read_text() + " ")
    with pytest.raises(Conflict, match="the tokenizer has changed"):
        preparer.prepare(0)


def test_a_file_is_hashed_once_while_it_does_not_change(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path, hashed = tmp_path / "weights", []
    path.write_bytes(b"one")
    os.utime(path, ns=(0, 0))
    monkeypatch.setattr(
        file_digests, "_hash", lambda path: hashed.append(path) or path.read_bytes().hex()
    )
    clock = lambda: path.stat().st_ctime + 100
    assert file_digests.file_digest(path, clock) == file_digests.file_digest(path, clock)
    assert len(hashed) == 1
    change_byte(path, 0)
    assert file_digests.file_digest(path, clock) != b"one".hex() and len(hashed) == 2
    # What was written a moment ago may be written again without another time.
    os.utime(path)
    for _ in range(2):
        file_digests.file_digest(path)
    assert len(hashed) == 4


@pytest.mark.parametrize("sharded", [True, False])
@pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors"])
def test_an_adapter_beside_the_weights_is_refused(own_model, name, sharded):
    [weights] = own_model.glob("*.safetensors")
    if sharded:
        names = dict.fromkeys(ModelCheckpoint(own_model).names(), weights.name)
        index = own_model / "model.safetensors.index.json"
        index.write_text(json.dumps({"weight_map": names}))
    (own_model / name).write_bytes(weights.read_bytes() if name.endswith("s") else b"{}")
    with pytest.raises(BadInput, match="merge_and_unload"):
        ModelCheckpoint(own_model)


class Short(LocalFolder):
    """Reads of ranges lack their second half, the first so many times."""

    left = 0

    def local_path(self, name):
        return None

    def read_range(self, name, start, size):
        data = super().read_range(name, start, size)
        if size > 1 and self.left > 0:
            self.left -= 1
            return data[: size // 2]
        return data

    def checksum(self, name):
        return ""


def test_a_short_read_is_repeated_and_never_becomes_zeros(tmp_path):
    storage = Short(tmp_path / "there")
    storage.create("a.bin", bytes(range(1, 101)))
    storage.left = 1
    copied = remote_files.copy_object(storage, "a.bin", tmp_path / "a.bin")
    assert copied.read_bytes() == bytes(range(1, 101))
    storage.left = 1000
    with pytest.raises(ShortRead, match="50 of 100 bytes"):
        remote_files.copy_object(storage, "a.bin", tmp_path / "b.bin")
    assert not (tmp_path / "b.bin").exists()


def test_a_short_read_of_a_shard_is_repeated_and_then_an_error(tmp_path):
    storage = Short(tmp_path)
    synthetic.extract(storage, synthetic.plan())
    whole = datasets.Dataset(LocalFolder(tmp_path)).read(7, "resid_post.0")
    storage.left = 1
    np.testing.assert_array_equal(datasets.Dataset(storage).read(7, "resid_post.0"), whole)
    dataset = datasets.Dataset(storage)
    storage.left = 1000
    with pytest.raises(ShortRead):
        dataset.read(7, "resid_post.0")


class Damaged(LocalFolder):
    """The first reads return other bytes than are stored."""

    left = 0

    def read_range(self, name, start, size):
        data = super().read_range(name, start, size)
        self.left -= 1
        return bytes(size) if self.left >= 0 else data

    def checksum(self, name):
        return remote_files.file_checksum("crc32c", self.path / name)


def test_a_copy_has_the_checksum_of_the_object(tmp_path):
    storage = Damaged(tmp_path / "there")
    storage.create("a.bin", b"some bytes")
    storage.left = 1
    copied = remote_files.copy_object(storage, "a.bin", tmp_path / "a.bin")
    assert copied.read_bytes() == b"some bytes"
    storage.left = 1000
    with pytest.raises(Conflict, match="checksum"):
        remote_files.copy_object(storage, "a.bin", tmp_path / "b.bin")
    assert not (tmp_path / "b.bin").exists()


def write_splits(folder, names):
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        if name.endswith(".txt"):
            (folder / name).write_text(name.partition("-")[0])
            continue
        table = pyarrow.table({"text": [name.partition("-")[0]]})
        pyarrow.parquet.write_table(table, folder / name)


SHARDED = ["train-00000-of-00002.parquet", "train-00001-of-00002.parquet",
           "test-00000-of-00001.parquet"]  # fmt: skip
PLAIN = ["train.parquet", "my_test.parquet", "validation.parquet"]
TEXT = ["train.txt", "test.txt", "README.txt"]


@pytest.mark.parametrize(
    "names, below",
    [(TEXT, ""), *((names, below) for names in (SHARDED, PLAIN) for below in ("", "data", "en"))],
)
def test_splits_of_a_folder_are_not_merged(tmp_path, model_folder, names, below):
    write_splits(tmp_path / "repo" / below, names)
    (tmp_path / "repo" / "README.md").write_text("# a dataset")
    planned = ["plan", tmp_path / "out", "--model", model_folder, "--data", tmp_path / "repo"]
    code, text = tpu(*planned)
    assert code == 2 and "--split" in text and "test, train" in text.replace("validation, ", ""), (
        text
    )
    code, text = tpu(*planned, "--split", "held")
    assert code == 2 and "no split 'held'" in text
    code, text = tpu(*planned, "--split", "test")
    assert code == 0, text
    plan = plans.load(LocalFolder(tmp_path / "out"))
    kind = "text" if names is TEXT else "parquet"
    assert (plan.data["kind"], plan.data["split"], plan.samples) == (kind, "test", 1)
    [sample] = sources.open_source(plan.data).read(range(1))
    assert sample.text.endswith(("test", "test.parquet", "test.txt"))


def test_one_split_and_files_without_splits_need_no_choice(tmp_path):
    write_splits(tmp_path / "one", SHARDED[:2])
    write_splits(tmp_path / "none", ["a.parquet", "b.parquet", "contest.parquet"])
    write_splits(tmp_path / "text", TEXT)
    for name, count, more in (("one", 2, {}), ("none", 3, {}), ("text", 3, {"split": "file"})):
        kind = sources.detect_kind(str(tmp_path / name))
        data = {"kind": kind, "path": str(tmp_path / name), **more}
        assert sources.open_source(data).count() == count


def test_a_root_with_several_folders_of_data_names_them(tmp_path):
    for name in ("en", "fr"):
        write_splits(tmp_path / name, SHARDED[:1])
    with pytest.raises(BadInput, match="en, fr"):
        sources.detect_kind(str(tmp_path))


@pytest.mark.parametrize("complete", [True, False])
def test_an_edited_plan_of_stored_units_is_refused(make, complete):  # noqa: F811
    folder = make("a")
    extraction.run(folder, settings())
    if not complete:
        verification.reopen(folder, [0])
    plan = plans.load(folder)
    folder.replace(plans.PLAN_FILE, replace(plan, keep="last").to_json())
    code, text = tpu("run", folder.path, "--mesh", "data=8", "--quiet")
    assert code == 1 and "another plan" in text, text
    folder.replace(plans.PLAN_FILE, plan.to_json())
    assert tpu("run", folder.path, "--mesh", "data=8", "--quiet")[0] == 0


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
@pytest.mark.parametrize(
    "record, field",
    [
        ({"input_ids": [3, 1, 2]}, None),
        ({"input_ids": [3, 1, 2, 0, 0], "attention_mask": [1, 1, 1, 0, 0]}, None),
        ({"tokens": [3, 1, 2], "text": "other"}, None),
        ({"a": {"b": [3, 1, 2]}, "text": "other"}, "a.b"),
        ({"ids": [3, 1, 2], "text": "other"}, "ids"),
    ],
)
def test_tokens_are_taken_from_their_field(tmp_path, kind, record, field):
    if kind == "jsonl":
        (tmp_path / "a.jsonl").write_text(json.dumps(record))
    else:
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist([record]), tmp_path / "a.parquet")
    data = {"kind": kind, "path": str(tmp_path), "text_field": field}
    [sample] = sources.open_source(data).read(range(1))
    assert (sample.tokens, sample.text, sample.skip_reason) == ([3, 1, 2], None, "")


def test_texts_and_conversations_are_taken_from_nested_fields(tmp_path):
    messages = [{"role": "user", "content": "hi"}]
    lines = [{"a": {"b": "text"}}, {"a": {"b": messages}}, {"a.b": "plain"}, {"a": {"c": 1}}]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, lines)))
    data = {"kind": "jsonl", "path": str(tmp_path), "text_field": "a.b", "id_field": "a.b"}
    one, two, three, four = sources.open_source(data).read(range(4))
    assert (one.text, one.id, two.messages, three.text) == ("text", "text", messages, "plain")
    assert "no id field 'a.b'" in four.skip_reason


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be", "utf-32"])
@pytest.mark.parametrize("name, split", [("a.txt", None), ("a.txt", "file"), ("a.jsonl", None)])
def test_a_file_in_utf_16_is_refused(tmp_path, encoding, name, split):
    (tmp_path / name).write_bytes('{"text": "one"}\n'.encode(encoding))
    kind = sources.detect_kind(str(tmp_path / name))
    with pytest.raises(BadInput, match="UTF-8"):
        sources.open_source({"kind": kind, "path": str(tmp_path / name), "split": split})


def test_missing_weights_are_still_said_to_be_missing(tmp_path):
    with pytest.raises(NotFound):
        ModelCheckpoint(tmp_path)
