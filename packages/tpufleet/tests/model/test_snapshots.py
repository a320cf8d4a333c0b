"""Digests of snapshots depend on content only."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tpufleet.errors import BadInput
from tpufleet.model.job.snapshots import (
    MAX_DEPTH,
    SnapshotEntry,
    require_digest,
    require_unpackable,
    snapshot_digest,
)

entries = st.lists(
    st.builds(
        SnapshotEntry,
        path=st.text(min_size=1, max_size=8),
        mode=st.sampled_from([0o644, 0o755]),
        size=st.integers(0, 9),
        sha256=st.sampled_from(["a" * 64, "b" * 64]),
        target=st.none() | st.text(max_size=4),
    ),
    unique_by=lambda entry: entry.path,
    max_size=5,
)


@given(entries, st.randoms())
def test_the_order_of_entries_does_not_matter(listed, random):
    shuffled = list(listed)
    random.shuffle(shuffled)
    assert snapshot_digest(shuffled) == snapshot_digest(listed)
    require_digest(snapshot_digest(listed))


@given(entries, entries)
def test_different_contents_have_different_digests(one, other):
    def content(listed):
        return {
            (e.path, e.target is None and e.mode & 0o100, e.size, e.sha256, e.target)
            for e in listed
        }

    assert (content(one) == content(other)) == (snapshot_digest(one) == snapshot_digest(other))


def test_only_the_executable_bit_of_a_mode_matters():
    def with_mode(mode):
        return snapshot_digest([SnapshotEntry(path="a", mode=mode, size=1, sha256="0" * 64)])

    assert with_mode(0o644) == with_mode(0o600) == with_mode(0o666)
    assert with_mode(0o644) != with_mode(0o755)
    assert with_mode(0o755) == with_mode(0o700)


def test_a_digest_is_sixty_four_lower_case_hex_digits():
    require_digest("0" * 64)
    wrong = ["", "0" * 63, "A" * 64, "../" + "0" * 61, "0" * 64 + "\n"]
    for text in wrong:
        with pytest.raises(BadInput):
            require_digest(text)


def test_a_path_has_a_limited_number_of_folders():
    deep = "a/" * MAX_DEPTH + "f"
    with pytest.raises(BadInput, match="too long"):
        require_unpackable([SnapshotEntry(path=deep)])
    require_unpackable([SnapshotEntry(path=deep.removeprefix("a/"))])


def test_links_that_take_long_to_follow_are_refused():
    """Each leads to the next one, by a long way."""
    way = "d/../" * 800
    links = [
        SnapshotEntry(path=f"l{number}", target=f"{way}l{number + 1}") for number in range(5000)
    ]
    started = time.process_time()
    with pytest.raises(BadInput, match="links"):
        require_unpackable(links)
    assert time.process_time() - started < 10


def test_many_plain_links_and_folders_are_accepted():
    files = [SnapshotEntry(path=f"bin/{number % 100}/{number}") for number in range(5_000)]
    links = [
        SnapshotEntry(path=f"links/{number}", target=f"../bin/{number % 100}/{number}")
        for number in range(5_000)
    ]
    require_unpackable([*files, *links])
