"""Numbers as people read them."""

from __future__ import annotations


def format_bytes(count: float) -> str:
    """Bytes: `1.5 kB`, `140.9 TB`."""
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} PB"


def format_duration(seconds: float) -> str:
    hours, rest = divmod(int(seconds), 3600)
    return f"{hours}:{rest // 60:02d}:{rest % 60:02d}"


def format_amount(value: float | None, sign: str, unknown: str) -> str:
    """An amount that is not shown as nothing when it is a little."""
    if value is None:
        return unknown
    return f"{sign}{value:,.2f}" if value == 0 or value >= 0.01 else f"under {sign}0.01"
