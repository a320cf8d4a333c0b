"""Filters and pages of listings."""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

from tpufleet_testbed.compute_engine.api_errors import invalid_field

_CLAUSE = re.compile(
    r"\s*\(?\s*(?P<field>[A-Za-z][\w.-]*)\s*(?P<operator>!=|=|<|>|:|\beq\b|\bne\b)\s*"
    r"(?P<value>\"[^\"]*\"|'[^']*'|[^\s()]+)\s*\)?\s*(?:AND\s*)?",
)

_SELECTED = re.compile(r"[^,()]+(?:\([^()]*(?:\([^()]*\)[^()]*)*\))?")  # of two levels


def matching(items: Sequence[dict[str, Any]], text: str) -> list[dict[str, Any]]:
    """Those that a filter selects: `name = a`, `(labels.x eq b) (status != RUNNING)`."""
    position, clauses = 0, []
    while position < len(text.rstrip()):
        match = _CLAUSE.match(text, position)
        if match is None or match["field"] == "OR":
            raise invalid_field("filter", text, "Invalid list filter expression.")
        clauses.append((match["field"], match["operator"], match["value"].strip("\"'")))
        position = match.end()
    return [item for item in items if all(_holds(item, *clause) for clause in clauses)]


def _holds(item: Mapping[str, Any], field: str, operator: str, wanted: str) -> bool:
    found: Any = item
    for part in field.split("."):
        found = found.get(part) if isinstance(found, Mapping) else None
    text = "" if found is None else str(found)
    if isinstance(found, bool):
        text = text.lower()
    match operator:
        case "=":
            return text == wanted
        case "!=":
            return text != wanted
        case ":":
            # That it finds parts of texts is not documented.
            return found is not None and fnmatchcase(text, wanted)
        case "eq":
            return re.fullmatch(wanted, text) is not None
        case "ne":
            return re.fullmatch(wanted, text) is None
        case "<":
            return text < wanted
    return text > wanted


def page(
    items: Sequence[dict[str, Any]], query: Mapping[str, str], most: int
) -> tuple[list[dict[str, Any]], str]:
    """Items of one page, and the token of the next. Items are in the order of their names, and the
    token says after which the next page begins: what is created or deleted meanwhile may be seen
    or missed."""
    found = sorted(items, key=lambda item: str(item["name"]))
    if query.get("orderBy") == "creationTimestamp desc":
        found.sort(key=lambda item: str(item.get("creationTimestamp", "")), reverse=True)
    elif query.get("orderBy") not in (None, "", "name"):
        raise invalid_field("orderBy", query["orderBy"])
    wanted = query.get("maxResults") or str(most)
    if not wanted.isdecimal() or int(wanted) > 500:
        raise invalid_field("maxResults", wanted)
    begin = 0
    if token := query.get("pageToken", ""):
        after = _read(token)
        names = [str(item["name"]) for item in found]
        begin = names.index(after) + 1 if after in names else sum(name <= after for name in names)
    end = begin + min(int(wanted) or most, most)
    shown = found[begin:end]
    token = base64.urlsafe_b64encode(str(shown[-1]["name"]).encode()).decode() if shown else ""
    return shown, token if end < len(found) else ""


def partial(found: Any, selector: str) -> Any:
    """What `fields` selects: `items(name,scheduling/model),nextPageToken`."""
    if isinstance(found, list):
        return [partial(each, selector) for each in found]
    shown: dict[str, Any] = {}
    parts = _SELECTED.findall(selector)
    for part in parts:
        match = re.fullmatch(r"(\w+)(?:/(.+)|\((.+)\))?", part)
        if match is None or not isinstance(found, Mapping) or ",".join(parts) != selector:
            raise invalid_field("fields", selector)
        inner = match[2] or match[3]
        if match[1] in found:
            shown[match[1]] = partial(found[match[1]], inner) if inner else found[match[1]]
    return shown


def _read(token: str) -> str:
    try:
        return base64.b64decode(token.encode(), altchars=b"-_", validate=True).decode()
    except (binascii.Error, UnicodeDecodeError):
        raise invalid_field("pageToken", token, "The page token is not valid.") from None
