"""Channels that the notifications of a user go to, and what was sent."""

from __future__ import annotations

from tpufleet.model.api_types import ChannelPage, CreatedChannel, DeliveryPage, NewChannel
from tpufleet.model.people.audit import AuditAction
from tpufleet.model.people.notifications import Delivery, NotificationChannel, NotificationRules
from tpufleet.model.people.users import Role
from tpufleet.service.notifications import channels
from tpufleet.service.notifications.channels import ChannelSecrets
from tpufleet.service.notifications.outbox import NotificationOutbox
from tpufleet.service.people.audit import AuditSubject
from tpufleet.service.transport.routing import ApiCall, Router

router = Router()


def _audit_put(call: ApiCall) -> AuditSubject:
    new = call.parse_body(NewChannel)  # its address may be a secret
    return AuditSubject(
        action=AuditAction.PUT_CHANNEL, target=call.path_param("name"), detail=str(new.kind)
    )


@router.route("GET", "/notifications", role=Role.VIEWER, response=ChannelPage)
def list_channels(call: ApiCall) -> ChannelPage:
    """List your channels for notifications, without their secrets."""
    return ChannelPage(channels=channels.listed(call.store, call.user.name))


@router.route(
    "PUT",
    "/notifications/{name}",
    role=Role.MEMBER,
    body=NewChannel,
    response=CreatedChannel,
    audit=_audit_put,
)
def put_channel(
    call: ApiCall, outbox: NotificationOutbox, secrets: ChannelSecrets, rules: NotificationRules
) -> CreatedChannel:
    """Add or replace a channel; returns the signing key of a webhook once."""
    outbox.begin()
    return channels.put(
        call.store,
        secrets,
        rules,
        call.user.name,
        call.path_param("name"),
        call.parse_body(NewChannel),
    )


@router.route(
    "DELETE",
    "/notifications/{name}",
    role=Role.MEMBER,
    response=NotificationChannel,
    audit=lambda call: AuditSubject(
        action=AuditAction.DELETE_CHANNEL, target=call.path_param("name")
    ),
)
def delete_channel(call: ApiCall) -> NotificationChannel:
    """Delete a channel."""
    return channels.delete(call.store, call.user.name, call.path_param("name"))


@router.route("POST", "/notifications/{name}/test", role=Role.MEMBER, response=Delivery)
def test_channel(call: ApiCall, outbox: NotificationOutbox) -> Delivery:
    """Send a test message to a channel."""
    queued = channels.queue_test(call.store, call.user.name, call.path_param("name"), call.now)
    outbox.wake()
    return queued


@router.route("GET", "/deliveries", role=Role.VIEWER, response=DeliveryPage)
def list_deliveries(call: ApiCall) -> DeliveryPage:
    """Notifications of the last days, newest first."""
    return DeliveryPage(deliveries=channels.history(call.store, call.user.name))
