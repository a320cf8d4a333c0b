"""Starts the agent of one host: `python -m tpufleet agent`."""

from __future__ import annotations

import os
import secrets
import signal
import sys
from collections.abc import Mapping
from dataclasses import replace
from queue import SimpleQueue
from typing import TYPE_CHECKING

from tpufleet.agent import settings, threads
from tpufleet.agent.workload import processes, watchdog
from tpufleet.errors import BadInput, FleetError

if TYPE_CHECKING:
    from tpufleet.agent.loop import Agent
    from tpufleet.agent.notices import NoticeWatcher

EXIT_BAD_SETTINGS = 2


class AgentRejected(FleetError):
    """The control plane does not know this host, or another agent speaks for it."""


def run(environ: Mapping[str, str]) -> int:
    """Until this host is released (0), or no longer ours (3)."""
    try:
        if environ.get("TPUFLEET_METADATA"):
            from tpufleet.agent import metadata  # only machines of a cloud have such a server

            environ = metadata.complete_environ(environ)
        given = settings.from_environ(environ)
    except BadInput as error:
        threads.log(str(error))
        return EXIT_BAD_SETTINGS
    given.work_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    keeper = watchdog.Watchdog(given.work_dir)
    if not processes.kill(
        (), watchdog.run_dirs_under(given.work_dir), within=watchdog.KILL_TIMEOUT_SECONDS
    ):
        threads.log("processes that an earlier agent left behind do not die")
    private = (settings.TOKEN_VARIABLE, settings.BOOTSTRAP_TOKEN_VARIABLE)
    base = {name: value for name, value in environ.items() if name not in private}
    try:
        return _agent(given, base, keeper).run()
    except AgentRejected as error:
        from tpufleet.agent.loop import EXIT_REJECTED

        threads.log(f"this host is not ours: {error}")
        return EXIT_REJECTED


def _agent(given: settings.AgentSettings, base: dict[str, str], keeper: watchdog.Watchdog) -> Agent:
    # httpx would load its own command line, and with it rich and click: a third of our start-up.
    sys.modules.setdefault("httpx._main", None)  # type: ignore[arg-type]
    # Imported after the fork, so that the guard stays small.
    from tpufleet.agent import bootstrap_token
    from tpufleet.agent.loop import Agent, InboxMessage, PhaseChanged, ShutdownRequested
    from tpufleet.agent.workload.runner import AgentContext
    from tpufleet.client.agents import AgentClient
    from tpufleet.clocks import SystemClock

    if given.bootstrap_token:
        try:
            given = replace(given, token=bootstrap_token.exchange(given), entry="")
        except FleetError as error:
            raise AgentRejected(str(error)) from error
    inbox: SimpleQueue[InboxMessage] = SimpleQueue()  # may be filled from a signal handler
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: inbox.put(ShutdownRequested()))
    surroundings = AgentContext(
        settings=given,
        base_env=base,
        agent_bin_dir=os.path.dirname(sys.executable),
        client=AgentClient(given.server, given.token),
        watchdog=keeper,
        clock=SystemClock(),
        on_phase_change=lambda: inbox.put(PhaseChanged()),
    )
    return Agent(surroundings, inbox, _watcher(given), boot_id=secrets.token_hex(8))


def _watcher(given: settings.AgentSettings) -> NoticeWatcher:
    from tpufleet.agent import metadata
    from tpufleet.agent.notices import NoNoticeWatcher, NoticeFileWatcher

    if given.metadata_url:
        return metadata.MetadataNoticeWatcher(metadata.MetadataClient(given.metadata_url))
    return NoticeFileWatcher(given.notice_file) if given.notice_file else NoNoticeWatcher()
