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
        ("key=hunter2222;", "key=***;"),
        ("hunter222", "hunter222"),
        ("MIIEvQIBADANBgkqh", "***"),
        ("everyones-key", "***"),
        ("debugging", "debugging"),
        ("hunter2222 hunter2222", "*** ***"),
        ("", ""),
    ],
    ids=["value", "part", "line", "shared", "short value", "twice", "empty"],
)
def test_values_are_masked(values, text, shown):
    for number, value in enumerate(["hunter2222", PEM, "debug", ""]):
        values.remember("ada", f"secret/{number}", value)
    values.remember(None, "secret/hf", "everyones-key")
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
    if not [value for value in secrets if value[:256] in text or value[-256:] in text]:
        assert shown == text


def test_a_value_does_not_hide_the_beginning_of_another_one(values):
    """Otherwise a user could uncover the rest of a secret in the log."""
    values.remember("mel", "secret/hf", "hf_4711_0815_4242")
    values.remember("mallory", "secret/x", "token: hf_")
    assert values.redact("bad token: hf_4711_0815_4242.") == "bad ***."


def test_a_value_that_another_source_has_too_is_still_masked(values):
    values.remember("ada", "secret/one", "hunter2222")
    values.remember("mel", "secret/one", "hunter2222")
    values.forget("ada", "secret/one")
    assert values.redact("hunter2222") == "***"
    values.forget_all("mel")
    assert values.redact("hunter2222") == "hunter2222"


def test_no_user_displaces_the_values_of_others(values):
    values.remember("ada", "secret/hf", "value-of-ada")
    kept = log_redaction.MAX_CHARACTERS // 60_008
    for number in range(100):
        values.remember("mallory", f"secret/{number}", f"{number:08}" + "m" * 60_000)
    shown = [values.redact(f"{number:08}" + "m" * 248) for number in (0, 99 - kept, 100 - kept, 99)]
    assert [text == "***" for text in shown] == [False, False, True, True]
    assert values.redact("value-of-ada") == "***"


def test_the_largest_value_is_masked_with_all_of_its_lines(values):
    lines = [f"line-of-value-{number:06}" for number in range(MAX_SECRET_BYTES // 21)]
    value = "\n".join(lines)
    values.remember("ada", "secret/hf", value)
    assert values.redact(f"<{value}>") == "<***>"
    assert values.redact(lines[-1]) == "***"


# Measured: under 0.1 s each. A pattern of all values that is compiled for each takes minutes.
MANY_SECONDS = 5.0


@pytest.mark.parametrize("prefix", ["", "https://hooks.example.com/"], ids=["random", "URLs"])
def test_many_values_do_not_slow_the_log_down(values, prefix):
    secrets = [f"{prefix}{number * 7919 % 100_003:040}"[-60:] for number in range(5_000)]
    started = time.process_time()
    for number, value in enumerate(secrets):
        values.remember(f"user-{number % 25}", f"secret/{number}", value)
    for number in range(1_000):
        assert "***" in values.redact(f"{secrets[number]:>200}")
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
