"""Every command line in the pages is one that `tpu` takes: the verb, its options, its arguments."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from tests.docs import markdown
from tpufleet.views.cli.registry import root

TPU = re.compile(r"(.*/)?tpu")


def words_of(line: str) -> list[list[str]]:
    """The simple commands of a shell line: cut at pipes, semicolons and redirections."""
    lexer = shlex.shlex(line, posix=True, punctuation_chars="|;&<>()")
    lexer.whitespace_split = True
    found: list[list[str]] = [[]]
    for word in lexer:
        if set(word) <= set("|;&()"):
            found.append([])
        elif set(word) <= set("<>"):
            found[-1].append("<")
        else:
            found[-1].append(word)
    return [_without_redirections(words) for words in found if words]


def _without_redirections(words: list[str]) -> list[str]:
    kept, skip = [], False
    for word in words:
        if skip or word == "<":
            skip = word == "<"
        else:
            kept.append(word)
    return kept


def command_lines() -> Iterator[tuple[str, list[str]]]:
    for block in markdown.blocks("sh", "console"):
        lines = block.text.replace("\\\n", " ").splitlines()
        if block.language == "console":
            lines = [line[2:] for line in lines if line.startswith("$ ")]
        for line in lines:
            for words in words_of(line):
                while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
                    words = words[1:]
                if words and TPU.fullmatch(words[0]):
                    yield f"{block.where}: {shlex.join(words)}", words[1:]


def check(words: list[str]) -> None:
    """Parses as the program would, and calls nothing."""
    current: click.Command = root()
    context: click.Context | None = None
    name, rest = "tpu", list(words)
    while True:
        context = current.make_context(name, rest, parent=context)
        if not isinstance(current, click.Group):
            return
        name, found, rest = current.resolve_command(context, [*context._protected_args,
                                                              *context.args])  # fmt: skip
        assert found is not None
        current = found


LINES = list(command_lines())


@pytest.mark.parametrize(("line", "words"), LINES, ids=[line[:60] for line, _ in LINES])
def test_a_command_line_in_a_page_is_accepted(line, words):
    try:
        check(words)
    except click.exceptions.Exit:
        return  # --help and its like
    except click.ClickException as error:
        pytest.fail(f"{line}: {error.format_message()}")


def mentions() -> list[tuple[Path, str]]:
    return [
        (page, code)
        for page in markdown.pages()
        for code in markdown.code_in_sentences(page)
        if re.match(r"(\./)?tpu [a-z]", code)
    ]


@pytest.mark.parametrize(("page", "code"), mentions(), ids=lambda value: str(value)[-60:])
def test_a_command_in_a_sentence_names_a_verb_and_options_that_exist(page, code):
    current: click.Command = root()
    path = code.split(" -- ")[0].split()[1:]
    while path and isinstance(current, click.Group) and not path[0].startswith("-"):
        found = current.get_command(click.Context(current), path.pop(0))
        assert found is not None, f"{page.name}: {code}"
        current = found
    known = {name for option in current.params for name in option.opts} | {"--help"}
    for word in path:
        assert not word.startswith("-") or word.split("=")[0] in known, f"{page.name}: {code}"


def test_the_check_would_find_a_wrong_option():
    with pytest.raises(click.NoSuchOption):
        check(["submit", "job.yaml", "--folow"])
    with pytest.raises(click.UsageError):
        check(["sbumit", "job.yaml"])
