"""Fault plans of the emulated GKE: what it has in stock, its quotas, and how slow it is."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from datetime import timedelta
from pathlib import Path
from typing import Any

from tpufleet.errors import BadInput
from tpufleet.model.tpu import tpu_types
from tpufleet.model.values import durations
from tpufleet_testbed.gke.node_pools import GkeEmulator

KINDS = ("spot", "on-demand", "reserved")
_DURATIONS = ("create", "delete", "chips", "flex_start", "upgrade")
_ZONE = re.compile(r"[a-z]+-[a-z]+[0-9]+-[a-z]")
_REGION = re.compile(r"[a-z]+-[a-z]+[0-9]+")

MACHINES = tuple(dict.fromkeys(row[5] for row in tpu_types.TYPES if row[5] is not None))
LABELS = tuple(row[6] for row in tpu_types.GENERATIONS if row[6] is not None)


@dataclass(frozen=True, kw_only=True, slots=True)
class GkeFaultPlan:
    zones: tuple[str, ...] = ("us-central1-a",)  # for the provisioner, in order
    create: timedelta = timedelta(seconds=5)
    delete: timedelta = timedelta(seconds=5)
    chips: timedelta = timedelta(0)  # from a ready node until its device plugin has them
    flex_start: timedelta = timedelta(0)  # until a flex-start pool has its nodes
    upgrade: timedelta = timedelta(minutes=5)  # or repair
    operations: int | None = None  # at the same time; None: no limit
    # Nodes by (zone, machine type), or (zone, machine type, kind of capacity).
    stock: Mapping[tuple[str, ...], int] = field(default_factory=dict)
    # Chips by (region, accelerator label), or (region, label, kind of capacity).
    quota: Mapping[tuple[str, ...], int] = field(default_factory=dict)


def apply(plan: GkeFaultPlan, gke: GkeEmulator) -> None:
    """Operations in progress keep their duration."""
    gke.creation_time, gke.deletion_time = plan.create, plan.delete
    gke.device_plugin_delay, gke.flex_start_delay = plan.chips, plan.flex_start
    gke.upgrade_time, gke.max_operations = plan.upgrade, plan.operations
    gke.stock, gke.quotas = dict(plan.stock), dict(plan.quota)
    gke.zones = plan.zones


def load(path: Path) -> GkeFaultPlan:
    """Read a plan from a YAML file."""
    try:
        return parse(path.read_text())
    except (OSError, UnicodeDecodeError, BadInput) as error:
        raise BadInput(f"{path}: {error}") from error


def parse(text: str) -> GkeFaultPlan:
    import yaml

    try:
        document = yaml.safe_load(text) or {}
    except yaml.YAMLError as error:
        raise BadInput(str(error)) from error
    known = [item.name for item in fields(GkeFaultPlan)]
    values: dict[str, Any] = {}
    for key, value in _mapping("plan", document).items():
        _check_known(key, known, "field")
        if key in _DURATIONS:
            values[key] = _duration(key, value)
        elif key == "zones":
            values[key] = _zones(value)
        elif key == "operations":
            values[key] = None if value is None else _count(key, value)
        elif key == "stock":
            values[key] = _limits(key, value, _ZONE, "zone", MACHINES, "machine type")
        else:
            values[key] = _limits(key, value, _REGION, "region", LABELS, "accelerator")
    return GkeFaultPlan(**values)


def _limits(
    key: str, value: Any, pattern: re.Pattern[str], place: str, names: tuple[str, ...], what: str
) -> dict[tuple[str, ...], int]:
    """`{place: {name: number}}`, or `{place: {name: {kind: number}}}`."""
    limits: dict[tuple[str, ...], int] = {}
    for where, by_name in _mapping(key, value).items():
        _check_place(key, where, pattern, place)
        for name, amount in _mapping(f"{key}.{where}", by_name).items():
            _check_known(name, names, what, f"{key}.{where}")
            path = f"{key}.{where}.{name}"
            if not isinstance(amount, dict):
                limits[where, name] = _count(path, amount)
                continue
            for kind, number in amount.items():
                _check_known(kind, KINDS, "kind of capacity", path)
                limits[where, name, kind] = _count(f"{path}.{kind}", number)
    return limits


def _check_place(key: str, name: Any, pattern: re.Pattern[str], place: str) -> None:
    if not pattern.fullmatch(str(name)):
        raise BadInput(f"{key}: {name!r} is not a {place}")


def _mapping(path: str, value: Any) -> dict[Any, Any]:
    if not isinstance(value, dict):
        raise BadInput(f"{path}: expected a mapping, not {value!r}")
    return value


def _check_known(name: Any, known: Any, what: str, path: str = "") -> None:
    if name not in known:
        near = difflib.get_close_matches(str(name), known, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]}?" if near else f"known are {', '.join(known)}"
        raise BadInput(f"{f'{path}: ' if path else ''}unknown {what} {name!r}; {hint}")


def _duration(path: str, value: Any) -> timedelta:
    try:
        return durations.parse(value) or timedelta(0)
    except BadInput as error:
        raise BadInput(f"{path}: {error}") from error


def _zones(value: Any) -> tuple[str, ...]:
    zones = tuple(value) if isinstance(value, list) else (value,)
    for zone in zones:
        _check_place("zones", zone, _ZONE, "zone")
    return zones


def _count(path: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise BadInput(f"{path}: expected a number from 0, not {value!r}")
    return value
