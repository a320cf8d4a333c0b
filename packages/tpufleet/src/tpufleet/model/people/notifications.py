"""Notifications: where a user wants messages to be sent, about what, and what is to be sent."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from typing import Annotated, Any

import msgspec
from msgspec import Meta, structs

from tpufleet import schema
from tpufleet.errors import BadInput, not_allowed, quote
from tpufleet.schema import about

MAX_CHANNELS = 20  # of a user
MAX_URL = 2000
NO_CHANNELS = "none"  # in the job field `notify`
_NAME = re.compile(r"[a-z0-9][a-z0-9-]{0,39}")
JOB_RULE = re.compile(rf"{_NAME.pattern}(:[a-z]+(\+[a-z]+)*)?")
# Deliberately narrow: no quoted local parts, no comments, no line breaks.
_EMAIL = r"(?=.{1,254}$)[A-Za-z0-9._%+-]{1,64}@([A-Za-z0-9-]{1,63}\.)+[A-Za-z]{2,24}"
HOST = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_.-]{0,251}[A-Za-z0-9])?")


class NotifyOn(StrEnum):
    END = "end"  # of a job, however it ended
    FAILURE = "failure"  # of a job
    RECOVERY = "recovery"  # a job that recovers again and again
    BUDGET = "budget"  # a warning, or an exhausted budget


DEFAULT_EVENTS = (NotifyOn.END, NotifyOn.RECOVERY, NotifyOn.BUDGET)


class ChannelKind(StrEnum):
    WEBHOOK = "webhook"
    SLACK = "slack"  # and servers that accept the same JSON
    EMAIL = "email"


@dataclass(frozen=True, kw_only=True, slots=True)
class NotificationChannel:
    name: str
    kind: ChannelKind
    target: str  # e-mail address, or host of the URL; the URL itself is a secret
    on: tuple[NotifyOn, ...]
    sealed: str  # encrypted URL and signing key


@dataclass(frozen=True, kw_only=True, slots=True)
class NotificationSettings:
    owner: str
    channels: dict[str, NotificationChannel] = field(default_factory=dict)


class DeliveryState(StrEnum):
    PENDING = "pending"
    SENT = "sent"
    FAILED = "failed"  # given up


@dataclass(frozen=True, kw_only=True, slots=True)
class Delivery:
    """One message to one channel. Its id follows from the event, so that it is queued once."""

    id: str
    owner: str
    channel: str
    subject: str
    text: str
    payload: dict[str, Any]  # what a webhook gets
    created_at: datetime
    due_at: datetime
    state: DeliveryState = DeliveryState.PENDING
    tries: int = 0
    error: str = ""  # of the last try
    sent_at: datetime | None = None


def _parse_destination(value: Any) -> str:
    text = str(value)
    try:
        if re.search(r"[/:]", text) or re.fullmatch(r"[0-9.]+", text):
            ipaddress.ip_network(text)
        elif not HOST.fullmatch(text):
            raise ValueError("not the name of a host")
    except ValueError as error:
        raise BadInput(f"{quote(value)} is neither a host name nor a network: {error}") from error
    return text


_Destination = Annotated[str, schema.custom("host or network", _parse_destination)]
_address = schema.text("e-mail address", _EMAIL, example="tpufleet@example.com")
_channel_name = schema.text(
    "channel",
    _NAME.pattern,
    example="team",
    rule="a-z, 0-9 and -, at most 40",
    reserved=NO_CHANNELS,
)
_Domain = Annotated[str, schema.text("domain", HOST.pattern, example="example.com")]


class SmtpSettings(msgspec.Struct, frozen=True, kw_only=True):
    host: Annotated[str, Meta(min_length=1), about("Mail server.", example="smtp.example.com")]
    port: Annotated[int, Meta(ge=1, le=65535)] = 587
    sender: Annotated[
        str,
        _address,
        about("Address that mail is from.", example="tpufleet@example.com"),
    ]
    username: str = ""
    password_file: str = ""
    starttls: bool = True

    def check(self) -> Iterator[tuple[str, str]]:
        if self.username and not self.password_file:
            yield "password_file", "required with a username"
        if self.username and not self.starttls:
            yield "starttls", "must be true with a username"


class NotificationRules(msgspec.Struct, frozen=True, kw_only=True):
    """The section `notifications` of a config file: what the administrator allows."""

    # Hosts and networks that webhooks may reach although they are not on the public internet.
    allow: tuple[_Destination, ...] = ()
    email_domains: tuple[_Domain, ...] = ()  # empty: any
    smtp: SmtpSettings | None = None


def parse_rules(config: Mapping[str, Any] | None) -> NotificationRules:
    """From a config file: {allow: [10.0.0.0/8, hooks.lab], smtp: {host: …, sender: …}}."""
    rules = schema.parse(NotificationRules, config or {}, path="notifications")
    return structs.replace(
        rules, email_domains=tuple(domain.lower() for domain in rules.email_domains)
    )


def check_name(name: str) -> str:
    return str(schema.check(_channel_name, name))


def check_email(address: str, rules: NotificationRules) -> str:
    schema.check(_address, address)
    domain = address.rpartition("@")[2].lower()
    if rules.email_domains and domain not in rules.email_domains:
        raise not_allowed("e-mail", domain, rules.email_domains)
    return address


def parse_job_rule(written: str) -> tuple[str, tuple[NotifyOn, ...] | None]:
    """`team` or `team:end+failure`: the channel, and its events (None: as the channel says)."""
    name, colon, events = written.partition(":")
    if not colon:
        return name, None
    return name, tuple(NotifyOn(each) for each in events.split("+"))


def job_rule_error(written: str) -> str | None:
    name, colon, events = written.partition(":")
    if not _NAME.fullmatch(name):
        return f"{written[:40]!r} is not the name of a channel; `tpu notify` lists yours"
    unknown = [each for each in events.split("+") if each not in set(NotifyOn)] if colon else []
    if unknown:
        return f"{unknown[0][:40]!r} is not an event; write {', '.join(NotifyOn)}"
    return None
