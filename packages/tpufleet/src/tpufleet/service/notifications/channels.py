"""Adding, listing and testing the channels of a user. URLs and signing keys are sealed, as the
secrets of jobs are."""

from __future__ import annotations

import base64
import secrets
from collections.abc import Sequence
from datetime import datetime, timedelta
from urllib.parse import urlsplit

from tpufleet.errors import BadInput, not_found
from tpufleet.model.api_types import CreatedChannel, NewChannel
from tpufleet.model.people.notifications import (
    MAX_CHANNELS,
    ChannelKind,
    Delivery,
    NotificationChannel,
    NotificationRules,
    NotificationSettings,
    check_email,
    check_name,
)
from tpufleet.model.values.encoding import from_json, to_json
from tpufleet.model.values.records import replace
from tpufleet.policy.notifications import MAX_TESTS_PER_HOUR
from tpufleet.service.files.secrets import SealedValues
from tpufleet.service.notifications import destinations
from tpufleet.service.notifications.senders import ChannelSecret, require_smtp
from tpufleet.service.operations import log_redaction
from tpufleet.service.transport.limits import TooManyRequests
from tpufleet.stores.base import Store

_TEST_PREFIX = "test-"  # of the id of a delivery; others start with the number of an event


class ChannelSecrets:
    def __init__(self, keys: Sequence[bytes]) -> None:
        self._sealed = SealedValues(keys)

    def seal(self, owner: str, name: str, secret: ChannelSecret) -> str:
        sealed = self._sealed.seal(_sealed_name(owner, name), to_json(secret).decode())
        return base64.b64encode(sealed).decode()

    def open(self, owner: str, channel: NotificationChannel) -> ChannelSecret:
        sealed = base64.b64decode(channel.sealed)
        text = self._sealed.open(_sealed_name(owner, channel.name), sealed)
        if text is None:
            raise BadInput("its URL cannot be decrypted; add the channel again")
        secret = from_json(text.encode(), ChannelSecret)
        _hide_in_log(owner, channel.name, secret)
        return secret


def _hide_in_log(owner: str, name: str, secret: ChannelSecret) -> None:
    log_redaction.remember(owner, f"channel/{name}/url", secret.url)
    log_redaction.remember(owner, f"channel/{name}/key", secret.key)


def _sealed_name(owner: str, name: str) -> str:
    return f"notifications/{owner}/{name}"


def put(
    store: Store,
    sealed: ChannelSecrets,
    rules: NotificationRules,
    owner: str,
    name: str,
    new: NewChannel,
) -> CreatedChannel:
    check_name(name)
    if not new.on:
        raise BadInput("on: name at least one event")
    key = ""
    if new.kind is ChannelKind.EMAIL:
        require_smtp(rules)
        target = check_email(new.address, rules)
        secret = ChannelSecret()
    else:
        destinations.parse(new.address, rules)
        target = urlsplit(new.address).hostname or ""
        key = secrets.token_urlsafe(32) if new.kind is ChannelKind.WEBHOOK else ""
        secret = ChannelSecret(url=new.address, key=key)
    channel = NotificationChannel(
        name=name,
        kind=new.kind,
        target=target,
        on=tuple(dict.fromkeys(new.on)),
        sealed=sealed.seal(owner, name, secret),
    )

    def add(before: NotificationSettings | None) -> NotificationSettings:
        known = before.channels if before is not None else {}
        if name not in known and len(known) >= MAX_CHANNELS:
            raise BadInput(f"more than {MAX_CHANNELS} channels; delete one: `tpu notify delete`")
        return NotificationSettings(owner=owner, channels={**known, name: channel})

    store.update_document(NotificationSettings, owner, add, required_user=owner)
    _hide_in_log(owner, name, secret)
    return CreatedChannel(channel=public(channel), signing_key=key)


def public(channel: NotificationChannel) -> NotificationChannel:
    return replace(channel, sealed="")


def listed(store: Store, owner: str) -> tuple[NotificationChannel, ...]:
    settings = store.document(NotificationSettings, owner)
    return tuple(public(each) for each in settings.channels.values()) if settings else ()


def find(store: Store, owner: str, name: str) -> NotificationChannel:
    known = {each.name: each for each in listed(store, owner)}
    if name not in known:
        raise not_found("channel", name, "notify", known)
    return known[name]


def delete(store: Store, owner: str, name: str) -> NotificationChannel:
    deleted = find(store, owner, name)

    def remove(before: NotificationSettings | None) -> NotificationSettings | None:
        if before is None:
            return None
        left = {key: each for key, each in before.channels.items() if key != name}
        return replace(before, channels=left) if left else None

    store.update_document(NotificationSettings, owner, remove)
    for part in ("url", "key"):
        log_redaction.forget(owner, f"channel/{name}/{part}")
    return deleted


def history(store: Store, owner: str) -> tuple[Delivery, ...]:
    """Newest first."""
    mine = [each for each in store.documents(Delivery) if each.owner == owner]
    return tuple(sorted(mine, key=lambda each: (each.created_at, each.id), reverse=True))


def queue_test(store: Store, owner: str, name: str, now: datetime) -> Delivery:
    find(store, owner, name)
    hour = timedelta(hours=1)
    recent = [
        each.created_at
        for each in history(store, owner)
        if each.id.startswith(_TEST_PREFIX) and now - each.created_at < hour
    ]
    if len(recent) >= MAX_TESTS_PER_HOUR:
        raise TooManyRequests(
            f"{MAX_TESTS_PER_HOUR} test messages in an hour", min(recent) + hour - now
        )
    text = f"tpufleet: this is a test of channel {name}, asked for by {owner}"
    test = Delivery(
        id=f"{_TEST_PREFIX}{secrets.token_hex(6)}-{owner}-{name}",
        owner=owner,
        channel=name,
        subject=text,
        text=text,
        payload={"event": "test", "at": now.isoformat(), "message": text, "text": text},
        created_at=now,
        due_at=now,
    )
    store.update_document(Delivery, test.id, lambda _: test, required_user=owner)
    return test


def check_job_channels(store: Store, owner: str, wanted: Sequence[str]) -> None:
    """For a job that is submitted: a name that means nothing is a mistake."""
    names = [written.partition(":")[0] for written in wanted]
    if not {*names} - {"none"}:
        return
    known = {each.name for each in listed(store, owner)}
    for name in names:
        if name != "none" and name not in known:
            raise BadInput(f"notify: {not_found('channel', name, 'notify', known)}")
