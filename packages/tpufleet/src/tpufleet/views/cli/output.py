"""Where commands print: tables for terminals and for pipes, JSON for programs."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from tpufleet.model.api_types import JobRow
from tpufleet.model.values import encoding
from tpufleet.views import text
from tpufleet.views.cli.usage_errors import HintedUsageError

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

GAP = 2  # spaces between columns
COLUMN_WIDTH = 28  # a sentence or a long name in less is hard to read
MIN_COLUMN_WIDTH = 8

Cell = str | tuple[str, str]  # a text, or a text and its style

NARROW = 100  # columns; below, tables leave out what explains rather than tells

_JSON = "tpufleet.json"  # in the context


def _remember_json(context: click.Context, _: click.Parameter, wanted: bool) -> None:
    if wanted:
        context.meta[_JSON] = True


# Read by `as_json`, so that no function has to pass it on.
json_option = click.option(
    "--json",
    is_flag=True,
    expose_value=False,
    callback=_remember_json,
    help="Print JSON.",
)
yes_option = click.option("--yes", "-y", is_flag=True, help="Do not ask for confirmation.")
detach_option = click.option(
    "--detach", "-d", is_flag=True, help="Submit, print the id, and return."
)
type_option = click.option(
    "--type", "tpu_type", default="v5e-16", show_default=True, help="TPU type."
)
python_folder_option = click.option(
    "--python-folder",
    type=click.Path(path_type=Path, exists=True, file_okay=False),
    metavar="DIR",
    help="A relocatable Python for Linux, instead of downloading one.",
)
dry_run_option = click.option("--dry-run", is_flag=True, help="Only show what would be done.")


def tag_option(*names: str) -> Callable[[Any], Any]:
    return repeatable(*names, "tags", metavar="TAG", help="Add a tag. Repeatable.")


def example(line: str) -> str:
    """The epilog of a command."""
    return f"\b\nExample:\n  {line}\n"


def options(*decorators: Any) -> Callable[[Any], Any]:
    """Several options and arguments as one decorator."""

    def add(command: Any) -> Any:
        for decorator in reversed(decorators):
            command = decorator(command)
        return command

    return add


def as_json() -> bool:
    """Whether the command that runs was given --json."""
    context = click.get_current_context(silent=True)
    return context is not None and bool(context.meta.get(_JSON))


def is_terminal() -> bool:
    return sys.stdout.isatty()


def is_narrow() -> bool:
    return is_terminal() and console().width < NARROW


def print_status(message: str) -> None:
    """A message for the user on standard error, apart from the command's result."""
    click.echo(text.without_control_characters(message), err=True)


def print_warnings(warnings: Iterable[object]) -> None:
    for warning in warnings:
        print_status(f"warning: {warning}")


def print_retrying(error: Exception) -> None:
    """What went wrong for now, without the advice: the command goes on by itself."""
    print_status(f"{str(error).partition(chr(10))[0]}; retrying")


def print_json(value: Any) -> None:
    """One JSON document on one line."""
    click.echo(encoding.to_json(value).decode())


def printed_json(value: object) -> bool:
    """Print the value if --json was given; False: it is still to be shown to people."""
    if as_json():
        print_json(value)
    return as_json()


def print_result(value: object, message: str) -> None:
    """The result of a change, for programs or for people."""
    if not printed_json(value):
        click.echo(text.without_control_characters(message))


def print_submitted(row: JobRow, accelerator: str, note: str = "", err: bool = False) -> None:
    line = f"submitted {row.name} as {row.id} on {row.slices} × {accelerator}{note}"
    click.echo(line, err=err)


def print_deleted(value: object, what: str) -> None:
    print_result(value, f"deleted {what}")


def confirm_deletion(what: str, yes: bool) -> None:
    confirm(f"Delete {what}?", yes)


def print_nothing_to(verb: str, things: str) -> None:
    print_status(f"no {things} to {verb}")


def none_yet(things: str, command: str) -> str:
    """Instead of an empty table."""
    return f"no {things}; add one with `{command}`"


def print_line(line: str, style: str = "") -> None:
    """One line, coloured on a terminal."""
    line = text.without_control_characters(line)
    if style and is_terminal():
        console().print(line, style=style, markup=False, highlight=False, soft_wrap=True)
    else:
        click.echo(line)


@functools.cache
def console() -> Any:
    from rich.console import Console  # slow to import; not needed for pipes

    return Console()


def print_table(
    titles: Sequence[str],
    rows: Iterable[Sequence[Cell]],
    empty: str = "none",
    *,
    value: object = None,
    droppable: Sequence[str] | None = None,
    whole: Sequence[str] = (),
) -> None:
    """Aligned columns; to a pipe without truncation or colour. `empty` is printed for no rows, and
    with --json the `value`.

    On a terminal the last column is wrapped. With `droppable`, each row takes one line instead: the
    last column is cut, and these columns are left out, the first one first, while it lacks room.
    Columns that are `whole` are never cut.
    """
    if value is not None and printed_json(value):
        return
    styled = [[_styled(cell) for cell in row] for row in rows]
    if not styled:
        print_status(empty)
    elif is_terminal():
        _rich_table(titles, styled, droppable, whole)
    else:
        lines = aligned([titles, *([value for value, _ in row] for row in styled)])
        click.echo("\n".join(lines))


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


