"""Notifications reach real HTTP and SMTP servers on loopback, once per event; and never a server
that the administrator has not allowed."""

from __future__ import annotations

import contextlib
import hmac
import json
import socket
import threading
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from email import message_from_bytes
from email.policy import default as email_policy
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from tests.contract.fake_store import FakeStore
from tests.ports import free_port
from tests.views.job_scenarios import record_event
from tpufleet.clocks import ManualClock
from tpufleet.errors import BadInput, Unreachable
from tpufleet.model.api_types import NewChannel
from tpufleet.model.job.jobs import Job, JobId, JobSpec, JobState
from tpufleet.model.people.notifications import (
    ChannelKind,
    Delivery,
    DeliveryState,
    NotificationRules,
    NotificationSettings,
    NotifyOn,
    SmtpSettings,
    parse_rules,
)
from tpufleet.model.people.users import Role, User
from tpufleet.model.values.encoding import to_json
from tpufleet.policy import notifications as policy
from tpufleet.service.notifications import channels, destinations, outbox, senders
from tpufleet.service.notifications.channels import ChannelSecrets
from tpufleet.service.notifications.outbox import NotificationOutbox
from tpufleet.service.operations import log_redaction
from tpufleet.service.transport.limits import TooManyRequests
from tpufleet.stores.base import ChangeSet

KEY = b"k" * 32
LOOPBACK = NotificationRules(allow=("127.0.0.1",))


class Receiver:
    """A real HTTP server that records what it gets, and answers with the statuses it is told."""

    def __init__(self) -> None:
        self.requests: list[tuple[str, dict[str, str], bytes]] = []
        self.statuses: list[int] = []
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                receiver.requests.append((self.path, dict(self.headers), body))
                status = receiver.statuses.pop(0) if receiver.statuses else 200
                self.send_response(status)
                self.send_header("Location", "http://169.254.169.254/latest/meta-data")
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *_: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}/hook?x=1"
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    receiver = Receiver()
    yield receiver
    receiver.close()


class Fleet:
    """A store with jobs of mel, and outboxes of servers that share it."""

    def __init__(self, rules: NotificationRules = LOOPBACK) -> None:
        self.store, self.clock, self.rules = FakeStore(), ManualClock(), rules
        self.secrets = ChannelSecrets([KEY])
        for name in ("mel", "mo"):
            self.add_user(name)

    def add_user(self, name: str) -> None:
        self.store.put_user(User(name=name, role=Role.MEMBER, created_at=self.clock.now()))

    def outbox(self, send_seconds: float = senders.SEND_SECONDS) -> NotificationOutbox:
        return NotificationOutbox(
            self.store,
            self.clock,
            self.secrets,
            self.rules,
            self.store.last_event,
            send_seconds=send_seconds,
        )

    def add_channel(
        self,
        kind: ChannelKind,
        address: str,
        *on: NotifyOn,
        name: str = "team",
        owner: str = "mel",
    ) -> str:
        new = NewChannel(kind=kind, address=address, on=on or (NotifyOn.END, NotifyOn.RECOVERY))
        created = channels.put(self.store, self.secrets, self.rules, owner, name, new)
        return created.signing_key

    def end_job(self, job_id: str, message: str = "exit status 1", owner: str = "mel") -> None:
        spec = JobSpec(name="train", command=("x",), accelerator="v5litepod-16")
        now = self.clock.now()
        job = Job(id=JobId(job_id), spec=spec, owner=owner, submitted_at=now)
        self.store.commit(ChangeSet(new_jobs=[job]))
        ended = replace(job, state=JobState.FAILED, ended_at=now, reason=message)
        self.store.commit(ChangeSet(jobs=[ended]))
        record_event(self, job_id, message, "failed")

    def deliveries(self) -> list[Delivery]:
        return self.store.documents(Delivery)


@pytest.fixture
def fleet() -> Fleet:
    fleet = Fleet()
    fleet.outbox().run_once()  # what happened before is not announced
    fleet.clock.advance(outbox.LEASE_TIME * 2)
    return fleet


