"""Full garbage collections of a large server are short, and cycles are freed in the end."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest

from tpufleet.compose.python_gc import ShortCollections


class Node:
    def __init__(self) -> None:
        self.itself = self


@pytest.fixture
def collections() -> Iterator[ShortCollections]:
    threshold = gc.get_threshold()
    collections = ShortCollections(longest_seconds=0.0)
    collections.start()
    yield collections
    collections.stop()
    gc.set_threshold(*threshold)


def test_what_survives_a_long_collection_is_left_out_of_the_next(collections):
    kept = [[number] for number in range(10_000)]
    gc.collect()
    assert gc.get_freeze_count() >= len(kept)
    assert len(gc.get_objects()) < len(kept)


def test_a_short_collection_leaves_nothing_out():
    collections = ShortCollections(longest_seconds=60.0)
    threshold = gc.get_threshold()
    collections.start()
    try:
        before = gc.get_freeze_count()
        gc.collect()
        assert gc.get_freeze_count() == before
    finally:
        collections.stop()
        gc.set_threshold(*threshold)


def test_cycles_among_what_was_left_out_are_freed_now_and_then(collections):
    node = Node()
    gc.collect()
    freed = weakref.ref(node)
    del node
    gc.collect()
    assert freed() is not None
    collections.collect_all()
    assert freed() is None