def _rich_table(
    titles: Sequence[str],
    rows: list[list[tuple[str, str]]],
    droppable: Sequence[str] | None,
    whole: Sequence[str],
) -> None:
    from rich.table import Table
    from rich.text import Text

    natural = {
        title: max(len(title), *(len(row[at][0]) for row in rows))
        for at, title in enumerate(titles)
    }
    widths = column_widths(natural, droppable or (), console().width, whole)
    table = Table(box=None, pad_edge=False, padding=(0, GAP, 0, 0), header_style="bold")
    for title, width in widths.items():
        wrapped = title == titles[-1] and droppable is None
        table.add_column(
            title, width=width, no_wrap=not wrapped, overflow="fold" if wrapped else "ellipsis"
        )
    for row in rows:
        cells = zip(titles, row, strict=True)
        shown = (Text(value, style=style) for title, (value, style) in cells if title in widths)
        table.add_row(*shown)
    console().print(table)


def column_widths(
    natural: Mapping[str, int], droppable: Sequence[str], total: int, whole: Sequence[str] = ()
) -> dict[str, int]:
    """Widths that fit into `total`: droppable columns are left out, the first one first, until
    every other column has a readable width; the last column that is left gets the rest."""
    wanted = {
        title: width if title in whole else min(width, COLUMN_WIDTH)
        for title, width in natural.items()
    }
    for title in droppable:
        if _table_width(wanted) > total:
            del wanted[title]
    last = list(wanted)[-1]
    cut = [title for title in wanted if title not in whole]
    while cut and (excess := _table_width(wanted) - total) > 0:
        widest = max(cut, key=lambda title: (wanted[title], title != last))
        if wanted[widest] <= MIN_COLUMN_WIDTH:
            break
        wanted[widest] -= min(excess, wanted[widest] - MIN_COLUMN_WIDTH, 4)
    for title in (last, *wanted):
        spare = max(0, total - _table_width(wanted))
        wanted[title] += min(spare, max(0, natural[title] - wanted[title]))
    return wanted


def _table_width(widths: Mapping[str, int]) -> int:
    return sum(widths.values()) + GAP * (len(widths) - 1)


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """A line for each row, without truncation."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]


class CommandGroup(click.Group):
    """A command that has subcommands beside its own arguments: `tpu reserve lab --for 2h`, and
    `tpu reserve list`. A first word that names a subcommand runs that; `list`, as in other groups,
    may be left out."""

    allow_extra_args = False
    allow_interspersed_args = True

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**{**attributes, "invoke_without_command": True})

    def make_context(
        self, info_name: str | None, args: list[str], parent: click.Context | None = None,
        **extra: Any,
    ) -> click.Context:  # fmt: skip
        if args and (command := self.commands.get(args[0])) is not None:
            name = f"{info_name} {args[0]}"
            return command.make_context(name, args[1:], parent=parent, **extra)
        args = args[1:] if args[:1] == ["list"] else args
        return super().make_context(info_name, args, parent, **extra)

    def invoke(self, context: click.Context) -> Any:
        own = context.command is self
        return click.Command.invoke(self, context) if own else context.command.invoke(context)

    def parse_args(self, context: click.Context, args: list[str]) -> list[str]:
        return click.Command.parse_args(self, context, args)

    def collect_usage_pieces(self, context: click.Context) -> list[str]:
        return click.Command.collect_usage_pieces(self, context)

    def format_options(self, context: click.Context, formatter: click.HelpFormatter) -> None:
        click.Command.format_options(self, context, formatter)
        self.format_commands(context, formatter)

    def shell_complete(self, context: click.Context, incomplete: str) -> list[CompletionItem]:
        from click.shell_completion import CompletionItem

        names = [name for name in self.commands if name.startswith(incomplete)]
        items = [
            CompletionItem(name, help=self.commands[name].get_short_help_str()) for name in names
        ]
        return [*items, *click.Command.shell_complete(self, context, incomplete)]


def options_as_terms(args: Sequence[str], options: Collection[str]) -> list[str]:
    """`--state failed --state lost` is `state:failed,lost`; `--archived` is `is:archived`."""
    terms: dict[str, list[str]] = {}
    kept: list[str] = []
    words = iter(args)
    for word in words:
        name, equals, value = word.partition("=")
        if name in options:
            terms.setdefault(name.removeprefix("--"), []).append(
                value if equals else next(words, "")
            )
        else:
            kept.append("is:archived" if word == "--archived" else word)
    return [*kept, *(f"{name}:{','.join(values)}" for name, values in terms.items())]


def read_secret(question: str) -> str:
    """From standard input, or prompted for; never an argument, which others could see."""
    if sys.stdin.isatty():
        return str(click.prompt(question, hide_input=True, err=True))
    return sys.stdin.read().removesuffix("\n")


def confirm(question: str, yes: bool) -> None:
    """Ask on a terminal; elsewhere --yes is required."""
    if yes:
        return
    if not sys.stdin.isatty():
        raise HintedUsageError("not a terminal; pass --yes to confirm")
    click.confirm(question, abort=True)


def require_any(options: Mapping[str, object]) -> None:
    """Of these options, which change something, at least one has to be given."""
    if all(value in (None, ()) for value in options.values()):
        raise HintedUsageError(f"nothing to change; pass one of {', '.join(options)}")


def require_one(options: Mapping[str, object]) -> None:
    """Of these options and arguments, exactly one has to be given."""
    if sum(bool(value) for value in options.values()) != 1:
        raise HintedUsageError(f"pass one of {', '.join(options)}")


def repeatable(*names: str, **attributes: Any) -> Callable[[Any], Any]:
    """An option that may be given several times; the order is kept."""
    return click.option(*names, multiple=True, **attributes)
