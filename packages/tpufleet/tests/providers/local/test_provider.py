"""The local provider beyond the contract: real processes, files, and their clean-up."""

from __future__ import annotations

import errno
import json
import os
import signal
import stat
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import psutil
import pytest
from msgspec.structs import replace

from tests.nested_folders import make_nested, refuse_to_delete
from tests.polling import wait_until
from tests.repository import TEST_ROOTS
from tpufleet.clocks import ManualClock
from tpufleet.errors import BadRequest, NoCapacity
from tpufleet.model.fleet.cloud_slices import CloudState
from tpufleet.model.fleet.slices import SliceId
from tpufleet.model.job.jobs import Capacity
from tpufleet.model.tpu import type_lookup
from tpufleet.providers.base import Fault, Order
from tpufleet.providers.local import fault_plan, processes, slice_records
from tpufleet.providers.local.processes import ProcessId
from tpufleet.providers.local.provider import LocalProvider
from tpufleet.providers.local.slice_records import SliceRecords
from tpufleet.providers.local.stock import PORTS, Stock, StockLimit

SLEEP = ("sleep", "1000")
A = SliceId("a")
B = SliceId("b")
# Ignores SIGTERM; has a double-forked workload in its own session, and a child with an empty
# environment.
STUBBORN = textwrap.dedent(
    """
    import os, signal, subprocess, sys, time
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            open("orphan.new", "w").write(str(os.getpid()))
            os.rename("orphan.new", "orphan")
            time.sleep(1000)
        os._exit(0)
    os.wait()
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"], env={})
    open("child.new", "w").write(str(child.pid))
    os.rename("child.new", "child")
    time.sleep(1000)
    """
)

# A chain of processes, each of which reports the death of the previous one.
WITNESSES = textwrap.dedent(
    """
    import os, pathlib, time
    def stand(number, reader):
        following, writer = os.pipe()
        if number < 30 and os.fork() == 0:
            os.close(writer)
            stand(number + 1, following)
        os.close(following)
        if number == 30:
            pathlib.Path("all").touch()
        if reader is not None:
            os.read(reader, 1)
            pathlib.Path("witness").touch()
        time.sleep(1000)
    stand(0, None)
    """
)
# Simulated slices of a user without the privilege to read an agent's protected memory.
UNREADABLE = textwrap.dedent(
    """
    import ctypes, os, pathlib, sys, time
    from tpufleet.model.fleet.slices import SliceId
    from tpufleet.providers.base import Fault
    from tpufleet.providers.local import processes
    from tpufleet.providers.local.provider import LocalProvider
    from tests.providers.local.test_provider import order, pids, lives, wait_until
    root = pathlib.Path(sys.argv[1])
    if len(sys.argv) == 2:
        for right in range(64):
            ctypes.CDLL(None).prctl(24, right, 0, 0, 0)  # PR_CAPBSET_DROP
        os.execv(sys.executable, [sys.executable, __file__, str(root), "unprivileged"])
    become = (
        "import os, sys; mark = 'LOCAL_TPU_SLICE=' + os.environ['LOCAL_TPU_SLICE'];"
        "os.execv(sys.executable, [sys.executable, '-X', mark, '-c', sys.argv[1]])"
    )
    close = (
        "import ctypes, pathlib, time; ctypes.CDLL(None).prctl(4, 0, 0, 0, 0);"
        "pathlib.Path('closed').touch(); time.sleep(1000)"
    )
    provider = LocalProvider(root, agent=(sys.executable, "-c", become, close))
    provider.request(order())
    provider.advance()
    wait_until((root / "a/0/closed").exists)
    [agent] = pids(root).values()
    try:
        open(f"/proc/{agent}/environ").read()
        sys.exit("its memory is readable")
    except PermissionError:
        pass
    assert [found.pid for found in processes.leftovers(root)] == [agent]
    provider.inject(SliceId("a"), Fault.PREEMPT)
    wait_until(lambda: not lives(agent))
    """
)


