"""Errors in how a command was called."""

from __future__ import annotations

import click


class HintedUsageError(click.UsageError):
    """A usage error whose message already names the next step, so `--help` is not suggested."""
