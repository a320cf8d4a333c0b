"""Secrets never appear in output, however it is cut into pieces."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tpufleet.model.redaction import MASK, Redactor

SECRETS = ("hunter22", "ababab", "-----BEGIN KEY-----\nMIIEvQIBADANBgkqh\n-----END KEY-----")


@given(
    st.lists(st.sampled_from([*SECRETS, "ab", "hunter", "text ", "\n", "MIIEvQIB"]), max_size=8),
    st.lists(st.integers(1, 20), min_size=1, max_size=30),
)
def test_no_value_is_shown_however_the_output_is_cut(parts, sizes):
    data, redactor, shown, at, number = "".join(parts).encode(), Redactor(SECRETS), b"", 0, 0
    while at < len(data):
        size = sizes[number % len(sizes)]
        shown += redactor.feed(data[at : at + size])
        at, number = at + size, number + 1
    shown += redactor.flush()
    assert not any(secret.encode() in shown for secret in SECRETS)
    assert b"MIIEvQIBADANBgkqh" not in shown
    if not any(secret.encode() in data for secret in (*SECRETS, "MIIEvQIBADANBgkqh")):
        assert shown == data


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("key=hunter22;", f"key={MASK};"),
        ("hunter2", "hunter2"),
        ("MIIEvQIBADANBgkqh", MASK),
        ("debug=1", "debug=1"),
    ],
    ids=["value", "part of a value", "line of a value", "short value"],
)
def test_values_are_replaced_in_text(text, shown):
    assert Redactor([*SECRETS, "1", ""]).text(text) == shown


def test_output_is_not_held_back_without_reason():
    redactor = Redactor(["hunter22"])
    assert redactor.feed(b"step 1\n") == b"step 1\n"
    assert redactor.feed(b"passwd hunt") == b"passwd "
    assert redactor.feed(b"ing\n") == b"hunting\n"
