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

from tpufleet.agent import guard, processes, settings, threads
from tpufleet.errors import BadInput, FleetError

if TYPE_CHECKING:
    from tpufleet.agent.loop import Agent
    from tpufleet.agent.notices import NoticeWatcher

BAD_SETTINGS = 2


class NotLetIn(FleetError):
    """The control plane does not know this host, or another agent speaks for it."""


def run(environ: Mapping[str, str]) -> int:
    """Until this host is released (0), or no longer ours (3)."""
    try:
        if environ.get("TPUFLEET_METADATA"):
            from tpufleet.agent import metadata  # only machines of a cloud have such a server

            environ = metadata.completed(environ)
        given = settings.from_environ(environ)
    except BadInput as error:
        threads.say(str(error))
        return BAD_SETTINGS
    given.work.mkdir(mode=0o700, parents=True, exist_ok=True)
    keeper = guard.Guard(given.work)
    if not processes.kill((), guard.under(given.work), within=guard.KILL_SECONDS):
        threads.say("processes that an earlier agent left behind do not die")
    private = (settings.TOKEN, settings.ENTRY)
    base = {name: value for name, value in environ.items() if name not in private}
    try:
        return _agent(given, base, keeper).run()
    except NotLetIn as error:
        from tpufleet.agent.loop import NOT_OURS

        threads.say(f"this host is not ours: {error}")
        return NOT_OURS


def _agent(given: settings.AgentSettings, base: dict[str, str], keeper: guard.Guard) -> Agent:
    # httpx would load its own command line, and with it rich and click: a third of our start-up.
    sys.modules.setdefault("httpx._main", None)  # type: ignore[arg-type]
    # Imported after the fork, so that the guard stays small.
    from tpufleet.agent import entering
    from tpufleet.agent.loop import Agent
    from tpufleet.agent.news import Changed, News, ToldToLeave
    from tpufleet.agent.surroundings import Surroundings
    from tpufleet.client.agents import AgentClient
    from tpufleet.clocks import SystemClock

    if given.entry:
        try:
            given = replace(given, token=entering.token(given), entry="")
        except FleetError as error:
            raise NotLetIn(str(error)) from error
    inbox: SimpleQueue[News] = SimpleQueue()  # may be filled from a signal handler
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: inbox.put(ToldToLeave()))
    surroundings = Surroundings(
        settings=given,
        base=base,
        own_path=os.path.dirname(sys.executable),
        client=AgentClient(given.server, given.token),
        guard=keeper,
        clock=SystemClock(),
        changed=lambda: inbox.put(Changed()),
    )
    return Agent(surroundings, inbox, _watcher(given), boot=secrets.token_hex(8))


def _watcher(given: settings.AgentSettings) -> NoticeWatcher:
    from tpufleet.agent import metadata
    from tpufleet.agent.notices import NoNotices, NoticeFile

    if given.metadata:
        return metadata.MetadataNotices(metadata.Metadata(given.metadata))
    return NoticeFile(given.notice_file) if given.notice_file else NoNotices()
