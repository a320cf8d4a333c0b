"""Stages joined by bounded queues, each in a thread of its own, each knowing how busy it is."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

_END = object()


class PipelineStopped(Exception):
    """Another stage failed; this one has nothing to add."""


class Pipeline:
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
    def failed(self) -> bool:
        return self._broken.is_set()

    def join(self) -> None:
        """Wait for every stage; raise what the first failing one raised."""
        self.wait()
        self.check()

    def wait(self) -> None:
        for stage in self.stages:
            stage.join()

    def check(self) -> None:
        if self._failure is not None:
            raise self._failure


class StageQueue:
    """A bounded queue that gives up when its line is broken."""

    def __init__(self, line: Pipeline, size: int):
        self._line, self._queue = line, queue.Queue[Any](size)

    def put(self, item: Any) -> None:
        while True:
            if self._line.failed:
                raise PipelineStopped
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
                if self._line.failed:
                    raise PipelineStopped from None
                continue
            if item is _END:
                self._queue.put(_END)  # for the others who take from this belt
                return
            yield item


class Stage:
    """Takes items from one belt, works, and puts its results, if any, on the next. With several
    hands it works on several items at once, and their order is lost."""

    def __init__(
        self,
        line: Pipeline,
        name: str,
        work: Callable[[Any], Any],
        source: Any,
        into: StageQueue | None,
        hands: int = 1,
    ):
        self.name, self.thread_count = name, hands
        self._spent = 0.0
        self._line, self._work, self._source, self._into = line, work, source, into
        self._lock, self._left = threading.Lock(), hands
        self._threads = [
            threading.Thread(target=self._run, name=f"extract-{name}-{number}", daemon=True)
            for number in range(hands)
        ]
        line.stages.append(self)

    @property
    def busy_seconds(self) -> float:
        """Seconds of work, as a mean over the hands."""
        return self._spent / self.thread_count

    def start(self) -> Stage:
        for thread in self._threads:
            thread.start()
        return self

    def join(self) -> None:
        for thread in self._threads:
            thread.join()

    def _run(self) -> None:
        try:
            for item in self._source:
                began = time.perf_counter()
                result = self._work(item)
                with self._lock:
                    self._spent += time.perf_counter() - began
                if self._into is not None and result is not None:
                    self._into.put(result)
            with self._lock:
                self._left -= 1
                last = not self._left
            if last and self._into is not None:
                self._into.close()
        except PipelineStopped:
            return
        except BaseException as error:
            self._line.fail(error)
