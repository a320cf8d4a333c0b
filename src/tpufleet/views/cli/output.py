"""Where commands print: tables for terminals and for pipes, JSON for programs."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import click

from tpufleet.model import encoding
from tpufleet.views import text
from tpufleet.views.cli.registry import HintedUsageError

Cell = str | tuple[str, str]  # a text, or a text and its style

json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON.")
yes_option = click.option("--yes", "-y", is_flag=True, help="Do not ask for confirmation.")
follow_option = click.option("--follow", "-f", is_flag=True, help="Follow the job until it ends.")


def is_terminal() -> bool:
    return sys.stdout.isatty()


def print_status(message: str) -> None:
    """A message for the user on standard error, apart from the command's result."""
    click.echo(message, err=True)


def print_json(value: Any) -> None:
    """One JSON document on one line."""
    click.echo(encoding.to_json(value).decode())


def print_result(value: object, message: str, as_json: bool) -> None:
    """The result of a change, for programs or for people."""
    if as_json:
        print_json(value)
    else:
        click.echo(message)


def print_line(line: str, style: str = "") -> None:
    """One line, coloured on a terminal."""
    if style and is_terminal():
        console().print(line, style=style, markup=False, highlight=False, soft_wrap=True)
    else:
        click.echo(line)


@functools.cache
def console() -> Any:
    from rich.console import Console  # slow to import; not needed for pipes

    return Console()


def print_table(titles: Sequence[str], rows: Iterable[Sequence[Cell]], empty: str) -> None:
    """Aligned columns; to a pipe without truncation or colour. `empty` is printed for no rows."""
    styled = [[_styled(cell) for cell in row] for row in rows]
    if not styled:
        print_status(empty)
    elif is_terminal():
        _rich_table(titles, styled)
    else:
        _plain_table(titles, styled)


def print_fields(pairs: Iterable[tuple[str, Cell]]) -> None:
    """`name:  value`, one per line; empty values are omitted."""
    styled = [(name, _styled(cell)) for name, cell in pairs]
    kept = [(name, cell) for name, cell in styled if cell[0] not in ("", "-")]
    width = max((len(name) for name, _ in kept), default=0)
    for name, (value, style) in kept:
        print_line(f"{name + ':':<{width + 1}}  {value}", style)


def _styled(cell: Cell) -> tuple[str, str]:
    value, style = (cell, "") if isinstance(cell, str) else cell
    return text.one_line(value), style


def _rich_table(titles: Sequence[str], rows: list[list[tuple[str, str]]]) -> None:
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="bold")
    for title in titles:
        table.add_column(title, no_wrap=title != titles[-1], overflow="fold")
    for row in rows:
        table.add_row(*(Text(value, style=style) for value, style in row))
    console().print(table)


def _plain_table(titles: Sequence[str], rows: list[list[tuple[str, str]]]) -> None:
    lines = [list(titles), *([value for value, _ in row] for row in rows)]
    widths = [max(len(cells[index]) for cells in lines) for index in range(len(titles))]
    for cells in lines:
        padded = (cell.ljust(width) for cell, width in zip(cells, widths, strict=True))
        click.echo("  ".join(padded).rstrip())


def confirm(question: str, yes: bool) -> None:
    """Ask on a terminal; elsewhere --yes is required."""
    if yes:
        return
    if not sys.stdin.isatty():
        raise HintedUsageError("not a terminal; pass --yes to confirm")
    click.confirm(question, abort=True)


def repeatable(*names: str, **attributes: Any) -> Callable[[Any], Any]:
    """An option that may be given several times; the order is kept."""
    return click.option(*names, multiple=True, **attributes)
