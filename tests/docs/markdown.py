"""Parsing the documentation: code blocks, inline code, links, headings, tables."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
EXAMPLES = ROOT / "examples"
MAY_BE_DELETED = ROOT / "packages/tpufleet-migration"

_BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
_CODE = re.compile(r"`([^`]+)`")
_LINK = re.compile(r"!?\[(?:[^\]]*)\]\(([^)\s]+)\)")


@dataclass(frozen=True, slots=True)
class Block:
    page: Path
    language: str
    text: str
    line: int

    @property
    def where(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def pages() -> list[Path]:
    paths = [ROOT / "README.md", *DOCS.rglob("*.md"), *EXAMPLES.rglob("*.md")]
    paths += ROOT.glob("packages/*/README.md")
    return sorted(paths)


def blocks(*languages: str) -> list[Block]:
    return [
        Block(page, match[1], match[2], text.count("\n", 0, match.start()) + 1)
        for page in pages()
        for text in [page.read_text()]
        for match in _BLOCK.finditer(text)
        if match[1] in languages
    ]


def prose(page: Path) -> str:
    """The page without its code blocks."""
    return _BLOCK.sub("", page.read_text())


def paragraphs(page: Path) -> list[str]:
    """Running text, and each item of a list; no headings and tables."""
    lines = ("" if line.startswith(("#", "|")) else line for line in prose(page).splitlines())
    text = re.sub(r"^(?= *(?:[-*]|\d+\.) )", "\n", "\n".join(lines), flags=re.MULTILINE)
    return [part for part in re.split(r"\n\s*\n", text) if part.strip()]


def code_in_sentences(page: Path) -> list[str]:
    return [" ".join(code.split()) for code in _CODE.findall(prose(page))]


def links(page: Path) -> list[str]:
    return _LINK.findall(prose(page))


def anchors(page: Path) -> set[str]:
    """The anchors that GitHub gives to headings."""
    headings = re.findall(r"^#+ (.+)$", prose(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def table(page: Path, name: str) -> list[str]:
    """The lines of a marked table, with its header."""
    _, mark, after = page.read_text().partition(f"<!-- table: {name} -->\n")
    assert mark, f"{page.name} has no table {name}"
    lines = after.splitlines()
    end = next((at for at, line in enumerate(lines) if not line.startswith("|")), len(lines))
    return lines[:end]


def cells(row: str) -> list[str]:
    return [cell.strip() for cell in re.split(r"(?<!\\)\|", row)[1:-1]]