@pytest.fixture
def root(tmp_path: Path) -> Iterator[Path]:
    root = tmp_path / "local"
    yield root
    LocalProvider(root).release_all()
    assert processes.leftovers(root) == []


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


def order(*slices: str, accelerator: str = "v5litepod-8", zone: str = "local-a") -> Order:
    names = tuple(SliceId(name) for name in slices or ("a",))
    return Order(
        id=f"order-{names[0]}",
        slices=names,
        accelerator=accelerator,
        zone=zone,
        capacity=Capacity.SPOT,
        tokens={name: f"token of {name}" for name in names},
        server_url="http://127.0.0.1:1",
        fleet="test",
        job_id="job-1",
    )


def pids(root: Path, name: str = "a") -> dict[int, int]:
    record = json.loads((root / name / "slice.json").read_text())
    return {int(index): agent["pid"] for index, agent in record["agents"].items()}


def state(provider: LocalProvider, name: str = "a") -> CloudState:
    return {found.id: found.state for found in provider.listing()}[SliceId(name)]


def lives(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def contents(root: Path) -> dict[str, tuple[int, bytes]]:
    return {
        str(path): (path.stat().st_mtime_ns, path.read_bytes())
        for path in root.rglob("*")
        if path.is_file()
    }


def test_every_host_runs_an_agent_with_its_environment(root, monkeypatch):
    monkeypatch.setenv("TPUFLEET_DATABASE", "postgres://secret")
    for name in ("PGPASSWORD", "AWS_SECRET_ACCESS_KEY", "DATABASE_URL", "GITHUB_TOKEN"):
        monkeypatch.setenv(name, "of the server")
    monkeypatch.setenv("WANDB_API_KEY", "for jobs")
    monkeypatch.setenv("HTTPS_PROXY", "http://proxy:3128")
    monkeypatch.setenv("PIP_INDEX_URL", "https://lab:hunter2@packages/simple")
    agent = ("sh", "-c", "env > seen; mv seen env; sleep 1000")
    provider = LocalProvider(root, agent=agent, inherit=["WANDB_API_KEY"])
    provider.request(order(accelerator="v5e-16"))
    provider.advance()
    wait_until(lambda: len(list(root.glob("a/*/env"))) == 4)
    lines = (root / "a/3/env").read_text().splitlines()
    seen = dict(line.split("=", 1) for line in lines if "=" in line)
    ours = {name: value for name, value in seen.items() if name.startswith("TPUFLEET_")}
    assert int(ours.pop("TPUFLEET_COORDINATOR_PORT")) in PORTS
    assert ours == {
        "TPUFLEET_SERVER": "http://127.0.0.1:1",
        "TPUFLEET_SLICE": "a",
        "TPUFLEET_HOST_INDEX": "3",
        "TPUFLEET_HOSTS": "4",
        "TPUFLEET_TOKEN_FILE": str(root / "a/3/token"),
        "TPUFLEET_WORK": str(root / "a/3/work"),
        "TPUFLEET_ADDRESS": "127.0.0.1",
        "TPUFLEET_CHIPS": "4",
        "TPUFLEET_NOTICE_FILE": str(root / "a/3/notice"),
        "TPUFLEET_PLATFORM": "cpu",
        "TPUFLEET_IMAGES": "refused",
        "TPUFLEET_WAITS_SECONDS": "1800",
    }
    assert seen["LOCAL_TPU_SLICE"].endswith("/a/3")
    assert "of the server" not in seen.values()
    assert seen["HTTPS_PROXY"] == "http://proxy:3128" and "PIP_INDEX_URL" not in seen
    assert seen["WANDB_API_KEY"] == "for jobs" and seen["PATH"] == os.environ["PATH"]


def test_the_token_is_only_in_a_private_file(root):
    provider = LocalProvider(root, agent=SLEEP)
    provider.request(order())
    provider.advance()
    token = root / "a/0/token"
    assert token.read_text() == "token of a"
    assert stat.S_IMODE(token.stat().st_mode) == 0o600
    files = [path for path in root.rglob("*") if path.is_file()]
    assert [path for path in files if b"token of" in path.read_bytes()] == [token]
    process = psutil.Process(pids(root)[0])
    assert "token of" not in str(process.cmdline()) + str(process.environ())


def test_agents_survive_the_server(root):
    script = textwrap.dedent(
        f"""
        import os, signal
        from pathlib import Path
        from tests.providers.local.test_provider import order
        from tpufleet.providers.local.provider import LocalProvider
        provider = LocalProvider(Path({str(root)!r}), agent=("sleep", "1000"))
        provider.request(order("a", accelerator="v5litepod-16"))
        provider.advance()
        os.killpg(0, signal.SIGKILL)
        """
    )
    died = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, TEST_ROOTS))},
        start_new_session=True,
        check=False,
    )
    assert died.returncode == -signal.SIGKILL
    provider = LocalProvider(root)
    assert state(provider) is CloudState.UP
    assert len(processes.leftovers(root)) == 4


