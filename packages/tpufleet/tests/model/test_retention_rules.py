"""The setting `retention`."""

from __future__ import annotations

from datetime import timedelta

import pytest

from tpufleet.errors import BadInput
from tpufleet.model.people import retention_rules
from tpufleet.model.people.retention_rules import RetentionRules

DAY = timedelta(days=1)


@pytest.mark.parametrize(
    ("document", "rules"),
    [
        (None, RetentionRules()),
        ({"logs": "none"}, RetentionRules(logs=None)),
        ({"checkpoints": "90d"}, RetentionRules(checkpoints=90 * DAY)),
    ],
)
def test_the_setting_is_read(document, rules):
    assert retention_rules.parse(document) == rules


def test_checkpoints_are_kept_by_default():
    assert RetentionRules().checkpoints is None


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ({"log": "1d"}, "retention.log: unknown field; did you mean logs"),
        ({"metrics": "1d"}, "write one of logs, code, checkpoints, events"),
        ({"logs": {"age": "1d"}}, "retention.logs: .* is not a duration"),
        ({"logs": "5x"}, "retention.logs: '5x' is not a duration"),
        ({"logs": "0s"}, "must be from 1h"),
    ],
)
def test_a_wrong_setting_is_explained(document, message):
    with pytest.raises(BadInput, match=message):
        retention_rules.parse(document)
