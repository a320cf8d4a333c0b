"""The catalogue of user-facing messages: complete, in plain language, with valid commands."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
from types import ModuleType
from typing import Any

import click
import pytest

from tests.docs import markdown
from tpufleet.views.cli.registry import SharedOptions, root

SCRIPT = markdown.ROOT / "scripts" / "messages.py"

# Quaint, vague or theatrical; the style guide has the plain equivalents.
BANNED = (
    r"ails?", r"mend(s|ed|ing)?", r"anew", r"afresh", r"stumbl\w*", r"farewell", r"heed(s|ed)?",
    r"nobody", r"somebody", r"everybody", r"anybody", r"whoever", r"whom", r"of old", r"in vain",
    r"in words", r"told", r"whose word", r"signs? of life", r"errands?", r"weather", r"hurt",
    r"drills?", r"on purpose", r"taken away", r"take it away", r"goes on", r"go on", r"makes? way",
    r"cannot be had", r"have (?:the )?word", r"is there twice", r"for good", r"in good order",
)  # fmt: skip
_BANNED = re.compile(rf"\b(?:{'|'.join(BANNED)})\b", re.IGNORECASE)
# docs/glossary.md: of Kubernetes, or of other programs.
_FOREIGN = re.compile(r"\b(?:[Cc]ontrol plane|[Nn]odes?|[Dd]irector(?:y|ies))\b")
_PLACEHOLDER = re.compile(r"\{[^{}]*\}")
_CODE = re.compile(r"`[^`]*`")


def load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("messages", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


PACKAGES = sorted(
    path.name for path in markdown.ROOT.glob("packages/*/src/tpufleet*") if path.suffix == ""
)


@pytest.fixture(scope="module")
def messages() -> list[Any]:
    """Every message. Reading the source takes seconds, so not when tests are collected."""
    return load().collect()


@pytest.mark.slow
def test_the_script_prints_a_table_and_json():
    table = subprocess.run(
        [sys.executable, SCRIPT, "--kind", "error"], capture_output=True, text=True, check=True
    ).stdout
    assert "| module | kind | message |" in table and "| help |" not in table
    document = subprocess.run(
        [sys.executable, SCRIPT, "--json", "--package", "tpufleet_gke"],
        capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    assert {row["kind"] for row in json.loads(document)} >= {"error", "help", "output"}


def test_errors_output_help_and_conditional_texts_are_found(messages):
    found = {(message.kind, message.text) for message in messages}
    assert ("error", "--dir: {chosen} is not empty; pass a new folder") in found
    assert ("help", "Print JSON.") in found
    assert ("output", "no cost yet") in found
    assert ("output", "nothing was billed since then") in found


def test_there_are_not_too_many_messages(messages):
    assert len(messages) <= 2_000, "merge some: CONTRIBUTING.md, What has to be earned"


@pytest.mark.parametrize("package", PACKAGES)
def test_messages_are_in_plain_language(package, messages):
    quaint = [
        f"{message.module}:{message.line}: {match[0]!r} in {message.text!r}"
        for message in messages
        if message.package == package
        for match in [_BANNED.search(_CODE.sub("", _PLACEHOLDER.sub("", message.text)))]
        if match
    ]
    assert quaint == []


def test_messages_use_the_words_of_the_glossary(messages):
    foreign = [
        f"{message.module}:{message.line}: {match[0]!r} in {message.text!r}"
        for message in messages
        if not re.search("gke|kubernetes|testbed", message.module)
        for match in [_FOREIGN.search(_CODE.sub("", _PLACEHOLDER.sub("", message.text)))]
        if match
    ]
    assert foreign == []


def unknown_part(code: str) -> str:
    """The command or options of this command line that do not exist; empty when all do."""
    current: click.Command = root()
    path = code.split(" -- ")[0].split()[1:]
    path = path[1:] if path[:1] == ["help"] else path
    known = {"--help", "--"}
    while path and isinstance(current, click.Group) and re.fullmatch(r"[a-z-]+", path[0]):
        if path[0].startswith("-"):
            break
        name = path.pop(0)
        command = current.get_command(click.Context(current), name)
        if command is None:
            return name
        if isinstance(current, SharedOptions):
            known |= {each for option in current.params for each in option.opts}
        current = command
    known |= {each for option in current.params for each in option.opts}
    options = {part.split("=")[0] for part in path if part.startswith("--")}
    return ", ".join(sorted(options - known))


def test_commands_in_messages_exist(messages):
    commands = {
        (message.module, code)
        for message in messages
        for code in re.findall(r"`(tpu [^`]*)`", message.text)
    }
    assert len(commands) > 100
    unknown = [(module, code, unknown_part(code)) for module, code in sorted(commands)]
    assert [row for row in unknown if row[2]] == []
