"""`tpu notify`, and the job field `notify`, through a real server."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.polling import wait_until
from tests.service.test_notifications import Receiver
from tests.views.job_scenarios import record_event
from tpufleet.model.job.jobs import JobState
from tpufleet.model.people.notifications import NotificationRules, NotificationSettings


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    receiver = Receiver()
    yield receiver
    receiver.close()


@pytest.fixture
def notifications() -> NotificationRules:
    return NotificationRules(allow=("127.0.0.1",))


def test_a_channel_is_added_tested_listed_and_deleted(tpu, receiver):
    assert "no channels; add one" in tpu("notify").stderr
    added = tpu.ok("notify", "add", "ci", "--webhook", receiver.url, "--on", "failure")
    assert "signing key, shown only now: " in added and "next: tpu notify test ci" in added
    assert tpu.ok("notify", "test", "ci") == "sent to ci\n"
    assert len(receiver.requests) == 1
    listed = tpu.ok("notify")
    assert listed.split("\n")[1].split() == ["ci", "webhook", "127.0.0.1", "failure"]
    assert "hook?" not in listed, "the URL is a secret"
    assert tpu.json("notify", "history")["deliveries"][0]["state"] == "sent"
    receiver.statuses = [404]
    refused = tpu("notify", "test", "ci")
    assert refused.exit_code == 1
    assert refused.stderr.startswith("error: cannot send to ci: 127.0.0.1 answered 404\n  next:")
    tpu.ok("notify", "delete", "ci")
    missing = tpu("notify", "test", "ci")
    assert missing.exit_code == 1 and "no channel named 'ci'" in missing.stderr


def test_a_job_chooses_its_channels(world, tpu, receiver):
    refused = tpu("run", "v5e-16", "--notify", "team", "--detach", "--", "x")
    assert refused.exit_code == 2
    assert "no channel named 'team'" in refused.stderr
    tpu.ok("notify", "add", "team", "--slack", receiver.url)
    tpu.ok("notify", "add", "quiet", "--slack", receiver.url, "--on", "budget")
    tpu.ok("run", "v5e-16", "--name", "a", "--notify", "quiet:failure", "--detach", "--", "x")
    tpu.ok("run", "v5e-16", "--name", "b", "--notify", "none", "--detach", "--", "x")
    tpu.ok("run", "v5e-16", "--name", "c", "--detach", "--", "x")
    for name in ("a", "b", "c"):
        job_id = tpu.json("show", name)["job"]["id"]
        world.end_job(job_id, JobState.FAILED, reason="broken")
        record_event(world, job_id, "broken", "failed")
    wait_until(lambda: len(receiver.requests) == 2)
    told = {(each["channel"], each["payload"]["name"]) for each in deliveries(tpu)}
    assert told == {("quiet", "a"), ("team", "c")}


def deliveries(tpu):
    return tpu.json("notify", "history")["deliveries"]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["add", "x"], "pass one of --webhook, --slack, --email"),
        (["add", "X!", "--slack", "https://example.org/"], "'X!' is not a channel"),
        (["add", "x", "--slack", "https://10.0.0.1/"], "not on the public internet (10.0.0.1)"),
        (["add", "x", "--slack", "https://169.254.169.254/"], "not on the public internet"),
        (["add", "x", "--email", "mel@example.org"], "this server has no mail server"),
    ],
)
def test_invalid_channels_are_refused(tpu, args, message):
    refused = tpu("notify", *args)
    assert refused.exit_code == 2 and message in refused.stderr


def test_channels_belong_to_one_user(world, tpu, admin, receiver):
    tpu.ok("notify", "add", "team", "--slack", receiver.url)
    assert admin.json("notify")["channels"] == []
    assert admin("notify", "delete", "team").exit_code == 1
    admin.ok("user", "delete", "mel", "--yes")
    assert world.store.document(NotificationSettings, "mel") is None
