"""Backoff for callers that do not use `tpufleet.backoff` yet."""

from __future__ import annotations

import zlib
from datetime import timedelta


def retry_delay(
    attempts: int, *, initial: timedelta, maximum: timedelta, key: str, spread: float = 0.2
) -> timedelta:
    """Doubles with each try up to `longest`, give or take `spread`.

    The jitter is derived from the key, so that a repeated decision is the same.
    """
    wait = min(initial * 2 ** min(max(attempts - 1, 0), 30), maximum)
    unit = zlib.crc32(f"{key}#{attempts}".encode()) / 0xFFFFFFFF
    return wait * (1 + spread * (2 * unit - 1))
