"""What can be done to a server and its hosts. Each fault says in words what it did."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Sequence

import psutil

from tests import server_process
from tests.chaos.chaos_run import ChaosJob, ChaosRun, Missed
from tpufleet.errors import BadRequest, Conflict, NotFound, Unreachable
from tpufleet.model.tpu import type_lookup


def server_dies(chaos_run: ChaosRun) -> str:
    """And comes back a moment later."""
    server = chaos_run.random.choice(chaos_run.servers)
    pid = server.pid
    server.kill()
    pause = chaos_run.random.choice([0.0, 0.0, 0.5, 2.0, 5.0])
    chaos_run.watch(pause)
    server.start()
    return f"{pid} killed, {server.pid} started after {pause:g} s"


def server_dies_while_it_starts(chaos_run: ChaosRun) -> str:
    server = chaos_run.random.choice(chaos_run.servers)
    server.kill()
    pauses = [chaos_run.random.uniform(0, 1.2) for _ in range(2)]
    for pause in pauses:
        server.launch()
        chaos_run.watch(pause)
        server.kill()
    server.start()
    return f"killed after {' and '.join(f'{pause:.2f} s' for pause in pauses)}"


def server_dies_in_the_middle_of_something(chaos_run: ChaosRun) -> str:
    """While it deals with a slice that was taken."""
    injected = chaos_run.random.choice((preempt, preempt_with_notice, kill_host))(chaos_run)
    pause = chaos_run.random.uniform(0, 0.4)
    chaos_run.watch(pause)
    server = chaos_run.random.choice(chaos_run.servers)
    server.kill()
    server.start()
    return f"{injected}, then killed after {pause:.2f} s"


def server_is_stopped_and_started(chaos_run: ChaosRun) -> str:
    server = chaos_run.random.choice(chaos_run.servers)
    status = server.stop()
    assert status == 0, chaos_run.failure_report(f"the server left with status {status}")
    server.start()
    return f"{server.pid} runs now"


def server_freezes(chaos_run: ChaosRun) -> str:
    pause = chaos_run.random.uniform(0.5, 5)
    chaos_run.servers[0].suspend()
    chaos_run.watch(pause)
    chaos_run.servers[0].resume()
    return f"for {pause:.1f} s"


def agent_dies(chaos_run: ChaosRun) -> str:
    return _kill_one(chaos_run, server_process.host_processes(chaos_run.local).agents)


def guard_and_agent_die(chaos_run: ChaosRun) -> str:
    """Nobody on the host is left to end the workload."""
    found = server_process.host_processes(chaos_run.local)
    if not found.agents:
        raise Missed("no agent runs")
    agent = chaos_run.random.choice(found.agents)
    guards = [pid for pid in found.guards if _parent(pid) == agent]
    for pid in guards:
        send_signal(pid, signal.SIGKILL)
    return f"{guards} and {_kill_one(chaos_run, [agent])}"


def workload_dies(chaos_run: ChaosRun) -> str:
    return _kill_one(chaos_run, server_process.host_processes(chaos_run.local).workloads)


def all_workloads_die(chaos_run: ChaosRun) -> str:
    found = server_process.host_processes(chaos_run.local).workloads
    if not any([send_signal(pid, signal.SIGKILL) for pid in found]):
        raise Missed("no workload runs")
    return str(found)


def job_is_cancelled(chaos_run: ChaosRun) -> str:
    """Waiting, starting or running; and something else dies at that moment."""
    number = chaos_run.counts[job_is_cancelled.__name__]
    work = ChaosJob(id=f"cancel-{chaos_run.seed}-{number}", steps=10_000, cancelled=True)
    chaos_run.submit(work)
    pause = chaos_run.pause(0.0, 12.0)
    died = ""
    if chaos_run.random.random() < 0.5:
        died = f", with {meanwhile(chaos_run, HOST_FAULTS)}"
    chaos_run.cancel(work)
    return f"{work.id} {pause}{died}"


def meanwhile(chaos_run: ChaosRun, faults: Sequence[Callable[[ChaosRun], str]]) -> str:
    """The first of them, in any order, that hits something. Counted apart from what is injected:
    few of those that miss are noticed."""
    for fault in chaos_run.random.sample(faults, k=len(faults)):
        with contextlib.suppress(Missed):
            message = fault(chaos_run)
            chaos_run.counts[f"{fault.__name__} (meanwhile)"] += 1
            return f"{fault.__name__} {message}"
    return "nothing else"


def _injected(kind: str) -> Callable[[ChaosRun], str]:
    def fault(chaos_run: ChaosRun) -> str:
        client = chaos_run.servers[0].client
        try:
            slices = sorted(client.slices(), key=lambda item: item.id)
        except Unreachable as error:  # it recovers from the fault before
            raise Missed(f"no answer: {error}") from error
        if not slices:
            raise Missed("no slice is there")
        chosen = chaos_run.random.choice(slices)
        hosts = type_lookup.find(chosen.accelerator).hosts
        host = chaos_run.random.randrange(hosts) if "host" in kind else None
        try:
            client.inject_fault(chosen.id, kind, host)
        except (NotFound, Conflict, BadRequest, Unreachable) as error:
            raise Missed(f"{chosen.id} was not there any more: {error}") from error
        return f"{chosen.id} host {host}"

    fault.__name__ = kind
    return fault


preempt = _injected("preempt")
preempt_with_notice = _injected("preempt-notice")
maintenance = _injected("maintenance")
kill_host = _injected("kill-host")
stall_host = _injected("stall-host")

SERVER_FAULTS = (
    server_dies,
    server_dies_while_it_starts,
    server_dies_in_the_middle_of_something,
    server_is_stopped_and_started,
    server_freezes,
)
HOST_FAULTS = (
    agent_dies,
    guard_and_agent_die,
    workload_dies,
    all_workloads_die,
    preempt,
    preempt_with_notice,
    maintenance,
    kill_host,
)
ALL_FAULTS = (*SERVER_FAULTS, *HOST_FAULTS, job_is_cancelled)


def _kill_one(chaos_run: ChaosRun, found: Sequence[int]) -> str:
    if not found:
        raise Missed("none runs")
    pid = chaos_run.random.choice(found)
    if not send_signal(pid, signal.SIGKILL):
        raise Missed(f"{pid} has ended meanwhile")
    return str(pid)


def send_signal(pid: int, number: signal.Signals) -> bool:
    """Whether there was such a process."""
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return False
    return True


def _parent(pid: int) -> int:
    try:
        return psutil.Process(pid).ppid()
    except psutil.NoSuchProcess:
        return 0
