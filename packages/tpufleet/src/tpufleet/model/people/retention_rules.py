"""How long files and events are kept: the setting `retention`."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from typing import Annotated, Any

import msgspec

from tpufleet import schema
from tpufleet.model.values import durations

YEAR = timedelta(days=365)
_Age = Annotated[timedelta | None, durations.within(3600)]


class RetentionRules(msgspec.Struct, frozen=True, kw_only=True):
    """Ages since the end of a job; None: for ever. Checkpoints are kept unless configured: they may
    be the only copy of weeks of work."""

    logs: _Age = YEAR
    code: _Age = YEAR  # with logs and results
    checkpoints: _Age = None
    events: _Age = YEAR


def parse(document: Mapping[str, Any] | None) -> RetentionRules:
    """What is missing has its default; `none` keeps for ever."""
    return schema.parse(RetentionRules, document or {}, path="retention")
