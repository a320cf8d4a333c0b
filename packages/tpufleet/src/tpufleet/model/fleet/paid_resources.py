"""What a cloud project contains and pays for, whoever made it."""

from __future__ import annotations

from enum import StrEnum

import msgspec


class Belongs(StrEnum):
    OURS = "ours"  # of the server that this machine uses
    ADOPTED = "adopted"  # by that server
    BY_HAND = "by hand"  # made with `tpu vm`
    ORPHANED = "orphaned"  # of a server whose address in the project nothing has any more
    OTHERS = "others"


class PaidResource(msgspec.Struct, frozen=True, kw_only=True):
    kind: str  # TPU VM, queued resource, VM, group, cluster, node pool, disk, address
    name: str
    location: str  # zone or region
    type: str
    state: str
    belongs: Belongs
    usd_per_hour: float | None  # an estimate; None: no price is known
    next: str = ""  # the command that ends it
