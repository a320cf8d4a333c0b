"""Rows into a training process: the order of a stored dataset, exactly once, whatever is killed."""

from __future__ import annotations

import json
import random
import resource
import shutil
import socket
import ssl
import subprocess
import sys
import threading
import weakref
from contextlib import closing, contextmanager, suppress

import numpy as np
import pytest

from tests.activations import stream_worker, synthetic
from tests.activations.tiny_model import tpu
from tests.ports import free_port
from tpufleet.errors import (
    BadInput,
    Conflict,
    NoAnswer,
    NotFound,
    Unauthorized,
    UntrustedCertificate,
)
from tpufleet_activations.io import dtypes, verification
from tpufleet_activations.io.storage import LocalFolder
from tpufleet_activations.io.unit_writer import StoredSample
from tpufleet_activations.pipeline import stream_server
from tpufleet_activations.streams import addresses, live_rows, protocol, stream

SITES = synthetic.SITES
SAMPLES = 100
BATCH = stream_worker.BATCH


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    """A dataset of the plan that `stream_worker` serves."""
    folder = LocalFolder(tmp_path_factory.mktemp("stored"))
    wanted = stream_worker.plan(SAMPLES)
    synthetic.extract(folder, wanted)
    return str(folder.path)


@pytest.fixture(scope="module")
def credentials(tmp_path_factory):
    made = addresses.Credentials(tmp_path_factory.mktemp("secret") / "credentials")
    made.create_missing()
    return made


@contextmanager
def extractor(address, credentials=None, samples=SAMPLES):
    """The address of one that runs in a thread."""
    where = addresses.parse(address)
    wanted = stream_worker.plan(samples)
    ended = threading.Event()
    opened = stream_server.StreamServer(where, credentials, wanted, ended.is_set)
    thread = threading.Thread(target=stream_worker.serve, args=(opened, wanted))
    thread.start()
    try:
        yield address if where.path else f"tcp://{where.host}:{opened.port}"
    finally:
        ended.set()
        opened.close()
        thread.join()


@pytest.fixture(params=["shared memory", "tcp"])
def live(request, tmp_path, credentials):
    """Arguments of `stream` for a running extractor."""
    if request.param == "tcp":
        with extractor("tcp://127.0.0.1:0", credentials) as address:
            yield {"source": address, "credentials": str(credentials.folder)}
    else:
        with extractor(f"unix:{tmp_path}/socket") as address:
            yield {"source": address}


def equal(left, right) -> bool:
    return left.values.keys() == right.values.keys() and all(
        np.array_equal(a, b)
        for a, b in zip(
            [*left.values.values(), *left[1:]], [*right.values.values(), *right[1:]], strict=True
        )
    )


def agree(left, right) -> bool:
    return all(equal(a, b) for a, b in zip(left, right, strict=True))


def test_a_dataset_is_streamed_row_for_row_once(stored):
    batches = list(stream(stored, SITES, **BATCH))
    found = {
        (int(sample), int(position)): rows.values[SITES[1]][n].astype(float)
        for rows in batches
        for n, (sample, position) in enumerate(zip(rows.samples, rows.positions, strict=True))
    }
    assert sum(len(rows.tokens) for rows in batches) == len(found)
    assert len(found) == sum(map(synthetic.length, range(SAMPLES)))
    for (sample, position), row in found.items():
        assert np.array_equal(row, synthetic.values(sample, SITES[1])[position])
    assert [len(rows.tokens) for rows in batches[:-1]] == [7] * (len(batches) - 1)


def test_a_stream_has_the_order_of_a_dataset(stored, live):
    with stream(sites=SITES, **live, **BATCH) as rows:
        assert agree(rows, stream(stored, SITES, **BATCH))


def test_some_sites_of_a_stream(stored, live):
    with stream(sites=SITES[2], **live, **BATCH) as rows:
        assert agree(rows, stream(stored, SITES[2], **BATCH))


