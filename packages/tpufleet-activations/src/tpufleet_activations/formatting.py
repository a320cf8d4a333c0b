"""Numbers and commands formatted for people."""

from __future__ import annotations

import shlex
import time
from collections.abc import Sequence

from tpufleet.runtime.units import HeldUnit


def extract_command(*words: str) -> str:
    """`tpu extract run 'my acts'`: as a shell takes it."""
    return f"`{shlex.join(['tpu', 'extract', *words])}`"


def example_epilog(line: str) -> str:
    """Below the options in the help of a command."""
    return f"\b\nExample:\n  {line}\n"


def format_count(number: int, noun: str) -> str:
    """`1 sample`, `1,200 samples`."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def format_bytes(count: float) -> str:
    """`1.5 kB`, `140.9 TB`: decimal units."""
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} PB"


def format_health(*, healthy: int, working: int, lost: int) -> str:
    """The last line of a table of workers."""
    return (
        f"Healthy: {healthy}  Working: {working}  Needs Recovery: {lost}  "
        f"Last update: {time.strftime('%H:%M:%S')}"
    )


def format_duration(seconds: float) -> str:
    """`1:02:03`."""
    hours, rest = divmod(int(seconds), 3600)
    return f"{hours}:{rest // 60:02d}:{rest % 60:02d}"


def format_waiting(held: Sequence[HeldUnit]) -> str:
    """Which units of other workers a worker waits for, and until when; "" if for none."""
    if not held:
        return ""
    first = min(held, key=lambda one: one.lease_left)
    units = f"{len(held):,} units" if len(held) > 1 else f"unit {first.unit:,}"
    workers = len({one.worker for one in held})
    others = f" and {workers - 1:,} more" if workers > 1 else ""
    return (
        f"waiting for {units} held by {first.worker}{others}: last heartbeat {first.silent:.0f} s "
        f"ago, taken over in {first.lease_left:.0f} s if there is no other (--lease)"
    )


def format_amount(value: float | None, symbol: str, unknown: str) -> str:
    """Two decimals, but a small positive amount is never shown as zero."""
    if value is None:
        return unknown
    return f"{symbol}{value:,.2f}" if value == 0 or value >= 0.01 else f"under {symbol}0.01"
