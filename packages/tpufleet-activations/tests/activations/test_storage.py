"""The contract of all storages: folder, Google Cloud Storage, S3.

The object stores are local servers, used through the official clients: see
`object_store_servers`.
"""

from __future__ import annotations

import itertools
import uuid
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import numpy as np
import pytest

from tests.activations import synthetic
from tests.activations.test_crash_safety import Clock, Killed
from tests.activations.test_datasets import assert_labels_equal_contents
from tests.activations.test_inputs import make_dataset
from tpufleet.errors import BadInput, Conflict, NotFound
from tpufleet_activations.inputs import sources
from tpufleet_activations.io import remote_files, verification
from tpufleet_activations.io.addresses import open_storage
from tpufleet_activations.io.shard_writer import BufferStream
from tpufleet_activations.io.storage import LocalFolder
from tpufleet_activations.pipeline import planning


@pytest.fixture(params=["folder", "gcs", "s3"])
def storage(request, tmp_path):
    prefix = f"runs/{uuid.uuid4().hex}"
    if request.param == "gcs":
        client = request.getfixturevalue("google")
        from tpufleet_activations.io.gcs import GcsBucket

        return GcsBucket("activations", prefix, client)
    if request.param == "s3":
        client = request.getfixturevalue("amazon")
        from tpufleet_activations.io.s3 import S3Bucket

        return S3Bucket("activations", prefix, client)
    return LocalFolder(tmp_path / "set")


def test_create_succeeds_only_once_per_name(storage):
    assert storage.create("units/a.json", b"first")
    assert not storage.create("units/a.json", b"second")
    assert storage.read("units/a.json") == b"first"
    storage.replace("units/a.json", b"third")
    assert storage.read("units/a.json") == b"third"


def test_exactly_one_of_many_concurrent_creates_succeeds(storage):
    with ThreadPoolExecutor(8) as pool:
        won = list(pool.map(lambda n: storage.create("units/x", b"%d" % n), range(8)))
    assert won.count(True) == 1
    assert storage.read("units/x") == b"%d" % won.index(True)


def test_names_are_listed_by_prefix(storage):
    for name in ("units/2", "units/1", "workers/1"):
        storage.create(name, b"")
    assert storage.names("units/") == ["units/1", "units/2"]
    assert storage.names("units/2") == ["units/2"]
    assert storage.names("none/") == []
    for name in ("units/00000007-0000", "units/00000008-0000", "units/00000010-0001"):
        assert storage.create(name, b"x")
    middle = storage.names("units/", "units/00000007", "units/00000009")
    assert middle == ["units/00000007-0000", "units/00000008-0000"]
    assert storage.names("units/", "units/00000009")[0] == "units/00000010-0001"


def test_missing_objects_raise_not_found(storage):
    for ask in (storage.read, storage.size, lambda name: storage.read_range(name, 0, 1)):
        with pytest.raises(NotFound):
            ask("units/none")
    storage.delete("units/none")


def test_a_file_is_uploaded_and_read_by_range(storage):
    draft = storage.staging() / f"{uuid.uuid4().hex}.draft"
    draft.write_bytes(bytes(range(256)) * 100)
    storage.upload(draft, "shards/a")
    assert not draft.exists()
    assert storage.size("shards/a") == 25_600
    assert storage.read_range("shards/a", 300, 4) == bytes([44, 45, 46, 47])
    storage.delete("shards/a")
    with pytest.raises(NotFound):
        storage.size("shards/a")


