"""Collect every user-facing message of the source tree, to review the wording in one place.

    .venv/bin/python scripts/messages.py                 # a Markdown table for each package
    .venv/bin/python scripts/messages.py --kind error    # errors alone
    .venv/bin/python scripts/messages.py --json
    .venv/bin/python scripts/messages.py --count         # how many there are, by distribution

Messages are found in the syntax tree: errors, output of commands, help texts, events and reasons,
log lines, and other sentences in the code (`text`). A part that is only known at run time is shown
as `{expression}`.
"""

from __future__ import annotations

import argparse
import ast
import json
import re
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SOURCES = sorted(ROOT.glob("packages/*/src/*"))
CORE = ROOT / "packages/tpufleet/src/tpufleet"

KINDS = ("error", "output", "help", "event", "log", "text")

# Functions that print: the position of the text among the arguments.
PRINTERS = {
    "echo": 0, "secho": 0, "confirm": 0, "prompt": 0, "print_status": 0, "print_line": 0,
    "print_table": 2, "print_result": 1, "interruptible": 0,
}  # fmt: skip
LOGGERS = {"debug", "info", "warning", "error", "exception", "critical"}
# Keyword arguments and fields that end up before a person.
EVENT_KEYWORDS = {
    "message", "reason", "impact", "remedy", "advice", "description", "detail", "hint", "summary",
}  # fmt: skip
HELP_KEYWORDS = {"help", "short_help", "epilog"}
COMMAND_DECORATORS = {"command", "group"}
SHORTEST = 2  # words; less is a name or a state, not a message
# Other literals count as a message from this many words on, unless they look like code or SQL.
SHORTEST_TEXT = 4
_CODE = re.compile(r"\{\w+: |.*\b(FROM|JOIN|SELECT|current_schema)\b", re.DOTALL)  # YAML, SQL
_SENTENCE = re.compile(r"[a-z0-9`'\"{][^\n=;<>$\\]*[a-z)`}.:?]", re.DOTALL)


@dataclass(frozen=True, order=True, slots=True)
class Message:
    package: str
    module: str
    kind: str
    text: str
    line: int


def error_classes() -> set[str]:
    """Names of the exceptions whose text reaches a person."""
    tree = ast.parse((CORE / "errors.py").read_text())
    ours = {node.name for node in tree.body if isinstance(node, ast.ClassDef)}
    return ours | {"UsageError", "ClickException", "BadParameter"}


def collect(sources: Sequence[Path] = SOURCES) -> list[Message]:
    """Every message of some import packages, in the order of the files."""
    errors = error_classes()
    messages = []
    for path in sorted(file for source in sources for file in source.rglob("*.py")):
        module = ".".join(path.relative_to(_source(path).parent).with_suffix("").parts)
        package = module.partition(".")[0]
        seen: set[tuple[str, str]] = set()
        for kind, line, text in sorted(_of_module(path, errors), key=lambda item: item[1]):
            if (kind, text) not in seen:
                seen.add((kind, text))
                messages.append(
                    Message(package=package, module=module, kind=kind, text=text, line=line)
                )
    return messages


def _source(path: Path) -> Path:
    return next(source for source in SOURCES if path.is_relative_to(source))


def _of_module(path: Path, errors: set[str]) -> Iterator[tuple[str, int, str]]:
    nodes = list(ast.walk(ast.parse(path.read_text())))
    classified: set[int] = set()
    for node in nodes:
        if isinstance(node, ast.Call):
            for kind, text_node in _of_call(node, errors):
                classified |= {id(part) for part in ast.walk(text_node)}
                for text in texts(text_node):
                    if kind in ("help", "error") or len(text.split()) >= SHORTEST:
                        yield kind, text_node.lineno, text
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            doc = ast.get_docstring(node)
            if doc and _is_command(node):
                yield "help", node.lineno, doc
    for text_node in _other_literals(nodes, classified):
        text, literal = _assembled(text_node), _literal(text_node)
        if _CODE.match(literal):
            continue
        if len(literal.split()) >= SHORTEST_TEXT and _SENTENCE.fullmatch(text):
            yield "text", text_node.lineno, text


