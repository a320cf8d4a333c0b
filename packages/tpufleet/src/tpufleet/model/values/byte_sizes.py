"""Sizes in text: `200M` is 200 MiB."""

from __future__ import annotations

import re

from tpufleet.errors import invalid

_UNITS = {"": 1, "k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40}


def parse(text: str) -> int:
    """In bytes."""
    match = re.fullmatch(r"([0-9]{1,15})\s*([kmgt]?)(i?b)?", text.strip().lower())
    if match is None:
        raise invalid(text, "a size in bytes, with k, M or G", "200M")
    return int(match[1]) * _UNITS[match[2]]
