"""The setting `retention`."""

from __future__ import annotations

from datetime import timedelta

import pytest

from tpufleet.errors import BadInput
from tpufleet.model.people import retention_rules
from tpufleet.model.people.retention_rules import RetentionRule, RetentionRules

DAY = timedelta(days=1)
NONE = RetentionRule()


@pytest.mark.parametrize(
    ("document", "rules"),
    [
        (None, RetentionRules()),
        ({"logs": {"size": "2T"}}, RetentionRules(logs=RetentionRule(age=365 * DAY, size=2**41))),
        ({"logs": "none"}, RetentionRules(logs=NONE)),
        ({"checkpoints": {"age": "90d"}}, RetentionRules(checkpoints=RetentionRule(age=90 * DAY))),
    ],
)
def test_the_setting_is_read(document, rules):
    assert retention_rules.parse(document) == rules


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ({"log": {}}, "retention.log: unknown field; did you mean logs"),
        ({"metrics": {}}, "write one of logs, code, checkpoints, events"),
        ({"logs": 5}, "must be a mapping"),
        ({"logs": {"age": "5x"}}, r"retention.logs.age: "),
        ({"logs": {"age": "0s"}}, "must be from 1h"),
        ({"events": {"size": "1G"}}, "not supported"),
        ({"logs": {"size": "much"}}, "not a size in bytes"),
    ],
)
def test_a_wrong_setting_is_explained(document, message):
    with pytest.raises(BadInput, match=message):
        retention_rules.parse(document)
