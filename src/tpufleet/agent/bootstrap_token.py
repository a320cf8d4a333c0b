"""Keeps what this process knows from others of the same user.

The way in for an agent whose machine only has a word that others can read too: it asks for the
slice's token with it before any workload runs, and after that the word is worth nothing."""

from __future__ import annotations

import ctypes
import secrets
import time
from collections.abc import Callable

from tpufleet.agent import threads
from tpufleet.agent.settings import AgentSettings
from tpufleet.client.agents import AgentClient
from tpufleet.errors import FleetError, Temporary

PR_SET_DUMPABLE = 4


def close_memory() -> None:
    """No process of the same user may look into the memory of this one, or trace it. Programs that
    it starts are open again."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "cannot close this process to others")


INITIAL_BACKOFF_SECONDS, MAX_BACKOFF_SECONDS = 0.5, 15.0


def exchange(settings: AgentSettings, sleep: Callable[[float], None] = time.sleep) -> str:
    """The slice's token, which stays in this process. Waits for the control plane; raises when
    another agent was there before."""
    close_memory()
    client, nonce = AgentClient(settings.server, settings.bootstrap_token), secrets.token_hex(16)
    wait, waited = INITIAL_BACKOFF_SECONDS, 0.0
    try:
        while True:
            try:
                return client.exchange_bootstrap_token(settings.host_id, nonce)
            except FleetError as error:
                enough = (
                    settings.server_timeout_seconds is not None
                    and waited > settings.server_timeout_seconds
                )
                if enough or not isinstance(error, Temporary):
                    raise
                threads.log(f"not let in yet: {error}")
            sleep(wait)
            waited += wait
            wait = min(wait * 2, MAX_BACKOFF_SECONDS)
    finally:
        client.close()
