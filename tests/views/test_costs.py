"""What was paid for, as a person reads it."""

from __future__ import annotations

from tpufleet.views.cli.costs import Spent, cells, total

TRAIN = Spent("train", chip_hours=8.0, useful=6.0, lost=1.0, usd=9.6, lost_usd=1.2)
ODD = Spent("odd", chip_hours=2.0, priced=False)


def test_a_row_tells_what_was_useful_and_what_was_lost():
    assert cells(TRAIN) == ("train", "8.00", "6.00 (75%)", "1.00", "$9.60", "$1.20")


def test_a_total_with_a_part_of_unknown_price_says_that_there_is_more():
    assert cells(total([TRAIN, ODD])) == (
        "total", "10.00", "6.00 (60%)", "1.00", "$9.60 and more", "$1.20",
    )  # fmt: skip
    assert cells(total([TRAIN, TRAIN]))[4] == "$19.20"
