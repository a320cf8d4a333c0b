"""Every hour: deletes files that nothing refers to (uploads that were never finished, code of no
job), and what the retention rules say. Sums up the costs of months that are over."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

from tpufleet.clocks import Clock
from tpufleet.model.people.retention_rules import RetentionRules
from tpufleet.service.files.job_files import JobFiles
from tpufleet.service.operations import retention_rules
from tpufleet.service.operations.background import log_failure
from tpufleet.service.people.settled_costs import settle
from tpufleet.stores.base import Store, code_reference

logger = logging.getLogger(__name__)

INTERVAL_SECONDS = 3600.0
# Longer than any upload takes; another server may be receiving it.
UNFINISHED_AFTER = timedelta(hours=6)
# Longer than any client takes between upload and submit.
UNUSED_AFTER = timedelta(days=1)
_DRAFTS = ("snapshots/.upload-*", "results/.upload-*", "logs/**/.*.fetched")


def run_until(
    stopping: threading.Event, store: Store, files: JobFiles, rules: RetentionRules, clock: Clock
) -> None:
    """Every hour until `stopping` is set. Runs in its own thread."""
    while True:
        _run("delete unused files", lambda: delete_orphans(store, files.state, clock.now()))
        _run(
            "apply the retention rules",
            lambda: retention_rules.apply(store, files, rules, clock.now()),
        )
        _run("sum up the costs of earlier months", lambda: settle(store, clock.now()))
        if stopping.wait(INTERVAL_SECONDS):
            return


def _run(purpose: str, task: Callable[[], object]) -> None:
    try:
        task()
    except Exception as error:
        log_failure(logger, purpose, error)


def delete_orphans(store: Store, state: Path, now: datetime) -> list[Path]:
    """Returns what was deleted."""
    orphans = [path for path in _drafts(state) if _age(path, now) > UNFINISHED_AFTER]
    # In this order: code that is submitted after the files were listed is not deleted.
    old = [path for path in state.glob("snapshots/*.tar.gz") if _age(path, now) > UNUSED_AFTER]
    unused = {path.name.removesuffix(".tar.gz"): path for path in old}
    needed = store.referred([code_reference(digest) for digest in unused])
    orphans += [path for digest, path in unused.items() if code_reference(digest) not in needed]
    for path in orphans:
        path.unlink(missing_ok=True)
        logger.info("deleted %s: nothing refers to it", path)
    return orphans


def _drafts(state: Path) -> Iterator[Path]:
    for pattern in _DRAFTS:
        yield from state.glob(pattern)


def _age(path: Path, now: datetime) -> timedelta:
    try:
        return now - datetime.fromtimestamp(path.stat().st_mtime, UTC)
    except FileNotFoundError:  # finished or deleted meanwhile
        return timedelta(0)
