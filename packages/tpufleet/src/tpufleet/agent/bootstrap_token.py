"""Exchange the bootstrap token of a host for the token of its slice.

Every process on a TPU VM can read the bootstrap token in the instance metadata. The agent exchanges
it before any workload runs; after that it is worthless without the nonce of that exchange. An agent
that starts again has the same nonce if its host keeps one where only root can read it.
"""

from __future__ import annotations

import ctypes
import os
import secrets
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from tpufleet.agent import threads
from tpufleet.agent.settings import AgentSettings
from tpufleet.backoff import Backoff
from tpufleet.errors import FleetError, Temporary

if TYPE_CHECKING:
    from tpufleet.client.agents import AgentClient

INITIAL_BACKOFF_SECONDS, MAX_BACKOFF_SECONDS = 0.5, 15.0
PR_SET_DUMPABLE = 4


def connect(settings: AgentSettings, token: str) -> AgentClient:
    from tpufleet.client.agents import AgentClient  # httpx is slow to import

    return AgentClient(
        settings.server,
        token,
        settings.ca_file,
        ca_certificates=settings.ca_certificates,
        proxy=settings.proxy,
    )


def exchange(
    settings: AgentSettings,
    sleep: Callable[[float], None] = time.sleep,
    on_retry: Callable[[FleetError], None] = lambda error: None,
) -> str:
    """Return the slice token, which never leaves this process.

    Waits for an unreachable server up to `settings.server_timeout_seconds`. Raises Forbidden
    when the token has already been exchanged for this host with another nonce.
    """
    protect_memory()
    client = connect(settings, settings.bootstrap_token)
    nonce = settings.nonce or secrets.token_hex(16)
    backoff = Backoff(first=INITIAL_BACKOFF_SECONDS, longest=MAX_BACKOFF_SECONDS)
    timeout, waited = settings.server_timeout_seconds, 0.0
    try:
        while True:
            try:
                return client.register(settings.host_id, nonce)
            except FleetError as error:
                timed_out = timeout is not None and waited > timeout
                if timed_out or not isinstance(error, Temporary):
                    raise
                threads.log(f"bootstrap token not accepted yet; retrying: {error}")
                on_retry(error)
            delay = backoff.failed()
            sleep(delay)
            waited += delay
    finally:
        client.close()


def read_nonce(file: int) -> str:
    """The nonce of this host, which root opened for this process; then the file is closed for it
    and for all processes that it starts."""
    nonce = os.read(file, 1024).decode().strip()
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, file)
    os.close(nothing)
    return nonce


def protect_memory() -> None:
    """Forbid processes of the same user to read this process's memory or trace it. Programs that it
    starts are not affected."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_DUMPABLE) failed")