def test_the_order_depends_on_the_seed(stored):
    first, again, other = (
        [rows.samples.tolist() for rows in stream(stored, SITES[0], batch=16, seed=seed)]
        for seed in (0, 0, 1)
    )
    assert first == again != other


def test_ranks_have_all_rows_between_them(stored, live):
    parts = []
    for rank in range(3):
        with stream(sites=SITES[0], rank=rank, world_size=3, **live, **BATCH) as rows:
            own = list(rows)
        assert agree(own, stream(stored, SITES[0], rank=rank, world_size=3, **BATCH))
        parts += [(s, p) for b in own for s, p in zip(b.samples, b.positions, strict=True)]
    assert len(parts) == len(set(parts)) == sum(map(synthetic.length, range(SAMPLES)))


def test_ranks_that_take_a_step_together_all_get_their_rows(tmp_path):
    # Each unit is more than a reader, its slots and its queue hold.
    wide = WideRows(units=5, rows=16_384)
    with wide.extractor(f"unix:{tmp_path}/socket") as address:
        first = stream(address, "resid_post.0", batch=512, buffer=512, world_size=2, rank=0)
        next(first)  # it has asked before the other comes
        second = stream(address, "resid_post.0", batch=512, buffer=512, world_size=2, rank=1)
        with first, second:
            assert sum(1 for _ in zip(first, second, strict=False)) == 2 * 32
            assert sum(1 for _ in first) == 32 - 2


@pytest.mark.parametrize("batch, buffer", [(7, 35), (7, 1), (64, 64), (300, 300), (1000, 10)])
def test_a_stream_continues_at_any_position(stored, batch, buffer):
    arguments = {"batch": batch, "buffer": buffer, "seed": 5}
    whole = list(stream(stored, SITES, **arguments))
    running = stream(stored, SITES, **arguments)
    for taken in range(len(whole) + 1):
        position = json.loads(json.dumps(running.position))
        assert agree(stream(stored, SITES, position=position, **arguments), whole[taken:])
        next(running, None)


def test_a_stream_that_was_resumed_can_be_resumed_again(stored):
    whole = list(stream(stored, SITES, **BATCH))
    position, taken = None, 0
    while taken < len(whole):
        rows = stream(stored, SITES, position=position, **BATCH)
        for expected in whole[taken : taken + 4]:
            assert equal(next(rows), expected)
        taken, position = taken + 4, rows.position
    assert list(stream(stored, SITES, position=position, **BATCH)) == []


def test_a_trainer_continues_a_live_stream_where_it_was(stored, live):
    expected = list(stream(stored, SITES, **BATCH))
    taken, position = 0, None
    while taken < len(expected):
        with stream(sites=SITES, position=position, **live, **BATCH) as rows:
            for batch in expected[taken : taken + 13]:
                assert equal(next(rows), batch)
            position = rows.position
        taken += 13


def test_a_position_of_another_order_is_refused(stored):
    position = stream(stored, SITES, **BATCH).position
    with pytest.raises(Conflict, match="seed 3"):
        stream(stored, SITES, position=position, **{**BATCH, "seed": 4})
    with pytest.raises(BadInput, match="the position"):
        stream(stored, SITES, position={"step": 1}, **BATCH)


def test_a_dataset_that_is_not_complete_is_refused(tmp_path):
    folder = LocalFolder(tmp_path / "part")
    wanted = stream_worker.plan(SAMPLES)
    synthetic.extract(folder, wanted)
    next(iter(sorted((folder.path / "units").glob("00000003*-0001.json")))).unlink()
    with pytest.raises(Conflict, match="7 of 8 units"):
        stream(str(folder.path), SITES, **BATCH)


def test_a_wrong_token_is_refused(tmp_path, credentials):
    other = tmp_path / "other"
    other.mkdir()
    (other / "cert.pem").write_bytes((credentials.folder / "cert.pem").read_bytes())
    (other / "token").write_text("wrong")
    (other / "token").chmod(0o600)
    with (
        extractor("tcp://127.0.0.1:0", credentials) as address,
        pytest.raises(Unauthorized, match="token"),
    ):
        stream(address, SITES, credentials=str(other), **BATCH)


