"""Names in a job file: which are valid, and what to write instead of one that is not."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from typing import Any

from tpufleet.model.spec_fields import COMMON_ALIASES

SHELL = ("bash", "-euo", "pipefail", "-c")  # what runs a command that is given as text
KNOWN_PROVIDERS = ("local", "tpu-vm", "gke")

_LABEL = re.compile(r"[a-z](?:[a-z0-9-]{0,38}[a-z0-9])?")
_ZONE = re.compile(r"[a-z]+(?:-[a-z]+)*[0-9]{0,2}-(?:[a-z]|ai[0-9][a-z])")
_REGION = re.compile(r"[a-z]+(?:-[a-z]+)*[0-9]{0,2}")
_TAG = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.=:/-]{0,62}")
_LAUNCHER = re.compile(
    r"(python|pypy)[0-9.]*|bash|sh|env|exec|uv|run|poetry|time|nice|torchrun|cd|set"
)


def label_error(value: Any) -> str | None:
    """Why this cannot be a name of a job or pool, and what can; None when it can."""
    if isinstance(value, str) and _LABEL.fullmatch(value):
        return None
    cure = _label_from(value) if isinstance(value, str) else ""
    return (
        f"{quote_value(value)} is not a name of lower-case letters, digits and dashes, at most 40, "
        f"starting with a letter; write {cure or 'train-1'}"
    )


def _label_from(text: str) -> str:
    cleaned = re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")
    return re.sub(r"^[0-9-]+", "", cleaned)[:40].strip("-")


def name_from(command: tuple[str, ...]) -> str:
    """`python -m lab.train lr=1` → train; `./run.sh` → run."""
    words = command[len(SHELL) :] if command[: len(SHELL)] == SHELL else command
    for word in [part for text in words for part in text.split()]:
        stem = word.rpartition("/")[2]
        if word.startswith("-") or "=" in word or _LAUNCHER.fullmatch(stem):
            continue
        parts = [part for part in stem.split(".") if part not in ("", "py", "sh")]
        if label := _label_from(parts[-1] if parts else ""):
            return label
    return "job"


def quote_value(value: Any) -> str:
    """A value in a message: short, on one line, whatever it is."""
    if isinstance(value, str):
        return repr(value if len(value) <= 60 else value[:57] + "…")
    if value is None or isinstance(value, (bool, float)):
        return str(value).lower()
    if isinstance(value, int):
        return str(value) if value.bit_length() <= 64 else "so large a number"
    kinds = {list: "a list", tuple: "a list", dict: "a mapping"}
    return kinds.get(type(value), f"a {type(value).__name__}")


def suggest(word: str, known: Iterable[str], cutoff: float = 0.6) -> str:
    """`; did you mean …?`, or a list of what there is."""
    known = list(known)
    close = [name for name in (COMMON_ALIASES.get(word.lower()),) if name in known]
    close += difflib.get_close_matches(word[:60].lower(), known, n=1, cutoff=cutoff)
    return f"; did you mean {close[0]}?" if close else f"; write one of {', '.join(known)}"


def zone_error(item: str) -> str | None:
    if _ZONE.fullmatch(item):
        return None
    if _REGION.fullmatch(item):
        return f"{item!r} is not a zone; write {item}-a, say"
    guess = item.strip().lower()
    cure = guess if _ZONE.fullmatch(guess) else "us-central1-a"
    return f"{quote_value(item)} is not a zone; write {cure}, say"


def provider_error(item: str) -> str | None:
    if item in KNOWN_PROVIDERS or (
        _LABEL.fullmatch(item)
        and not difflib.get_close_matches(item, KNOWN_PROVIDERS, n=1, cutoff=0.75)
    ):
        return None
    return f"no provider is called {quote_value(item)}{suggest(item, KNOWN_PROVIDERS)}"


def tag_error(item: str) -> str | None:
    if _TAG.fullmatch(item):
        return None
    cure = re.sub(r"[^A-Za-z0-9_.=:/-]+", "-", item).strip("-")[:63] or "baseline"
    return f"{quote_value(item)} is not a tag of letters, digits and _.=:/-, at most 63; write {cure}"
