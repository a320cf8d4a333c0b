"""Budgets: how much money a user or a pool may spend in a period."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from enum import StrEnum
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from tpufleet import schema
from tpufleet.schema import Text, about

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


class Budget(msgspec.Struct, frozen=True, kw_only=True):
    scope: BudgetScope
    name: str  # of the user or the pool; "*": each user without a budget of their own
    usd: float
    period: BudgetPeriod = BudgetPeriod.MONTH


class BudgetUse(msgspec.Struct, frozen=True, kw_only=True):
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


class BudgetReport(msgspec.Struct, frozen=True, kw_only=True):
    budgets: tuple[BudgetUse, ...]
    now: datetime


class BudgetLimit(msgspec.Struct, frozen=True, kw_only=True):
    usd: Annotated[float, Meta(ge=0, le=1e12), about("Dollars.", example="100")]
    period: BudgetPeriod | None = None  # None: that of all budgets

    @classmethod
    def expand(cls, value: Any) -> Any:
        return value if isinstance(value, Mapping) else {"usd": value}


class BudgetSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The section `budgets` of a config file."""

    users: dict[Text, BudgetLimit] = {}
    pools: dict[Text, BudgetLimit] = {}
    period: BudgetPeriod = BudgetPeriod.MONTH


def parse(config: Mapping[str, Any] | None) -> tuple[Budget, ...]:
    """From a config file: {users: {alice: 100, "*": 50}, pools: {lab: {usd: 9, period: week}}}."""
    settings = schema.parse(BudgetSettings, config or {}, path="budgets")
    scopes = ((BudgetScope.USER, settings.users), (BudgetScope.POOL, settings.pools))
    return tuple(
        Budget(scope=scope, name=name, usd=limit.usd, period=limit.period or settings.period)
        for scope, limits in scopes
        for name, limit in limits.items()
    )
