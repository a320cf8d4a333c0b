"""Kubernetes quantities such as 100m, 16Gi and 4. Pure."""

from __future__ import annotations

import re

from tpufleet.errors import invalid

PATTERN = re.compile(r"([0-9]+(?:\.[0-9]+)?)(m|k|Ki|[MGTPE]i?)?")
SCALES = {
    "m": 1e-3, "": 1.0, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15, "E": 1e18,
    "Ki": 2.0**10, "Mi": 2.0**20, "Gi": 2.0**30, "Ti": 2.0**40, "Pi": 2.0**50, "Ei": 2.0**60,
}  # fmt: skip


def parse(quantity: str | int | float) -> float:
    """In cores, bytes or units."""
    match = PATTERN.fullmatch(str(quantity))
    if match is None:
        raise invalid(quantity, "a quantity", "4, 500m or 16Gi")
    number, unit = match.groups()
    return float(number) * SCALES[unit or ""]
