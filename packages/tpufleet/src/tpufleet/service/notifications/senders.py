"""Sends one notification: an HTTP POST, signed for webhooks, or an e-mail through SMTP."""

from __future__ import annotations

import contextlib
import hmac
import http.client
import os
import smtplib
import socket
import ssl
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from email.message import EmailMessage
from email.utils import format_datetime
from pathlib import Path

from tpufleet.errors import BadInput, Unreachable
from tpufleet.model.people.notifications import (
    ChannelKind,
    Delivery,
    NotificationChannel,
    NotificationRules,
    SmtpSettings,
)
from tpufleet.model.values.encoding import to_json
from tpufleet.service.notifications import destinations
from tpufleet.service.notifications.destinations import Destination

TIMEOUT_SECONDS = 10.0  # without a byte
SEND_SECONDS = 15.0  # in all: a receiver that answers byte by byte must not delay the others
SIGNATURE_HEADER = "Tpufleet-Signature"
DELIVERY_HEADER = "Tpufleet-Delivery"
# The receiver may be asked again after these; any other status from 300 on is final.
_RETRIED = frozenset({408, 425, 429})


@dataclass(frozen=True, kw_only=True, slots=True)
class ChannelSecret:
    url: str = ""
    key: str = ""  # signs the requests to a webhook


def send(
    channel: NotificationChannel,
    secret: ChannelSecret,
    message: Delivery,
    rules: NotificationRules,
    now: datetime,
    seconds: float = SEND_SECONDS,
) -> None:
    """Unreachable when a retry may help, BadInput when it cannot. A POST takes at most `seconds`
    once the name is resolved."""
    match channel.kind:
        case ChannelKind.EMAIL:
            send_mail(require_smtp(rules), channel.target, message, now)
        case ChannelKind.SLACK:
            _post(secret.url, to_json({"text": message.text}), {}, rules, seconds)
        case ChannelKind.WEBHOOK:
            body = to_json({"id": message.id, **message.payload})
            moment = str(int(now.timestamp()))
            headers = {
                DELIVERY_HEADER: message.id,
                SIGNATURE_HEADER: f"t={moment},v1={signature(secret.key, moment, body)}",
            }
            _post(secret.url, body, headers, rules, seconds)


def require_smtp(rules: NotificationRules) -> SmtpSettings:
    if rules.smtp is None:
        raise BadInput(
            "this server has no mail server\n"
            "  next: ask an admin to set notifications.smtp, or use a webhook"
        )
    return rules.smtp


def signature(key: str, moment: str, body: bytes) -> str:
    """HMAC-SHA256 over the time, a dot and the body, so that an old request cannot be replayed."""
    return hmac.new(key.encode(), moment.encode() + b"." + body, "sha256").hexdigest()


def _post(
    url: str, body: bytes, headers: dict[str, str], rules: NotificationRules, seconds: float
) -> None:
    """To an address that was checked, so that the name cannot lead elsewhere meanwhile. Redirects
    are not followed."""
    destination = destinations.parse(url, rules)
    addresses = destinations.resolve(destination, rules)
    expired = threading.Event()
    timeout = min(seconds, TIMEOUT_SECONDS)
    try:
        raw = socket.create_connection((str(addresses[0]), destination.port), timeout)
        with contextlib.closing(raw), _disconnected_after(raw, seconds, expired):
            connection = _connection(destination, raw, timeout)
            with contextlib.closing(connection):
                connection.request(
                    "POST",
                    destination.path,
                    body,
                    {"Content-Type": "application/json", "User-Agent": "tpufleet", **headers},
                )
                response = connection.getresponse()
                response.read(1024)
        if expired.is_set():
            raise TimeoutError
    except (OSError, http.client.HTTPException) as error:
        problem = f"no answer within {seconds:g} s" if expired.is_set() else error
        raise Unreachable(f"{destination.host}: {problem or type(error).__name__}") from error
    if response.status >= 300:
        retried = response.status >= 500 or response.status in _RETRIED
        kind = Unreachable if retried else BadInput
        raise kind(f"{destination.host} answered {response.status}")


def _connection(
    destination: Destination, raw: socket.socket, timeout: float
) -> http.client.HTTPConnection:
    """On this socket; the certificate and the Host header are those of the name."""
    connection = http.client.HTTPConnection(destination.host, destination.port, timeout=timeout)
    if destination.secure:
        context = ssl.create_default_context()
        raw = context.wrap_socket(raw, server_hostname=destination.host)
    connection.sock = raw
    return connection


@contextlib.contextmanager
def _disconnected_after(
    raw: socket.socket, seconds: float, expired: threading.Event
) -> Iterator[None]:
    """The timeout of a socket starts again with each byte."""
    # Of its own: TLS takes the socket over, and a closed descriptor may be another file by then.
    with socket.socket(fileno=os.dup(raw.fileno())) as duplicate:

        def disconnect() -> None:
            expired.set()
            with contextlib.suppress(OSError):  # already disconnected
                duplicate.shutdown(socket.SHUT_RDWR)

        timer = threading.Timer(seconds, disconnect)
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()
            timer.join()


def send_mail(settings: SmtpSettings, to: str, message: Delivery, now: datetime) -> None:
    mail = EmailMessage()
    mail["From"], mail["To"] = settings.sender, to
    mail["Subject"] = f"[tpufleet] {message.subject}"
    mail["Date"] = format_datetime(now)
    # The same for every try, so that mail programs show it once.
    mail["Message-ID"] = f"<{message.id}@{settings.sender.rpartition('@')[2]}>"
    mail["Auto-Submitted"] = "auto-generated"
    mail.set_content(message.text + "\n")
    try:
        with smtplib.SMTP(settings.host, settings.port, timeout=TIMEOUT_SECONDS) as server:
            if settings.starttls:
                server.starttls(context=ssl.create_default_context())
            if settings.username:
                password = Path(settings.password_file).read_text().strip()
                server.login(settings.username, password)
            server.send_message(mail)
    except smtplib.SMTPRecipientsRefused as error:
        codes = {code for code, _ in error.recipients.values()}
        kind = BadInput if all(code >= 500 for code in codes) else Unreachable
        raise kind(
            f"{settings.host} refused {to} ({', '.join(map(str, sorted(codes)))})"
        ) from error
    except (OSError, smtplib.SMTPException) as error:
        raise Unreachable(f"{settings.host}: {error}") from error