def _other_literals(nodes: list[ast.AST], classified: set[int]) -> Iterator[ast.expr]:
    """String literals that are neither docstrings, patterns, nor parts of a classified message."""
    skipped = set(classified)
    for node in nodes:
        if isinstance(node, ast.Expr):  # docstrings
            skipped.add(id(node.value))
        elif isinstance(node, ast.JoinedStr) and id(node) not in skipped:
            skipped |= {id(part) for part in node.values}
        elif isinstance(node, ast.Call) and ast.unparse(node.func).startswith("re."):
            skipped |= {id(part) for each in node.args[:1] for part in ast.walk(each)}
        elif isinstance(node, ast.Compare):  # `"no space left" in message`
            skipped.add(id(node.left))
    for node in nodes:
        if id(node) in skipped:
            continue
        if isinstance(node, ast.JoinedStr):
            yield node
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node


def _of_call(node: ast.Call, errors: set[str]) -> Iterator[tuple[str, ast.expr]]:
    name = _name(node.func)
    if name in errors:
        yield from (("error", argument) for argument in node.args[:1])
    elif name in PRINTERS and len(node.args) > PRINTERS[name]:
        yield "output", node.args[PRINTERS[name]]
    elif name in LOGGERS and _is_logger(node.func):
        yield from (("log", argument) for argument in node.args[:1])
    for keyword in node.keywords:
        if keyword.arg in HELP_KEYWORDS:
            yield "help", keyword.value
        elif keyword.arg in EVENT_KEYWORDS:
            yield "event", keyword.value
        elif keyword.arg == "empty":
            yield "output", keyword.value


def _name(function: ast.expr) -> str:
    if isinstance(function, ast.Attribute):
        return function.attr
    return function.id if isinstance(function, ast.Name) else ""


def _is_logger(function: ast.expr) -> bool:
    return isinstance(function, ast.Attribute) and _name(function.value) in {
        "log",
        "logger",
        "_log",
    }


def _is_command(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    calls = (item for item in node.decorator_list if isinstance(item, ast.Call))
    return any(_name(call.func).rpartition("_")[2] in COMMAND_DECORATORS for call in calls)


def texts(node: ast.expr) -> list[str]:
    """What an expression can read as; empty when none of it is written out."""
    if isinstance(node, ast.IfExp):
        return [*texts(node.body), *texts(node.orelse)]
    if isinstance(node, ast.BoolOp):
        return [text for value in node.values for text in texts(value)]
    text = _assembled(node)
    return [text] if any(part.isalpha() for part in _literal(node)) else []


def _assembled(node: ast.expr) -> str:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(_assembled(part) for part in node.values)
    if isinstance(node, ast.FormattedValue):
        return "{" + ast.unparse(node.value) + "}"
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return _assembled(node.left) + _assembled(node.right)
    return "{" + ast.unparse(node) + "}"


def _literal(node: ast.expr) -> str:
    """The part that is written out, without expressions."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else ""
    if isinstance(node, ast.JoinedStr):
        return "".join(_literal(part) for part in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return _literal(node.left) + _literal(node.right)
    return ""


def markdown(messages: Iterable[Message]) -> str:
    lines = [
        "# Messages",
        "All user-facing texts, to review the wording. `{…}` is filled in at run time.",
    ]
    package = ""
    for message in messages:
        if message.package != package:
            package = message.package
            lines += ["", f"## {package}", "| module | kind | message |", "|---|---|---|"]
        lines.append(f"| {message.module} | {message.kind} | {_cell(message.text)} |")
    return "\n".join(lines) + "\n"


def _cell(text: str) -> str:
    """One line that Markdown shows as it is: no links, HTML or table syntax outside of code."""
    line = " ".join(text.replace("\b", "").split()).replace("|", "\\|")
    parts = line.split("`")
    if len(parts) % 2 == 0:  # an unbalanced backtick starts no code
        parts = [line.replace("`", "'")]
    escaped = [re.sub(r"([\[\]<*_])", r"\\\1", part) for part in parts[::2]]
    parts[::2] = escaped
    return "`".join(parts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kind", choices=KINDS, action="append", help="only this kind; repeatable")
    parser.add_argument("--package", action="append", help="only this package; repeatable")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--count", action="store_true", help="print only how many there are")
    options = parser.parse_args()
    kept = [
        message
        for message in collect()
        if (not options.kind or message.kind in options.kind)
        and (not options.package or message.package in options.package)
    ]
    if options.count:
        for package, count in Counter(message.package for message in kept).items():
            print(f"{count:6} {package}")
        print(f"{len(kept):6} in all")
    elif options.json:
        json.dump([asdict(message) for message in kept], sys.stdout, ensure_ascii=False)
        print()
    else:
        print(markdown(kept), end="")


if __name__ == "__main__":
    main()
