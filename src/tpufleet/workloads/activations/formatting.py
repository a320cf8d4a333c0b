"""Numbers formatted for people."""

from __future__ import annotations


def format_bytes(count: float) -> str:
    """`1.5 kB`, `140.9 TB`: decimal units."""
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} PB"


def format_duration(seconds: float) -> str:
    """`1:02:03`."""
    hours, rest = divmod(int(seconds), 3600)
    return f"{hours}:{rest // 60:02d}:{rest % 60:02d}"


def format_amount(value: float | None, symbol: str, unknown: str) -> str:
    """Two decimals, but a small positive amount is never shown as zero."""
    if value is None:
        return unknown
    return f"{symbol}{value:,.2f}" if value == 0 or value >= 0.01 else f"under {symbol}0.01"