def test_an_empty_token_lets_nobody_in(tmp_path):
    emptied = addresses.Credentials(tmp_path / "credentials")
    emptied.create_missing()
    (emptied.folder / "token").write_text("\n")
    with pytest.raises(BadInput, match="token"), extractor("tcp://127.0.0.1:0", emptied):
        pass


@pytest.mark.parametrize("slot", [-1, stream_server.SLOTS])
def test_a_reader_that_frees_a_slot_that_does_not_exist_is_disconnected(tmp_path, slot):
    address = f"unix:{tmp_path}/socket"
    hello = protocol.Hello(
        version=protocol.VERSION, token="", sites=tuple(SITES), rank=0, world_size=1
    )
    with extractor(address), addresses.connect(addresses.parse(address), None) as connection:
        protocol.send(connection, hello)
        assert isinstance(protocol.receive(connection).message, protocol.Welcome)
        protocol.send(connection, protocol.Free(slot=slot))
        with pytest.raises(protocol.Closed):
            protocol.receive(connection)


def test_another_certificate_is_refused(tmp_path, credentials):
    other = addresses.Credentials(tmp_path / "other")
    other.create_missing()
    with (
        extractor("tcp://127.0.0.1:0", credentials) as address,
        pytest.raises(UntrustedCertificate, match="another certificate"),
    ):
        stream(address, SITES, credentials=str(other.folder), **BATCH)


def test_a_token_that_others_can_read_is_refused(credentials, tmp_path):
    copy = tmp_path / "copy"
    copy.mkdir()
    for name in ("cert.pem", "token"):
        (copy / name).write_bytes((credentials.folder / name).read_bytes())
    (copy / "token").chmod(0o644)
    with pytest.raises(BadInput, match="chmod 600"):
        stream("tcp://127.0.0.1:1", SITES, credentials=str(copy), **BATCH)


def test_a_tcp_stream_needs_credentials():
    with pytest.raises(BadInput, match="credentials"):
        stream("tcp://127.0.0.1:1", SITES, **BATCH)


def test_a_tls_connection_is_used_by_one_thread_at_a_time(stored, credentials, monkeypatch):
    """Python 3.13.6 has a lock for each, which a thread holds while it waits for bytes."""
    locks = weakref.WeakKeyDictionary()

    def locked(name):
        unlocked = getattr(ssl.SSLSocket, name)

        def call(connection, *arguments):
            with locks.setdefault(connection, threading.RLock()):
                return unlocked(connection, *arguments)

        monkeypatch.setattr(ssl.SSLSocket, name, call)

    locked("recv_into")
    locked("send")
    folder = str(credentials.folder)
    with (
        extractor("tcp://127.0.0.1:0", credentials) as address,
        stream(address, SITES, credentials=folder, **BATCH) as rows,
    ):
        assert agree(rows, stream(stored, SITES, **BATCH))


def test_a_reader_that_ends_does_not_end_the_extractor_for_others(stored, tmp_path):
    address = f"unix:{tmp_path}/socket"
    with extractor(address), stream(address, SITES, **BATCH) as rows:
        first = next(rows)
        with stream(address, SITES[0], **BATCH) as others:
            assert agree(others, stream(stored, SITES[0], **BATCH))
        assert agree([first, *rows], stream(stored, SITES, **BATCH))


def test_an_extractor_without_readers_ends(tmp_path, caplog):
    """Such as one that was started again when a rank had all its rows already."""
    address = f"unix:{tmp_path}/socket"
    wanted = stream_worker.plan(SAMPLES)
    opened = stream_server.StreamServer(
        addresses.parse(address), None, wanted, lambda: False, idle_seconds=0.5
    )
    thread = threading.Thread(target=stream_worker.serve, args=(opened, wanted))
    thread.start()
    with closing(opened):
        with stream(address, SITES, world_size=2, rank=1, **BATCH) as rows:
            assert list(rows)
        thread.join()
    assert "no reader for" in caplog.text


