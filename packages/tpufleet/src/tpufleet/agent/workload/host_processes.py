"""Several processes of a job on one host, which share its chips: on TPU7x one for each of its two
NUMA nodes, so that each has its chips, CPUs and memory near it.

How libtpu is told: https://gist.github.com/skye/f82ba45d2445bb19d53545538754f9a3
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from tpufleet.model.fleet.agent_protocol import Assignment
from tpufleet.model.tpu import type_lookup

NUMA_NODES = Path("/sys/devices/system/node")
# Of libtpu, and the next ones: not 8471 of libtpu itself, nor 8476 of JAX.
_FIRST_PORT = 8479


def of_process(assignment: Assignment, local: int) -> Assignment:
    """What the `local`-th process of this host is told. Processes are counted host by host."""
    count = assignment.processes_per_host
    return replace(
        assignment,
        process_id=assignment.process_id * count + local,
        num_processes=assignment.num_processes * count,
        chips=assignment.chips // count,
    )


def variables(assignment: Assignment, local: int, *, simulated: bool) -> dict[str, str]:
    if assignment.processes_per_host == 1:
        return {}
    tpu = {} if simulated else _of_libtpu(assignment, local)
    return {"TPUFLEET_LOCAL_PROCESS_ID": str(local), **tpu}


def _of_libtpu(assignment: Assignment, local: int) -> dict[str, str]:
    """Which chips are its own, and where the others of its slice are. The grid of processes is that
    of hosts, each of which is divided along its first dimensions."""
    count = assignment.processes_per_host
    kind = type_lookup.find(assignment.accelerator)
    slice_shape = _three([int(each) for each in kind.topology.split("x")])
    per_process = _host_shape(kind.chips_per_host)
    left = count
    for axis, chips in enumerate(per_process):
        parts = next(size for size in range(min(left, chips), 0, -1) if not (left % size))
        per_process[axis], left = chips // parts, left // parts
    grid = [whole // part for whole, part in zip(slice_shape, per_process, strict=True)]
    own = assignment.chips // count
    ports = range(_FIRST_PORT, _FIRST_PORT + count)
    return {
        "TPU_CHIPS_PER_PROCESS_BOUNDS": _written(per_process),
        "TPU_PROCESS_BOUNDS": _written(grid),
        "TPU_PROCESS_ADDRESSES": ",".join(
            f"{host}:{port}" for host in assignment.hostnames for port in ports
        ),
        "TPU_PROCESS_PORT": str(ports[local]),
        "TPU_VISIBLE_CHIPS": _written(range(local * own, (local + 1) * own)),
        "CLOUD_TPU_TASK_ID": str(assignment.worker_id * count + local),
    }


@contextmanager
def near_its_chips(local: int, count: int, nodes: Path = NUMA_NODES) -> Iterator[None]:
    """What is started in this thread meanwhile runs on the CPUs of its NUMA node, if there are as
    many nodes as processes."""
    found = sorted(nodes.glob("node[0-9]*"), key=lambda node: int(node.name[4:]))
    before = os.sched_getaffinity(0)
    own = _cpus(found[local]) & before if count > 1 and len(found) == count else set()
    if not own:
        yield
        return
    os.sched_setaffinity(0, own)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def _cpus(node: Path) -> set[int]:
    """`0-55,112-167`"""
    ranges = [part.partition("-") for part in (node / "cpulist").read_text().strip().split(",")]
    return {cpu for low, _, high in ranges if low for cpu in range(int(low), int(high or low) + 1)}


def _host_shape(chips: int) -> list[int]:
    return {1: [1, 1, 1], 4: [2, 2, 1], 8: [2, 4, 1]}.get(chips, [chips, 1, 1])


def _three(shape: list[int]) -> list[int]:
    return [*shape, 1, 1][:3]


def _written(numbers: Iterable[int]) -> str:
    return ",".join(map(str, numbers))
