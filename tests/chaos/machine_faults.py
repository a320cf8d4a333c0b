"""Faults of the machine: frozen processes, clocks that are set, a database, a disk and a network
that go away for a while. During each, something else may die."""

from __future__ import annotations

import signal
from collections.abc import Callable
from typing import Literal

from tests import server_process
from tests.chaos import ledger
from tests.chaos.chaos_run import ChaosJob, ChaosRun, Missed
from tests.chaos.faults import (
    agent_dies,
    all_workloads_die,
    guard_and_agent_die,
    meanwhile,
    send_signal,
    workload_dies,
)
from tpufleet.controller.loop import LEASE_TTL
from tpufleet.policy.recovery.liveness import AGENT_LEASE, HOST_LOST_AFTER

# What can die while nothing else works.
DEATHS = (agent_dies, guard_and_agent_die, workload_dies, all_workloads_die)
CLOCK_OFFSETS = (-86400, -3600, -90, 0, 90, 3600, 86400)  # seconds
SHORT = (0.5, 8.0)
LONGER_THAN_LEASE = (LEASE_TTL.total_seconds() + 1, LEASE_TTL.total_seconds() + 8)
LONGER_THAN_AGENT_LEASE = (AGENT_LEASE.total_seconds() + 40, AGENT_LEASE.total_seconds() + 60)
LONGER_THAN_SILENCE = (HOST_LOST_AFTER.total_seconds() + 5, HOST_LOST_AFTER.total_seconds() + 15)


def everything_dies(run: ChaosRun) -> str:
    """SIGKILL to all servers, agents and workloads, as with `kill -9 -1`."""
    for server in run.servers:
        server.kill()
    processes = server_process.host_processes(run.local)
    pids = (*processes.guards, *processes.agents, *processes.workloads)
    for pid in pids:
        send_signal(pid, signal.SIGKILL)
    pause = run.pause(0.0, 3.0)
    for server in run.servers:
        server.start()
    return f"{len(run.servers)} servers and {len(pids)} other processes, {pause}"


def server_freezes_briefly(run: ChaosRun) -> str:
    return _freeze_server(run, SHORT)


def server_freezes_beyond_its_lease(run: ChaosRun) -> str:
    return _freeze_server(run, LONGER_THAN_LEASE)


def servers_freeze_beyond_the_silence_of_hosts(run: ChaosRun) -> str:
    for server in run.servers:
        server.suspend()
    pause = run.pause(*LONGER_THAN_SILENCE)
    for server in run.servers:
        server.resume()
    return pause


def _freeze_server(run: ChaosRun, span: tuple[float, float]) -> str:
    server = run.random.choice(run.servers)
    server.suspend()
    pause = _meanwhile(run, span)
    server.resume()
    return f"{server.home.name} {pause}"


def agent_freezes(run: ChaosRun) -> str:
    agents = server_process.host_processes(run.local).agents
    if not agents:
        raise Missed("no agent runs")
    pid = run.random.choice(agents)
    if not send_signal(pid, signal.SIGSTOP):
        raise Missed(f"{pid} has ended meanwhile")
    pause = run.pause(2.0, 25.0)
    send_signal(pid, signal.SIGCONT)
    return f"{pid} {pause}"


def clock_of_servers_is_set(run: ChaosRun) -> str:
    return _set_clock(run, "servers")


def clock_of_hosts_is_set(run: ChaosRun) -> str:
    return _set_clock(run, "hosts")


def _set_clock(run: ChaosRun, who: Literal["servers", "hosts"]) -> str:
    clock = run.machine.clock
    if not clock.works:
        raise Missed("no compiler")
    others = [offset for offset in CLOCK_OFFSETS if offset != clock.offsets[who]]
    return f"{clock.set(who, run.random.choice(others)):+d} s"


def database_restarts(run: ChaosRun) -> str:
    """Postgres stops; SQLite is locked by another program."""
    postgres = run.machine.postgres
    if postgres is None:
        with run.machine.locked_database():
            return f"locked {_meanwhile(run, SHORT)}"
    postgres.stop()
    pause = _meanwhile(run, (0.5, 15.0))
    postgres.start()
    return f"stopped {pause}"


def database_dies(run: ChaosRun) -> str:
    postgres = run.machine.postgres
    if postgres is None:
        raise Missed("SQLite has no process of its own")
    postgres.kill()
    pause = _meanwhile(run, (0.0, 4.0))
    postgres.start()
    return f"killed {pause}"


