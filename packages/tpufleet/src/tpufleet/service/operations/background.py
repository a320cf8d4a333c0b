"""Failures of work that a server repeats in the background."""

from __future__ import annotations

import logging

from tpufleet.errors import DatabaseUnreachable, FleetError


def log_failure(logger: logging.Logger, what: str, error: Exception) -> None:
    """Without a stack for errors of the outside world, which repeat until it recovers. `what` is
    part of the format, because `RecentErrors` counts messages by it."""
    if isinstance(error, FleetError | OSError):
        by_store = isinstance(error, DatabaseUnreachable)  # which logs it
        level = logging.DEBUG if by_store else logging.WARNING
        logger.log(level, f"cannot {what}; retrying: %s", error)
    else:
        logger.error(f"cannot {what}; retrying", exc_info=error)
