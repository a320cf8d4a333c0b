"""What was paid for, as a person reads it."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from tpufleet.views.cli.cost import CostTotal, cells, retry_time, total

TRAIN = CostTotal("train", chip_hours=8.0, useful=6.0, lost=1.0, usd=9.6, lost_usd=1.2)
ODD = CostTotal("odd", chip_hours=2.0, priced=False)


def test_a_row_tells_what_was_useful_and_what_was_lost():
    assert cells(TRAIN) == ("train", "8.00", "6.00 (75%)", "1.00", "$9.60", "$1.20")


def test_a_zone_is_asked_again_later_or_at_once():
    now = datetime(2026, 1, 1, tzinfo=UTC)
    assert retry_time(now + timedelta(seconds=15), now) == "in 15 s"
    assert retry_time(now - timedelta(minutes=13), now) == "now"
    assert retry_time(None, now) == "-"


def test_a_total_with_a_part_of_unknown_price_says_that_there_is_more():
    assert cells(total([TRAIN, ODD])) == (
        "total", "10.00", "6.00 (60%)", "1.00", "$9.60 and more", "$1.20",
    )  # fmt: skip
    assert cells(total([TRAIN, TRAIN]))[4] == "$19.20"