def test_an_extractor_accepts_readers_again_after_an_error(stored, tmp_path, caplog):
    """Such as when the process had too many open files."""
    pause = threading.Event()
    limit, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with extractor(f"unix:{tmp_path}/socket") as address, socket.socket(socket.AF_UNIX) as waiting:
        resource.setrlimit(resource.RLIMIT_NOFILE, (0, most))
        try:
            waiting.connect(f"{tmp_path}/socket")
            while "Too many open files" not in caplog.text:
                pause.wait(0.01)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (limit, most))
        with stream(address, SITES, **BATCH) as rows:
            assert agree(rows, stream(stored, SITES, **BATCH))


def test_only_the_owner_opens_a_socket(tmp_path):
    with extractor(f"unix:{tmp_path}/socket"):
        assert (tmp_path / "socket").stat().st_mode & 0o777 == 0o600
    assert not (tmp_path / "socket").exists()


def test_a_site_that_is_not_in_the_plan_is_refused(live):
    with pytest.raises(NotFound, match=r"resid_post\.9"):
        stream(sites="resid_post.9", **live, **BATCH)
    with pytest.raises(BadInput, match="sites is 0"):
        stream(sites=[], **live, **BATCH)


@pytest.mark.parametrize("address", ["http://host:1", "tcp://host", "unix:", "tcp://host:99999"])
def test_an_invalid_address_is_named(address):
    with pytest.raises(BadInput, match="an address"):
        addresses.parse(address)


def test_without_an_extractor_the_reader_gives_up(tmp_path):
    with pytest.raises(NoAnswer, match="--stream unix:"):
        stream(f"unix:{tmp_path}/socket", SITES, patience=0.3, **BATCH)


class Cutting:
    """Between reader and extractor: forwards so many bytes of each connection, then closes it."""

    def __init__(self, target, cuts):
        self._target, self._cuts = target, iter(cuts)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self.connections = 0
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self):
        for cut in self._cuts:
            here, _ = self._listener.accept()
            self.connections += 1
            there = socket.create_connection(("127.0.0.1", self._target))
            threading.Thread(target=self._forward, args=(here, there, 1 << 40), daemon=True).start()
            self._forward(there, here, cut)

    @staticmethod
    def _forward(source, target, left):
        with suppress(OSError):
            while left and (data := source.recv(min(left, 1 << 16))):
                target.sendall(data)
                left -= len(data)
        for side in (source, target):
            with suppress(OSError):
                side.shutdown(socket.SHUT_RDWR)


def test_frames_that_were_cut_off_are_asked_for_again(stored, credentials):
    chance = random.Random(1)
    cuts = [6000, *(chance.randrange(2000, 9000) for _ in range(20)), 1 << 40]
    with extractor("tcp://127.0.0.1:0", credentials) as address:
        proxy = Cutting(addresses.parse(address).port, cuts)
        folder, cut = str(credentials.folder), f"tcp://127.0.0.1:{proxy.port}"
        with stream(cut, SITES, credentials=folder, **BATCH) as rows:
            assert agree(rows, stream(stored, SITES, **BATCH))
    assert proxy.connections > 5


def frame_of_rows(**changes):
    fields = {"unit": 0, "row": 0, "count": 1, "tensors": (("samples", "I64", 0),), **changes}
    return protocol.Rows(**fields)


@pytest.mark.parametrize(
    "content",
    [
        b"HTTP/1.1 400 Bad Request\r\n\r\n",
        protocol._HEADER.pack(protocol._MAGIC, 1 << 31),
        protocol._HEADER.pack(protocol._MAGIC, 3) + b"abc",
    ],
    ids=["another protocol", "too long", "no message"],
)
def test_what_is_no_frame_is_refused(content):
    here, there = socket.socketpair()
    with here, there:
        there.sendall(content)
        with pytest.raises(protocol.BrokenFrame):
            protocol.receive(here)


