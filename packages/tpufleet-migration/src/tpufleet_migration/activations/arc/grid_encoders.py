"""Grids as text. Encoders are expressions such as `GridShapeEncoder(MinimalGridEncoder())`.

Expressions are parsed, never evaluated with `eval`.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Sequence
from typing import Any

from tpufleet.errors import BadInput, invalid
from tpufleet_activations.input_errors import check_choice

Encoder = Callable[[Sequence[Sequence[int]]], str]
DEFAULT = "GridShapeEncoder(RowNumberEncoder(MinimalGridEncoder()))"
SYMBOLS = "ñò÷ûąćďęĚĞ"  # single tokens in common vocabularies, one per color


def parse_encoder(text: str) -> Encoder:
    """Build the encoder of an expression such as `GridCodeBlockEncoder(RepeatNumberEncoder(3))`."""
    try:
        tree = ast.parse(text, mode="eval").body
    except SyntaxError as error:
        raise _invalid(text, error.msg) from None
    return _build(tree, text)


def _build(node: ast.expr, text: str) -> Any:
    if isinstance(node, ast.Constant) and isinstance(node.value, str | int):
        return node.value
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
        raise _invalid(text, "expected nested calls")
    check_choice("grid encoder", node.func.id, ENCODERS)
    factory = ENCODERS[node.func.id]
    arguments = [_build(argument, text) for argument in node.args]
    keywords = {item.arg: _build(item.value, text) for item in node.keywords if item.arg}
    try:
        return factory(*arguments, **keywords)
    except TypeError as error:
        raise _invalid(text, error) from None


def _invalid(text: str, reason: object) -> BadInput:
    return invalid(text, f"a grid encoder ({reason})", DEFAULT)


def minimal() -> Encoder:
    return separated("")


def separated(split_symbol: str) -> Encoder:
    return lambda grid: "\n".join(split_symbol.join(map(str, row)) for row in grid)


def repeated(n: int = 3) -> Encoder:
    return lambda grid: "\n".join("".join(str(cell) * n for cell in row) for row in grid)


def code_block(base_encoder: Encoder) -> Encoder:
    return lambda grid: f"```grid\n{base_encoder(grid)}\n```"


def with_shape(base_encoder: Encoder) -> Encoder:
    return lambda grid: f"```grid shape: {len(grid)}x{len(grid[0])}\n{base_encoder(grid)}\n```"


def row_numbers(base_encoder: Encoder) -> Encoder:
    def encode(grid: Sequence[Sequence[int]]) -> str:
        lines = base_encoder(grid).splitlines()
        return "\n".join(f"{number} {line}" for number, line in enumerate(lines, 1))

    return encode


def replaced(base_encoder: Encoder) -> Encoder:
    table = str.maketrans("0123456789", SYMBOLS)
    return lambda grid: base_encoder(grid).translate(table)


ENCODERS: dict[str, Callable[..., Encoder]] = {
    "MinimalGridEncoder": minimal,
    "GridWithSeparationEncoder": separated,
    "GridCodeBlockEncoder": code_block,
    "GridShapeEncoder": with_shape,
    "RowNumberEncoder": row_numbers,
    "RepeatNumberEncoder": repeated,
    "ReplaceNumberEncoder": replaced,
}