def test_a_webhook_gets_signed_json(fleet, receiver):
    key = fleet.add_channel(ChannelKind.WEBHOOK, receiver.url)
    fleet.end_job("job-1")
    assert fleet.outbox().run_once() == 1
    ((path, headers, body),) = receiver.requests
    assert path == "/hook?x=1"
    sent = json.loads(body)
    assert sent["event"] == "job.failed" and sent["job"] == "job-1" and sent["owner"] == "mel"
    assert sent["id"] == headers[senders.DELIVERY_HEADER]
    moment, value = (
        part.partition("=")[2] for part in headers[senders.SIGNATURE_HEADER].split(",")
    )
    expected = hmac.new(key.encode(), f"{moment}.".encode() + body, "sha256").hexdigest()
    assert hmac.compare_digest(value, expected)


def test_slack_gets_a_text(fleet, receiver):
    fleet.add_channel(ChannelKind.SLACK, receiver.url)
    fleet.end_job("job-1", "out of memory")
    fleet.outbox().run_once()
    ((_, headers, body),) = receiver.requests
    assert json.loads(body) == {"text": "train failed: out of memory\n  next: tpu why job-1"}
    assert senders.SIGNATURE_HEADER not in headers


def test_each_event_is_sent_once_by_several_servers(fleet, receiver):
    fleet.add_channel(ChannelKind.SLACK, receiver.url)
    first, second = fleet.outbox(), fleet.outbox()
    for number in range(3):
        fleet.end_job(f"job-{number}")
    assert first.run_once() == 3
    assert second.run_once() == 0, "the first one has the lease"
    fleet.end_job("job-3")
    fleet.clock.advance(outbox.LEASE_TIME * 2)  # the first one is gone
    assert second.run_once() == 1
    assert second.run_once() == 0
    assert len(receiver.requests) == 4


def test_a_server_that_stops_before_it_moves_on_queues_nothing_twice(fleet, receiver):
    fleet.add_channel(ChannelKind.SLACK, receiver.url)
    position = fleet.store.metadata(outbox.POSITION)
    fleet.end_job("job-1")
    assert fleet.outbox().run_once() == 1
    fleet.store.put_metadata(outbox.POSITION, position)  # its last write was lost
    fleet.clock.advance(outbox.LEASE_TIME * 2)
    assert fleet.outbox().run_once() == 0
    assert len(receiver.requests) == 1


def test_a_receiver_that_is_down_is_tried_again_later(fleet, receiver):
    fleet.add_channel(ChannelKind.SLACK, receiver.url)
    receiver.statuses = [503, 429]
    server = fleet.outbox()
    fleet.end_job("job-1")
    assert server.run_once() == 0
    (waiting,) = fleet.deliveries()
    assert waiting.state is DeliveryState.PENDING and "answered 503" in waiting.error
    assert server.run_once() == 0 and len(receiver.requests) == 1, "not before its time"
    fleet.clock.advance(timedelta(seconds=31))
    assert server.run_once() == 0
    fleet.clock.advance(timedelta(seconds=61))
    assert server.run_once() == 1
    (sent,) = fleet.deliveries()
    assert sent.state is DeliveryState.SENT and sent.tries == 3 and not sent.error


@pytest.mark.parametrize("status", [302, 400, 404, 410])
def test_a_refusal_and_a_redirect_are_final(fleet, receiver, status):
    fleet.add_channel(ChannelKind.SLACK, receiver.url)
    receiver.statuses = [status]
    fleet.end_job("job-1")
    assert fleet.outbox().run_once() == 0
    (failed,) = fleet.deliveries()
    assert failed.state is DeliveryState.FAILED and f"answered {status}" in failed.error
    assert len(receiver.requests) == 1, "the redirect was not followed"


def test_a_receiver_that_hangs_up_is_tried_again(fleet):
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        port = closed.getsockname()[1]
    fleet.add_channel(ChannelKind.SLACK, f"http://127.0.0.1:{port}/")
    fleet.end_job("job-1")
    assert fleet.outbox().run_once() == 0
    assert fleet.deliveries()[0].state is DeliveryState.PENDING


