"""What a shell completes for arguments: job names, TPU types, pools, zones, reservations, views, …

Names come from the server, asked for at most a second.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import click
from click.shell_completion import CompletionItem

from tpufleet.errors import FleetError

if TYPE_CHECKING:
    from tpufleet.client.fleet import FleetClient

ANSWER_WITHIN_SECONDS = 1.0
MAX_JOBS = 200

Candidates = Sequence[tuple[str, str]]  # value and what the shell shows beside it


class CompletedName(click.ParamType):
    """Text of any kind, with proposals for the shell."""

    def __init__(self, name: str, candidates: Callable[[], Candidates]) -> None:
        self.name = name
        self._candidates = candidates

    def shell_complete(
        self, context: click.Context, parameter: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        return [
            CompletionItem(value, help=note)
            for value, note in self._candidates()
            if value.startswith(incomplete)
        ]


def job_names() -> Candidates:
    def ask(client: FleetClient) -> Candidates:
        newest: dict[str, str] = {}
        for row in client.jobs(owner=client.me().name, limit=MAX_JOBS).jobs:
            newest.setdefault(row.name, f"{row.state}, {row.accelerator}")
        return [*newest.items(), ("@last", "your newest job")]

    return _asked(ask)


def pool_names() -> Candidates:
    return _asked(lambda client: [(each.name, each.accelerator) for each in client.pools()])


def tpu_types() -> Candidates:
    from tpufleet.model.tpu import type_lookup

    known = type_lookup.all_types()
    return [
        (spelling, f"chips: {known[name].chips}, hosts: {known[name].hosts}")
        for spelling, name in type_lookup.spellings().items()
    ]


def zones() -> Candidates:
    from tpufleet.model.tpu import tpu_zones

    return [(zone, "") for zone in tpu_zones.zones()]


def views() -> Candidates:
    return _asked(lambda client: sorted(client.preferences().views.items()))


def aliases() -> Candidates:
    def ask(client: FleetClient) -> Candidates:
        known = client.preferences()
        return sorted((known.config_aliases | known.tpu_aliases).items())

    return _asked(ask)


def folders() -> Candidates:
    return _asked(lambda client: sorted(client.preferences().folders.items()))


def settings() -> Candidates:
    from tpufleet.model.people.preferences import SETTINGS

    return [(key, setting.description) for key, setting in SETTINGS.items()]


def reservations() -> Candidates:
    return _asked(
        lambda client: [
            (each.id, f"{each.owner}, {each.pool} {each.note}".strip())
            for each in client.reservations()
        ],
    )


def released() -> Candidates:
    def ask(client: FleetClient) -> Candidates:
        held = [row for row in client.slices() if row.reserved_for is not None]
        return [(row.id, f"held for {row.reserved_for}") for row in held]

    return [*reservations(), *_asked(ask)]


def inventory() -> Candidates:
    def ask(client: FleetClient) -> Candidates:
        rows = client.inventory().rows
        return [(row.alias or row.id, f"{row.accelerator}, {row.state}") for row in rows]

    return _asked(ask)


def channels() -> Candidates:
    return _asked(lambda client: [(each.name, each.kind) for each in client.channels()])


_JOB = CompletedName("job", job_names)
_TYPE = CompletedName("type", tpu_types)
_POOL = CompletedName("pool", pool_names)
_ZONE = CompletedName("zone", zones)
# By name of the parameter in the command's function.
BY_PARAMETER: dict[str, click.ParamType] = {
    "job": _JOB, "jobs": _JOB, "target": _JOB, "before": _JOB, "parent": _JOB,
    "accelerator": _TYPE, "types": _TYPE, "tpu_type": _TYPE,
    "pool": _POOL, "zone": _ZONE, "zones": _ZONE,
    "file": click.Path(), "files": click.Path(), "workdir": click.Path(), "command": click.Path(),
}  # fmt: skip

# By command and parameter, where the name of the parameter says little.
_BY_COMMAND: dict[str, click.ParamType] = {
    name: CompletedName(name.rpartition(".")[2], candidates)
    for candidates, names in {
        views: ("config view delete.name",),
        aliases: ("config alias delete.name",),
        folders: ("run.folder", "config dir get.number", "config dir delete.number"),
        settings: ("config get.key", "config set.key", "config reset.keys"),
        reservations: ("reserve extend.reservation",),
        released: ("reserve end.name",),
        inventory: ("inventory set.name",),
        channels: ("notify delete.name", "notify test.name"),
    }.items()
    for name in names
}


def add_to(command: click.Command, path: str) -> None:
    """Propose values for the plain text parameters of this command and its subcommands."""
    for parameter in command.params:
        name = parameter.name or ""
        proposed = _BY_COMMAND.get(f"{path}.{name}") or BY_PARAMETER.get(name)
        if proposed is not None and parameter.type in (click.STRING, click.UNPROCESSED):
            parameter.type = proposed
    if isinstance(command, click.Group):
        for name, child in command.commands.items():
            add_to(child, f"{path} {name}")


def _asked(ask: Callable[[FleetClient], Candidates]) -> Candidates:
    """The answer of the server; none where there is no server."""
    from tpufleet import config
    from tpufleet.views.cli import connection

    try:
        settings = connection.settings()
        url = settings.server or config.embedded_server_url(settings.home)
        if url is None:
            return ()
        from tpufleet.client.fleet import FleetClient

        with FleetClient(
            url,
            config.read_token(settings, url),
            ca_file=settings.ca_file,
            certificate=config.embedded_certificate(settings.home, url),
            timeout=ANSWER_WITHIN_SECONDS,
        ) as client:
            return ask(client)
    except (FleetError, OSError):  # a shell must not print errors on the command line being typed
        return ()
