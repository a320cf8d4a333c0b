"""The memory of who refused what: what is not asked again at once. Changed by its owner alone."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta

from tpufleet.policy import spreads
from tpufleet.provisioner.pools import Place, Wanted
from tpufleet.provisioner.seen import Trouble

FIRST_WAIT = timedelta(seconds=15)
LONGEST_WAIT = timedelta(minutes=10)
PASSING_WAIT = timedelta(seconds=2)
# Somebody has to change a permission or a quota; look again now and then.
PERMANENT_WAIT = timedelta(hours=1)


@dataclass(frozen=True, kw_only=True, slots=True)
class Refusal:
    words: str
    until: datetime
    streak: int
    trouble: Trouble


class Refusals:
    def __init__(self) -> None:
        self._places: dict[tuple[str, str, str, int], Refusal] = {}
        self._pools: dict[str, Refusal] = {}

    def place(self, wanted: Wanted, place: Place) -> Refusal | None:
        return self._places.get(_key(place, wanted.shape.machine_type, wanted.shape.nodes))

    def pool(self, wanted: Wanted) -> Refusal | None:
        """Of this very request: it is asked again at once when it changes."""
        return self._pools.get(f"{wanted.name}|{wanted.hash}")

    def refuse_place(
        self, place: Place, machine_type: str, nodes: int, *, trouble: Trouble, words: str,
        now: datetime,
    ) -> None:  # fmt: skip
        key = _key(place, machine_type, nodes)
        self._places[key] = _next(self._places.get(key), trouble, words, now, str(key))

    def refuse_pool(self, wanted: Wanted, trouble: Trouble, words: str, now: datetime) -> None:
        key = f"{wanted.name}|{wanted.hash}"
        self._pools[key] = _next(self._pools.get(key), trouble, words, now, key)

    def granted(self, place: Place, machine_type: str, nodes: int) -> None:
        self._places.pop(_key(place, machine_type, nodes), None)

    def forget_before(self, moment: datetime) -> None:
        """What has been over for long: the memory must not grow for ever."""
        for table in (self._places, self._pools):
            for key in [key for key, refusal in table.items() if refusal.until < moment]:
                del table[key]


def _key(place: Place, machine_type: str, nodes: int) -> tuple[str, str, str, int]:
    return place.zone, place.capacity.value, machine_type, nodes


def _next(
    previous: Refusal | None, trouble: Trouble, words: str, now: datetime, key: str
) -> Refusal:
    streak = (previous.streak if previous else 0) + 1
    if trouble in (Trouble.PERMISSION, Trouble.REQUEST):
        wait = PERMANENT_WAIT
    else:
        first = PASSING_WAIT if trouble is Trouble.PASSING else FIRST_WAIT
        wait = spreads.backoff(streak, first=first, longest=LONGEST_WAIT, key=key)
    return Refusal(words=words, until=now + wait, streak=streak, trouble=trouble)