def test_listing_changes_no_file_and_no_process(root):
    provider = LocalProvider(root, agent=SLEEP)
    provider.request(order("a", "b"))
    provider.advance()
    provider.inject(B, Fault.PREEMPT)
    provider.request(order("c"))
    before, running = contents(root), processes.leftovers(root)
    for _ in range(3):
        LocalProvider(root).listing()
        provider.listing()
    assert contents(root) == before
    assert processes.leftovers(root) == running


def test_agents_left_by_a_crashed_boot_are_replaced(root):
    provider = LocalProvider(root, agent=SLEEP)
    provider.request(order(accelerator="v5litepod-16"))
    provider.advance()
    unknown = set(pids(root).values())
    # As left by a server that died between starting the agents and recording them.
    records = SliceRecords(root)
    records.save(replace(records.get(A), booting=True, agents={}))
    successor = LocalProvider(root, agent=SLEEP)
    assert state(successor) is CloudState.CREATING
    successor.advance()
    assert state(successor) is CloudState.UP
    assert not any(map(lives, unknown))
    wait_until(  # a process that just starts another program has no marker yet
        lambda: {found.pid for found in processes.leftovers(root)} == set(pids(root).values())
    )


def test_a_partly_moved_order_is_complete_after_a_crash(root):
    provider = LocalProvider(root, agent=SLEEP)
    provider.request(order("a", "b"))
    # As left by a server that died before it moved the last slice of the order.
    (root / ".orders/order-a").mkdir(parents=True)
    (root / "b").rename(root / ".orders/order-a/b")
    successor = LocalProvider(root, agent=SLEEP)
    assert [found.id for found in successor.listing()] == [A, B]
    successor.request(order("a", "b"))
    successor.advance()
    assert [found.state for found in successor.listing()] == [CloudState.UP, CloudState.UP]


def test_a_slice_without_processes_is_not_counted_as_stopped(root):
    provider = LocalProvider(root, agent=SLEEP)
    provider.request(order("a", "b"))
    provider.advance()
    killed = [psutil.Process(pid) for pid in pids(root).values()]
    for process in killed:
        process.kill()
    psutil.wait_procs(killed)
    provider.request(order("c"))  # not booted yet
    assert LocalProvider(root).stop_all("stopped by hand") == 1
    assert all(each.state is CloudState.FAILED for each in LocalProvider(root).listing())


def test_the_next_server_reads_why_all_slices_were_stopped(root):
    provider = LocalProvider(root, agent=SLEEP)
    provider.request(order("a", "b"))
    provider.advance()
    assert LocalProvider(root).stop_all("stopped by hand") == 2
    assert processes.leftovers(root) == [] and LocalProvider(root).stop_all("again") == 0
    found = LocalProvider(root).listing()
    assert {(each.state, each.message) for each in found} == {
        (CloudState.FAILED, "stopped by hand")
    }


