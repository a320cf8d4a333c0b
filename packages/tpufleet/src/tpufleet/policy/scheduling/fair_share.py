"""Fair share between users: who used many chips lately goes after who used few.

Usage is in chip seconds and decays with a half-life. It is compared in steps of doubling, so that
jobs do not change places all the time, and within one step the order is first in, first out.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from datetime import datetime, timedelta

import msgspec

DEFAULT_HALF_LIFE = timedelta(days=7)
LEDGER_NAME = "fair_share"  # in the store's metadata
_CHIP_HOUR = 3600.0
_NEGLIGIBLE = 1.0  # chip seconds


class UsageLedger(msgspec.Struct, frozen=True, kw_only=True):
    """Decayed chip seconds of each user at a moment."""

    at: datetime
    usage: dict[str, float] = {}


def advance(
    ledger: UsageLedger, chips: Mapping[str, int], now: datetime, half_life: timedelta
) -> UsageLedger:
    """The ledger at `now`, when each user held this many chips since."""
    elapsed = (now - ledger.at).total_seconds()
    if elapsed <= 0:
        return ledger
    kept = 0.5 ** (elapsed / half_life.total_seconds())
    # The integral of a constant rate that decays.
    gained = half_life.total_seconds() / math.log(2) * (1 - kept)
    usage = {
        owner: ledger.usage.get(owner, 0.0) * kept + chips.get(owner, 0) * gained
        for owner in {*ledger.usage, *chips}
    }
    return UsageLedger(
        at=now, usage={owner: used for owner, used in usage.items() if used >= _NEGLIGIBLE}
    )


def usage_step(chip_seconds: float) -> int:
    """0 below one chip hour, then one more for each doubling."""
    return max(0, math.floor(math.log2(chip_seconds / _CHIP_HOUR)) + 1) if chip_seconds > 0 else 0


def usage_steps(ledger: UsageLedger | None) -> dict[str, int]:
    """By user; those that are missing have step 0."""
    if ledger is None:
        return {}
    steps = {owner: usage_step(used) for owner, used in ledger.usage.items()}
    return {owner: step for owner, step in steps.items() if step}
