"""Every `tpu` command line in the documentation is valid."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from tests.docs import markdown
from tpufleet.views.cli.output import CommandGroup
from tpufleet.views.cli.registry import SharedOptions, root

TPU = re.compile(r"(.*/)?tpu")


def simple_commands(line: str) -> list[list[str]]:
    """The simple commands of a shell line: split at pipes, semicolons and redirections."""
    lexer = shlex.shlex(line, posix=True, punctuation_chars="|;&<>()")
    lexer.whitespace_split = True
    commands: list[list[str]] = [[]]
    for argument in lexer:
        if set(argument) <= set("|;&()"):
            commands.append([])
        elif set(argument) <= set("<>"):
            commands[-1].append("<")
        else:
            commands[-1].append(argument)
    return [_without_redirections(arguments) for arguments in commands if arguments]


def _without_redirections(arguments: list[str]) -> list[str]:
    kept, skip = [], False
    for argument in arguments:
        if skip or argument == "<":
            skip = argument == "<"
        else:
            kept.append(argument)
    return kept


def command_lines() -> Iterator[tuple[str, list[str]]]:
    for block in markdown.blocks("sh", "console"):
        lines = block.text.replace("\\\n", " ").splitlines()
        if block.language == "console":
            lines = [line[2:] for line in lines if line.startswith("$ ")]
        for line in lines:
            for arguments in simple_commands(line):
                while arguments and re.fullmatch(r"[A-Z_]+=.*", arguments[0]):
                    arguments = arguments[1:]
                if arguments and TPU.fullmatch(arguments[0]):
                    yield f"{block.where}: {shlex.join(arguments)}", arguments[1:]


def check(arguments: list[str]) -> None:
    """Parses as the program would, and calls nothing."""
    current: click.Command = root()
    context: click.Context | None = None
    name, rest = "tpu", list(arguments)
    while True:
        context = current.make_context(name, rest, parent=context)
        if not isinstance(current, click.Group):
            return
        left = [*context._protected_args, *context.args]
        if not left and current.invoke_without_command:
            return
        name, command, rest = current.resolve_command(context, left)
        assert command is not None
        current = command


LINES = list(command_lines())


@pytest.mark.parametrize(("line", "arguments"), LINES, ids=[line[:60] for line, _ in LINES])
def test_a_documented_command_line_is_valid(line, arguments):
    try:
        check(arguments)
    except click.exceptions.Exit:
        return  # --help and its like
    except click.ClickException as error:
        pytest.fail(f"{line}: {error.format_message()}")


def mentions() -> list[tuple[Path, str]]:
    return [
        (page, code)
        for page in markdown.pages()
        if page.parent.name != "migration"  # these name commands of other tools
        for code in markdown.code_in_sentences(page)
        if re.match(r"(\./)?tpu [a-z]", code)
    ]


@pytest.mark.parametrize(("page", "code"), mentions(), ids=lambda value: str(value)[-60:])
def test_a_command_in_prose_names_an_existing_command_and_options(page, code):
    current: click.Command = root()
    path = code.removeprefix("./").removeprefix("tpu help").split(" -- ")[0].split()
    path = path[1:] if path[:1] == ["tpu"] else path
    shared = ["--help"]
    while path and isinstance(current, click.Group) and not path[0].startswith("-"):
        command = current.get_command(click.Context(current), path[0])
        if command is None and isinstance(current, CommandGroup):
            break  # an argument of its own
        assert command is not None, f"{page.name}: {code}"
        if isinstance(current, SharedOptions):
            shared += [name for option in current.params for name in option.opts]
        current = command
        del path[0]
    known = {name for option in current.params for name in option.opts} | {*shared}
    for argument in path:
        assert not argument.startswith("-") or argument.split("=")[0] in known, (
            f"{page.name}: {code}"
        )


def test_the_check_rejects_unknown_options_and_commands():
    with pytest.raises(click.NoSuchOption):
        check(["submit", "job.yaml", "--folow"])
    with pytest.raises(click.UsageError):
        check(["sbumit", "job.yaml"])


def test_the_errors_of_a_job_file_are_those_that_are_printed(tmp_path, monkeypatch):
    [shown] = [
        block.text.splitlines()[1:]
        for block in markdown.blocks("console")
        if block.page.name == "job-file.md" and "acelerator" in block.text
    ]
    monkeypatch.chdir(tmp_path)
    Path("job.yaml").write_text("acelerator: v5e-16\ncommand: [x]\ntimeout: 12 hours\n")
    answer = CliRunner().invoke(root(), ["submit", "job.yaml", "--dry-run"])
    assert [f"error: {line}" for line in str(answer.exception).splitlines()] == shown