def test_a_partly_written_order_is_discarded(root):
    provider = LocalProvider(root, agent=SLEEP)
    provider.request(order("a", "b"))
    provider.release_all()
    half = root / ".staging/order-a/a/0"
    half.mkdir(parents=True)
    (half / "token").write_text("token of a")
    assert provider.listing() == []
    provider.request(order("a", "b"))
    provider.advance()
    assert [found.id for found in provider.listing()] == [A, B]


@pytest.mark.parametrize("levels", [1400, 3000])
def test_deeply_nested_folders_of_a_job_are_deleted_with_its_slice(root, levels):
    provider = LocalProvider(root, agent=SLEEP)
    provider.request(order("a"))
    provider.request(order("b"))
    make_nested(root / "a/0/work", levels)
    provider.release(A, "local-a")
    wait_until(lambda: [each.id for each in provider.listing()] == [B] or provider.advance())
    assert list((root / ".trash").iterdir()) == []
    provider.release_all()


def test_a_folder_that_cannot_be_deleted_does_not_stop_other_slices(root, caplog, monkeypatch):
    busy = root / ".trash" / "gone" / "busy"
    busy.mkdir(parents=True)
    refuse_to_delete("busy", monkeypatch)
    provider = LocalProvider(root, agent=SLEEP)
    provider.request(order("a"))
    provider.advance()
    provider.release_all()
    assert provider.listing() == []
    [message] = [each.getMessage() for each in caplog.records if "cannot delete" in each.msg]
    assert str(busy.parent) in message and os.strerror(errno.EBUSY) in message
    monkeypatch.undo()
    SliceRecords(root).recover()
    assert list((root / ".trash").iterdir()) == []


def test_release_kills_daemons_and_processes_that_ignore_sigterm_or_cleared_their_environment(root):
    provider = LocalProvider(root, agent=(sys.executable, "-c", STUBBORN))
    provider.request(order("a", "b"))
    provider.advance()
    both = lambda: [*root.glob("?/0/child"), *root.glob("?/0/orphan")]
    wait_until(lambda: len(both()) == 4)

    def family(name: str) -> list[int]:
        started = [int((root / name / "0" / kind).read_text()) for kind in ("orphan", "child")]
        return [*started, *pids(root, name).values()]

    released, kept = family("a"), family("b")
    provider.release(A, "local-a")
    assert [found.id for found in provider.listing()] == [B]
    assert not any(map(lives, released))
    assert all(map(lives, kept))
    assert not (root / "a").exists()


def test_a_slice_is_stopping_until_its_processes_are_gone(root):
    provider = LocalProvider(root, agent=SLEEP)
    provider.request(order())
    provider.advance()
    # As left by a server that died during a release.
    records = SliceRecords(root)
    records.save(replace(records.get(A), released=True, swept=False))
    successor = LocalProvider(root, agent=SLEEP)
    assert state(successor) is CloudState.STOPPING
    assert lives(pids(root)[0])
    successor.advance()
    assert successor.listing() == []


def test_a_preemption_kills_all_processes_of_the_slice_and_no_others(root):
    provider = LocalProvider(root, agent=(sys.executable, "-c", STUBBORN))
    provider.request(order("a", "b"))
    provider.advance()
    wait_until(lambda: len(list(root.glob("?/0/child"))) == 2)
    provider.inject(A, Fault.PREEMPT)
    assert {found.marker.split("/")[1] for found in processes.leftovers(root)} == {"b"}
    with pytest.raises(BadRequest, match="already ended"):
        provider.inject(A, Fault.PREEMPT)


