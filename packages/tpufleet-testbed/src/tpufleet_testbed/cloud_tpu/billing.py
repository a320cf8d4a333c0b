"""What the cloud bills: every node from READY to its end; and how many requests it denied."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta


@dataclass(frozen=True, kw_only=True, slots=True)
class BillingEntry:
    node: str  # short name
    zone: str
    chips: int
    labels: dict[str, str]
    began_at: datetime
    ended_at: datetime | None = None
    ended_by: str = ""

    def chip_hours(self, now: datetime) -> float:
        return self.chips * ((self.ended_at or now) - self.began_at) / timedelta(hours=1)


@dataclass(slots=True)
class BillingLedger:
    entries: list[BillingEntry] = field(default_factory=list)
    denied: int = 0  # requests for a node, for want of quota or stock
    _running: dict[str, int] = field(default_factory=dict)

    def begin(self, key: str, entry: BillingEntry) -> None:
        self._running[key] = len(self.entries)
        self.entries.append(entry)

    def end(self, key: str, at: datetime, by: str) -> None:
        """No-op if it is not running."""
        index = self._running.pop(key, None)
        if index is not None:
            self.entries[index] = replace(self.entries[index], ended_at=at, ended_by=by)

    def is_running(self, key: str) -> bool:
        return key in self._running

    def running(self) -> list[BillingEntry]:
        return [self.entries[index] for index in self._running.values()]

    def chip_hours(self, now: datetime) -> float:
        return sum(entry.chip_hours(now) for entry in self.entries)