@pytest.mark.parametrize(
    "changes",
    [
        {"count": -1},
        {"count": 1 << 40},
        {"tensors": (("x", "I64", -4),)},
        {"tensors": (("x", "F99", 0),)},
    ],
)
def test_rows_of_an_impossible_size_are_refused(changes):
    here, there = socket.socketpair()
    with here, there:
        protocol.send(there, frame_of_rows(**changes))
        with pytest.raises(protocol.BrokenFrame):
            protocol.receive(here)


@pytest.fixture(scope="module", params=["skip", "concat"])
def planned(request, model_folder, tmp_path_factory):
    """A plan of a real model, and a dataset of it."""
    folder = tmp_path_factory.mktemp("planned")
    chance = random.Random(4)
    texts = ["".join(chance.choices("abcdef ", k=chance.randrange(1, 70))) for _ in range(90)]
    lines = [json.dumps({"text": text}) for text in texts]
    (folder / "data.jsonl").write_text("\n".join(lines))
    out = folder / "acts"
    model = shutil.copytree(model_folder, folder / "model")
    (model / "tokenizer_config.json").write_text(json.dumps({"bos_token": "?"}))
    status, output = tpu(
        "plan", out, "--model", model, "--data", folder / "data.jsonl", "--max-length", 64,
        "--site", "resid_post.*", "--too-long", request.param, "--batch-tokens", 512,
    )  # fmt: skip
    assert status == 0, output
    shutil.copytree(out, folder / "streamed")
    status, output = tpu("run", out, "--quiet")
    assert status == 0, output
    return folder


def test_the_command_streams_what_it_would_store(planned, tmp_path):
    address = f"unix:{tmp_path}/socket"
    ended = []
    run = lambda: ended.append(tpu("run", planned / "streamed", "--quiet", "--stream", address))
    thread = threading.Thread(target=run)
    thread.start()
    sites = ["resid_post.0", "resid_post.1"]
    with stream(address, sites, **BATCH) as rows:
        assert agree(rows, stream(str(planned / "acts"), sites, **BATCH))
    thread.join()
    assert ended[0][0] == 0, ended
    assert not (planned / "streamed" / "shards").exists()
    assert verification.verify(LocalFolder(planned / "acts")).intact


class WideRows:
    """Units of many wide rows, and how many rows were given to be sent."""

    def __init__(self, units=6, rows=4096, width=1024):
        sites = {"resid_post.0": width}
        self.plan = synthetic.plan(samples=units, unit_samples=1, sites=tuple(sites), widths=sites)
        self.rows, self.width, self.sent = rows, width, 0

    @contextmanager
    def extractor(self, address):
        ended = threading.Event()
        where = addresses.parse(address)
        opened = stream_server.StreamServer(where, None, self.plan, ended.is_set)
        thread = threading.Thread(target=self.serve, args=(opened,), daemon=True)
        thread.start()
        yield address
        ended.set()
        opened.close()
        thread.join()

    def serve(self, opened):
        position = np.arange(self.rows, dtype=np.int32)
        for claim in opened.claims():
            if claim is None:
                continue
            sample = StoredSample(
                sample=claim.unit, tokens=position, positions=position, metadata={}
            )
            writer = opened.open_writer(claim, [sample])
            for _ in range(0, self.rows, 512):
                block = np.full((512, self.width), claim.unit, dtypes.stored_dtype("bf16"))
                writer.append("resid_post.0", block)
                self.sent += 512
            writer.finish()


