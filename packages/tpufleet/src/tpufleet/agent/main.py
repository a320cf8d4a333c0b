"""Starts the agent of one host: `python -m tpufleet agent`."""

from __future__ import annotations

import os
import secrets
import signal
import sys
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from queue import SimpleQueue
from typing import TYPE_CHECKING

from tpufleet.agent import bootstrap_token, threads
from tpufleet.agent import settings as agent_settings
from tpufleet.agent.settings import AgentSettings
from tpufleet.agent.workload import containment, watchdog
from tpufleet.errors import BadInput, FleetError
from tpufleet.model.fleet.bootstrap import BootstrapStage

if TYPE_CHECKING:
    from tpufleet.agent.bootstrap_report import BootstrapReporter
    from tpufleet.agent.loop import Agent
    from tpufleet.agent.notices import WatchNotices

EXIT_BAD_SETTINGS = 2


class AgentRejected(FleetError):
    """The server does not know this host, or already has an agent for it."""


def run(environ: Mapping[str, str]) -> int:
    """Run until this host is released (exit status 0) or rejected (3)."""
    try:
        if environ.get("TPUFLEET_METADATA"):
            from tpufleet.agent import metadata  # only cloud machines have a metadata server

            environ = metadata.complete_environ(environ)
        settings = agent_settings.from_environ(environ)
    except BadInput as error:
        threads.log(str(error))
        _reporter(environ).failed(BootstrapStage.STARTING_AGENT, str(error))
        return EXIT_BAD_SETTINGS
    reporter = _reporter(environ)
    settings.work_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    try:
        contained = containment.from_environ(environ, settings.work_dir)
    except ValueError as error:
        threads.log(f"cannot contain jobs: {error}")
        return EXIT_BAD_SETTINGS
    threads.log(f"containment: {contained.description}")
    if contained.cgroup is not None:
        containment.make_room_for_limits(contained.cgroup)
    elif contained.mechanism is containment.Mechanism.MARKS:
        containment.adopt_orphans()
    if agent_settings.NONCE_FILE_VARIABLE in environ:
        bootstrap_token.protect_memory()  # first: the watchdog is a copy of this process
        nonce = bootstrap_token.read_nonce(int(environ[agent_settings.NONCE_FILE_VARIABLE]))
        settings = replace(settings, nonce=nonce)
    guard = watchdog.Watchdog(contained)
    if not watchdog.kill_leftovers(contained):
        threads.log("processes of an earlier agent survived SIGKILL; continuing")
    credentials = (agent_settings.TOKEN_VARIABLE, agent_settings.BOOTSTRAP_TOKEN_VARIABLE)
    base_env = {name: value for name, value in environ.items() if name not in credentials}
    base_env[containment.IN_USE_VARIABLE] = contained.description
    base_env[containment.WEAK_VARIABLE] = "1" if contained.weak else ""
    try:
        return _build_agent(settings, base_env, guard, contained, reporter).run()
    except AgentRejected as error:
        from tpufleet.agent.loop import EXIT_REJECTED

        threads.log(f"rejected by the server; exiting: {error}")
        reporter.failed(BootstrapStage.CONNECTING, str(error))
        return EXIT_REJECTED


def _build_agent(
    settings: AgentSettings,
    base_env: dict[str, str],
    guard: watchdog.Watchdog,
    contained: containment.Containment,
    reporter: BootstrapReporter,
) -> Agent:
    # httpx would load its own command line, and with it rich and click: a third of our start-up.
    sys.modules.setdefault("httpx._main", None)  # type: ignore[arg-type]  # None blocks the import
    # Imported after the fork, so that the watchdog process stays small.
    from tpufleet.agent.loop import Agent, InboxMessage, PhaseChanged, ShutdownRequested
    from tpufleet.agent.workload.runner import AgentContext
    from tpufleet.clocks import SystemClock

    if settings.bootstrap_token:
        try:
            token = bootstrap_token.exchange(settings, on_retry=reporter.connecting)
        except FleetError as error:
            raise AgentRejected(str(error)) from error
        reporter.connected()
        settings = replace(settings, token=token, bootstrap_token="", nonce="")
    inbox: SimpleQueue[InboxMessage] = SimpleQueue()  # reentrant: signal handlers put into it
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: inbox.put(ShutdownRequested()))
    context = AgentContext(
        settings=settings,
        base_env=base_env,
        agent_bin_dir=os.path.dirname(sys.executable),
        client=bootstrap_token.connect(settings, settings.token),
        watchdog=guard,
        containment=contained,
        clock=SystemClock(),
        on_phase_change=lambda: inbox.put(PhaseChanged()),
    )
    return Agent(context, inbox, _notice_watcher(settings), boot_id=secrets.token_hex(8))


def _reporter(environ: Mapping[str, str]) -> BootstrapReporter:
    from tpufleet.agent import bootstrap_report

    return bootstrap_report.from_environ(environ)


def _notice_watcher(settings: AgentSettings) -> WatchNotices | None:
    from tpufleet.agent import notices
    from tpufleet.agent.metadata import MetadataClient

    if settings.metadata_url:
        return partial(notices.watch_metadata, MetadataClient(settings.metadata_url))
    if settings.notice_file:
        return partial(notices.watch_file, settings.notice_file)
    return None
