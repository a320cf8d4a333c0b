"""Pipeline stages: threads joined by bounded queues. Each stage measures how busy it is."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

_END = object()
_POLL_SECONDS = 0.2  # how often a blocked queue checks whether the pipeline has failed


class PipelineStopped(Exception):
    """Another stage failed, and its error is the one to report."""


class Pipeline:
    """A set of stages that fail together: the first error stops all of them."""

    def __init__(self) -> None:
        self.stages: list[Stage] = []
        self._error: BaseException | None = None
        self._failed = threading.Event()

    def fail(self, error: BaseException) -> None:
        if not self._failed.is_set():
            self._error = error
            self._failed.set()

    @property
    def failed(self) -> bool:
        return self._failed.is_set()

    def join(self) -> None:
        """Wait for all stages; raise the first error."""
        self.wait()
        self.check()

    def wait(self) -> None:
        for stage in self.stages:
            stage.join()

    def check(self) -> None:
        if self._error is not None:
            raise self._error


class StageQueue:
    """A bounded queue between two stages. Blocked calls raise once the pipeline has failed."""

    def __init__(self, pipeline: Pipeline, size: int):
        self._pipeline, self._queue = pipeline, queue.Queue[Any](size)

    def put(self, item: Any) -> None:
        while True:
            if self._pipeline.failed:
                raise PipelineStopped
            try:
                return self._queue.put(item, timeout=_POLL_SECONDS)
            except queue.Full:
                continue

    def close(self) -> None:
        self.put(_END)

    def resize(self, size: int) -> None:
        """Hold up to this many items from now on."""
        with self._queue.mutex:
            self._queue.maxsize = size
            self._queue.not_full.notify_all()

    def depth(self) -> int:
        return self._queue.qsize()

    def __iter__(self) -> Iterator[Any]:
        while True:
            try:
                item = self._queue.get(timeout=_POLL_SECONDS)
            except queue.Empty:
                if self._pipeline.failed:
                    raise PipelineStopped from None
                continue
            if item is _END:
                self._queue.put(_END)  # for the other consumers of this queue
                return
            yield item


class Stage:
    """Processes the items of `source` and puts results other than None into `output`.

    With several threads, items are processed concurrently and their order is lost.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        name: str,
        process: Callable[[Any], Any],
        source: Iterable[Any],
        output: StageQueue | None,
        thread_count: int = 1,
    ):
        self.name, self.thread_count = name, thread_count
        self._seconds = 0.0
        self._pipeline, self._process = pipeline, process
        self._source, self._output = source, output
        self._lock, self._running = threading.Lock(), thread_count
        self._threads = [
            threading.Thread(target=self._run, name=f"extract-{name}-{number}", daemon=True)
            for number in range(thread_count)
        ]
        pipeline.stages.append(self)

    @property
    def busy_seconds(self) -> float:
        """Time spent processing, averaged over the threads."""
        return self._seconds / self.thread_count

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
                result = self._process(item)
                with self._lock:
                    self._seconds += time.perf_counter() - began
                if self._output is not None and result is not None:
                    self._output.put(result)
            with self._lock:
                self._running -= 1
                last = not self._running
            if last and self._output is not None:
                self._output.close()
        except PipelineStopped:
            return
        except BaseException as error:
            self._pipeline.fail(error)
