"""The inventory of slices and pools."""

from __future__ import annotations

from tpufleet.model.fleet.inventory import Inventory, InventoryChange, InventoryNote
from tpufleet.model.people.users import Role
from tpufleet.service.fleet import inventory
from tpufleet.service.transport.routing import ApiCall, Router

router = Router()


@router.get("/inventory", Role.VIEWER)
def get_inventory(call: ApiCall) -> Inventory:
    """Slices and room in pools, with state, owner, job and notes; chips by type and zone."""
    return inventory.inventory(call.store, call.now)


@router.patch("/inventory/{name}", Role.MEMBER)
def annotate_inventory(call: ApiCall, body: InventoryChange) -> InventoryNote:
    """Change alias, note or belongs-to of a slice or a pool."""
    return inventory.annotate(call.context, call.path_param("name"), body)