@pytest.mark.parametrize("kind", ["shared memory", "tcp"])
def test_a_slow_reader_holds_the_extractor_back(tmp_path, credentials, kind):
    wide = WideRows(units=40)
    where = addresses.parse(f"unix:{tmp_path}/socket" if kind != "tcp" else "tcp://127.0.0.1:0")
    used = credentials if kind == "tcp" else None
    ended = threading.Event()
    opened = stream_server.StreamServer(where, used, wide.plan, ended.is_set)
    address = f"tcp://127.0.0.1:{opened.port}" if kind == "tcp" else str(where)
    thread = threading.Thread(target=wide.serve, args=(opened,), daemon=True)
    thread.start()
    source = live_rows.LiveRows(
        address, ["resid_post.0"], credentials=str(credentials.folder) if used else None
    )
    limit = 16 << 20
    source.start(list(range(40)), 0, limit)
    # Nobody takes the rows: the pipeline stops once all buffers are full.
    stalled = threading.Event()
    last = -1
    while wide.sent != last or source._bytes < limit:
        last = wide.sent
        stalled.wait(0.3)
    row_bytes = 2 * wide.width + 16
    kernel = 16 << 20  # buffers of sockets, and of TLS
    most = limit + protocol.FRAME_BYTES * (stream_server.SLOTS + 3) + kernel
    assert source._bytes <= limit + protocol.FRAME_BYTES + row_bytes
    assert wide.sent * row_bytes <= most < 40 * wide.rows * row_bytes
    taken = sum(
        block.height for unit in range(40) for block in source.unit_blocks(unit, 0, 1 << 20)
    )
    assert taken == 40 * wide.rows
    source.close()
    thread.join()  # the reader has all, so the extractor ends
    opened.close()


def start(role, *arguments):
    command = [sys.executable, "-m", "tests.activations.stream_worker", role, *arguments]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    return process


def survive_kills(tmp_path, address, credentials, count, samples, seed):
    """Read to the end while both sides are killed so many times; the digest of what was read."""
    chance = random.Random(seed)
    checkpoint = tmp_path / "checkpoint.json"
    folder = "" if credentials is None else str(credentials.folder)
    serve = lambda: start("serve", address, folder, str(samples))
    read = lambda: start("read", address, folder, str(checkpoint))
    sides = {"extractor": serve(), "reader": None}
    assert sides["extractor"].stdout.readline()
    sides["reader"] = read()
    left = chance.randrange(12)
    try:
        while True:
            line = sides["reader"].stdout.readline()
            if line == "end\n":
                break
            assert line == "batch\n", "the reader failed"
            left -= 1
            if left > 0 or not count:
                continue
            side = chance.choice(["extractor", "reader"])
            sides[side].kill()
            sides[side].wait()
            sides[side].stdout.close()
            sides[side] = serve() if side == "extractor" else read()
            count, left = count - 1, chance.randrange(12)
        assert not count, f"{count} kills are left: use more samples"
        assert sides["extractor"].wait() == 0, "the extractor ends when the reader has all"
    finally:
        for process in sides.values():
            if process is not None:
                process.kill()
                process.wait()
                process.stdout.close()
    return json.loads(checkpoint.read_text())["digest"]


def undisturbed(tmp_path, samples):
    folder = LocalFolder(tmp_path / "stored")
    synthetic.extract(folder, stream_worker.plan(samples))
    digest = ""
    for batch in stream(str(folder.path), SITES, **BATCH):
        digest = stream_worker.fold(digest, batch)
    return digest


@pytest.mark.parametrize("kind", ["shared memory", "tcp"])
def test_kills_of_either_side_neither_lose_nor_repeat_a_row(tmp_path, credentials, kind):
    tcp = kind == "tcp"
    address = f"tcp://127.0.0.1:{free_port()}" if tcp else f"unix:{tmp_path}/socket"
    own = credentials if tcp else None
    digest = survive_kills(tmp_path, address, own, count=6, samples=200, seed=1)
    assert digest == undisturbed(tmp_path, 200)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["shared memory", "tcp"])
def test_hundred_kills_of_either_side(tmp_path, credentials, kind):
    tcp = kind == "tcp"
    address = f"tcp://127.0.0.1:{free_port()}" if tcp else f"unix:{tmp_path}/socket"
    own = credentials if tcp else None
    digest = survive_kills(tmp_path, address, own, count=100, samples=2500, seed=2)
    assert digest == undisturbed(tmp_path, 2500)
