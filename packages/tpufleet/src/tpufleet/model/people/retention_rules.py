"""How long files and events are kept: the setting `retention`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import timedelta
from typing import Annotated, Any

import msgspec

from tpufleet import schema
from tpufleet.model.values import byte_sizes, durations

YEAR = timedelta(days=365)


def _parse_size(value: Any) -> int | None:
    return None if value == "none" else byte_sizes.parse(str(value))


class RetentionRule(msgspec.Struct, frozen=True, kw_only=True):
    # Since the end of the job; None: for ever.
    age: Annotated[timedelta | None, durations.within(3600)] = None
    # Bytes of all jobs together; None: no limit.
    size: Annotated[int | None, schema.custom("size", _parse_size)] = None


class RetentionRules(msgspec.Struct, frozen=True, kw_only=True):
    """Checkpoints are kept unless configured: they may be the only copy of weeks of work."""

    logs: RetentionRule = RetentionRule(age=YEAR)
    code: RetentionRule = RetentionRule(age=YEAR)  # with logs and results
    checkpoints: RetentionRule = RetentionRule()
    events: RetentionRule = RetentionRule(age=YEAR)

    def check(self) -> Iterator[tuple[str, str]]:
        # Purging code also marks the job, and events are deleted in the order of their times.
        for kind in ("code", "events"):
            if getattr(self, kind).size is not None:
                yield f"{kind}.size", "not supported; use age"


def parse(document: Mapping[str, Any] | None) -> RetentionRules:
    """What is missing has its default; `none` keeps for ever."""
    filled: dict[str, Any] = {}
    for kind, limits in (document or {}).items():
        default = getattr(RetentionRules(), str(kind), None)
        if limits is None or limits == "none":
            filled[kind] = {}
        elif isinstance(limits, dict) and default is not None:
            filled[kind] = {"age": default.age, **limits}
        else:
            filled[kind] = limits
    return schema.parse(RetentionRules, filled, path="retention")
