"""`tpu serve` and `tpu rules`, which show or start what only the top layer knows."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import click
import psutil

from tpufleet import config
from tpufleet.errors import FleetError
from tpufleet.views.cli import connection, output
from tpufleet.views.cli.output import json_option

STOPS_WITHIN = 30.0  # seconds


def serve_command(
    run: Callable[[config.Config, bool], int], clear: Callable[[Path], None]
) -> click.Command:
    """`run` is the server itself; True: embedded, it leaves the terminal alone. `clear` takes away
    the simulated slices below a folder."""

    @click.command(
        "serve",
        short_help="Run the control plane.",
        epilog="\b\nExamples:\n  tpu serve\n  tpu serve --listen 0.0.0.0:8470 "
        "--store postgresql://db/fleet\n  tpu serve --stop\n",
    )
    @click.option("--listen", metavar="HOST:PORT", help="Where (default: 127.0.0.1, a free port).")
    @click.option("--store", metavar="URL", help="Database (default: SQLite in the state folder).")
    @click.option("--provider", metavar="NAME", help="Where slices come from (default: local).")
    @click.option("--embedded", is_flag=True, hidden=True)
    @click.option("--stop", is_flag=True, help="Stop the server of this state folder.")
    @click.option("--all", "everything", is_flag=True, help="With --stop: its slices too.")
    @json_option
    @click.pass_context
    def serve(
        context: click.Context,
        listen: str | None,
        store: str | None,
        provider: str | None,
        embedded: bool,
        stop: bool,
        everything: bool,
        as_json: bool,
    ) -> None:
        """Run the control plane: the API, and the controller that acts on what people ask for.

        It keeps its state in one folder (TPUFLEET_HOME). Several servers may share one Postgres;
        exactly one of them acts. Simulated slices and what runs on them outlive the server, so
        that the next one goes on with them; `tpu serve --stop --all` ends them too.
        """
        settings = connection.settings()
        if stop:
            stopped = stop_server(settings.home)
            if everything:
                clear(settings.data)
            if as_json:
                output.print_json({"stopped": stopped})
            elif stopped:
                click.echo("stopped the control plane")
            else:
                click.echo(f"no control plane runs in {settings.home}")
            return
        chosen = {"listen": listen, "store": store, "provider": provider}
        given = {name: value for name, value in chosen.items() if value is not None}
        if listen is not None:
            config.check_listen_address(listen, "--listen")
        # uvicorn ends well on SIGTERM, then raises it again: by default that would kill us before
        # the server has tidied up. As an exception it passes through every `finally`.
        signal.signal(signal.SIGTERM, _leave)
        context.exit(run(dataclasses.replace(settings, **given), embedded))

    return serve


def _leave(*_: object) -> None:
    raise SystemExit(0)


def stop_server(home: Path) -> bool:
    """SIGTERM to the server of this state folder, and wait until it is gone. False: there was
    none."""
    try:
        pid = int(json.loads((home / "server.json").read_text())["pid"])
        process = psutil.Process(pid)
        ours = "serve" in process.cmdline()
    except (OSError, ValueError, KeyError, TypeError, psutil.NoSuchProcess):
        ours = False
    if ours:  # the number may have gone to another program since
        os.kill(pid, signal.SIGTERM)
        deadline = time.monotonic() + STOPS_WITHIN
        while psutil.pid_exists(pid) and process.status() != psutil.STATUS_ZOMBIE:
            if time.monotonic() > deadline:
                raise FleetError(f"the server (process {pid}) does not stop; see {home}/server.log")
            time.sleep(0.05)
    return ours


ACTIONS = {
    "reapply": "get new slices, and go on from the last checkpoint",
    "resume": "stay on the same slices, and go on from the last checkpoint",
    "rerun": "stay on the same slices, and start afresh",
    "pass": "leave it to a person: the job fails",
}


def rules_command(rows: Sequence[dict[str, str]]) -> click.Command:
    """`rows`: rule, what it does by reason, and what it is the default for."""

    @click.command("rules", short_help="The five rules of recovery.")
    @json_option
    def rules(as_json: bool) -> None:
        """What follows when an attempt ends, by rule. Choose one with --rule or `rule:`.

        The default is pre when the first kind of capacity is spot, else pass. Needs no server.
        """
        if as_json:
            output.print_json({"rules": rows, "actions": ACTIONS})
            return
        titles = [title.replace("_", " ").upper() for title in rows[0]]
        output.print_table(titles, (list(row.values()) for row in rows), "")
        click.echo()
        for action, meaning in ACTIONS.items():
            click.echo(f"{action:<8}  {meaning}")

    return rules
