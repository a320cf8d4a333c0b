"""Values of secrets in the log of a server: all are masked, and no user can slow the log down or
displace the values of others."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tpufleet.service.files.secrets import MAX_SECRET_BYTES
from tpufleet.service.operations import log_redaction
from tpufleet.service.operations.log_redaction import SecretValues

PEM = "-----BEGIN KEY-----\nMIIEvQIBADANBgkqh\n-----END KEY-----"


@pytest.fixture
def values() -> SecretValues:
    return SecretValues()


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("key=hunter2222;", "key=***(secret of ada);"),
        ("hunter222", "hunter222"),
        ("MIIEvQIBADANBgkqh", "***(secret of ada)"),
        ("everyones-key", "***(shared secret)"),
        ("debugging", "debugging"),
        ("hunter2222 hunter2222", "***(secret of ada) ***(secret of ada)"),
        ("of several", "***(secret of ada, mel, mo, …)"),
        ("", ""),
    ],
    ids=["value", "part", "line", "shared", "short value", "twice", "several owners", "empty"],
)
def test_values_are_masked_with_the_name_of_their_owner(values, text, shown):
    for number, value in enumerate(["hunter2222", PEM, "debug", ""]):
        values.remember("ada", f"secret/{number}", value)
    values.remember(None, "secret/hf", "everyones-key")
    for owner in ("mo", "zoe", "mel", "ada"):
        values.remember(owner, "secret/hf", "of several")
    assert values.redact(text) == shown


PIECES = ["hunter22", "hunter2222", "22-token", "hunter22-token-of-mel", "ab", "-", "x" * 300]


@given(
    st.lists(st.sampled_from(PIECES), max_size=6, unique=True),
    st.lists(st.sampled_from([*PIECES, "hunter", "x" * 299]), max_size=6),
)
def test_no_value_is_left_in_a_text(known, pieces):
    values, text = SecretValues(), "".join(pieces)
    secrets = [value for value in known if len(value) >= log_redaction.MIN_LENGTH]
    for value in known:
        values.remember("ada", f"secret/{value}", value)
    shown = values.redact(text)
    assert not [value for value in secrets if value in shown]
    if not [value for value in secrets if value[:256] in text]:
        assert shown == text


def test_a_value_does_not_hide_the_beginning_of_another_one(values):
    """Otherwise a user could uncover the rest of a secret in the log."""
    values.remember("mel", "secret/hf", "hf_4711_0815_4242")
    values.remember("mallory", "secret/x", "token: hf_")
    shown = values.redact("bad token: hf_4711_0815_4242.")
    assert shown == "bad ***(secret of mallory, mel)."


def test_the_owner_of_a_longer_value_is_not_named_for_a_shorter_one(values):
    values.remember("mallory", "secret/x", "is refused")
    values.remember("mel", "secret/x", "is refused at night")
    values.remember("ada", "secret/x", "is refused by the sea")
    assert values.redact("job-1 is refused.") == "job-1 ***(secret of mallory)."
    assert values.redact("is refused by nobody").startswith("***(secret of mallory)")
    assert values.redact("is refused at night") == "***(secret of mallory, mel)"


def test_a_value_that_another_source_has_too_is_still_masked(values):
    values.remember("ada", "secret/one", "hunter2222")
    values.remember("mel", "secret/one", "hunter2222")
    values.forget("ada", "secret/one")
    assert values.redact("hunter2222") == "***(secret of mel)"
    values.forget_all("mel")
    assert values.redact("hunter2222") == "hunter2222"
    assert len(values) == 0


def test_no_user_displaces_the_values_of_others(values):
    values.remember("ada", "secret/hf", "value-of-ada")
    for number in range(log_redaction.MAX_USER_PARTS + 1_000):
        values.remember("mallory", f"secret/{number}", f"mallory-{number:06}")
    assert len(values) == log_redaction.MAX_USER_PARTS + 1
    assert values.redact("value-of-ada") == "***(secret of ada)"
    assert values.redact("mallory-000000") == "mallory-000000"
    assert values.redact("mallory-004999") == "***(secret of mallory)"


def test_the_characters_of_one_user_are_limited(values):
    values.remember("ada", "secret/hf", "value-of-ada")
    for number in range(100):
        values.remember("mallory", f"secret/{number}", f"{number:08}" + "m" * 60_000)
    assert len(values) == 1 + log_redaction.MAX_USER_CHARACTERS // 60_008
    assert values.redact("value-of-ada") == "***(secret of ada)"


def test_the_largest_value_is_masked_with_all_of_its_lines(values):
    lines = [f"line-of-value-{number:06}" for number in range(MAX_SECRET_BYTES // 21)]
    value = "\n".join(lines)
    values.remember("ada", "secret/hf", value)
    assert values.redact(f"<{value}>") == "<***(secret of ada)>"
    assert values.redact(lines[-1]) == "***(secret of ada)"


def test_the_user_with_the_most_values_loses_them_at_the_limit_of_all(values, monkeypatch):
    monkeypatch.setattr(log_redaction, "MAX_PARTS", 10)
    for number in range(9):
        values.remember("mallory", f"secret/{number}", f"mallory-{number:06}")
    for owner in ("ada", "mel", "mo"):
        values.remember(owner, "secret/hf", f"value-of-{owner}")
    assert len(values) == 10
    assert all("***" in values.redact(f"value-of-{owner}") for owner in ("ada", "mel", "mo"))


# Measured: under 0.1 s each. A pattern of all values that is compiled for each takes minutes.
MANY_SECONDS = 5.0


@pytest.mark.parametrize("prefix", ["", "https://hooks.example.com/"], ids=["random", "URLs"])
def test_many_values_do_not_slow_the_log_down(values, prefix):
    secrets = [f"{prefix}{number * 7919 % 100_003:040}"[-60:] for number in range(5_000)]
    started = time.process_time()
    for number, value in enumerate(secrets):
        values.remember(f"user-{number % 25}", f"secret/{number}", value)
    for number in range(1_000):
        assert "***(secret of user-" in values.redact(f"{secrets[number]:>200}")
    assert time.process_time() - started < MANY_SECONDS


@pytest.mark.parametrize(
    "secrets",
    [
        ["a" * (8 + number) for number in range(200)],
        ["a" * 5_000 + f"{number:04}" for number in range(200)],
        ["a" * 65_000 + "b"],
    ],
    ids=["nested", "common beginning", "long"],
)
def test_values_that_almost_match_everywhere_do_not_slow_the_log_down(values, secrets):
    for number, value in enumerate(secrets):
        values.remember("mallory", f"secret/{number}", value)
    started = time.process_time()
    values.redact("a" * 20_000 + ".")
    assert time.process_time() - started < MANY_SECONDS
