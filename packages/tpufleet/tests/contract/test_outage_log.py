"""An unreachable database is logged when that begins, once a minute, and when it ends."""

from __future__ import annotations

import pytest

from tpufleet.errors import DatabaseUnreachable
from tpufleet.stores.sql.outage_log import REPEAT_SECONDS, OutageLog

REFUSED = DatabaseUnreachable("connection refused")


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture):
    def read() -> list[str]:
        messages = [record.getMessage() for record in caplog.records]
        caplog.clear()
        return messages

    return read


def test_one_line_at_the_begin_one_a_minute_and_one_at_the_end(lines):
    now = 0.0
    log = OutageLog(lambda: now)
    log.succeeded()
    for _ in range(100):
        log.failed(REFUSED, now)
    assert lines() == [
        "the database does not respond; retrying (0 s, 1 calls failed): connection refused"
    ]
    now = REPEAT_SECONDS
    for _ in range(100):
        log.failed(REFUSED, now)
    assert lines() == [
        "the database does not respond; retrying (60 s, 101 calls failed): connection refused"
    ]
    now += 30
    for _ in range(100):
        log.succeeded()
    assert lines() == ["the database responds again (90 s, 200 calls failed)"]
    log.failed(REFUSED, now)
    assert lines() == [
        "the database does not respond; retrying (0 s, 1 calls failed): connection refused"
    ]


def test_a_call_that_began_before_the_end_of_an_outage_begins_no_other(lines):
    now = 0.0
    log = OutageLog(lambda: now)
    log.succeeded()
    log.failed(REFUSED, now)
    now = 20.0
    log.succeeded()
    assert len(lines()) == 2
    log.failed(REFUSED, 15.0)
    log.succeeded()
    assert lines() == []
    log.failed(REFUSED, 20.0)
    assert len(lines()) == 1


def test_a_database_that_never_responded_is_an_error_of_whoever_opens_it(lines):
    log = OutageLog()
    log.failed(REFUSED, 0.0)
    log.succeeded()
    assert lines() == []
