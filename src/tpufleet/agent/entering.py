"""The way in for an agent whose machine only has a word that others can read too: it asks for the
slice's token with it before any workload runs, and after that the word is worth nothing."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable

from tpufleet.agent import privacy, threads
from tpufleet.agent.settings import AgentSettings
from tpufleet.client.agents import AgentClient
from tpufleet.errors import FleetError, Temporary

FIRST_WAIT, LONGEST_WAIT = 0.5, 15.0


def token(given: AgentSettings, sleep: Callable[[float], None] = time.sleep) -> str:
    """The slice's token, which stays in this process. Waits for the control plane; raises when
    another agent was there before."""
    privacy.close_memory()
    client, nonce = AgentClient(given.server, given.entry), secrets.token_hex(16)
    wait, waited = FIRST_WAIT, 0.0
    try:
        while True:
            try:
                return client.enter(given.host_id, nonce)
            except FleetError as error:
                enough = given.waits_seconds is not None and waited > given.waits_seconds
                if enough or not isinstance(error, Temporary):
                    raise
                threads.say(f"not let in yet: {error}")
            sleep(wait)
            waited += wait
            wait = min(wait * 2, LONGEST_WAIT)
    finally:
        client.close()