def test_all_processes_of_a_host_die_at_once(root):
    provider = LocalProvider(root, agent=(sys.executable, "-c", WITNESSES))
    provider.request(order())
    provider.advance()
    wait_until((root / "a/0/all").exists)
    provider.inject(A, Fault.PREEMPT)
    assert not (root / "a/0/witness").exists()


def test_an_agent_with_unreadable_memory_is_found_and_killed(root, tmp_path):
    program = tmp_path / "closed.py"
    program.write_text(UNREADABLE)
    result = subprocess.run(
        [sys.executable, str(program), str(root)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, TEST_ROOTS))},
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert result.returncode == 0, result.stderr


def test_a_notice_is_written_on_every_host_and_the_kill_follows(root, clock):
    provider = LocalProvider(root, agent=SLEEP, clock=clock, notice_period=timedelta(seconds=30))
    provider.request(order(accelerator="v5litepod-16"))
    provider.advance()
    provider.inject(A, Fault.MAINTENANCE)
    notices = [(root / f"a/{index}/notice").read_text() for index in range(4)]
    assert notices == ["maintenance"] * 4
    clock.advance(timedelta(seconds=29))
    provider.advance()
    assert all(map(lives, pids(root).values()))
    clock.advance(timedelta(seconds=1))
    provider.advance()
    assert state(provider) is CloudState.PREEMPTED
    assert processes.leftovers(root) == []


def test_a_stall_suspends_one_host_and_release_still_works(root):
    provider = LocalProvider(root, agent=("sh", "-c", "sleep 1000 & wait"))
    provider.request(order(accelerator="v5litepod-16"))
    provider.advance()
    wait_until(lambda: len(processes.leftovers(root)) == 8)
    provider.inject(A, Fault.STALL_HOST, 1)

    def stopped() -> list[str]:
        return sorted(
            found.marker[-1]
            for found in processes.leftovers(root)
            if psutil.Process(found.pid).status() == psutil.STATUS_STOPPED
        )

    wait_until(lambda: stopped() == ["1", "1"])
    provider.release(A, "local-a")
    assert provider.listing() == []


@pytest.mark.parametrize(
    "host", [pytest.param(4, id="no such host"), pytest.param(None, id="no host named")]
)
def test_a_host_fault_needs_a_valid_host(root, host):
    provider = LocalProvider(root, agent=SLEEP)
    provider.request(order(accelerator="v5litepod-16"))
    provider.advance()
    with pytest.raises(BadRequest, match="has hosts 0 to 3"):
        provider.inject(A, Fault.KILL_HOST, host)
    assert len(processes.leftovers(root)) == 4


def test_a_slice_whose_agents_all_died_has_failed(root):
    provider = LocalProvider(root, agent=("true",))
    provider.request(order())
    provider.advance()
    wait_until(lambda: state(provider) is CloudState.FAILED)


def test_a_slice_whose_agent_cannot_start_has_failed_with_the_reason(root):
    provider = LocalProvider(root, agent=("/does/not/exist",))
    provider.request(order())
    provider.advance()
    (found,) = provider.listing()
    assert found.state is CloudState.FAILED
    assert "/does/not/exist" in found.message


def test_a_process_with_a_reused_pid_is_not_mistaken_for_the_agent(root):
    provider = LocalProvider(root, agent=SLEEP)
    provider.request(order())
    provider.advance()
    bystander = subprocess.Popen(["sleep", "1000"])
    try:
        records = SliceRecords(root)
        agent = records.get(A).agents[0]
        reused = ProcessId(pid=bystander.pid, started=agent.started - 5)
        records.save(replace(records.get(A), agents={0: reused}))
        successor = LocalProvider(root)
        assert state(successor) is CloudState.FAILED
        successor.release(A, "local-a")
        assert successor.listing() == []
        assert bystander.poll() is None
    finally:
        bystander.kill()
        bystander.wait()


