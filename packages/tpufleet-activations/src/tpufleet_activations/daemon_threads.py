"""Threads for work that need not be finished when the process ends.

At its end, Python waits for the threads of `concurrent.futures`. A program may take minutes to
compile, and weights to read, and whoever interrupts a run should not have to wait for them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any


class DaemonThreads:
    """Up to so many, which are started when they are needed."""

    def __init__(self, count: int, name: str):
        self._count, self._name = count, name
        self._tasks: SimpleQueue[tuple[Future[Any], Callable[..., Any], tuple[Any, ...]] | None]
        self._tasks = SimpleQueue()
        self._started = 0
        self._lock = threading.Lock()

    def submit(self, work: Callable[..., Any], *arguments: Any) -> Future[Any]:
        future: Future[Any] = Future()
        self._tasks.put((future, work, arguments))
        with self._lock:
            if self._started < self._count:
                self._started += 1
                threading.Thread(target=self._run, name=self._name, daemon=True).start()
        return future

    def map(self, work: Callable[[Any], Any], items: Iterable[Any]) -> list[Any]:
        """The results of all, once they are done; the first error, if there is one."""
        return [future.result() for future in [self.submit(work, item) for item in items]]

    def close(self) -> None:
        """Threads end once the tasks are done. Does not wait for them."""
        with self._lock:
            self._count = 0
            for _ in range(self._started):
                self._tasks.put(None)

    def __enter__(self) -> DaemonThreads:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _run(self) -> None:
        while (task := self._tasks.get()) is not None:
            future, work, arguments = task
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(work(*arguments))
            except BaseException as error:
                future.set_exception(error)
            del task, future, work, arguments  # what they hold is freed before the next one
