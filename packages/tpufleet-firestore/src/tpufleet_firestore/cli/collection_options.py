"""Options that say which collection: of bridges and of clients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click


def collection_options(command: Callable[..., Any]) -> Callable[..., Any]:
    for option in (
        click.option("--collection", default="tpu_jobs", show_default=True),
        click.option("--database", help="Firestore database (default: the default one)."),
        click.option("--project", help="Google Cloud project (default: of the credentials)."),
    ):
        command = option(command)
    return command
