"""How costs are displayed."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from tpufleet.views.cli.cost import CostTotal, cells, total
from tpufleet.views.cli.stock import retry_time

TRAIN = CostTotal("train", chip_hours=8.0, useful=6.0, lost=1.0, unknown=0.5, usd=9.6, lost_usd=1.2)
ODD = CostTotal("odd", chip_hours=2.0, priced=False)


def test_a_row_shows_useful_lost_and_unknown_chip_hours():
    assert cells(TRAIN) == ("train", "8.00", "6.00 (75%)", "1.00", "0.50", "$9.60", "$1.20")


def test_retry_time_of_a_zone():
    now = datetime(2026, 1, 1, tzinfo=UTC)
    assert retry_time(now + timedelta(seconds=15), now) == "in 15 s"
    assert retry_time(now - timedelta(minutes=13), now) == "now"
    assert retry_time(None, now) == "-"


def test_a_total_with_an_unknown_price_is_marked():
    assert cells(total([TRAIN, ODD])) == (
        "total", "10.00", "6.00 (60%)", "1.00", "0.50", "$9.60 + unpriced", "$1.20",
    )  # fmt: skip
    assert cells(total([TRAIN, TRAIN]))[5] == "$19.20"


def test_simulated_slices_are_never_shown_as_real_cost():
    simulated = CostTotal("try", chip_hours=2.0, simulated_usd=2.4)
    assert cells(simulated)[5:] == ("$2.40 simulated", "$0.00")
    assert cells(total([TRAIN, simulated]))[5] == "$9.60 + $2.40 simulated"
