"""Programs that one attempt compiled are there for the next one."""

from __future__ import annotations

import json
import os
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from tests import fake_gcs
from tests.agent.conftest import AgentHarness
from tests.agent.control_plane import FakeControlPlane
from tests.agent.test_environment_variables import SETTINGS
from tests.polling import wait_until
from tests.ports import free_port
from tpufleet.agent.workload.compiled_programs import ProgramArchives, open_archives
from tpufleet.errors import NotFound, Temporary
from tpufleet.runtime import gcs

PRINT_FOLDERS = ("sh", "-c", 'echo "folders: $JAX_COMPILATION_CACHE_DIR, $TPUFLEET_COMPILED_DIR"')
PRINT_FOLDER = ("sh", "-c", 'echo "folder: $JAX_COMPILATION_CACHE_DIR"')
COMPILE = """
import jax, jax.monitoring
counts = {"cache_hits": 0, "cache_misses": 0}
def count(name, **_):
    event = name.rpartition("/")[2]
    if event in counts: counts[event] += 1
jax.monitoring.register_event_listener(count)
jax.jit(lambda x: x * 2 + 1)(3.0).block_until_ready()
print("programs:", counts, flush=True)
"""

# Programs of all devices, and of those of one process.
IN_GANG = """
import os, pathlib, time, jax, jax.monitoring, numpy
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from tpufleet import runtime
counts = {"compile_requests_use_cache": 0, "cache_hits": 0}
def count(name, **_):
    event = name.rpartition("/")[2]
    if event in counts: counts[event] += 1
jax.monitoring.register_event_listener(count)
here = runtime.initialize()
rows = NamedSharding(Mesh(numpy.array(jax.devices()), ("chip",)), PartitionSpec("chip"))
ones = numpy.ones(jax.device_count())
x = jax.make_array_from_callback(ones.shape, rows, lambda index: ones[index])
float(jax.jit(lambda x: (x * 2).sum())(x))
jax.jit(lambda x: x * 3 + 1)(3.0).block_until_ready()
print("programs:", counts["compile_requests_use_cache"] - counts["cache_hits"], flush=True)
while not (pathlib.Path(os.environ["TPUFLEET_RUN_DIR"]) / "go").exists():
    time.sleep(0.05)
"""


@pytest.fixture
def base_env() -> dict[str, str]:
    """Without the cache of the tests."""
    return {name: value for name, value in os.environ.items() if not name.startswith("JAX_")}


def line(harness, attempt: str, prefix: str) -> str:
    harness.wait_for_exit(attempt)
    return next(line for line in harness.log(attempt).splitlines() if line.startswith(prefix))


def test_a_second_attempt_compiles_nothing(harness, base_env):
    harness.assign_python(COMPILE)
    harness.start(base_env)
    assert "'cache_hits': 0" in line(harness, "j1.0", "programs: ")
    harness.assign_python(COMPILE, attempt_id="j1.1", number=1)
    assert "'cache_misses': 0" in line(harness, "j1.1", "programs: ")


def test_the_programs_of_jobs_and_users_are_apart(harness, base_env):
    place = str(harness.checkpoint)
    harness.assign(*PRINT_FOLDER, checkpoint=place)
    harness.start(base_env)
    first = line(harness, "j1.0", "folder: ")
    for attempt, changes, same in (
        ("j1.1", {"checkpoint": f"{place}/from-attempt-1"}, True),
        ("j2.0", {"checkpoint": f"{place}-2"}, False),
        ("j3.0", {"checkpoint": place, "owner": "ann"}, False),
    ):
        harness.assign(*PRINT_FOLDER, attempt_id=attempt, **changes)
        assert (line(harness, attempt, "folder: ") == first) is same


def test_a_gang_keeps_programs_where_every_process_writes_its_own(harness, base_env):
    """`runtime.initialize` sees to that. JAX alone would keep those of process 0."""
    harness.assign(*PRINT_FOLDERS, num_processes=2)
    harness.start(base_env)
    printed = line(harness, "j1.0", "folders: ")
    folder = next(path for path in (harness.work / "compiled").iterdir() if path.is_dir())
    assert printed == f"folders: , {folder}"