def test_a_slice_is_released_when_the_disk_is_full(root, monkeypatch):
    """That is what makes room."""
    provider = LocalProvider(root, agent=SLEEP)
    provider.request(order())
    provider.advance()

    def full(path, data, mode=0o600):
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    monkeypatch.setattr(slice_records, "write_atomic", full)
    provider.release(A, "local-a")

    def is_gone() -> bool:
        provider.advance()
        return not provider.listing() and not (root / A).exists()

    wait_until(is_gone)


def test_an_agent_is_recognized_after_the_system_clock_was_set(root):
    provider = LocalProvider(root, agent=SLEEP)
    provider.request(order())
    provider.advance()
    records = SliceRecords(root)
    agent = records.get(A).agents[0]
    moved = replace(agent, started=agent.started + 3600)
    records.save(replace(records.get(A), agents={0: moved}))
    assert state(LocalProvider(root)) is CloudState.UP


def test_slices_never_share_a_port(root):
    provider = LocalProvider(root, agent=SLEEP)
    for name in ("a", "b", "c"):
        provider.request(order(name, f"{name}2"))
    ports = [record.port for record in SliceRecords(root).all()]
    assert len(set(ports)) == 6
    assert all(port in PORTS for port in ports)


@pytest.mark.parametrize(
    "limits",
    [
        pytest.param(Stock(limits=(StockLimit(slices=1, zone="us-*"),)), id="by zone"),
        pytest.param(
            Stock(limits=(StockLimit(slices=1, accelerator="v5litepod-8"),)), id="by type"
        ),
        pytest.param(Stock(limits=(StockLimit(slices=1, capacity="spot"),)), id="by capacity"),
        pytest.param(Stock(chips=15), id="by chips"),
        pytest.param(Stock(hosts=type_lookup.find("v5litepod-8").hosts), id="by hosts"),
    ],
)
def test_stock_is_limited(root, limits):
    provider = LocalProvider(root, stock=limits, agent=SLEEP)
    provider.request(order("a", zone="us-central1-a"))
    with pytest.raises(NoCapacity):
        provider.request(order("b", zone="us-central1-a"))
    provider.inject(A, Fault.PREEMPT)
    provider.request(order("b", zone="us-central1-a"))


@pytest.mark.parametrize("zone", ["", "Mars", "../a", "us central"])
def test_an_invalid_zone_is_rejected(root, zone):
    with pytest.raises(BadRequest, match="zone"):
        LocalProvider(root).request(order(zone=zone))


@pytest.mark.parametrize("name", ["../a", ".hidden", "a/b", ""])
def test_a_name_that_could_leave_the_folder_is_rejected(root, name):
    with pytest.raises(BadRequest):
        LocalProvider(root).request(order(name))


def test_the_background_thread_boots_injects_faults_and_notifies(root):
    plan = fault_plan.parse({"script": [{"slice": 0, "after": 3, "fault": "preempt"}]})
    provider = LocalProvider(root, agent=SLEEP, plan=plan)
    woken: list[CloudState] = []
    provider.on_change(lambda: woken.extend(found.state for found in provider.listing()))
    provider.start()
    provider.request(order("a"))
    wait_until(lambda: CloudState.PREEMPTED in woken)
    assert CloudState.UP in woken
    provider.release(A, "local-a")
    wait_until(lambda: provider.listing() == [])
    provider.close()


def test_the_background_thread_detects_a_dead_agent(root):
    provider = LocalProvider(root, agent=SLEEP)
    provider.start()
    provider.request(order(accelerator="v5litepod-16"))
    wait_until(lambda: state(provider) is CloudState.UP)
    woken: list[tuple[int, ...]] = []
    provider.on_change(lambda: woken.append(provider.listing()[0].lost_hosts))
    os.kill(pids(root)[3], signal.SIGKILL)
    # It may also be called for the boot.
    wait_until(lambda: woken[-1:] == [(3,)])
    provider.close()
    assert state(provider) is CloudState.UP
