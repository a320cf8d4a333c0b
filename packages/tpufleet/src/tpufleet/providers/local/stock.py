"""The stock of simulated zones: slices by zone, type and capacity, total chips, and ports."""

from __future__ import annotations

import socket
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from operator import attrgetter

import msgspec

from tpufleet.errors import NoCapacity, QuotaExceeded
from tpufleet.providers.base import out_of_capacity
from tpufleet.providers.local.slice_records import SliceRecord

# Below the ephemeral port range.
PORTS = range(20_000, 30_000)


class StockLimit(msgspec.Struct, frozen=True, kw_only=True):
    """At most this many matching slices. Patterns may contain * and ?."""

    slices: int
    zone: str = "*"
    accelerator: str = "*"
    capacity: str = "*"

    def covers(self, zone: str, accelerator: str, capacity: str) -> bool:
        return (
            fnmatchcase(zone, self.zone)
            and fnmatchcase(accelerator, self.accelerator)
            and fnmatchcase(capacity, self.capacity)
        )


class Stock(msgspec.Struct, frozen=True, kw_only=True):
    limits: tuple[StockLimit, ...] = ()
    chips: int | None = None  # over all slices; None: unlimited
    hosts: int | None = None  # likewise

    def check(self, wanted: Sequence[SliceRecord], held: Iterable[SliceRecord]) -> None:
        """NoCapacity unless all wanted slices fit beside the held ones."""
        held = [record for record in held if record.holds_stock]
        for limit in self.limits:
            matching = [record for record in wanted if _covers(limit, record)]
            used = sum(_covers(limit, record) for record in held)
            if matching and used + len(matching) > limit.slices:
                first = matching[0]
                detail = _in_use("slices", used, limit.slices, len(matching))
                raise out_of_capacity(first.accelerator, first.capacity, first.zone, detail)
        for what, most, size in (
            ("hosts (local_hosts)", self.hosts, attrgetter("hosts")),
            ("chips", self.chips, attrgetter("chips")),
        ):
            used, more = sum(map(size, held)), sum(map(size, wanted))
            if most is not None and used + more > most:
                raise NoCapacity(f"out of simulated {_in_use(what, used, most, more)}")


UNLIMITED = Stock()


def _in_use(what: str, used: int, most: int, more: int) -> str:
    return f"{what}: {used} of {most} in use, {more} more requested"


def _covers(limit: StockLimit, record: SliceRecord) -> bool:
    return limit.covers(record.zone, record.accelerator, record.capacity)


def free_ports(count: int, taken: set[int], start: int) -> list[int]:
    """Ports that no slice has and no process listens on, searched from `start` on."""
    ports: list[int] = []
    for offset in range(len(PORTS)):
        if len(ports) == count:
            break
        port = PORTS[(start + offset) % len(PORTS)]
        if port not in taken and _free(port):
            ports.append(port)
    if len(ports) < count:
        raise QuotaExceeded(
            f"no free port between {PORTS.start} and {PORTS.stop - 1}; release some slices"
        )
    return ports


def _free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("", port))
        except OSError:
            return False
    return True
