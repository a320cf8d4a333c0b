"""Connecting to the server: settings, server URL and token."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click
from msgspec import structs

from tpufleet import config
from tpufleet.errors import BadInput, NoConnection, NotFound, Unauthorized, Unreachable
from tpufleet.views.cli import output

if TYPE_CHECKING:
    from tpufleet.client.fleet import FleetClient

NO_SERVER = (
    "no server is running on this machine, and none is configured\n"
    "  next: start one with `tpu serve`, or pass --server URL (or set TPUFLEET_SERVER)"
)


def settings(
    *,
    new_file: bool = False,
    serve: bool = False,
    enable: Sequence[str] = (),
    tls_options: bool = False,
) -> config.Config:
    """Read for each command: the environment of this process and the user's config file.
    `new_file`: the command may create the file that TPUFLEET_CONFIG names. The others: see
    `config.load`."""
    _warn_once()
    named = os.environ.get("TPUFLEET_CONFIG")
    if named and not new_file and not Path(named).exists():
        raise BadInput(
            f"TPUFLEET_CONFIG: no such file: {named}\n"
            "  next: correct or unset the variable, or write the file with `tpu init`"
        )
    return config.load(os.environ, Path.home(), serve=serve, enable=enable, tls_options=tls_options)


def _warn_once() -> None:
    """About misspelt variables; a command may read its settings several times."""
    context = click.get_current_context(silent=True)
    if context is None or context.meta.setdefault("tpufleet.warned", False):
        return
    context.meta["tpufleet.warned"] = True
    output.print_warnings(config.misspelt_variables(os.environ))


def connect(*, start: bool = False, announce: bool = True, follow: bool = False) -> FleetClient:
    """A client of the configured server, or of the embedded one, which `start` may start. `follow`:
    interruptions of streams are shown."""
    read = settings()
    url = _server_option() or read.server
    if url is None:
        url = _started(read, announce) if start else config.embedded_server_url(read.home)
    if url is None:
        raise Unreachable(NO_SERVER)
    return client_for(read, url, interrupted=output.print_retrying if follow else None)


def is_remote() -> bool:
    """Whether a server is configured, whose settings are not those of this machine."""
    return (_server_option() or settings().server) is not None


def client_for(
    read: config.Config, url: str, interrupted: Callable[[Unreachable], None] | None = None
) -> FleetClient:
    from tpufleet.client.fleet import FleetClient  # imports the HTTP client
    from tpufleet.client.transport import CALL_SECONDS

    if url.startswith("http:") and not config.is_loopback(url) and not read.insecure_http:
        unsafe = (
            f"{url} is not encrypted, and your token can be read on the way; use https, or set "
        )
        output.print_warnings([f"{unsafe}insecure_http: true on a network that you trust"])
    timeout = read.request_timeout
    return FleetClient(
        url,
        config.read_token(read, url),
        timeout=timeout.total_seconds() if timeout else CALL_SECONDS,
        ca_file=read.ca_file,
        certificate=config.embedded_certificate(read.home, url),
        interrupted=interrupted or (lambda _: None),
    )


def _server_option() -> str | None:
    context = click.get_current_context(silent=True)
    url = context.meta.get("tpufleet.server") if context is not None else None
    return None if url is None else config.checked(config.parse_server_url, url, "--server")


def _started(read: config.Config, announce: bool) -> str:
    """URL of the embedded server, which is started unless it is running and responds."""
    from tpufleet.views.cli import embedded_server

    local = structs.replace(read, token_file=None)

    def is_ready(url: str) -> bool:
        try:
            client = client_for(local, url)
        except Unauthorized:  # the server has not written its token yet
            return False
        try:
            client.me()  # another error is an answer, so it runs: a second one could not start
        except (NoConnection, BadInput, NotFound):  # or another program has its address now
            return False
        finally:
            client.close()
        return True

    running = config.embedded_server_url(read.home)
    if running is not None and is_ready(running):
        return running
    try:
        url, new = embedded_server.start(read.home, is_ready)
    except KeyboardInterrupt:
        if announce:
            click.echo("interrupted; the server that was starting was stopped", err=True)
        raise
    if new and announce:
        click.echo(
            f"started a server at {url} (state in {read.home}; stop it with `tpu serve --stop`)",
            err=True,
        )
    return url
