"""How long files and events are kept: the setting `retention`."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from datetime import timedelta
from typing import Any

from tpufleet.errors import SettingErrors
from tpufleet.model.values import byte_sizes, durations

YEAR = timedelta(days=365)
MIN_AGE = timedelta(hours=1)
# Purging code also marks the job, and events are deleted in the order of their times.
_WITHOUT_SIZE = frozenset({"code", "events"})


@dataclass(frozen=True, kw_only=True, slots=True)
class RetentionRule:
    age: timedelta | None = None  # since the end of the job; None: for ever
    size: int | None = None  # bytes of all jobs together; None: no limit


@dataclass(frozen=True, kw_only=True, slots=True)
class RetentionRules:
    """Checkpoints are kept unless configured: they may be the only copy of weeks of work."""

    logs: RetentionRule = RetentionRule(age=YEAR)
    code: RetentionRule = RetentionRule(age=YEAR)  # with logs and results
    checkpoints: RetentionRule = RetentionRule()
    events: RetentionRule = RetentionRule(age=YEAR)


def parse(document: Mapping[str, Any] | None) -> RetentionRules:
    """What is missing has its default; `none` keeps for ever."""
    errors = SettingErrors("retention")
    rules, known = RetentionRules(), [field.name for field in fields(RetentionRules)]
    for kind, limits in (document or {}).items():
        if kind not in known:
            close = difflib.get_close_matches(str(kind), known, n=1)
            hint = f"did you mean {close[0]}?" if close else f"known kinds: {', '.join(known)}"
            errors.add(str(kind), f"unknown kind; {hint}")
        elif limits is None or limits == "none":
            rules = replace(rules, **{kind: RetentionRule()})
        elif not isinstance(limits, dict):
            errors.add(kind, "must be none, or have age or size or both")
        else:
            rules = replace(rules, **{kind: _rule(getattr(rules, kind), limits, kind, errors)})
    errors.raise_all()
    return rules


def _rule(
    default: RetentionRule, limits: Mapping[str, Any], kind: str, errors: SettingErrors
) -> RetentionRule:
    age, size = default.age, default.size
    for key, value in limits.items():
        with errors.collect(f"{kind}.{key}"):
            if key == "age":
                age = durations.parse(value)
                if age is not None and age < MIN_AGE:
                    errors.add(f"{kind}.age", "must be at least an hour, such as 30d")
            elif key == "size" and kind in _WITHOUT_SIZE:
                errors.add(f"{kind}.size", "not supported; use age")
            elif key == "size":
                size = None if str(value) == "none" else byte_sizes.parse(str(value))
            else:
                errors.add(f"{kind}.{key}", "unknown field; write age or size")
    return RetentionRule(age=age, size=size)
