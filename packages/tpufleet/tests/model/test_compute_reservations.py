"""Names of reservations and their blocks, in both notations."""

from __future__ import annotations

import pytest

from tpufleet.errors import BadInput
from tpufleet.model.fleet import compute_reservations
from tpufleet.model.fleet.compute_reservations import ComputeReservation

PATHS = {
    "mine": ComputeReservation(name="mine"),
    "projects/p/reservations/mine": ComputeReservation(name="mine", project="p"),
    "mine/reservationBlocks/b": ComputeReservation(name="mine", block="b"),
    "projects/p/reservations/mine/reservationBlocks/b/reservationSubBlocks/s": ComputeReservation(
        name="mine", project="p", block="b", sub_block="s"
    ),
}


@pytest.mark.parametrize(("path", "reservation"), PATHS.items(), ids=PATHS)
def test_a_path_names_a_reservation_and_its_blocks(path, reservation):
    assert compute_reservations.parse(path) == reservation
    assert str(reservation) == path


def test_pods_select_a_block_by_labels():
    labels = compute_reservations.parse("mine/reservationBlocks/b").node_labels
    assert labels == {
        "cloud.google.com/reservation-name": "mine",
        "cloud.google.com/reservation-blocks": "b",
    }


@pytest.mark.parametrize("text", ["", "mine/b", "mine/reservationSubBlocks/s", "a/b/c"])
def test_anything_else_is_rejected_with_the_form(text):
    with pytest.raises(BadInput, match="/reservationBlocks/BLOCK"):
        compute_reservations.parse(text)