class TarPit:
    """Accepts connections and answers with one byte now and then, without end."""

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}/"
        self.closed = threading.Event()
        self.connections = 0
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            self.connections += 1
            with connection, contextlib.suppress(OSError):
                connection.sendall(b"HTTP/1.1 200 OK\r\nX: ")
                while not self.closed.wait(0.02):
                    connection.sendall(b"x")

    def close(self) -> None:
        self.closed.set()
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join()


@pytest.fixture
def tar_pit() -> Iterator[TarPit]:
    tar_pit = TarPit()
    yield tar_pit
    tar_pit.close()


def test_a_receiver_that_answers_without_end_is_given_up(fleet, tar_pit):
    fleet.add_channel(ChannelKind.SLACK, tar_pit.url)
    fleet.end_job("job-1")
    assert fleet.outbox(send_seconds=0.3).run_once() == 0
    (waiting,) = fleet.deliveries()
    assert waiting.state is DeliveryState.PENDING and "0.3 s" in waiting.error


def test_a_receiver_that_hangs_is_waited_for_once_and_the_others_get_their_messages(
    fleet, receiver, tar_pit
):
    """A round takes as long as one message of each user that fails."""
    fleet.add_channel(ChannelKind.SLACK, tar_pit.url)
    fleet.add_channel(ChannelKind.SLACK, tar_pit.url, name="zweite")
    fleet.add_channel(ChannelKind.SLACK, receiver.url, owner="mo")
    for number in range(20):
        fleet.end_job(f"job-{number}")
    fleet.end_job("job-of-mo", owner="mo")
    server = fleet.outbox(send_seconds=2.0)  # the receiver of mo answers within it
    assert server.run_once() == 1
    assert tar_pit.connections == 1
    tried = [each for each in fleet.deliveries() if each.tries]
    assert {each.channel for each in tried if each.owner == "mel"} == {"team"}
    assert len(tried) == 21, "the other messages of the channel fail with the first one"
    assert server.run_once() == 0
    assert tar_pit.connections == 2, "the other channel"


def test_of_a_flood_only_so_many_messages_are_kept(fleet, receiver):
    fleet.add_channel(ChannelKind.SLACK, receiver.url)
    receiver.statuses = [503] * 10
    server = fleet.outbox()
    for number in range(policy.MAX_PENDING + 50):
        fleet.end_job(f"job-{number}")
    server.run_once()
    kept = fleet.deliveries()
    assert len(kept) == policy.MAX_PENDING + 1
    assert [each.error for each in kept if each.state is DeliveryState.FAILED] == [
        "too many are waiting"
    ]


def test_of_what_was_sent_the_newest_messages_are_kept(fleet, receiver):
    fleet.add_channel(ChannelKind.SLACK, receiver.url)
    now = fleet.clock.now()
    for number in range(policy.MAX_KEPT + 20):
        old = Delivery(
            id=f"{number:06d}",
            owner="mel",
            channel="team",
            subject="",
            text="",
            payload={},
            created_at=now + timedelta(milliseconds=number),
            due_at=now,
            state=DeliveryState.SENT,
        )
        fleet.store.update_document(Delivery, old.id, lambda _, old=old: old)
    fleet.outbox().run_once()
    kept = fleet.deliveries()
    assert len(kept) == policy.MAX_KEPT and kept[0].id == "000020"


def test_tests_of_channels_are_limited(fleet, receiver):
    """They could flood the receiver, and the store."""
    fleet.add_channel(ChannelKind.SLACK, receiver.url)
    for _ in range(policy.MAX_TESTS_PER_HOUR):
        channels.queue_test(fleet.store, "mel", "team", fleet.clock.now())
    with pytest.raises(TooManyRequests, match="test messages"):
        channels.queue_test(fleet.store, "mel", "team", fleet.clock.now())
    fleet.clock.advance(timedelta(hours=1, seconds=1))
    assert channels.queue_test(fleet.store, "mel", "team", fleet.clock.now())


