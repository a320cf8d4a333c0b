"""`tpu config import`: settings, aliases and folders from the data.json of the job manager."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from tpufleet.errors import BadInput, NotFound
from tpufleet.model.people.preferences import (
    DEFAULT_CONFIG_ALIASES,
    SETTINGS,
    PreferenceChanges,
)
from tpufleet.views import text
from tpufleet.views.cli import connection, output
from tpufleet.views.cli.output import json_option


@click.command("import", epilog="\b\nExample:\n  tpu config import data.json --as ada\n")
@click.argument("file", type=click.Path(dir_okay=False, path_type=Path))
@click.option("--as", "name", metavar="USER", help="Import what FILE has of this user.")
@json_option
def config_import(file: Path, name: str | None) -> None:
    """Import settings, aliases and folders from the data.json of the job manager that
    this program replaces. Its jobs are not imported."""
    try:
        document = json.loads(file.read_text(encoding="utf-8"))
        users = document["users"]
    except OSError as error:
        raise BadInput(f"{file}: {error.strerror}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise BadInput(
            f"{file} is no data.json of the former job manager: it has no JSON object with `users`"
        ) from error
    with connection.connect() as client:
        name = name or client.me().name
        if name not in users:
            raise NotFound(
                f"{file}: no user named {name!r}; pass --as with one of {', '.join(users)}"
            )
        changes, skipped = imported(users[name], document)
        client.change_preferences(changes)
    counts = {
        "settings": len(changes.settings),
        "config aliases": len(changes.config_aliases),
        "TPU aliases": len(changes.tpu_aliases),
        "folders": len(changes.folders),
    }
    if output.printed_json({"imported": counts, "skipped": skipped}):
        return
    click.echo("imported " + ", ".join(f"{count} {what}" for what, count in counts.items()))
    for each in skipped:
        output.print_status(f"  not imported: {text.one_line(each)}")


def imported(user: dict[str, Any], document: dict[str, Any]) -> tuple[PreferenceChanges, list[str]]:
    """What can be taken over, and what cannot."""
    skipped: list[str] = []
    values: dict[str, Any] = {}
    for key, value in dict(user.get("settings") or {}).items():
        if key in SETTINGS and isinstance(value, (bool, int, str)):
            values[key] = value
        elif value:
            skipped.append(f"setting {key}={value!r}")
    folders: dict[str, str | None] = {
        str(n): str(path) for n, path in dict(user.get("working_dir") or {}).items()
    }
    aliases = {
        str(alias): str(path) for alias, path in dict(user.get("config_aliases") or {}).items()
    }
    tpus: dict[str, str | None] = {
        str(alias): str(name) for alias, name in dict(document.get("tpu_aliases") or {}).items()
    }
    if jobs := user.get("job_data"):
        skipped.append(f"{text.counted(len(jobs), 'job')}, which ran in tmux")
    return (
        PreferenceChanges(
            settings=values,
            config_aliases={
                name: path
                for name, path in aliases.items()
                if DEFAULT_CONFIG_ALIASES.get(name) != path
            },
            tpu_aliases=tpus,
            folders=folders,
        ),
        skipped,
    )
