"""How a command reaches the control plane: settings, the right server, the right token."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import TYPE_CHECKING

import click

from tpufleet import config
from tpufleet.errors import FleetError, Unauthorized, Unreachable

if TYPE_CHECKING:
    from tpufleet.client.fleet import FleetClient

NO_SERVER = (
    "no control plane runs on this machine, and none is configured; `tpu run` and `tpu submit` "
    "start one, `tpu serve` does too, or name one with --server or TPUFLEET_SERVER"
)


def settings() -> config.Config:
    """Read anew for each command: the environment of this process and the user's files."""
    return config.load(os.environ, Path.home())


def connect(*, start: bool = False, announce: bool = True) -> FleetClient:
    """A client of the configured server, else of the embedded one. `start` may start that one."""
    read = settings()
    url = _named() or read.server
    if url is None:
        url = _started(read, announce) if start else config.embedded_server_url(read.home)
    if url is None:
        raise Unreachable(NO_SERVER)
    return client_of(read, url)


def client_of(read: config.Config, url: str) -> FleetClient:
    from tpufleet.client.fleet import FleetClient  # brings in the HTTP client

    return FleetClient(url, config.read_token(read, url))


def _named() -> str | None:
    context = click.get_current_context(silent=True)
    named = context.meta.get("tpufleet.server") if context is not None else None
    return config.check_server_url(named, "--server") if named is not None else None


def _started(read: config.Config, say_so: bool) -> str:
    """URL of the embedded server, which is started unless it runs and answers."""
    from tpufleet.views.cli import embedded_server

    local = dataclasses.replace(read, token_file=None)

    def answers(url: str) -> bool:
        try:
            client = client_of(local, url)
        except Unauthorized:  # the server has not written its token yet
            return False
        try:
            client.me()
        except FleetError:
            return False
        finally:
            client.close()
        return True

    running = config.embedded_server_url(read.home)
    if running is not None and answers(running):
        return running
    url, new = embedded_server.start(read.home, answers)
    if new and say_so:
        where = f"state in {read.home}; stop it with `tpu serve --stop`"
        click.echo(f"started a control plane at {url} ({where})", err=True)
    return url
