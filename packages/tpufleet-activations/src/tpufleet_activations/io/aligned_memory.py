"""Page-aligned memory that is used again: new memory costs a page fault every few kilobytes."""

from __future__ import annotations

import mmap
import weakref
from collections import defaultdict, deque

import numpy as np

HUGE_PAGE = 2 << 20


class MemoryPool:
    """Arrays of bytes. The memory of one is used again once neither it nor a view of it exists,
    for the next one of the same size."""

    def __init__(self) -> None:
        # Appending and popping are atomic: memory returns from any thread, at any time.
        self._free: defaultdict[int, deque[mmap.mmap]] = defaultdict(deque)

    def take(self, size: int) -> np.ndarray:
        """So many bytes, on a page boundary, with any content."""
        page = HUGE_PAGE if size >= HUGE_PAGE else mmap.PAGESIZE
        capacity = -(-max(size, 1) // page) * page
        free = self._free[capacity]
        try:
            memory = free.pop()
        except IndexError:
            # Private: the kernel gives shared memory no huge pages by default.
            memory = mmap.mmap(-1, capacity, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            if capacity >= HUGE_PAGE and hasattr(mmap, "MADV_HUGEPAGE"):  # Linux
                memory.madvise(mmap.MADV_HUGEPAGE)
        whole = np.frombuffer(memory, np.uint8)  # the base of every view
        weakref.finalize(whole, free.append, memory).atexit = False
        return whole[:size]
