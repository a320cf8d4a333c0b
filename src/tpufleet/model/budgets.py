"""Budgets: how much money a user or a pool may spend in a period."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from typing import Any

from tpufleet.errors import BadInput

EVERY_USER = "*"
# Name in the store's metadata under which the controller reports what was spent.
BUDGET_REPORT = "budget_report"


class BudgetScope(StrEnum):
    USER = "user"
    POOL = "pool"


class BudgetPeriod(StrEnum):
    """In UTC."""

    DAY = "day"
    WEEK = "week"  # from Monday
    MONTH = "month"
    TOTAL = "total"  # never starts again


@dataclass(frozen=True, kw_only=True, slots=True)
class Budget:
    scope: BudgetScope
    name: str  # of the user or the pool; "*": each user without a budget of their own
    usd: float
    period: BudgetPeriod = BudgetPeriod.MONTH


@dataclass(frozen=True, kw_only=True, slots=True)
class BudgetUse:
    """What one user or pool has spent of a budget."""

    scope: BudgetScope
    name: str
    usd: float
    period: BudgetPeriod
    spent: float
    since: datetime | None  # start of the period; None: from the beginning

    @property
    def share(self) -> float:
        return self.spent / self.usd if self.usd else 1.0

    @property
    def exhausted(self) -> bool:
        return self.spent >= self.usd


@dataclass(frozen=True, kw_only=True, slots=True)
class BudgetReport:
    budgets: tuple[BudgetUse, ...]
    now: datetime


def parse(config: Mapping[str, Any] | None) -> tuple[Budget, ...]:
    """From a config file: {users: {alice: 100, "*": 50}, pools: {lab: {usd: 9, period: week}}}."""
    if not config:
        return ()
    for key in config:
        if key not in ("users", "pools", "period"):
            close = difflib.get_close_matches(str(key), ("users", "pools", "period"), n=1)
            hint = f"did you mean {close[0]}?" if close else "write users, pools or period"
            raise BadInput(f"budgets: {key}: unknown field; {hint}")
    period = _period(config.get("period", BudgetPeriod.MONTH), "budgets: period")
    return (
        *_of_scope(BudgetScope.USER, config.get("users"), "budgets: users", period),
        *_of_scope(BudgetScope.POOL, config.get("pools"), "budgets: pools", period),
    )


def _of_scope(
    scope: BudgetScope, document: Any, where: str, period: BudgetPeriod
) -> Iterator[Budget]:
    if document is None:
        return
    if not isinstance(document, Mapping):
        raise BadInput(f"{where}: must be a mapping of names to dollars, such as {{alice: 100}}")
    for name, value in document.items():
        fields = value if isinstance(value, Mapping) else {"usd": value}
        for key in fields:
            if key not in ("usd", "period"):
                raise BadInput(f"{where}: {name}: {key}: unknown field; write usd and period")
        usd = fields.get("usd")
        if isinstance(usd, bool) or not isinstance(usd, int | float) or not 0 <= usd < 1e12:
            raise BadInput(f"{where}: {name}: must be an amount in dollars, such as 100")
        own = _period(fields.get("period", period), f"{where}: {name}: period")
        yield Budget(scope=scope, name=str(name), usd=float(usd), period=own)


def _period(value: Any, where: str) -> BudgetPeriod:
    if value not in set(BudgetPeriod):
        raise BadInput(f"{where}: {value!r} is not one of {', '.join(BudgetPeriod)}")
    return BudgetPeriod(value)