def test_messages_of_a_deleted_channel_are_dropped(fleet, receiver):
    fleet.add_channel(ChannelKind.SLACK, receiver.url)
    fleet.add_channel(ChannelKind.SLACK, receiver.url, name="other")
    receiver.statuses = [503]  # the other one is left for the next round
    fleet.end_job("job-1")
    server = fleet.outbox()
    server.run_once()
    channels.delete(fleet.store, "mel", "team")
    fleet.clock.advance(timedelta(minutes=5))
    assert server.run_once() == 1
    states = {each.channel: each.state for each in fleet.deliveries()}
    assert states == {"team": DeliveryState.FAILED, "other": DeliveryState.SENT}


def test_nothing_is_queued_for_a_user_who_is_deleted_meanwhile(fleet, receiver):
    fleet.add_channel(ChannelKind.SLACK, receiver.url)
    fleet.end_job("job-1")
    fleet.store.delete_user("mel")  # the channel is deleted after that
    assert fleet.outbox().run_once() == 0
    assert fleet.deliveries() == []


def test_a_message_that_is_deleted_while_it_is_sent_is_not_recorded_again(fleet, receiver):
    fleet.add_channel(ChannelKind.SLACK, receiver.url)
    fleet.end_job("job-1")
    receiver.statuses = [503]
    server = fleet.outbox()
    server.run_once()
    [queued] = fleet.deliveries()
    fleet.store.update_document(Delivery, queued.id, lambda _: None)
    server._save(queued)
    assert fleet.deliveries() == []


def test_old_messages_are_deleted(fleet, receiver):
    fleet.add_channel(ChannelKind.SLACK, receiver.url)
    fleet.end_job("job-1")
    fleet.outbox().run_once()
    fleet.clock.advance(outbox.KEPT_FOR + timedelta(hours=1))
    fleet.outbox().run_once()
    assert not fleet.deliveries()


def test_the_url_of_a_channel_is_masked_in_the_log_while_the_channel_exists(
    fleet, receiver, monkeypatch
):
    url = f"{receiver.url}/very-secret"
    fleet.add_channel(ChannelKind.SLACK, url)
    assert log_redaction.redact(f"cannot reach {url}") == "cannot reach ***"
    channels.delete(fleet.store, "mel", "team")
    assert log_redaction.redact(url) == url
    monkeypatch.setattr(channels, "MAX_CHANNELS", 0)
    with pytest.raises(BadInput, match="more than 0 channels"):
        fleet.add_channel(ChannelKind.SLACK, url)
    assert log_redaction.redact(url) == url


def test_urls_and_keys_are_sealed(fleet, receiver):
    secret = receiver.url.replace("/hook", "/services/T0/B0/very-secret")
    key = fleet.add_channel(ChannelKind.WEBHOOK, secret)
    (stored,) = fleet.store.documents(NotificationSettings)
    assert "very-secret" not in to_json(stored).decode() and key not in to_json(stored).decode()
    assert "very-secret" not in to_json(channels.listed(fleet.store, "mel")).decode()
    opened = fleet.secrets.open("mel", stored.channels["team"])
    assert (opened.url, opened.key) == (secret, key)
    stolen = replace(stored.channels["team"], name="other")
    with pytest.raises(BadInput, match="cannot be decrypted"):
        fleet.secrets.open("mel", stolen)
    with pytest.raises(BadInput, match="cannot be decrypted"):
        fleet.secrets.open("mo", stored.channels["team"])


# The attacker's view: a member chooses the URL that the server connects to.

INTERNAL = [
    "http://127.0.0.1/", "https://127.0.0.1:8470/", "https://127.1/", "https://0x7f000001/",
    "https://2130706433/", "https://0/", "https://[::1]/", "https://[::ffff:127.0.0.1]/",
    "https://169.254.169.254/computeMetadata/v1/", "https://[fd00:ec2::254]/",
    "https://[64:ff9b::a9fe:a9fe]/", "https://[2002:7f00:0001::]/", "https://10.0.0.5/",
    "https://192.168.1.1/", "https://172.16.0.1/", "https://100.64.0.1/", "https://[fe80::1]/",
    "https://224.0.0.1/", "https://0.0.0.0/", "https://255.255.255.255/",
    "https://192.0.0.192/", "https://192.0.0.8/", "https://192.88.99.1/", "https://198.18.0.1/",
    "https://203.0.113.1/", "https://240.0.0.1/", "https://[fec0::1]/", "https://[fc00::1]/",
    "https://[ff02::1]/", "https://[2001:db8::1]/", "https://[3fff::1]/", "https://[5f00::1]/",
    "https://[100::1]/", "https://[64:ff9b:1::1]/", "https://[::127.0.0.1]/",
    "https://[::ffff:0:7f00:1]/", "https://[4000::1]/", "https://[::]/",
]  # fmt: skip


