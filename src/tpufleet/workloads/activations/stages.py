"""Stages joined by bounded queues, each in a thread of its own, each knowing how busy it is."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

_END = object()


class Stopped(Exception):
    """Another stage failed; this one has nothing to add."""


class Line:
    """The common fate of some stages: the first failure stops all of them."""

    def __init__(self) -> None:
        self.stages: list[Stage] = []
        self._failure: BaseException | None = None
        self._broken = threading.Event()

    def fail(self, error: BaseException) -> None:
        if not self._broken.is_set():
            self._failure = error
            self._broken.set()

    @property
    def broken(self) -> bool:
        return self._broken.is_set()

    def join(self) -> None:
        """Wait for every stage; raise what the first failing one raised."""
        self.settle()
        self.check()

    def settle(self) -> None:
        for stage in self.stages:
            stage.thread.join()

    def check(self) -> None:
        if self._failure is not None:
            raise self._failure


class Belt:
    """A bounded queue that gives up when its line is broken."""

    def __init__(self, line: Line, size: int):
        self._line, self._queue = line, queue.Queue[Any](size)

    def put(self, item: Any) -> None:
        while True:
            if self._line.broken:
                raise Stopped
            try:
                return self._queue.put(item, timeout=0.2)
            except queue.Full:
                continue

    def close(self) -> None:
        self.put(_END)

    def depth(self) -> int:
        return self._queue.qsize()

    def __iter__(self) -> Iterator[Any]:
        while True:
            try:
                item = self._queue.get(timeout=0.2)
            except queue.Empty:
                if self._line.broken:
                    raise Stopped from None
                continue
            if item is _END:
                return
            yield item


class Stage:
    """Takes items from one belt, works, and puts its results, if any, on the next."""

    def __init__(
        self, line: Line, name: str, work: Callable[[Any], Any], source: Any, into: Belt | None
    ):
        self.name, self.busy, self.done = name, 0.0, 0
        self._line, self._work, self._source, self._into = line, work, source, into
        self.thread = threading.Thread(target=self._run, name=f"extract-{name}", daemon=True)
        line.stages.append(self)

    def start(self) -> Stage:
        self.thread.start()
        return self

    def _run(self) -> None:
        try:
            for item in self._source:
                began = time.perf_counter()
                result = self._work(item)
                self.busy += time.perf_counter() - began
                self.done += 1
                if self._into is not None and result is not None:
                    self._into.put(result)
            if self._into is not None:
                self._into.close()
        except Stopped:
            return
        except BaseException as error:
            self._line.fail(error)
