"""Where commands print: tables for terminals and for pipes, JSON for programs."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import click

from tpufleet.model import encoding
from tpufleet.views import text

Cell = str | tuple[str, str]  # words, or words with a style

json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON, for programs.")


def is_terminal() -> bool:
    return sys.stdout.isatty()


def print_status(words: str) -> None:
    """A word to the person, which is not part of the answer."""
    click.echo(words, err=True)


def print_json(value: Any) -> None:
    """One JSON document on one line."""
    click.echo(encoding.to_json(value).decode())


def print_line(words: str, style: str = "") -> None:
    """Words in a colour where there are colours."""
    if style and is_terminal():
        console().print(words, style=style, markup=False, highlight=False, soft_wrap=True)
    else:
        click.echo(words)


@functools.cache
def console() -> Any:
    from rich.console import Console  # slow to import; pipes do without

    return Console()


def print_table(titles: Sequence[str], rows: Iterable[Sequence[Cell]], empty: str) -> None:
    """Aligned columns. To a pipe nothing is cut and no colour is sent."""
    listed = [[_pair(cell) for cell in row] for row in rows]
    if not listed:
        print_status(empty)
    elif is_terminal():
        _rich_table(titles, listed)
    else:
        _plain_table(titles, listed)


def print_fields(pairs: Iterable[tuple[str, Cell]]) -> None:
    """`name:  value`, one a line; those without a value are left out."""
    kept = [(name, _pair(cell)) for name, cell in pairs]
    kept = [(name, cell) for name, cell in kept if cell[0] not in ("", "-")]
    width = max((len(name) for name, _ in kept), default=0)
    for name, (words, style) in kept:
        print_line(f"{name + ':':<{width + 1}}  {words}", style)


def _pair(cell: Cell) -> tuple[str, str]:
    words, style = (cell, "") if isinstance(cell, str) else cell
    return text.one_line(words), style


def _rich_table(titles: Sequence[str], rows: list[list[tuple[str, str]]]) -> None:
    from rich.table import Table
    from rich.text import Text

    drawn = Table(box=None, pad_edge=False, header_style="bold")
    for title in titles:
        drawn.add_column(title, no_wrap=title != titles[-1], overflow="fold")
    for row in rows:
        drawn.add_row(*(Text(words, style=style) for words, style in row))
    console().print(drawn)


def _plain_table(titles: Sequence[str], rows: list[list[tuple[str, str]]]) -> None:
    lines = [list(titles), *([words for words, _ in row] for row in rows)]
    widths = [max(len(cells[index]) for cells in lines) for index in range(len(titles))]
    for cells in lines:
        padded = (cell.ljust(width) for cell, width in zip(cells, widths, strict=True))
        click.echo("  ".join(padded).rstrip())


def confirm(question: str, yes: bool) -> None:
    """Ask a person; a program must say --yes."""
    if yes:
        return
    if not sys.stdin.isatty():
        raise click.UsageError("nobody is there to ask; add --yes")
    click.confirm(question, abort=True)


def repeatable(*names: str, **attributes: Any) -> Callable[[Any], Any]:
    """An option that may be given several times, in order."""
    return click.option(*names, multiple=True, **attributes)
