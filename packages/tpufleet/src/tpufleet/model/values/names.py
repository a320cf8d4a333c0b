"""Names that people write in files and options: of jobs and pools, zones, providers, tags."""

from __future__ import annotations

import difflib
import re
from typing import Annotated, Any

import msgspec

from tpufleet import schema
from tpufleet.errors import unknown

PROVIDERS = ("local", "tpu-vm", "compute", "gke")
MAX_ITEMS = 100  # of a list, such as the tags of a job
DISTINCT = msgspec.Meta(max_length=MAX_ITEMS, extra_json_schema={"uniqueItems": True})
_LABEL = r"[a-z](?:[a-z0-9-]{0,38}[a-z0-9])?"
_ZONE = r"[a-z]+(?:-[a-z]+)*[0-9]{0,2}-(?:[a-z]|ai[0-9][a-z])"
_REGION = r"[a-z]+(?:-[a-z]+)*[0-9]{0,2}"


def label_from(text: str) -> str:
    cleaned = re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")
    return re.sub(r"^[0-9-]+", "", cleaned)[:40].strip("-")


def _zone_from(text: str) -> str:
    cleaned = text.strip().lower()
    return f"{cleaned}-a" if re.fullmatch(_REGION, cleaned) else cleaned


_label = schema.text(
    "name",
    _LABEL,
    example="train-1",
    repair=label_from,
    rule="lower-case letters, digits and dashes, starting with a letter, at most 40 characters",
)
_zone = schema.text("zone", _ZONE, example="us-central1-a", repair=_zone_from)
Label = Annotated[str, _label]
Zone = Annotated[str, _zone]
Tag = Annotated[
    str,
    schema.text(
        "tag",
        r"[A-Za-z0-9][A-Za-z0-9_.=:/-]{0,62}",
        example="baseline",
        repair=lambda text: re.sub(r"[^A-Za-z0-9_.=:/-]+", "-", text).strip("-")[:63],
        rule="letters, digits and _.=:/-, at most 63 characters",
    ),
]


def _parse_provider(value: Any) -> str:
    """A provider of another server is not known here, but a misspelling of ours is an error."""
    text = value if isinstance(value, str) else ""
    near = difflib.get_close_matches(text, PROVIDERS, n=1, cutoff=0.75)
    if text in PROVIDERS or (re.fullmatch(_LABEL, text) and not near):
        return text
    raise unknown("provider", value, PROVIDERS)


Provider = Annotated[
    str,
    schema.custom("provider", _parse_provider, {"type": "string", "pattern": f"^(?:{_LABEL})$"}),
]


def label_error(value: Any) -> str | None:
    """Why this cannot name a job or pool, with a valid name; None when it can."""
    return schema.error_of(_label, value)


def zone_error(value: Any) -> str | None:
    return schema.error_of(_zone, value)
