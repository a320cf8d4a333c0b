"""The setting `retention`: ages and sizes by kind of file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from datetime import timedelta
from typing import Any

from tpufleet import config
from tpufleet.errors import BadInput
from tpufleet.model import durations
from tpufleet.policy.retention import RetentionRule, RetentionRules

# Purging code also marks the job, and events are deleted in the order of their times.
_WITHOUT_SIZE = frozenset({"code", "events"})
MIN_AGE = timedelta(hours=1)


def parse(document: Mapping[str, Any] | None) -> RetentionRules:
    """What is missing has its default; `none` keeps for ever."""
    rules, known = RetentionRules(), [field.name for field in fields(RetentionRules)]
    for kind, limits in (document or {}).items():
        if kind not in known:
            raise BadInput(f"retention: unknown kind {kind!r}; known kinds: {', '.join(known)}")
        if limits is None or limits == "none":
            rules = replace(rules, **{kind: RetentionRule()})
            continue
        if not isinstance(limits, dict) or not limits.keys() <= {"age", "size"}:
            raise BadInput(f"retention.{kind}: must be none, or have age or size or both")
        if "size" in limits and kind in _WITHOUT_SIZE:
            raise BadInput(f"retention.{kind}.size: not supported; use age")
        rules = replace(rules, **{kind: _rule(getattr(rules, kind), limits, kind)})
    return rules


def _rule(default: RetentionRule, limits: Mapping[str, Any], kind: str) -> RetentionRule:
    age, size = default.age, default.size
    if "age" in limits:
        try:
            age = durations.parse(limits["age"])
        except BadInput as error:
            raise BadInput(f"retention.{kind}.age: {error}") from error
        if age is not None and age < MIN_AGE:
            raise BadInput(f"retention.{kind}.age: must be at least an hour")
    if "size" in limits:
        text = str(limits["size"])
        size = None if text == "none" else config.parse_size(text, f"retention.{kind}.size")
    return RetentionRule(age=age, size=size)
