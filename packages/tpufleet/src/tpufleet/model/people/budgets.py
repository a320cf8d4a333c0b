"""Budgets: how much money a user or a pool may spend in a period."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from typing import Any

from tpufleet.errors import SettingErrors

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
    errors, known = SettingErrors("budgets"), ("users", "pools", "period")
    for key in config:
        if key not in known:
            close = difflib.get_close_matches(str(key), known, n=1)
            hint = f"did you mean {close[0]}?" if close else "write users, pools or period"
            errors.add(str(key), f"unknown field; {hint}")
    period = _period(config.get("period", BudgetPeriod.MONTH), "period", errors)
    budgets = (
        *_of_scope(BudgetScope.USER, config.get("users"), "users", period, errors),
        *_of_scope(BudgetScope.POOL, config.get("pools"), "pools", period, errors),
    )
    errors.raise_all()
    return budgets


def _of_scope(
    scope: BudgetScope, document: Any, where: str, period: BudgetPeriod, errors: SettingErrors
) -> list[Budget]:
    budgets: list[Budget] = []
    if document is None:
        return budgets
    if not isinstance(document, Mapping):
        errors.add(where, "must be a mapping of names to dollars, such as {alice: 100}")
        return budgets
    for name, value in document.items():
        fields = value if isinstance(value, Mapping) else {"usd": value}
        for key in fields:
            if key not in ("usd", "period"):
                errors.add(f"{where}.{name}.{key}", "unknown field; write usd and period")
        own = _period(fields.get("period", period), f"{where}.{name}.period", errors)
        usd = fields.get("usd")
        if isinstance(usd, bool) or not isinstance(usd, int | float) or not 0 <= usd < 1e12:
            path = f"{where}.{name}.usd" if isinstance(value, Mapping) else f"{where}.{name}"
            errors.add(path, "must be an amount in dollars, such as 100")
        else:
            budgets.append(Budget(scope=scope, name=str(name), usd=float(usd), period=own))
    return budgets


def _period(value: Any, where: str, errors: SettingErrors) -> BudgetPeriod:
    if value not in list(BudgetPeriod):
        errors.add(where, f"{value!r} is not a period; write {', '.join(BudgetPeriod)}")
        return BudgetPeriod.MONTH
    return BudgetPeriod(value)
