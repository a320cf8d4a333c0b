"""Channels that the notifications of a user go to, and what was sent."""

from __future__ import annotations

from tpufleet.model.api_types import ChannelPage, CreatedChannel, DeliveryPage, NewChannel
from tpufleet.model.people.audit import AuditAction
from tpufleet.model.people.notifications import Delivery, NotificationChannel, NotificationRules
from tpufleet.model.people.users import Role
from tpufleet.service.notifications import channels
from tpufleet.service.notifications.channels import ChannelSecrets
from tpufleet.service.notifications.outbox import NotificationOutbox
from tpufleet.service.transport.routing import ApiCall, Router

router = Router()


@router.get("/notifications", Role.VIEWER)
def list_channels(call: ApiCall) -> ChannelPage:
    """List your channels for notifications, without their secrets."""
    return ChannelPage(channels=channels.listed(call.store, call.user.name))


@router.put(
    "/notifications/{name}",
    Role.MEMBER,
    audit=AuditAction.PUT_CHANNEL,
    detail=lambda call: str(call.parse_body(NewChannel).kind),  # the address may be a secret
)
def put_channel(
    call: ApiCall,
    outbox: NotificationOutbox,
    secrets: ChannelSecrets,
    rules: NotificationRules,
    body: NewChannel,
) -> CreatedChannel:
    """Add or replace a channel; returns the signing key of a webhook once."""
    outbox.begin()
    name = call.path_param("name")
    return channels.put(call.store, secrets, rules, call.user.name, name, body)


@router.delete("/notifications/{name}", Role.MEMBER, audit=AuditAction.DELETE_CHANNEL)
def delete_channel(call: ApiCall) -> NotificationChannel:
    """Delete a channel."""
    return channels.delete(call.store, call.user.name, call.path_param("name"))


@router.post("/notifications/{name}/test", Role.MEMBER)
def test_channel(call: ApiCall, outbox: NotificationOutbox) -> Delivery:
    """Send a test message to a channel."""
    queued = channels.queue_test(call.store, call.user.name, call.path_param("name"), call.now)
    outbox.wake()
    return queued


@router.get("/deliveries", Role.VIEWER)
def list_deliveries(call: ApiCall) -> DeliveryPage:
    """Notifications of the last days, newest first."""
    return DeliveryPage(deliveries=channels.history(call.store, call.user.name))
