"""What one user may take of a server, at its default settings."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from tests.service.harness import SPEC, ServiceHarness
from tpufleet import config
from tpufleet.errors import BadInput, Conflict
from tpufleet.model.api_types import JobChanges, NewJob, NewToken
from tpufleet.model.people.users import Role, Token, User
from tpufleet.service.api import costs
from tpufleet.service.jobs.commands import CommandContext
from tpufleet.service.people import user_commands
from tpufleet.service.transport.auth import Caller
from tpufleet.stores.memory import MemoryStore

DAY = timedelta(days=1)
NOW = datetime(2026, 1, 1, tzinfo=UTC)


def test_a_user_has_a_limited_number_of_valid_tokens(service: ServiceHarness):
    mel = service.client("mel")
    for _ in range(49):
        mel.create_token()
        mel.create_token(expires_in=DAY)
    last = mel.create_token()
    with pytest.raises(Conflict, match=r"mel has 100 tokens.*\n.*tpu token revoke"):
        mel.create_token()
    with pytest.raises(Conflict, match="mel has 100 tokens"):
        service.client("ada").create_token("mel")
    service.client("mo").create_token()
    mel.revoke_token(last.id)
    mel.create_token()
    service.clock.advance(2 * DAY)
    mel.create_token()  # those that expired do not count


class StoreWhoseTokensAreWrittenAtOnce(MemoryStore):
    """No token is written before all requests have been checked."""

    writers = threading.Barrier(1)

    def put_token(self, token: Token, **options: Any) -> None:
        self.writers.wait(timeout=900)
        super().put_token(token, **options)


def test_requests_at_the_same_time_make_no_more_tokens_than_the_limit():
    store = StoreWhoseTokensAreWrittenAtOnce()
    store.put_user(User(name="mel", role=Role.MEMBER, created_at=NOW))
    store.put_token(Token(id="t1", user="mel", hash="h1", created_at=NOW))
    caller = Caller(name="mel", role=Role.MEMBER, token_id="t1")
    context = CommandContext(store=store, caller=caller, now=NOW)
    store.writers = threading.Barrier(8)

    def create(_: int) -> bool:
        try:
            user_commands.create_token(context, NewToken(), limit=6)
        except Conflict:
            return False
        return True

    with ThreadPoolExecutor(8) as threads:
        assert sum(threads.map(create, range(8))) == 5
    assert len(store.tokens("mel")) == 6


def test_replacing_a_token_makes_no_more_tokens_than_the_limit_twice(service: ServiceHarness):
    mel = service.client("mel")
    newest = mel.create_token().id
    known = len(service.store.tokens("mel"))
    for _ in range(200 - known):
        newest = mel.rotate_token(newest, overlap=7 * DAY).id
    with pytest.raises(Conflict, match="mel has 200 tokens"):
        mel.rotate_token(newest, overlap=7 * DAY)
    service.clock.advance(8 * DAY)
    mel.rotate_token(newest, overlap=7 * DAY)


def test_a_wrong_tag_is_named_without_a_position_among_the_others(service: ServiceHarness):
    service.submit("job-1", tags=["base"])
    with pytest.raises(BadInput, match=r"^tags: 'with space' is not a tag"):
        service.client("mel").change_job("job-1", JobChanges(add_tags=("with space",)))


def test_an_event_about_long_notes_is_short(service: ServiceHarness):
    service.submit("job-1")
    mel = service.client("mel")
    for number in range(3):
        mel.change_job("job-1", JobChanges(notes=f"{number}" * 99_000))
    edits = [event for event in mel.events("job-1").events if event.state == "edited"]
    assert len(edits) == 3 and all(len(event.message) < 300 for event in edits)
    assert mel.job("job-1").row.notes == "2" * 99_000


def test_an_environment_has_a_limited_number_of_variables(service):
    variables = {f"V{number}": "x" for number in range(1001)}
    with pytest.raises(BadInput, match="env: 1001 items; at most 1000"):
        service.submit("job-1", env=variables)
    variables.pop("V0")
    assert service.submit("job-1", env=variables)


def test_an_environment_has_a_limited_size(service):
    with pytest.raises(BadInput, match="at most 262144"):
        service.submit("job-1", env={f"V{number}": "x" * 90_000 for number in range(3)})
    assert service.submit("job-1", env={"V1": "x" * 90_000, "V2": "x" * 90_000})


def test_the_defaults_are_those_of_the_settings(tmp_path):
    settings = config.load({"TPUFLEET_HOME": str(tmp_path)}, tmp_path)
    assert (settings.local_hosts, settings.tokens_per_user) == (64, 100)
    changed = {"TPUFLEET_LOCAL_HOSTS": "128", "TPUFLEET_TOKENS_PER_USER": "5"}
    settings = config.load({"TPUFLEET_HOME": str(tmp_path), **changed}, tmp_path)
    assert (settings.local_hosts, settings.tokens_per_user) == (128, 5)


def test_a_job_with_more_simulated_hosts_than_the_server_has_is_refused(service):
    """A v5e-16 has 4 hosts."""
    with pytest.raises(BadInput, match=r"68 hosts.* at most 64.*\n.*local_hosts"):
        service.submit("job-1", slices=17, providers=["local"])
    assert service.submit("job-1", slices=16, providers=["local"])
    assert service.submit("job-2", slices=17, providers=["tpu-vm"])


def test_a_call_has_a_limited_number_of_patterns_of_metrics(service):
    """The server compiles each of them; jobs of a sweep have the same ones."""
    specs = [
        {
            **SPEC,
            "metrics": {f"m{number}": f"{job} {number} ([0-9]+)" for number in range(50)},
        }
        for job in range(21)
    ]
    with pytest.raises(BadInput, match=r"jobs\[20\]\.metrics: patterns .* 1000, not"):
        service.client("mel").submit(
            [NewJob(id=f"job-{index}", spec=spec) for index, spec in enumerate(specs)]
        )
    same = [NewJob(id=f"job-{index}", spec=specs[0]) for index in range(30)]
    assert len(service.client("mel").submit(same)) == 30


def test_only_one_report_of_costs_is_computed_at_a_time(service):
    with costs._reporting, service.http(service.tokens["mel"]) as http:
        busy = http.get("/costs")
        assert busy.status_code == 429 and int(busy.headers["Retry-After"]) > 0
    assert service.client("mel").costs().rows == ()