class Gang:
    """Two hosts, each with its agent, that run one program after another."""

    def __init__(self, folder: Path, base_env: dict[str, str]) -> None:
        self.hosts = []
        for index in range(2):
            (folder / str(index)).mkdir(parents=True)
            host = AgentHarness(FakeControlPlane(), folder / str(index))
            self.hosts.append(host)
            host.start(base_env)

    def run(self, number: int, checkpoint: str, until: Callable[[], object]) -> list[str]:
        """What each process says of its programs. They end when `until` is true."""
        address = f"127.0.0.1:{free_port()}"
        attempt = f"j1.{number}"
        for index, host in enumerate(self.hosts):
            host.assign_python(
                IN_GANG, attempt_id=attempt, number=number, checkpoint=checkpoint,
                process_id=index, num_processes=2, coordinator_address=address,
                owned_by_admin=True,
            )  # fmt: skip
        for host in self.hosts:
            host.wait_for_log("programs: ", attempt)
        wait_until(until, 120)
        for host in self.hosts:
            (host.run_dir(attempt) / "go").touch()
        return [line(host, attempt, "programs: ") for host in self.hosts]

    def close(self) -> None:
        for host in self.hosts:
            host.close()
            host.control_plane.close()


@pytest.fixture
def new_gang(tmp_path, base_env) -> Iterator[Callable[[], Gang]]:
    gangs: list[Gang] = []

    def start() -> Gang:
        gangs.append(Gang(tmp_path / f"gang-{len(gangs)}", base_env))
        return gangs[-1]

    yield start
    for gang in gangs:
        gang.close()


def compiled(lines: list[str]) -> list[int]:
    """Requests for programs less those that were found, by process."""
    return [int(text.split()[-1]) for text in lines]


def test_a_second_attempt_of_a_gang_compiles_nothing(new_gang, tmp_path):
    gang = new_gang()
    place = str(tmp_path / "checkpoints")
    assert min(compiled(gang.run(0, place, lambda: True))) > 1
    assert compiled(gang.run(1, place, lambda: True)) == [0, 0]


def test_new_hosts_find_the_programs_of_a_gang_in_the_bucket(new_gang, monkeypatch):
    with fake_gcs.server() as url:
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", url)
        gcs.connect().create_bucket("lab")
        bucket = gcs.Bucket("gs://lab/run/.compiled")
        wanted = {f"{process}.{kind}" for process in "01" for kind in ("json", "zip")}
        first = new_gang().run(0, "gs://lab/run", lambda: bucket.names().keys() >= wanted)
        written = bucket.names()
        again = new_gang().run(1, "gs://lab/run/from-attempt-1", lambda: True)
        assert min(compiled(first)) > 1 and compiled(again) == [0, 0]
        assert bucket.names() == written, "nothing is new"
        listed = [set(json.loads(bucket.read(f"{process}.json"))) for process in "01"]
        assert listed[0].isdisjoint(listed[1]), "each program has one writer"


class CountingBucket(gcs.Bucket):
    """The official client, with the number of requests."""

    requests = 0

    def _blob(self, name):
        self.requests += 1
        return super()._blob(name)


def test_a_start_costs_few_requests_however_many_programs_there_are(tmp_path, monkeypatch):
    with fake_gcs.server() as url:
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", url)
        gcs.connect().create_bucket("lab")
        folders = [tmp_path / name for name in ("first", "other")]
        for folder in folders:
            folder.mkdir()
        for number in range(200):
            (folders[0] / f"jit_f{number}-0a-cache").write_bytes(b"program")
        ProgramArchives(gcs.Bucket("gs://lab/p"), folders[0], 0).upload()
        bucket = CountingBucket("gs://lab/p")
        other = ProgramArchives(bucket, folders[1], 255)
        other.fetch()
        assert len(list(folders[1].iterdir())) == 200 and bucket.requests == 3
        other.upload()
        other.fetch()
        assert bucket.requests == 6, "it asks only what there is"
        (folders[1] / "jit_local-0b-cache").write_bytes(b"own")
        other.upload()
        assert json.loads(bucket.read("255.json")) == ["jit_local-0b-cache"]


class RateLimitedBucket:
    """In memory, as Google limits buckets: an object is written once a second. No second passes."""

    url = "memory"

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.reads: Counter[str] = Counter()

    def write(self, name: str, data: bytes) -> None:
        if name in self.objects:
            raise Temporary(f"429 for {name}")
        self.objects[name] = data

    def upload(self, name: str, path: Path) -> None:
        self.write(name, path.read_bytes())

    def read(self, name: str) -> bytes:
        self.reads[name] += 1
        if name not in self.objects:
            raise NotFound(name)
        return self.objects[name]

    def download(self, name: str, path: Path) -> None:
        path.write_bytes(self.read(name))