@pytest.mark.parametrize("url", INTERNAL)
def test_internal_addresses_are_refused(url):
    with pytest.raises(BadInput):
        destinations.parse(url, NotificationRules())


@pytest.mark.parametrize(
    "url",
    [
        "ftp://example.org/", "file:///etc/passwd", "gopher://example.org/", "https:///x",
        "https://user:pass@example.org/", "https://example.org/\r\nX-Evil: 1",
        "https://example.org:99999/", "http://example.org/", "https://exa mple.org/",
        "https://example.org/" + "x" * 3000,
    ],
)  # fmt: skip
def test_other_schemes_credentials_and_line_breaks_are_refused(url):
    with pytest.raises(BadInput):
        destinations.parse(url, NotificationRules())


@pytest.mark.parametrize("address", ["8.8.8.8", "[2606:4700:4700::1111]", "[2a00:1450:4001::1]"])
def test_addresses_of_the_internet_are_accepted(address):
    assert destinations.parse(f"https://{address}/", NotificationRules()).secure


@pytest.mark.parametrize("name", ["localhost", "localhost."])
def test_a_name_that_leads_inside_is_refused_when_it_is_resolved(name):
    """A lookup decides, and the connection goes to the address that was checked."""
    destination = destinations.parse(f"https://{name}/", NotificationRules())
    with pytest.raises(BadInput, match="not on the public internet"):
        destinations.resolve(destination, NotificationRules())


def test_a_name_that_changes_its_meaning_later_is_refused_when_it_is_sent(receiver):
    fleet = Fleet()
    fleet.outbox().run_once()
    fleet.clock.advance(outbox.LEASE_TIME * 2)
    fleet.add_channel(ChannelKind.SLACK, receiver.url)
    fleet.rules = NotificationRules()  # the admin no longer allows it
    fleet.end_job("job-1")
    assert fleet.outbox().run_once() == 0
    assert not receiver.requests and fleet.deliveries()[0].state is DeliveryState.FAILED


@pytest.mark.parametrize(
    ("allow", "url", "allowed"),
    [
        (["10.0.0.0/8"], "https://10.1.2.3/", True),
        (["10.0.0.0/8"], "https://192.168.1.1/", False),
        (["hooks.lab"], "http://hooks.lab/", True),
        (["hooks.lab"], "http://other.lab/", False),
        (["127.0.0.1"], "http://127.0.0.1:9/", True),
        (["127.0.0.1"], "https://[::ffff:127.0.0.1]/", True),
    ],
)
def test_an_admin_allows_hosts_and_networks(allow, url, allowed):
    rules = parse_rules({"allow": allow})
    if allowed:
        destinations.parse(url, rules)
    else:
        with pytest.raises(BadInput):
            destinations.parse(url, rules)


def test_a_name_that_does_not_resolve_is_tried_again():
    destination = destinations.parse("https://no-such-host.invalid/", NotificationRules())
    with pytest.raises(Unreachable):
        destinations.resolve(destination, NotificationRules())


# E-mail


class Mailbox:
    """A real SMTP server."""

    def __init__(self) -> None:
        self.messages: list[Any] = []
        self.answer = "250 OK"

    async def handle_RCPT(self, server, session, envelope, address, options) -> str:
        if self.answer.startswith("250"):
            envelope.rcpt_tos.append(address)
        return self.answer

    async def handle_DATA(self, server, session, envelope) -> str:
        self.messages.append(envelope)
        return "250 OK"


