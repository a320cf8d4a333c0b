"""What simulated zones have to give: slices by zone, type and kind of capacity, chips in all, and
the ports that gangs meet on."""

from __future__ import annotations

import socket
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from tpufleet.errors import NoCapacity, QuotaExceeded
from tpufleet.providers.local.slice_records import SliceRecord

# Below the range from which the system gives ports to anybody who asks.
PORTS = range(20_000, 30_000)


@dataclass(frozen=True, kw_only=True, slots=True)
class StockLimit:
    """At most this many slices that match. Patterns may hold * and ?."""

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


@dataclass(frozen=True, kw_only=True, slots=True)
class Stock:
    limits: tuple[StockLimit, ...] = ()
    chips: int | None = None  # over all slices; None: as many as anybody asks for

    def check(self, wanted: Sequence[SliceRecord], held: Iterable[SliceRecord]) -> None:
        """NoCapacity, in words, unless all that is wanted fits beside what is held."""
        held = [record for record in held if record.holds_stock]
        for limit in self.limits:
            asked = [record for record in wanted if _covers(limit, record)]
            used = sum(_covers(limit, record) for record in held)
            if asked and used + len(asked) > limit.slices:
                first = asked[0]
                raise NoCapacity(
                    f"there is no more capacity in zone {first.zone} for {first.accelerator} "
                    f"({first.capacity}): {used} of {limit.slices} slices are in use and "
                    f"{len(asked)} more were asked for"
                )
        chips = sum(record.chips for record in held)
        more = sum(record.chips for record in wanted)
        if self.chips is not None and chips + more > self.chips:
            raise NoCapacity(
                f"this machine simulates {self.chips} chips; {chips} are in use and {more} more "
                "were asked for"
            )


UNLIMITED = Stock()


def _covers(limit: StockLimit, record: SliceRecord) -> bool:
    return limit.covers(record.zone, record.accelerator, record.capacity)


def free_ports(count: int, taken: set[int], start: int) -> list[int]:
    """Ports that no slice has and nobody listens on, looking from `begin` onwards."""
    found: list[int] = []
    for offset in range(len(PORTS)):
        if len(found) == count:
            break
        port = PORTS[(start + offset) % len(PORTS)]
        if port not in taken and _free(port):
            found.append(port)
    if len(found) < count:
        raise QuotaExceeded(
            f"no free port is left between {PORTS.start} and {PORTS.stop - 1}; release some slices"
        )
    return found


def _free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("", port))
        except OSError:
            return False
    return True