def database_freezes(run: ChaosRun) -> str:
    postgres = run.machine.postgres
    if postgres is None:
        with run.machine.locked_database():
            return f"locked {_meanwhile(run, LONGER_THAN_LEASE)}"
    postgres.suspend()
    pause = _meanwhile(run, LONGER_THAN_LEASE)
    postgres.resume()
    return pause


def disk_is_full(run: ChaosRun) -> str:
    pids = [server.pid for server in run.servers]
    run.machine.disk.fill(pids)
    pause = _meanwhile(run, SHORT)
    run.machine.disk.free(pids)
    return pause


def disk_is_read_only(run: ChaosRun) -> str:
    """As the kernel makes it after an error."""
    disk = run.machine.read_only
    if not disk.works:
        raise Missed("no compiler")
    before = disk.refused
    disk.set(True)
    pause = _meanwhile(run, SHORT)
    disk.set(False)
    if disk.refused == before:
        raise Missed("nothing was written meanwhile")
    return f"{pause}, {disk.refused - before} writes were refused"


def network_is_partitioned(run: ChaosRun) -> str:
    """Between the hosts and the servers."""
    return _partition(run, run.random.choice((SHORT, SHORT, LONGER_THAN_SILENCE)))


def network_is_partitioned_beyond_the_lease_of_agents(run: ChaosRun) -> str:
    """Hosts that hear nothing for so long end their workload themselves, before it can have a
    successor. Slices that are hard to replace are kept meanwhile. Takes eleven minutes."""
    number = run.counts[network_is_partitioned_beyond_the_lease_of_agents.__name__]
    work = ChaosJob(
        id=f"long-{run.seed}-{number}", steps=100_000, capacity="on-demand", cancelled=True
    )
    run.submit(work)
    run.watch_until(lambda: ledger.alive(run.ledger_folder(work)), f"{work.id} does not run")
    pause = _partition(run, LONGER_THAN_AGENT_LEASE)
    attempts = run.store.attempts(work.id)
    run.watch_until(
        lambda: len(ledger.read(run.ledger_folder(work))) > len(attempts),
        f"{work.id} has no other attempt",
    )
    run.cancel(work)
    return f"{work.id} {pause}"


def _partition(run: ChaosRun, span: tuple[float, float]) -> str:
    balancer, is_long = run.machine.balancer, span is LONGER_THAN_AGENT_LEASE
    before = balancer.lost
    balancer.partition()
    pause = run.pause(*span) if is_long else _meanwhile(run, span)
    alive = [name for work in run.works for name in ledger.alive(run.ledger_folder(work))]
    balancer.heal()
    if balancer.lost == before:
        raise Missed("no host sent anything meanwhile")
    assert not is_long or not alive, run.failure_report(
        f"without a server for {span[0]:g} s, and these run: {alive}"
    )
    return f"{pause}, {balancer.lost - before} messages were lost"


def job_is_cancelled_during_a_fault(run: ChaosRun) -> str:
    """It is asked for until a server acknowledges it, which may be after the fault."""
    number = run.counts[job_is_cancelled_during_a_fault.__name__]
    work = ChaosJob(id=f"cancel-during-{run.seed}-{number}", steps=10_000, cancelled=True)
    run.submit(work)
    run.pause(0.0, 12.0)
    run.cancel_soon(work, run.random.uniform(0.0, 3.0))
    return f"{work.id}, with {meanwhile(run, DURING_A_CANCEL)}"


def _meanwhile(run: ChaosRun, span: tuple[float, float]) -> str:
    """Let time pass, in which now and then something else dies."""
    if run.random.random() < 0.6:
        return run.pause(*span)
    first = run.pause(0.0, span[1] / 2)
    return f"{first}, {meanwhile(run, DEATHS)}, {run.pause(span[0], span[1])}"


DURING_A_CANCEL = (
    everything_dies,
    server_freezes_beyond_its_lease,
    clock_of_servers_is_set,
    database_restarts,
    database_dies,
    disk_is_full,
    disk_is_read_only,
    network_is_partitioned,
)


MACHINE_FAULTS: tuple[Callable[[ChaosRun], str], ...] = (
    everything_dies,
    server_freezes_briefly,
    server_freezes_beyond_its_lease,
    servers_freeze_beyond_the_silence_of_hosts,
    agent_freezes,
    clock_of_servers_is_set,
    clock_of_hosts_is_set,
    database_restarts,
    database_dies,
    database_freezes,
    disk_is_full,
    disk_is_read_only,
    network_is_partitioned,
    job_is_cancelled_during_a_fault,
)