@pytest.fixture
def mailbox() -> Iterator[tuple[Mailbox, int]]:
    controller_module = pytest.importorskip("aiosmtpd.controller")
    mailbox = Mailbox()
    port = free_port()
    controller = controller_module.Controller(mailbox, hostname="127.0.0.1", port=port)
    controller.start()
    yield mailbox, port
    controller.stop()


def mail_fleet(port: int, *domains: str) -> Fleet:
    smtp = SmtpSettings(host="127.0.0.1", port=port, sender="tpu@example.org", starttls=False)
    fleet = Fleet(NotificationRules(smtp=smtp, email_domains=domains))
    fleet.outbox().run_once()
    fleet.clock.advance(outbox.LEASE_TIME * 2)
    return fleet


def test_an_email_has_a_subject_and_the_next_command(mailbox):
    box, port = mailbox
    fleet = mail_fleet(port)
    fleet.add_channel(ChannelKind.EMAIL, "mel@example.org")
    fleet.end_job("job-1", "exit status 1\r\nBcc: victim@example.org")
    assert fleet.outbox().run_once() == 1
    (envelope,) = box.messages
    assert envelope.rcpt_tos == ["mel@example.org"], "a message cannot add receivers"
    mail = message_from_bytes(envelope.content, policy=email_policy)
    assert mail["Subject"].startswith("[tpufleet] train failed: exit status 1")
    assert mail["Bcc"] is None and "next: tpu why job-1" in mail.get_content()
    assert fleet.deliveries()[0].id in mail["Message-ID"]


def test_emails_of_a_user_are_limited(mailbox):
    box, port = mailbox
    fleet = mail_fleet(port)
    fleet.add_channel(ChannelKind.EMAIL, "victim@example.org")
    server = fleet.outbox()
    for number in range(policy.MAX_EMAILS_PER_HOUR + 5):
        fleet.end_job(f"job-{number}")
    assert server.run_once() == policy.MAX_EMAILS_PER_HOUR == len(box.messages)
    dropped = [each for each in fleet.deliveries() if each.state is DeliveryState.FAILED]
    assert len(dropped) == 5 and "e-mails in an hour" in dropped[0].error
    fleet.clock.advance(timedelta(hours=1, seconds=1))
    fleet.end_job("job-later")
    assert server.run_once() == 1


@pytest.mark.parametrize(
    ("answer", "state"),
    [("550 no such user", DeliveryState.FAILED), ("450 busy", DeliveryState.PENDING)],
)
def test_a_refused_receiver_is_final_and_a_busy_server_is_not(mailbox, answer, state):
    box, port = mailbox
    fleet = mail_fleet(port)
    fleet.add_channel(ChannelKind.EMAIL, "mel@example.org")
    box.answer = answer
    fleet.end_job("job-1")
    assert fleet.outbox().run_once() == 0
    assert fleet.deliveries()[0].state is state


@pytest.mark.parametrize(
    "address",
    ["mel", "mel@", "a@b", "mel@example.org\r\nRCPT TO:<x@y.org>", "<mel@example.org>",
     "mel@example.org,mo@example.org", "mel@elsewhere.org"],
)  # fmt: skip
def test_addresses_that_are_not_plain_or_not_allowed_are_refused(address):
    fleet = mail_fleet(25, "example.org")
    with pytest.raises(BadInput):
        fleet.add_channel(ChannelKind.EMAIL, address)


def test_without_a_mail_server_email_is_refused_at_once():
    with pytest.raises(BadInput, match="no mail server"):
        Fleet().add_channel(ChannelKind.EMAIL, "mel@example.org")


@pytest.mark.parametrize(
    "config",
    [{"alow": []}, {"allow": "x/y"}, {"allow": ["10.0.0.0/99"]}, {"smtp": {}},
     {"smtp": {"host": "x", "sender": "nobody"}}, {"smtp": {"host": "x", "prot": 1}},
     {"smtp": {"host": "x", "sender": "a@example.org", "port": "25"}}],
)  # fmt: skip
def test_invalid_settings_are_reported(config):
    with pytest.raises(BadInput, match=r"^notifications\."):
        parse_rules(config)