def test_256_hosts_at_once_write_each_object_once_and_find_all_programs(tmp_path):
    bucket, hosts = RateLimitedBucket(), 256

    def archives(round_number: int, process: int) -> ProgramArchives:
        folder = tmp_path / str(round_number) / str(process) / "programs"
        folder.mkdir(parents=True)
        return ProgramArchives(bucket, folder, process)

    def compile_and_upload(process: int) -> None:
        own = archives(0, process)
        for name in ("jit_step-0a", f"jit_local-{process}"):
            (own._folder / f"{name}-cache").write_bytes(b"program")
        own.upload()

    compile_and_upload(0)
    with ThreadPoolExecutor(32) as threads:
        list(threads.map(compile_and_upload, range(1, hosts)))
        bucket.reads.clear()
        again = [archives(1, process) for process in range(hosts)]
        list(threads.map(ProgramArchives.fetch, again))
    programs = [json.loads(bucket.objects[f"{process}.json"]) for process in range(hosts)]
    assert len({name for each in programs for name in each}) == sum(map(len, programs))
    assert bucket.reads.total() <= 4 * hosts
    for process, host in enumerate(again):
        found = {path.name for path in host._folder.iterdir()}
        assert found >= {"jit_step-0a-cache", f"jit_local-{process}-cache"}


def test_an_archive_writes_only_programs_and_only_below_its_folder(tmp_path, monkeypatch):
    with fake_gcs.server() as url:
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", url)
        gcs.connect().create_bucket("lab")
        bucket, folder = gcs.Bucket("gs://lab/p"), tmp_path / "programs"
        folder.mkdir()
        names = ["../evil-cache", "/tmp/evil-cache", "authorized_keys", "jit_f-0a-cache"]
        with zipfile.ZipFile(tmp_path / "forged.zip", "w") as archive:
            for name in names:
                archive.writestr(name, b"x")
            archive.writestr("bomb-cache", b"0" * 10**6, zipfile.ZIP_DEFLATED)
        bucket.upload("0.zip", tmp_path / "forged.zip")
        bucket.write("0.json", json.dumps(names).encode())
        (folder / "jit_f-0a-cache").symlink_to(tmp_path / "elsewhere")
        ProgramArchives(bucket, folder, 0).fetch()
        assert [path.name for path in folder.iterdir()] == ["jit_f-0a-cache"]
        assert sorted(path.name for path in tmp_path.iterdir()) == ["forged.zip", "programs"]


@pytest.mark.parametrize(
    ("platform", "admin", "checkpoint", "shared"),
    [
        ("", False, "gs://lab/run", True),
        ("cpu", True, "gs://lab/run", True),
        ("cpu", False, "gs://lab/run", False),
        ("", True, "/mnt/run", False),
    ],
    ids=["host-of-a-cloud", "admin-on-the-server", "member-on-the-server", "folder"],
)
def test_jobs_of_members_do_not_choose_what_the_server_writes_to_buckets(
    harness, platform, admin, checkpoint, shared
):
    assignment = harness.assign("true", checkpoint=checkpoint, owned_by_admin=admin)
    settings = replace(SETTINGS, platform=platform)
    assert (open_archives(assignment, settings, harness.work) is not None) is shared


def test_a_job_can_choose_its_own_folder(harness, base_env):
    harness.assign("sh", "-c", "env", env={"JAX_COMPILATION_CACHE_DIR": "/own"})
    harness.start(base_env)
    assert line(harness, "j1.0", "JAX_COMPILATION") == "JAX_COMPILATION_CACHE_DIR=/own"
    assert "JAX_PERSISTENT_CACHE" not in harness.log()


def test_a_host_keeps_the_programs_of_the_last_jobs(harness, base_env):
    harness.start(base_env)
    for number in range(10):
        harness.assign(*PRINT_FOLDER, attempt_id=f"j{number}.0", checkpoint=f"/run-{number}")
        newest = line(harness, f"j{number}.0", "folder: ").removeprefix("folder: ")
    kept = [path for path in (harness.work / "compiled").iterdir() if path.is_dir()]
    assert len(kept) == 8 and newest in map(str, kept)
