"""Secrets never appear in output, however it is cut into pieces."""

from __future__ import annotations

import random
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tpufleet.model.values.redaction import (
    MASK,
    MIN_VALUE_LENGTH,
    PIECE_LENGTH,
    Redactor,
    redactable,
)

SECRETS = (
    "hunter22", "ababab", "-----BEGIN KEY-----\nMIIEvQIBADANBgkqh\n-----END KEY-----",
    "machine example.org login\npw hunter2",
)  # fmt: skip
SIZES = st.lists(st.integers(1, 20), min_size=1, max_size=30)


def pieces_of(data: bytes, sizes: list[int]) -> list[bytes]:
    pieces, at = [], 0
    while at < len(data):
        size = sizes[len(pieces) % len(sizes)]
        pieces.append(data[at : at + size])
        at += size
    return pieces


def shown(values, pieces: list[bytes]) -> bytes:
    redactor = Redactor(values)
    return b"".join([*map(redactor.feed, pieces), redactor.flush()])


def masked_one_byte_at_a_time(values, data: bytes) -> bytes:
    """What is wanted, written as plainly as possible."""
    secret = bytearray(len(data))
    for part in map(str.encode, redactable(values)):
        for start in range(len(data)):
            if data.startswith(part, start):
                secret[start : start + len(part)] = b"\1" * len(part)
    result = b""
    for at, byte in enumerate(data):
        if not secret[at]:
            result += bytes([byte])
        elif not at or not secret[at - 1]:
            result += MASK.encode()
    return result


@given(
    st.lists(st.sampled_from([*SECRETS, "ab", "hunter", "text ", "\n", "MIIEvQIB"]), max_size=8),
    SIZES,
)
def test_no_value_is_shown_however_the_output_is_cut(parts, sizes):
    data = "".join(parts).encode()
    result = shown(SECRETS, pieces_of(data, sizes))
    values = [part.encode() for part in redactable(SECRETS)]
    assert not any(value in result for value in values)
    if not any(value in data for value in values):
        assert result == data


# Few letters: values overlap, contain and repeat each other.
@given(
    st.lists(st.text("ab\n", max_size=24), max_size=5),
    st.lists(st.one_of(st.text("ab\n", max_size=12), st.integers(0, 4)), max_size=12),
    SIZES,
)
def test_output_in_pieces_is_masked_like_the_whole(values, parts, sizes):
    text = "".join(
        part if isinstance(part, str) else values[part] if part < len(values) else ""
        for part in parts
    )
    data = text.encode()
    expected = masked_one_byte_at_a_time(values, data)
    assert Redactor(values).data(data) == expected
    assert shown(values, [data]) == expected
    assert shown(values, pieces_of(data, sizes)) == expected
    assert shown(values, pieces_of(data, [1])) == expected
    assert Redactor(values).text(text).encode() == expected
    secrets = [value.strip("\n") for value in values]
    assert not any(
        secret.encode() in expected for secret in secrets if len(secret) >= MIN_VALUE_LENGTH
    )


@st.composite
def repetitive_text(draw):
    """Long runs with few periods, which are broken here and there."""
    runs = st.tuples(st.sampled_from(["a", "ab", "aab", "abcab", "b"]), st.integers(1, 700))
    return "".join((unit * length)[:length] for unit, length in draw(st.lists(runs, max_size=4)))


@given(
    st.lists(repetitive_text(), min_size=1, max_size=3),
    st.lists(st.tuples(st.integers(0, 2), st.integers(0, 2100), repetitive_text()), max_size=3),
    st.lists(st.integers(1, 900), min_size=1, max_size=5),
)
def test_long_values_that_repeat_themselves_are_masked(values, parts, sizes):
    data = b""
    for number, length, text in parts:
        data += (values[number % len(values)][:length] + text).encode()
    expected = masked_one_byte_at_a_time(values, data)
    assert Redactor(values).data(data) == expected
    assert shown(values, pieces_of(data, sizes)) == expected


