"""E-mail through a real SMTP server that wants TLS and a login. The password never leaves without
TLS that was verified."""

from __future__ import annotations

import shutil
import ssl
import subprocess
from collections.abc import Callable, Iterator
from email import message_from_bytes
from pathlib import Path
from typing import Any

import pytest

from tests.ports import free_port
from tpufleet.clocks import ManualClock
from tpufleet.errors import BadInput, Unreachable
from tpufleet.model.people.notifications import Delivery, SmtpSettings, parse_rules
from tpufleet.service.notifications import senders

USER, PASSWORD = "fleet", "s3cret, and long"


class Mailbox:
    """What a mail server got, and which passwords it was sent."""

    def __init__(self) -> None:
        self.messages: list[Any] = []
        self.logins: list[tuple[str, str, bool]] = []  # user, password, encrypted

    async def handle_DATA(self, server: Any, session: Any, envelope: Any) -> str:
        self.messages.append((envelope, session.ssl is not None))
        return "250 OK"

    def authenticate(self, server: Any, session: Any, envelope: Any, how: str, data: Any) -> Any:
        user, password = data.login.decode(), data.password.decode()
        self.logins.append((user, password, session.ssl is not None))
        from aiosmtpd.smtp import AuthResult

        return AuthResult(success=(user, password) == (USER, PASSWORD), handled=False)


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    if shutil.which("openssl") is None:
        pytest.skip("no openssl program to make a certificate with")
    folder = tmp_path_factory.mktemp("mail")
    cert, key = folder / "cert.pem", folder / "key.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256",
         "-nodes", "-days", "2", "-subj", "/CN=mail", "-addext", "subjectAltName=IP:127.0.0.1",
         "-keyout", str(key), "-out", str(cert)],
        check=True, capture_output=True,
    )  # fmt: skip
    return cert, key


Serve = Callable[..., tuple[Mailbox, SmtpSettings]]


@pytest.fixture
def serve(
    certificate: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Serve]:
    """Starts mail servers; the certificate is trusted as that of a private CA would be."""
    controller_module = pytest.importorskip("aiosmtpd.controller")
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate[0]))
    password = tmp_path / "password"
    password.write_text(PASSWORD + "\n")
    running = []

    def start(*, tls: bool = True, **settings: Any) -> tuple[Mailbox, SmtpSettings]:
        box, context = Mailbox(), None
        if tls:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(*certificate)
        controller = controller_module.Controller(
            box,
            hostname="127.0.0.1",
            port=free_port(),
            tls_context=context,
            require_starttls=tls,
            auth_require_tls=tls,
            auth_required=tls,
            authenticator=box.authenticate,
        )
        controller.start()
        running.append(controller)
        chosen = SmtpSettings(
            host="127.0.0.1",
            port=controller.port,
            sender="fleet@example.org",
            username=USER,
            password_file=str(password),
        )
        return box, chosen if not settings else SmtpSettings(**{**fields(chosen), **settings})

    yield start
    for controller in running:
        controller.stop()


def fields(settings: SmtpSettings) -> dict[str, Any]:
    return {name: getattr(settings, name) for name in SmtpSettings.__struct_fields__}


def send(settings: SmtpSettings) -> None:
    now = ManualClock().now()
    message = Delivery(
        id="d1", channel="mail", owner="mel", subject="train failed", text="exit status 1",
        payload={}, created_at=now, due_at=now,
    )  # fmt: skip
    senders.send_mail(settings, "mel@example.org", message, now)


def test_a_message_is_sent_with_login_over_tls(serve):
    box, settings = serve()
    send(settings)
    ((envelope, encrypted),) = box.messages
    assert box.logins == [(USER, PASSWORD, True)] and encrypted
    assert message_from_bytes(envelope.content)["Subject"] == "[tpufleet] train failed"


def test_a_refused_password_is_told_without_it_and_tried_again(serve, tmp_path):
    wrong = tmp_path / "wrong"
    wrong.write_text("wr0ng")
    box, settings = serve(password_file=str(wrong))
    with pytest.raises(Unreachable, match="535") as refused:
        send(settings)
    assert not box.messages and "wr0ng" not in str(refused.value)


def test_a_server_without_tls_gets_neither_the_message_nor_the_password(serve):
    box, settings = serve(tls=False)
    with pytest.raises(Unreachable, match="STARTTLS"):
        send(settings)
    assert not box.messages and not box.logins


def test_a_certificate_that_is_not_trusted_gets_no_password(serve, monkeypatch, tmp_path):
    box, settings = serve()
    nobody = tmp_path / "none.pem"
    nobody.touch()
    monkeypatch.setenv("SSL_CERT_FILE", str(nobody))
    with pytest.raises(Unreachable, match="certificate"):
        send(settings)
    assert not box.messages and not box.logins


def test_a_missing_password_file_is_named(serve, tmp_path):
    _, settings = serve(password_file=str(tmp_path / "missing"))
    with pytest.raises(Unreachable, match="missing"):
        send(settings)


@pytest.mark.parametrize(
    ("smtp", "message"),
    [
        ({"username": "fleet"}, "password_file"),
        ({"username": "fleet", "password_file": "/p", "starttls": False}, "starttls"),
    ],
)
def test_a_login_needs_a_password_and_tls(smtp, message):
    document = {"smtp": {"host": "mail.lab", "sender": "fleet@example.org", **smtp}}
    with pytest.raises(BadInput, match=message):
        parse_rules(document)
