"""Failures of work that a server repeats in the background."""

from __future__ import annotations

import logging

from tpufleet.errors import DatabaseUnreachable, FleetError


def log_failure(logger: logging.Logger, what: str, error: Exception) -> None:
    """Without a stack for errors of the outside world, which repeat until it recovers."""
    if isinstance(error, DatabaseUnreachable):  # logged by its store
        logger.debug("cannot %s: %s", what, error)
    elif isinstance(error, FleetError | OSError):
        logger.warning("cannot %s; retrying: %s", what, error)
    else:
        logger.error("cannot %s; retrying", what, exc_info=error)
