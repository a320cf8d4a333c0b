"""`tpu config`: preferences of a user, kept on the server: settings, aliases, folders, views."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import click

from tpufleet.errors import BadInput, FleetError, NotFound
from tpufleet.model.people.preferences import (
    SETTINGS,
    PreferenceChanges,
    Preferences,
    find_zone,
)
from tpufleet.model.tpu import topology
from tpufleet.views import text
from tpufleet.views.cli import connection, output
from tpufleet.views.cli.entry_points import registered
from tpufleet.views.cli.jobs.rules import rules
from tpufleet.views.cli.output import json_option
from tpufleet.views.cli.settings.completion import completion

if TYPE_CHECKING:
    from tpufleet.client.fleet import FleetClient


def _change(changes: PreferenceChanges) -> Preferences:
    with connection.connect() as client:
        return client.change_preferences(changes)


def read() -> Preferences:
    with connection.connect() as client:
        return client.preferences()


def use_time_zone(client: FleetClient) -> None:
    """Show times in the time zone of the user."""
    text.show_times_in(find_zone(str(client.preferences().setting("time_zone"))))


# tpu config


@click.group(
    cls=output.ListingGroup,
    epilog="\b\nExamples:\n  tpu config\n  tpu config set time_zone Europe/Berlin\n"
    "  tpu config alias set lr config.optimizer.learning_rate\n",
)
@json_option
@click.pass_context
def config(context: click.Context, as_json: bool) -> None:
    """Show settings: key, value and where each comes from; or change yours.

    Settings of the connection come from the environment and a file on this machine; your own are
    kept on the server, so they are the same on every machine.
    """
    if context.invoked_subcommand is not None:
        return
    rows = connection_rows()
    try:
        preferences = read()
        rows += [
            (key, _shown(preferences.setting(key)), "yours" if key in preferences.settings
             else "default", setting.description)
            for key, setting in SETTINGS.items()
        ]  # fmt: skip
    except FleetError as error:
        output.print_status(f"your settings are on the server: {error}")
    if as_json:
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
        ("server", "URL of the control plane."),
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


@config.command("get", epilog="\b\nExample:\n  tpu config get time_zone\n")
@click.argument("key")
@json_option
def config_get(key: str, as_json: bool) -> None:
    """Print the value of one of your settings."""
    if key not in SETTINGS:
        raise BadInput(f"unknown setting {key!r}; known: {', '.join(SETTINGS)}")
    value = read().setting(key)
    output.print_result({key: value}, _shown(value), as_json)


@config.command("set", epilog="\b\nExample:\n  tpu config set time_zone Europe/Zurich\n")
@click.argument("key")
@click.argument("value")
@json_option
def config_set(key: str, value: str, as_json: bool) -> None:
    """Set KEY to VALUE."""
    changed = _change(PreferenceChanges(settings={key: value}))
    output.print_result(changed, f"{key} is now {_shown(changed.setting(key))}", as_json)


@config.command("reset", epilog="\b\nExample:\n  tpu config reset time_zone\n")
@click.argument("keys", metavar="[KEY]…", nargs=-1)
@json_option
def config_reset(keys: tuple[str, ...], as_json: bool) -> None:
    """Return KEYs, or all of your settings, to their defaults."""
    changes = PreferenceChanges(settings=dict.fromkeys(keys), reset_settings=not keys)
    message = f"{', '.join(keys)} reset" if keys else "all settings reset"
    output.print_result(_change(changes), message, as_json)


# tpu alias


@config.group(
    cls=output.ListingGroup,
    epilog="\b\nExamples:\n  tpu alias\n  tpu alias set lr config.optimizer.learning_rate\n"
    "  tpu alias set big v4-128 --tpu\n",
)
@json_option
@click.pass_context
def alias(context: click.Context, as_json: bool) -> None:
    """List or change your aliases: of config paths, and of TPU types.

    `tpu run big --config lr=0.1 -- python train.py` uses one of each: it runs on the TPU type that
    `big` stands for, and appends `--config.optimizer.learning_rate=0.1` to the command, if the
    aliases are those of the examples.
    """
    if context.invoked_subcommand is not None:
        return
    preferences = read()
    if as_json:
        output.print_json(
            {"config": preferences.all_config_aliases, "tpu": preferences.tpu_aliases}
        )
        return
    rows = [
        (name, "config", path, "yours" if name in preferences.config_aliases else "default")
        for name, path in sorted(preferences.all_config_aliases.items())
    ]
    rows += [(name, "TPU", kind, "yours") for name, kind in sorted(preferences.tpu_aliases.items())]
    output.print_table(("ALIAS", "OF", "MEANS", "ORIGIN"), rows, "no aliases")


_tpu = click.option("--tpu", "is_tpu", is_flag=True, help="An alias of a TPU type.")


@alias.command("set", epilog="\b\nExample:\n  tpu alias set big v5p-128 --tpu\n")
@click.argument("name")
@click.argument("meaning", metavar="PATH|TYPE")
@_tpu
@json_option
def alias_set(name: str, meaning: str, is_tpu: bool, as_json: bool) -> None:
    """Let NAME mean a config PATH, or with --tpu a TPU TYPE."""
    if is_tpu and not topology.is_known(meaning):
        output.print_status(
            f"{meaning} is no TPU type{topology.suggestion(meaning)}; it can be the name of a node"
        )
    changes = (
        PreferenceChanges(tpu_aliases={name: meaning})
        if is_tpu
        else PreferenceChanges(config_aliases={name: meaning})
    )
    output.print_result(_change(changes), f"{name} means {meaning}", as_json)


@alias.command("delete", epilog="\b\nExample:\n  tpu alias delete big --tpu\n")
@click.argument("name")
@_tpu
@json_option
def alias_delete(name: str, is_tpu: bool, as_json: bool) -> None:
    """Delete an alias."""
    known = read().tpu_aliases if is_tpu else read().all_config_aliases
    if name not in known:
        raise NotFound(f"no alias named {name!r}; `tpu alias` lists them")
    changes = (
        PreferenceChanges(tpu_aliases={name: None})
        if is_tpu
        else PreferenceChanges(config_aliases={name: None})
    )
    output.print_result(_change(changes), f"{name} deleted", as_json)


# tpu dir


@config.group(
    "dir",
    cls=output.ListingGroup,
    epilog="\b\nExamples:\n  tpu dir here 1\n  tpu run v5e-16 --dir 1 -- python train.py\n",
)
@json_option
@click.pass_context
def folders(context: click.Context, as_json: bool) -> None:
    """List or change your numbered working directories, 1 to 100."""
    if context.invoked_subcommand is not None:
        return
    known = read().folders
    if as_json:
        output.print_json({"folders": known})
        return
    rows = [(number, known[number]) for number in sorted(known, key=int)]
    output.print_table(("DIR", "PATH"), rows, "no directories; `tpu dir here 1` sets the first")


@folders.command("set", epilog="\b\nExample:\n  tpu dir set ~/research/lm 1\n")
@click.argument("path", type=click.Path(file_okay=False, path_type=Path))
@click.argument("number", metavar="N")
@json_option
def folder_set(path: Path, number: str, as_json: bool) -> None:
    """Let N mean the folder PATH."""
    resolved = str(path.expanduser().resolve())
    changed = _change(PreferenceChanges(folders={number: resolved}))
    output.print_result(changed, f"directory {number} is {resolved}", as_json)


@folders.command("here", epilog="\b\nExample:\n  tpu dir here 1\n")
@click.argument("number", metavar="N", default="1")
@json_option
def folder_here(number: str, as_json: bool) -> None:
    """Let N (default: 1) mean the current folder."""
    here = str(Path.cwd())
    changed = _change(PreferenceChanges(folders={number: here}))
    output.print_result(changed, f"directory {number} is {here}", as_json)


@folders.command("get", epilog="\b\nExample:\n  cd $(tpu dir get 1)\n")
@click.argument("number", metavar="N")
@json_option
def folder_get(number: str, as_json: bool) -> None:
    """Print the path of N; 0 is the parent of directory 1."""
    path = find_folder(read(), number)
    output.print_result({"path": path}, path, as_json)


def find_folder(preferences: Preferences, number: str) -> str:
    known = preferences.folders
    if number == "0" and "1" in known:
        return str(Path(known["1"]).parent)
    if number not in known:
        raise NotFound(
            f"no directory {number}; `tpu dir` lists them, `tpu dir here {number}` sets it"
        )
    return known[number]


@folders.command("delete", epilog="\b\nExample:\n  tpu dir delete 1\n")
@click.argument("number", metavar="N")
@json_option
def folder_delete(number: str, as_json: bool) -> None:
    """Forget directory N. Deletes no files."""
    find_folder(read(), number)
    changed = _change(PreferenceChanges(folders={number: None}))
    output.print_result(changed, f"directory {number} deleted; its files are untouched", as_json)


@folders.command("swap", epilog="\b\nExample:\n  tpu dir swap 1 2\n")
@click.argument("one", metavar="N")
@click.argument("other", metavar="M")
@json_option
def folder_swap(one: str, other: str, as_json: bool) -> None:
    """Exchange directories N and M."""
    known = read()
    swapped: dict[str, str | None] = {
        one: find_folder(known, other),
        other: find_folder(known, one),
    }
    changed = _change(PreferenceChanges(folders=swapped))
    output.print_result(changed, f"directory {one} is {swapped[one]}", as_json)


# tpu view


@config.group(
    cls=output.ListingGroup,
    epilog="\b\nExamples:\n  tpu view save bad 'owner:me state:failed since:7d'\n"
    "  tpu jobs --view bad\n",
)
@json_option
@click.pass_context
def view(context: click.Context, as_json: bool) -> None:
    """List or change saved queries of `tpu jobs`."""
    if context.invoked_subcommand is not None:
        return
    views = read().views
    if as_json:
        output.print_json({"views": views})
        return
    output.print_table(
        ("VIEW", "QUERY"),
        sorted(views.items()),
        "no views; save one with `tpu view save NAME QUERY`",
    )


@view.command("save", epilog="\b\nExample:\n  tpu view save bad 'owner:me state:failed since:7d'\n")
@click.argument("name")
@click.argument("query", metavar="QUERY…", nargs=-1, required=True)
@json_option
def view_save(name: str, query: tuple[str, ...], as_json: bool) -> None:
    """Save QUERY as NAME. It is checked first."""
    with connection.connect() as client:
        client.jobs(query=" ".join(query), limit=1)
        changed = client.change_preferences(PreferenceChanges(views={name: " ".join(query)}))
    output.print_result(changed, f"saved; `tpu jobs --view {name}` lists its jobs", as_json)


@view.command("delete", epilog="\b\nExample:\n  tpu view delete bad\n")
@click.argument("name")
@json_option
def view_delete(name: str, as_json: bool) -> None:
    """Delete a view."""
    saved_query(read(), name)
    changed = _change(PreferenceChanges(views={name: None}))
    output.print_result(changed, f"view {name} deleted", as_json)


def saved_query(preferences: Preferences, name: str) -> str:
    if name not in preferences.views:
        known = ", ".join(sorted(preferences.views)) or "none"
        raise NotFound(f"no view named {name!r}; saved: {known}")
    return preferences.views[name]


config.add_command(completion)
config.add_command(rules)
for commands in registered("tpufleet.config"):  # of other distributions
    for name, command in commands.items():
        config.add_command(command.load(), name)
