"""`tpu config`: preferences of a user, kept on the server: settings, aliases, folders, views."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING

import click

from tpufleet.entry_points import registered
from tpufleet.errors import FleetError, not_found, unknown
from tpufleet.model.people.preferences import (
    SETTINGS,
    PreferenceChanges,
    Preferences,
    find_zone,
)
from tpufleet.model.tpu import type_lookup
from tpufleet.views import text
from tpufleet.views.cli import connection, output
from tpufleet.views.cli.jobs.rules import rules
from tpufleet.views.cli.output import example, json_option
from tpufleet.views.cli.settings.completion import completion

if TYPE_CHECKING:
    from tpufleet.client.fleet import FleetClient


PATH_PREFIX = "config"  # of paths in the config of a program


def _change(changes: PreferenceChanges) -> Preferences:
    with connection.connect() as client:
        return client.change_preferences(changes)


def read() -> Preferences:
    with connection.connect() as client:
        return client.preferences()


def use_time_zone(client: FleetClient) -> None:
    """Show times in the time zone of the user."""
    text.show_times_in(find_zone(str(client.preferences().setting("time_zone"))))


# Settings


@click.group(
    cls=output.CommandGroup,
    epilog="\b\nExamples:\n  tpu config\n  tpu config set time_zone Europe/Berlin\n"
    "  tpu config alias set lr config.optimizer.learning_rate\n",
)
@json_option
def config() -> None:
    """Show settings: key, value and where each comes from; or change yours.

    Settings of the connection come from the environment and a file on this machine; your own are
    kept on the server, so they are the same on every machine.
    """
    rows = connection_rows()
    try:
        preferences = read()
        rows += [
            (key, _shown(preferences.setting(key)), _origin(key in preferences.settings),
             setting.description)
            for key, setting in SETTINGS.items()
        ]  # fmt: skip
    except FleetError as error:
        output.print_status(f"your settings are on the server: {error}")
    if output.as_json():
        names = ("key", "value", "origin", "description")
        output.print_json({"settings": [dict(zip(names, row, strict=True)) for row in rows]})
        return
    droppable = ("MEANING",) if output.is_narrow() else None
    output.print_table(("KEY", "VALUE", "ORIGIN", "MEANING"), rows, "", droppable=droppable)


def connection_rows() -> list[tuple[str, str, str, str]]:
    """Of this machine: from the environment, the file, or the defaults."""
    from tpufleet import config as configuration

    values = connection.settings()
    rows = []
    for key, meaning in (
        ("server", "URL of the server."),
        ("home", "Folder for the state of this machine."),
        ("token_file", "File with your token."),
        ("ca_file", "CA certificates to trust."),
    ):
        value = getattr(values, key, None)
        origin = configuration.origin(values, key, os.environ)
        rows.append((key, "-" if value is None else str(value), origin, meaning))
    return rows


def _shown(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _origin(changed: bool) -> str:
    return "yours" if changed else "default"


@config.command("get", epilog=example("tpu config get time_zone"))
@click.argument("key")
def config_get(key: str) -> None:
    """Print the value of one of your settings."""
    if key not in SETTINGS:
        raise unknown("setting", key, SETTINGS)
    click.echo(_shown(read().setting(key)))


@config.command("set", epilog=example("tpu config set time_zone Europe/Berlin"))
@click.argument("key")
@click.argument("value")
def config_set(key: str, value: str) -> None:
    """Set KEY to VALUE."""
    changed = _change(PreferenceChanges(settings={key: value}))
    click.echo(f"{key} is now {_shown(changed.setting(key))}")


@config.command("reset", epilog=example("tpu config reset time_zone"))
@click.argument("keys", metavar="[KEY]…", nargs=-1)
def config_reset(keys: tuple[str, ...]) -> None:
    """Return KEYs, or all of your settings, to their defaults."""
    _change(PreferenceChanges(settings=dict.fromkeys(keys), reset_settings=not keys))
    click.echo(f"{', '.join(keys) or 'all settings'} reset")


# Aliases


@config.group(
    cls=output.CommandGroup,
    epilog="\b\nExamples:\n  tpu config alias set lr config.optimizer.learning_rate\n"
    "  tpu config alias set big v4-128\n",
)
@json_option
def alias() -> None:
    """List or change your aliases: of config paths, and of TPU types.

    `tpu run big --config lr=0.1 -- python train.py` uses one of each: it runs on the TPU type that
    `big` stands for, and appends `--config.optimizer.learning_rate=0.1` to the command, if the
    aliases are those of the examples.
    """
    known = read()
    rows = [
        (name, "config", path, _origin(name in known.config_aliases))
        for name, path in sorted(known.all_config_aliases.items())
    ]
    rows += [(name, "TPU", kind, _origin(True)) for name, kind in sorted(known.tpu_aliases.items())]
    output.print_table(
        ("ALIAS", "OF", "MEANS", "ORIGIN"),
        rows,
        value={"config": known.all_config_aliases, "tpu": known.tpu_aliases},
    )


@alias.command("set", epilog=example("tpu config alias set lr config.optimizer.learning_rate"))
@click.argument("name")
@click.argument("meaning", metavar="PATH|TYPE")
def alias_set(name: str, meaning: str) -> None:
    """Let NAME mean a PATH, which starts with config, or else a TPU TYPE."""
    if meaning.startswith(PATH_PREFIX):
        _change(PreferenceChanges(config_aliases={name: meaning}))
    else:
        if not type_lookup.is_known(meaning):
            output.print_status(
                f"{meaning} is not a TPU type{type_lookup.suggestion(meaning)}; it can be the name "
                "of a TPU VM"
            )
        _change(PreferenceChanges(tpu_aliases={name: meaning}))
    click.echo(f"{name} means {meaning}")


@alias.command("delete", epilog=example("tpu config alias delete lr"))
@click.argument("name")
def alias_delete(name: str) -> None:
    """Delete an alias."""
    known = read()
    if name in known.tpu_aliases:
        _change(PreferenceChanges(tpu_aliases={name: None}))
    elif name in known.all_config_aliases:
        _change(PreferenceChanges(config_aliases={name: None}))
    else:
        raise unknown("alias", name, known.all_config_aliases)
    output.print_deleted({"deleted": name}, name)


# Numbered folders


@config.group(
    "dir",
    cls=output.CommandGroup,
    epilog="\b\nExamples:\n  tpu config dir here 1\n  tpu run v5e-16 --dir 1 -- python train.py\n",
)
@json_option
def folders() -> None:
    """List or change your numbered folders, 1 to 100."""
    known = read().folders
    rows = [(number, known[number]) for number in sorted(known, key=int)]
    empty = output.none_yet("folders", "tpu config dir here 1")
    output.print_table(("DIR", "PATH"), rows, empty, value={"folders": known})


def _set_folders(changes: dict[str, str | None]) -> None:
    _change(PreferenceChanges(folders=changes))
    for number, path in changes.items():
        click.echo(f"folder {number} is {path or 'deleted; its files are untouched'}")


@folders.command("set", epilog=example("tpu config dir set ~/code/train 2"))
@click.argument("path", type=click.Path(file_okay=False, path_type=Path))
@click.argument("number", metavar="N")
def folder_set(path: Path, number: str) -> None:
    """Let N mean the folder PATH."""
    _set_folders({number: str(path.expanduser().resolve())})


@folders.command("here", epilog=example("tpu config dir here 2"))
@click.argument("number", metavar="N", default="1")
def folder_here(number: str) -> None:
    """Let N (default: 1) mean the current folder."""
    _set_folders({number: str(Path.cwd())})


@folders.command("get", epilog="\b\nExample:\n  cd $(tpu config dir get 1)\n")
@click.argument("number", metavar="N")
def folder_get(number: str) -> None:
    """Print the path of N; 0 is the parent of folder 1."""
    click.echo(find_folder(read(), number))


def find_folder(preferences: Preferences, number: str) -> str:
    known = preferences.folders
    if number == "0" and "1" in known:
        return str(Path(known["1"]).parent)
    if number not in known:
        raise not_found("folder", number, "config dir")
    return known[number]


@folders.command("delete", epilog=example("tpu config dir delete 2"))
@click.argument("number", metavar="N")
def folder_delete(number: str) -> None:
    """Forget folder N. Deletes no files."""
    find_folder(read(), number)
    _set_folders({number: None})


@folders.command("swap", epilog=example("tpu config dir swap 1 2"))
@click.argument("one", metavar="N")
@click.argument("other", metavar="M")
def folder_swap(one: str, other: str) -> None:
    """Exchange folders N and M."""
    known = read()
    _set_folders({one: find_folder(known, other), other: find_folder(known, one)})


# Saved queries


@config.group(
    cls=output.CommandGroup,
    epilog="\b\nExamples:\n  tpu config view save bad 'owner:me state:failed since:7d'\n"
    "  tpu jobs view:bad\n",
)
@json_option
def view() -> None:
    """List or change saved queries of `tpu jobs`."""
    views = read().views
    empty = "no views; save one with `tpu config view save NAME QUERY`"
    output.print_table(("VIEW", "QUERY"), sorted(views.items()), empty, value={"views": views})


@view.command("save", epilog=example("tpu config view save bad state:failed since:7d"))
@click.argument("name")
@click.argument("query", metavar="QUERY…", nargs=-1, required=True)
def view_save(name: str, query: tuple[str, ...]) -> None:
    """Save QUERY as NAME. It is checked first."""
    with connection.connect() as client:
        client.jobs(query=" ".join(query), limit=1)
        client.change_preferences(PreferenceChanges(views={name: " ".join(query)}))
    click.echo(f"saved; `tpu jobs view:{name}` lists its jobs")


@view.command("delete", epilog=example("tpu config view delete bad"))
@click.argument("name")
def view_delete(name: str) -> None:
    """Delete a view."""
    saved_query(read(), name)
    _change(PreferenceChanges(views={name: None}))
    output.print_deleted({"deleted": name}, name)


def with_view(preferences: Preferences, query: str) -> str:
    """The query, with a saved one in place of `view:NAME`."""
    return re.sub(r"(?<!\S)view:(\S+)", lambda found: saved_query(preferences, found[1]), query)


def saved_query(preferences: Preferences, name: str) -> str:
    if name not in preferences.views:
        raise unknown("view", name, sorted(preferences.views))
    return preferences.views[name]


config.add_command(completion)
config.add_command(rules)
for commands in registered("tpufleet.config"):  # of other distributions
    for command_name, command in commands.items():
        config.add_command(command.load(), command_name)
