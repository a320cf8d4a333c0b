"""`tpu submit-code`: the client's side of the Firestore collection."""

from __future__ import annotations

import getpass
from collections.abc import Callable, Iterable
from datetime import datetime
from pathlib import Path
from typing import Any

import click

from tpufleet.errors import BadInput
from tpufleet.views import text
from tpufleet.views.cli import output
from tpufleet.views.cli.output import json_option

EXAMPLE = """\
x = jnp.ones((100, 100))
result = float(jnp.sum(x @ x))
logger.info("challenge %s: the sum is %s", challenge_number, result)
"""
_SINCE = {"pending": "created_at", "scheduled": "scheduled_at", "running": "started_at"}
_TIMES = ("created_at", "scheduled_at", "started_at", "completed_at")
_TOLD = (
    "id", "status", "challenge_number", "timeout", "seconds", *_TIMES, "log_url", "result_url",
)  # fmt: skip


def submit_code_command(codes: Callable[[dict[str, Any]], Any]) -> click.Command:
    @click.command(
        "submit-code",
        short_help="Send code by Firestore.",
        epilog="""\b
Examples:
  tpu submit-code solution.py --challenge 7 --follow
  tpu submit-code --list
  tpu submit-code --show 9yTf0sWlYSS3Y7kcWZUc --follow
""",
    )
    @click.argument("file", required=False)
    @click.option("--challenge", type=int, default=1, show_default=True, help="Its number.")
    @click.option("--timeout", type=float, default=300, show_default=True, help="In seconds.")
    @click.option("--description", default="", help="Kept with the document.")
    @click.option("--list", "listing", is_flag=True, help="The 10 newest documents.")
    @click.option("--show", "shown", metavar="ID", help="A document that is there already.")
    @click.option("--follow", "-f", is_flag=True, help="Tell each change until it has ended.")
    @click.option("--project", help="Google Cloud project (default: that of the credentials).")
    @click.option("--database", help="Firestore database (default: the default one).")
    @click.option("--collection", "name", default="tpu_jobs", show_default=True)
    @json_option
    @click.pass_context
    def submit_code(
        context: click.Context,
        file: str | None,
        challenge: int,
        timeout: float,
        description: str,
        listing: bool,
        shown: str | None,
        follow: bool,
        as_json: bool,
        **place: Any,
    ) -> None:
        """Add the Python code in FILE (`-` is standard input; a small example without one) to a
        Firestore collection that a `tpu bridge firestore` serves.

        The code is given jax, jnp, logger and challenge_number, and hands back what it calls
        `result`. The exit status with --follow is 0 when it completed, 1 when it failed.
        """
        there = codes(place)
        if listing:
            _list(there.newest(), as_json)
            return
        if shown is None:
            about = {"submitted_by": getpass.getuser(), "description": description}
            shown = there.add(_code(file), challenge, timeout, about)
        told = there.follow(shown) if follow else [there.show(shown)]
        status = _tell(told, as_json, follow)
        context.exit(status if follow else 0)

    return submit_code


def _code(file: str | None) -> str:
    if file is None:
        return EXAMPLE
    try:
        return click.get_text_stream("stdin").read() if file == "-" else Path(file).read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise BadInput(f"{file}: cannot be read: {error}") from error


def _list(rows: list[dict[str, Any]], as_json: bool) -> None:
    if as_json:
        output.print_json({"documents": rows})
        return
    output.print_table(
        ["id", "status", "challenge", "created", "result"],
        [
            [
                row["id"],
                str(row.get("status")),
                str(row.get("challenge_number", "")),
                _words(row.get("created_at")),
                text.one_line(str(row.get("error") or row.get("result") or ""))[:60],
            ]
            for row in rows
        ],
        empty="no documents; `tpu submit-code FILE` adds one",
    )


def _tell(rows: Iterable[dict[str, Any]], as_json: bool, follow: bool) -> int:
    """The exit status. On the way to its end a document gets a line for each step."""
    status = ""
    for row in rows:
        status = str(row.get("status"))
        if as_json:
            output.print_json(row)
            continue
        if follow and status in _SINCE:
            click.echo(f"{_words(row.get(_SINCE[status]))}  {row['id']}  {text.one_line(status)}")
            continue
        output.print_fields((name, _words(row.get(name))) for name in _TOLD)
        for name in ("result", "error"):
            if row.get(name) is not None:
                click.echo(f"{name}: {text.without_control_characters(str(row[name]))}")
    return 1 if status == "failed" else 0


def _words(value: Any) -> str:
    if isinstance(value, datetime):
        return value.strftime("%Y-%m-%d %H:%M:%S")
    return "" if value is None else str(value)
