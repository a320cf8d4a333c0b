"""Notifications: where a user wants messages to be sent, about what, and what is to be sent."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from typing import Any

from tpufleet.errors import BadInput, SettingErrors
from tpufleet.model.values import setting_fields

MAX_CHANNELS = 20  # of a user
MAX_URL = 2000
NO_CHANNELS = "none"  # in the job field `notify`
_NAME = re.compile(r"[a-z0-9][a-z0-9-]{0,39}")
JOB_RULE = re.compile(rf"{_NAME.pattern}(:[a-z]+(\+[a-z]+)*)?")
# Deliberately narrow: no quoted local parts, no comments, no line breaks.
_EMAIL = re.compile(r"[A-Za-z0-9._%+-]{1,64}@([A-Za-z0-9-]{1,63}\.)+[A-Za-z]{2,24}")
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


@dataclass(frozen=True, kw_only=True, slots=True)
class SmtpSettings:
    host: str
    port: int = 587
    sender: str = ""
    username: str = ""
    password_file: str = ""
    starttls: bool = True


@dataclass(frozen=True, kw_only=True, slots=True)
class NotificationRules:
    """What the administrator of the server allows."""

    # Hosts and networks that webhooks may reach although they are not on the public internet.
    allow: tuple[str, ...] = ()
    email_domains: tuple[str, ...] = ()  # empty: any
    smtp: SmtpSettings | None = None


def parse_rules(config: Mapping[str, Any] | None) -> NotificationRules:
    """From a config file: {allow: [10.0.0.0/8, hooks.lab], smtp: {host: …, sender: …}}."""
    errors, known = SettingErrors("notifications"), ("allow", "email_domains", "smtp")
    values = dict(config or {})
    for key in values:
        if key not in known:
            errors.add(str(key), f"unknown field; write {', '.join(known)}")
    domains = _texts(values.get("email_domains"), "email_domains", errors)
    rules = NotificationRules(
        allow=_texts(values.get("allow"), "allow", errors),
        email_domains=tuple(each.lower() for each in domains),
        smtp=None if values.get("smtp") is None else _smtp(values["smtp"], errors),
    )
    errors.raise_all()
    return rules


def _texts(value: Any, key: str, errors: SettingErrors) -> tuple[str, ...]:
    if value is None:
        return ()
    if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
        example = "hooks.lab, 10.0.0.0/8" if key == "allow" else "example.com"
        errors.add(key, f"must be a list, such as [{example}]")
        return ()
    for each in value if key == "email_domains" else ():
        if not HOST.fullmatch(each):
            errors.add(key, f"{each!r} is not a domain; write one such as example.com")
    for each in value if key == "allow" else ():
        if re.search(r"[/:]", each) or re.fullmatch(r"[0-9.]+", each):
            try:
                ipaddress.ip_network(each)
            except ValueError as error:
                errors.add(key, f"{each!r} is neither a host name nor a network: {error}")
        elif not HOST.fullmatch(each):
            errors.add(key, f"{each!r} is neither a host name nor a network")
    return tuple(value)


def _smtp(value: Any, errors: SettingErrors) -> SmtpSettings | None:
    types: dict[str, type] = {
        "host": str, "port": int, "sender": str, "username": str, "password_file": str,
        "starttls": bool,
    }  # fmt: skip
    if not isinstance(value, dict):
        errors.add("smtp", "must be a mapping with a host and a sender")
        return None
    valid: dict[str, Any] = {}
    for key, given in value.items():
        if key not in types:
            errors.add(f"smtp.{key}", f"unknown field; write {', '.join(types)}")
        elif type(given) is not types[key]:
            errors.add(f"smtp.{key}", f"{given!r} {setting_fields.PROBLEMS[types[key]]}")
        elif key == "port" and given not in range(1, 65536):
            errors.add("smtp.port", f"{given} is not a port; write a number from 1 to 65535")
        else:
            valid[key] = given
    if not value.get("host"):
        errors.add("smtp.host", "required; the name of the mail server")
    wrong_type = "sender" in value and "sender" not in valid
    if not wrong_type and not _EMAIL.fullmatch(valid.get("sender", "")):
        errors.add("smtp.sender", "must be an e-mail address")
    if value.get("username") and not value.get("password_file"):
        errors.add("smtp.password_file", "required with a username")
    if value.get("username") and not value.get("starttls", True):
        errors.add("smtp.starttls", "must be true with a username")
    return SmtpSettings(**valid) if valid.get("host") else None


def check_name(name: str) -> str:
    if not _NAME.fullmatch(name) or name == NO_CHANNELS:
        raise BadInput(
            f"channel {name[:40]!r}: use lower-case letters, digits and dashes, at most 40"
        )
    return name


def check_email(address: str, rules: NotificationRules) -> str:
    if len(address) > 254 or not _EMAIL.fullmatch(address):
        raise BadInput(f"{address[:80]!r} is not an e-mail address")
    domain = address.rpartition("@")[2].lower()
    if rules.email_domains and domain not in rules.email_domains:
        allowed = ", ".join(rules.email_domains)
        raise BadInput(f"e-mail to {domain} is not allowed on this server; allowed: {allowed}")
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