@pytest.mark.parametrize("lost", [404, 410])
def test_an_upload_whose_session_is_lost_is_begun_anew(google, monkeypatch, tmp_path, lost):
    from google.api_core import exceptions
    from google.cloud.storage import Blob

    from tpufleet_activations.io import gcs

    upload, sessions = Blob.upload_from_file, []

    def lose_first(blob, content, **options):
        sessions.append(blob.name)
        if sessions.count(blob.name) == 1:
            content.read(5)
            raise exceptions.from_http_status(lost, "no such session")
        upload(blob, content, **options)

    monkeypatch.setattr(Blob, "upload_from_file", lose_first)
    bucket = gcs.GcsBucket("activations", uuid.uuid4().hex, google)
    data = bytes(range(256)) * 40
    bucket.put(BufferStream([memoryview(data)]), "small")
    assert bucket.read("small") == data
    draft = tmp_path / "draft"
    draft.write_bytes(data)
    bucket.upload(draft, "large")
    assert bucket.read("large") == data
    assert len(sessions) == 2 * 2


# One byte below, at and above the size from which parts are uploaded, several parts with a short
# last one, and the default size of a shard.
SIZES = [(64 << 20) - 1, (97 << 20) + 5]
SLOW_SIZES = [
    pytest.param(size, marks=pytest.mark.slow) for size in (64 << 20, planning.SHARD_BYTES)
]


