"""The keyword arguments that describe a job: the fields of a job file, typed for editors."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any, TypedDict


class JobFields(TypedDict, total=False):
    """See the job file reference; a job file and these arguments have the same fields."""

    name: str
    setup: str | Sequence[str]
    slices: int
    processes_per_host: int
    capacity: str | Sequence[str]
    zones: str | Sequence[str]
    providers: str | Sequence[str]
    pool: str
    env: Mapping[str, str]
    secrets: Mapping[str, str]
    workdir: str | os.PathLike[str] | None  # None: send no files
    checkpoint: str
    timeout: str
    priority: int
    rule: str
    retries: Mapping[str, int]
    crash_loop: int
    grace: str
    hung_after: str
    tags: Sequence[str]
    notes: str
    metrics: Mapping[str, str]
    notify: str | Sequence[str]
    reuse: str | Sequence[str]
    require_reservation: bool
    max_cost: float
    max_hours: float
    python: str
    image: str
    dependencies: Sequence[str]
    mounts: Sequence[Mapping[str, Any]]
    pod: Mapping[str, Any]


def to_document(
    command: str | Sequence[str], accelerator: str, fields: JobFields
) -> dict[str, Any]:
    """As a job file has it: plain lists and mappings."""
    document: dict[str, Any] = {"command": _plain(command), "accelerator": accelerator}
    for name, value in fields.items():
        if name != "workdir" and value is not None:
            document[name] = _plain(value)
    return document


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, Sequence) and not isinstance(value, str):
        return list(value)
    return value.total_seconds() if isinstance(value, timedelta) else value
