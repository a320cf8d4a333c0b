"""`tpu submit-code`: add code to a Firestore collection, list it, follow it."""

from __future__ import annotations

import getpass
import sys
from collections.abc import Iterable
from datetime import datetime
from pathlib import Path
from typing import Any

import click

from tpufleet.errors import unreadable
from tpufleet.views import text
from tpufleet.views.cli import output
from tpufleet.views.cli.output import json_option
from tpufleet_firestore.cli.collection_options import collection_options

EXAMPLE = """\
x = jnp.ones((100, 100))
result = float(jnp.sum(x @ x))
logger.info("challenge %s: sum = %s", challenge_number, result)
"""
# The time field of each status on the way to the end.
_STATUS_TIMES = {"pending": "created_at", "scheduled": "scheduled_at", "running": "started_at"}
_TIMES = ("created_at", "scheduled_at", "started_at", "completed_at")
_SHOWN_FIELDS = (
    "id", "status", "challenge_number", "timeout", "seconds", *_TIMES, "log_url", "result_url",
)  # fmt: skip


@click.command(
    epilog="""\b
Examples:
  tpu submit-code solution.py --challenge 7 --follow
  tpu submit-code --list
  tpu submit-code --show 9yTf0sWlYSS3Y7kcWZUc --follow
""",
)
@click.argument("file", required=False)
@click.option("--challenge", type=int, default=1, show_default=True, help="Challenge number.")
@click.option("--timeout", type=float, default=300, show_default=True, help="In seconds.")
@click.option("--description", default="", help="Stored in the document.")
@click.option("--list", "listing", is_flag=True, help="List the 10 newest documents.")
@click.option("--show", "document_id", metavar="ID", help="Show an existing document.")
@click.option("--follow", "-f", is_flag=True, help="Print each status change until the end.")
@collection_options
@json_option
@click.pass_context
def submit_code(
    context: click.Context,
    file: str | None,
    challenge: int,
    timeout: float,
    description: str,
    listing: bool,
    document_id: str | None,
    follow: bool,
    project: str | None,
    database: str | None,
    collection: str,
) -> None:
    """Add the Python code in FILE (`-` is standard input; default: a small example) to a Firestore
    collection that a `tpu bridge firestore` serves.

    The code has jax, jnp, logger and challenge_number, and returns the variable `result`. The exit
    status with --follow is 0 when it completed, 1 when it failed.
    """
    from tpufleet_firestore.bridge.client_submissions import CodeSubmissions

    submissions = CodeSubmissions(project, database, collection)
    if listing:
        _list(submissions.list_newest())
        return
    if document_id is None:
        metadata = {"submitted_by": getpass.getuser(), "description": description}
        document_id = submissions.add(_code(file), challenge, timeout, metadata)
    rows = submissions.follow(document_id) if follow else [submissions.show(document_id)]
    status = _show(rows, follow)
    context.exit(status if follow else 0)


def _code(file: str | None) -> str:
    if file is None:
        return EXAMPLE
    try:
        return sys.stdin.read() if file == "-" else Path(file).read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise unreadable(file, error) from error


def _list(rows: list[dict[str, Any]]) -> None:
    output.print_table(
        ["ID", "STATUS", "CHALLENGE", "CREATED", "RESULT"],
        [
            [
                row["id"],
                str(row.get("status")),
                str(row.get("challenge_number", "")),
                _formatted(row.get("created_at")),
                text.one_line(str(row.get("error") or row.get("result") or ""))[:60],
            ]
            for row in rows
        ],
        empty=output.none_yet("documents", "tpu submit-code FILE"),
        value={"documents": rows},
    )


def _show(rows: Iterable[dict[str, Any]], follow: bool) -> int:
    """The exit status. While following, one line per status; at the end the whole document."""
    status = ""
    for row in rows:
        status = str(row.get("status"))
        if output.as_json():
            output.print_json(row)
            continue
        if follow and status in _STATUS_TIMES:
            since = _formatted(row.get(_STATUS_TIMES[status]))
            click.echo(f"{since}  {row['id']}  {text.one_line(status)}")
            continue
        output.print_fields((name, _formatted(row.get(name))) for name in _SHOWN_FIELDS)
        for name in ("result", "error"):
            if row.get(name) is not None:
                click.echo(f"{name}: {text.without_control_characters(str(row[name]))}")
    return 1 if status == "failed" else 0


def _formatted(value: Any) -> str:
    if isinstance(value, datetime):
        return value.strftime("%Y-%m-%d %H:%M:%S")
    return "" if value is None else str(value)
