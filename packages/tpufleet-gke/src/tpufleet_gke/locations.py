"""Regions and zones of Google Cloud, as people write them in files and settings."""

from __future__ import annotations

import re
from typing import Annotated

from tpufleet import schema

_REGION = r"[a-z]+(-[a-z]+)*[0-9]{0,2}"


def _region_of(text: str) -> str:
    return re.sub(r"([0-9])-?[a-z]$", r"\1", text.strip().lower())


def _zone_of(text: str) -> str:
    return f"{text}-a" if re.fullmatch(_REGION, text) else text.strip().lower()


Region = Annotated[
    str,
    schema.text("region", r"[a-z]+(-[a-z]+)+[0-9]+", example="us-central1", repair=_region_of),
]
# Also of AI zones: us-central1-ai1a.
Zone = Annotated[
    str,
    schema.text(
        "zone", rf"{_REGION}-([a-z]|ai[0-9][a-z])", example="us-central1-a", repair=_zone_of
    ),
]