@pytest.mark.parametrize("size", [*SIZES, *SLOW_SIZES], ids=lambda n: f"{n:,}")
def test_a_file_of_any_size_is_uploaded_at_default_settings(storage, size):
    block = np.random.default_rng(size).bytes((1 << 20) + 1)  # no part is a multiple of it
    draft = storage.staging() / f"{uuid.uuid4().hex}.draft"
    with open(draft, "wb") as file:
        for start in range(0, size, len(block)):
            file.write(block[: size - start])
    storage.upload(draft, "shards/large")
    assert not draft.exists()
    assert storage.size("shards/large") == size
    # Around the boundaries of parts: a few, since emulators read all of an object for a range.
    for boundary in (0, 32 << 20, size // 2 >> 25 << 25, size - 64):
        start = max(boundary - 64, 0)
        stored = storage.read_range("shards/large", start, 128)
        at = start % len(block)
        assert stored == (block[at:] + block)[: min(128, size - start)], f"at {start:,}"
    storage.delete("shards/large")


@pytest.mark.parametrize("compression", ["none", "zstd"])
def test_a_dataset_can_be_stored_and_read(storage, compression):
    wanted = synthetic.plan(samples=7, compression=compression)
    synthetic.extract(storage, wanted)
    assert_labels_equal_contents(storage, wanted)
    assert verification.verify(storage).intact


class Mortal:
    """Any storage, whose user dies before or after the n-th thing it writes."""

    def __init__(self, inner, step, after):
        self._inner, self._left, self._after = inner, step, after

    def __getattr__(self, name):
        attribute = getattr(self._inner, name)
        if name not in ("create", "replace", "upload", "put"):
            return attribute

        def dying(*arguments):
            self._left -= 1
            if self._left == 0 and not self._after:
                raise Killed
            answer = attribute(*arguments)
            if self._left == 0:
                raise Killed
            return answer

        return dying


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_a_crash_at_any_write_neither_loses_nor_duplicates_samples(storage, after):
    clock, lease = Clock(), timedelta(seconds=60)
    wanted = synthetic.plan(samples=5, unit_samples=3)
    for step in range(1, 9):
        clock.now += 61
        try:
            synthetic.extract(
                Mortal(storage, step, after), wanted, f"v{step}", lease=lease, clock=clock
            )
        except Killed:
            continue
    clock.now += 61
    synthetic.extract(storage, wanted, "heir", lease=lease, clock=clock)
    assert_labels_equal_contents(storage, wanted)
    assert verification.verify(storage).intact


def test_data_in_a_bucket_is_cached_and_refreshed(google, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("GOOGLE_CLOUD_PROJECT", "test")
    bucket = open_storage(f"gs://activations/{uuid.uuid4().hex}")
    bucket.create("streams/a.jsonl", b'{"text": "one"}\n')
    bucket.create("streams/b.jsonl", b'{"text": "two"}\n')
    assert remote_files.fetch(f"{bucket.url}/streams/a.jsonl").read_bytes() == b'{"text": "one"}\n'
    folder = remote_files.fetch(f"{bucket.url}/streams")
    assert sorted(path.name for path in folder.glob("[!.]*")) == ["a.jsonl", "b.jsonl"]
    bucket.replace("streams/a.jsonl", b'{"text": "uno"}\n')
    assert remote_files.fetch(f"{bucket.url}/streams/a.jsonl").read_bytes() == b'{"text": "uno"}\n'
    with pytest.raises(NotFound):
        remote_files.fetch(f"{bucket.url}/none")


def create_objects(url, objects):
    """Through the clients of the services: names may be empty or end with a slash."""
    bucket = open_storage(url)
    for name, data in objects.items():
        bucket.replace(name, data)


def test_folder_markers_of_consoles_are_no_files(cloud, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    url = f"{cloud}://activations/{uuid.uuid4().hex}"
    create_objects(f"{url}/lines", {"": b"", "a.jsonl": b'{"text": "one"}\n', "old/": b""})
    assert sources.detect_kind(f"{url}/lines") == "jsonl"
    for path in (f"{url}/lines", f"{url}/lines/"):
        assert sources.open_source({"kind": "jsonl", "path": path}).count() == 1
    make_dataset(tmp_path / "saved", 30)
    files = {
        str(path.relative_to(tmp_path / "saved")): path.read_bytes()
        for path in sorted((tmp_path / "saved").rglob("*.*"))
    }
    create_objects(f"{url}/saved", {"": b"", "train/": b"", **files})
    assert sources.open_source({"kind": "hf", "path": f"{url}/saved"}).count() == 30
    create_objects(f"{url}/model", {"": b"", "config.json": b"{}", "original/": b""})
    folder = remote_files.model_folder(f"{url}/model")
    assert [path.name for path in folder.glob("[!.]*")] == ["config.json"]
    create_objects(f"{url}/empty", {"": b""})
    with pytest.raises(NotFound, match="does not exist"):
        remote_files.fetch(f"{url}/empty")


def test_a_model_in_a_bucket_has_its_chat_templates(cloud, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    url = f"{cloud}://activations/{uuid.uuid4().hex}"
    templates = ("chat_template.jinja", "additional_chat_templates/tool_use.jinja")
    names = ("config.json", *templates, "original/params.json", "onnx/chat.jinja")
    create_objects(url, dict.fromkeys(names, b"{}"))

    def copied():
        folder = remote_files.model_folder(url)
        return {str(path.relative_to(folder)) for path in folder.rglob("[!.]*") if path.is_file()}

    assert copied() == {"config.json", *templates}
    open_storage(url).delete(templates[1])
    assert copied() == {"config.json", templates[0]}


def test_a_cached_object_may_become_a_folder(cloud, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    url = f"{cloud}://activations/{uuid.uuid4().hex}"
    create_objects(url, {"train": b"x"})
    remote_files.fetch(url, recursive=True)
    open_storage(url).delete("train")
    create_objects(url, {"train/a.jsonl": b"y"})
    assert (remote_files.fetch(url, recursive=True) / "train" / "a.jsonl").read_bytes() == b"y"


def test_objects_are_not_copied_out_of_the_cache(tmp_path, monkeypatch, amazon):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("AWS_ENDPOINT_URL", amazon.meta.endpoint_url)
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "test")
    prefix = uuid.uuid4().hex
    for name in (f"/{tmp_path}/out", "../../../out"):
        amazon.put_object(Bucket="activations", Key=f"{prefix}/{name}", Body=b"x")
        with pytest.raises(BadInput, match="its name is not a file path"):
            remote_files.fetch(f"s3://activations/{prefix}", recursive=True)
        amazon.delete_object(Bucket="activations", Key=f"{prefix}/{name}")
    assert not list(tmp_path.rglob("out"))


@pytest.mark.parametrize("slash", ["", "/"], ids=["bucket", "slash"])
def test_inputs_may_be_a_whole_bucket(cloud, request, tmp_path, monkeypatch, slash):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    bucket = f"inputs-{uuid.uuid4().hex}"
    if cloud == "gs":
        request.getfixturevalue("google").create_bucket(bucket)
    else:
        request.getfixturevalue("amazon").create_bucket(Bucket=bucket)
    create_objects(f"{cloud}://{bucket}", {"a.jsonl": b'{"text": "one"}\n', "config.json": b"{}"})
    path = f"{cloud}://{bucket}{slash}"
    assert sources.detect_kind(path) == "jsonl"
    assert sources.open_source({"kind": "jsonl", "path": path}).count() == 1
    assert (remote_files.model_folder(path) / "config.json").read_bytes() == b"{}"


class Rewritten:
    """A storage in which an object is replaced before each of its first reads of a range."""

    def __init__(self, inner, contents, start=0):
        self._inner, self._contents, self._start = inner, iter(contents), start

    def __getattr__(self, name):
        return getattr(self._inner, name)

    def read_range(self, name, start, size):
        for content in itertools.islice(self._contents, int(start == self._start)):
            self._inner.replace(name, content)
        return self._inner.read_range(name, start, size)


@pytest.mark.parametrize("last", [b"two", b"longer than two", b"", b"x"], ids=repr)
def test_an_object_that_is_replaced_during_its_download_is_read_again(storage, tmp_path, last):
    storage.create("a.bin", b"one!")
    target = tmp_path / "cache" / "a.bin"
    for _ in range(2):
        copied = remote_files.copy_object(Rewritten(storage, [b"1" * 40, last]), "a.bin", target)
        assert copied.read_bytes() == last
    assert remote_files.copy_object(storage, "a.bin", target).read_bytes() == last


def test_pieces_are_of_one_version(storage, tmp_path):
    size = remote_files.PIECE + 1
    storage.create("a.bin", b"A" * size)
    changing = Rewritten(storage, [b"B" * size], start=remote_files.PIECE)
    copied = remote_files.copy_object(changing, "a.bin", tmp_path / "a.bin")
    assert copied.read_bytes() == b"B" * size


def test_an_object_that_is_always_replaced_is_not_used(storage, tmp_path):
    storage.create("a.bin", b"first")
    changing = Rewritten(storage, (b"%d" % number for number in range(100)))
    with pytest.raises(Conflict, match=r"was replaced, .* in each of 5 downloads"):
        remote_files.copy_object(changing, "a.bin", tmp_path / "cache" / "a.bin")
    assert not any((tmp_path / "cache").iterdir())


@pytest.mark.parametrize("kind", ["gs", "s3"])
def test_a_saved_dataset_is_read_from_a_bucket(kind, request, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    if kind == "gs":
        request.getfixturevalue("google")
        monkeypatch.setenv("GOOGLE_CLOUD_PROJECT", "test")
    else:
        client = request.getfixturevalue("amazon")
        monkeypatch.setenv("AWS_ENDPOINT_URL", client.meta.endpoint_url)
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            monkeypatch.setenv(name, "test")
    local = make_dataset(tmp_path / "saved", 30)
    address = f"{kind}://activations/{uuid.uuid4().hex}/saved"
    bucket = open_storage(address)
    for path in sorted((tmp_path / "saved").rglob("*.*")):
        bucket.create(str(path.relative_to(tmp_path / "saved")), path.read_bytes())
    assert sources.detect_kind(address) == "hf"
    there, here = (sources.open_source({**local, "path": p}) for p in (address, local["path"]))
    assert there.count() == 30 and there.digest() == here.digest()
    assert [sample.text for sample in there.read(range(8, 12))] == [
        f"text {number}" for number in range(8, 12)
    ]
    assert len(list(sources.read_records(address))) == 30