@pytest.mark.parametrize(
    ("values", "pieces", "result"),
    [
        (["machine example.org login\npw hunter2"],
         ["machine example.org login\n", "pw hunter2\n"], "***\n"),
        (["machine example.org login\npw hunter2"],
         ["machine example.org login\n", "pw other\n"], "***\npw other\n"),
        (["hunter", "hunter-second-secret-value"], ["v=hunter", "-second-secret-value\n"],
         "v=***\n"),
        (["hunter", "hunter-second-secret-value"], ["v=hunter", "-third\n"], "v=***-third\n"),
        (["abcdefgh", "efghijklmnop"], ["abcdefghijklmnop\n"], "***\n"),
        (["abcdefgh", "efghijklmnop"], ["abcdefgh", "ijklmno", "p\n"], "***\n"),
        (["abcdefgh", "efghijklmnop"], ["abcdefgh", "ijk\n"], "***ijk\n"),
        (["hunter22"], ["hunter22", "hunter22", " hunter22\n"], "*** ***\n"),
        (["hunter22"], ["v=hunt"], "v=hunt"),
    ],
    ids=[
        "line by line", "another second line", "longer value", "shorter value", "overlap",
        "overlap in pieces", "beginning of an overlap", "adjacent", "part of a value",
    ],
)  # fmt: skip
def test_a_value_is_masked_when_another_one_ends_or_starts_within_it(values, pieces, result):
    assert shown(values, [piece.encode() for piece in pieces]).decode() == result


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("key=hunter22;", f"key={MASK};"),
        ("hunter2", "hunter2"),
        ("MIIEvQIBADANBgkqh", MASK),
        ("debug=1", "debug=1"),
        ("\ud800 hunter22 é", f"\ud800 {MASK} é"),
    ],
    ids=["value", "part of a value", "line of a value", "short value", "no valid text"],
)
def test_values_are_replaced_in_text(text, shown):
    assert Redactor([*SECRETS, "1", ""]).text(text) == shown


def test_output_is_not_held_back_without_reason():
    redactor = Redactor(["hunter22"])
    assert redactor.feed(b"step 1\n") == b"step 1\n"
    assert redactor.feed(b"passwd hunt") == b"passwd "
    assert redactor.feed(b"ing\n") == b"hunting\n"


def test_no_more_than_a_piece_of_a_long_value_is_held_back():
    value = "".join(map(str, range(1000))).encode()
    redactor = Redactor([value.decode()])
    beginning = value[: PIECE_LENGTH - 1]
    assert redactor.feed(beginning) == b""
    assert redactor.feed(b"!") == beginning + b"!"
    assert redactor.feed(value[:PIECE_LENGTH]) == MASK.encode()
    assert redactor.feed(value[PIECE_LENGTH:] + b"!") == b"!"


def random_text(seed: int, length: int) -> str:
    return random.Random(seed).randbytes(length // 2).hex()


SIZE, MEBIBYTE = 64 * 1024, 1024 * 1024
RANDOM = [random_text(seed, SIZE) for seed in range(16)]
SAME_BEGINNING = [RANDOM[0][:-8] + f"{seed:08}" for seed in range(16)]
PERIODIC = ["a" * (SIZE - 1000 * number - 1) + "b" for number in range(16)]
BROKEN = ["a" * (SIZE // 2 - number) + "b" + "a" * (SIZE // 2) for number in range(16)]
LINES = ["\n".join(text[at : at + 64] for at in range(0, SIZE, 64)) for text in RANDOM]


@pytest.mark.parametrize(
    ("values", "output"),
    [
        (RANDOM, random_text(99, MEBIBYTE)),
        (RANDOM, RANDOM[3] * 16),
        (RANDOM, RANDOM[3][:-1] * 16),
        (RANDOM, RANDOM[3][:8] * (MEBIBYTE // 8)),
        (SAME_BEGINNING, RANDOM[0][:30_000] * 35),
        (SAME_BEGINNING, RANDOM[0][:10] * (MEBIBYTE // 10)),
        (PERIODIC, "a" * MEBIBYTE),
        (PERIODIC, ("a" * 65_000 + "c") * 16),
        (["a" * (SIZE - number) for number in range(16)], "a" * MEBIBYTE),
        (BROKEN, "a" * MEBIBYTE),
        (BROKEN, BROKEN[3] * 16),
        (LINES, random_text(99, MEBIBYTE)),
        (LINES, LINES[3] * 16),
        (LINES, LINES[3][:40] * (MEBIBYTE // 40)),
    ],
    ids=[
        "unrelated", "value", "most of a value", "beginning of a value", "common half",
        "common beginning", "one letter", "runs of one letter", "value of one letter",
        "broken run", "value with a broken run", "lines, unrelated", "lines, value",
        "lines, beginning",
    ],
)  # fmt: skip
def test_long_values_do_not_slow_the_output_down(values, output):
    """Measured: under 1.5 s each. Comparing each end with each beginning took 14 s or more, except
    where the output is a whole value."""
    redactor, data = Redactor(values), output.encode()
    started = time.process_time()
    for at in range(0, len(data), SIZE):
        redactor.feed(data[at : at + SIZE])
    redactor.flush()
    assert time.process_time() - started < 5.0


def test_a_long_value_that_arrives_in_small_pieces_is_not_searched_again_and_again():
    redactor, data = Redactor(RANDOM), RANDOM[3].encode()
    started = time.process_time()
    result = b"".join([*(redactor.feed(data[at : at + 1]) for at in range(SIZE)), redactor.flush()])
    assert result == MASK.encode()
    assert time.process_time() - started < 5.0
