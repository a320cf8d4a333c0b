"""Names of Compute Engine reservations and of their blocks, as node pools and node selectors have
them. Pure.

Paths: https://docs.cloud.google.com/kubernetes-engine/docs/how-to/tpu-all-capacity-mode and
https://cloud.google.com/kubernetes-engine/docs/how-to/consuming-reservations
"""

from __future__ import annotations

import re

import msgspec

from tpufleet.errors import invalid

NAME_LABEL = "cloud.google.com/reservation-name"
PROJECT_LABEL = "cloud.google.com/reservation-project"
BLOCK_LABEL = "cloud.google.com/reservation-blocks"
SUB_BLOCK_LABEL = "cloud.google.com/reservation-subblocks"

_PATH = re.compile(
    r"(?:projects/(?P<project>[^/]+)/(?:(?:zones|locations)/[^/]+/)?reservations/)?(?P<name>[^/]+)"
    r"(?:/reservationBlocks/(?P<block>[^/]+)(?:/reservationSubBlocks/(?P<sub_block>[^/]+))?)?"
)


class ComputeReservation(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    project: str = ""  # empty: that of the cluster
    block: str = ""  # empty: any
    sub_block: str = ""

    def __str__(self) -> str:
        """As a node pool's reservation affinity names it."""
        prefix = f"projects/{self.project}/reservations/" if self.project else ""
        block = f"/reservationBlocks/{self.block}" if self.block else ""
        sub_block = f"/reservationSubBlocks/{self.sub_block}" if self.sub_block else ""
        return f"{prefix}{self.name}{block}{sub_block}"

    @property
    def node_labels(self) -> dict[str, str]:
        """That GKE sets on nodes, and that pods select."""
        labels = {
            NAME_LABEL: self.name,
            PROJECT_LABEL: self.project,
            BLOCK_LABEL: self.block,
            SUB_BLOCK_LABEL: self.sub_block,
        }
        return {key: value for key, value in labels.items() if value}

    def without_project(self) -> ComputeReservation:
        return ComputeReservation(name=self.name, block=self.block, sub_block=self.sub_block)


def parse(text: str) -> ComputeReservation:
    match = _PATH.fullmatch(text)
    if match is None:
        block = "[/reservationBlocks/BLOCK[/reservationSubBlocks/SUB_BLOCK]]"
        raise invalid(text, "a reservation", f"[projects/PROJECT/reservations/]NAME{block}")
    return ComputeReservation(**{key: value or "" for key, value in match.groupdict().items()})
