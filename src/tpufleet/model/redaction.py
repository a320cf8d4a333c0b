"""Removes the values of secrets from text and from output that arrives in pieces."""

from __future__ import annotations

import re
from collections.abc import Iterable

MASK = "***"
# Shorter values, such as `1` or `true`, are in every output by chance.
MIN_VALUE_LENGTH = 6
MIN_LINE_LENGTH = 16


def redactable(values: Iterable[str]) -> list[str]:
    """The values, and the lines of values of several lines, as far as they are long enough."""
    parts: dict[str, None] = {}
    for value in values:
        value = value.strip("\n")
        if len(value) >= MIN_VALUE_LENGTH:
            parts[value] = None
        for line in value.splitlines() if "\n" in value else ():
            if len(line.strip()) >= MIN_LINE_LENGTH:
                parts[line.strip()] = None
    return sorted(parts, key=len, reverse=True)  # the longest match first


class Redactor:
    def __init__(self, values: Iterable[str]) -> None:
        parts = redactable(values)
        self._parts = [part.encode() for part in parts]
        self._text = re.compile("|".join(map(re.escape, parts))) if parts else None
        self._bytes = re.compile(b"|".join(map(re.escape, self._parts))) if parts else None
        self._held = b""  # the end of what was fed, while it may be the beginning of a value

    def text(self, text: str) -> str:
        return text if self._text is None else self._text.sub(MASK, text)

    def feed(self, data: bytes) -> bytes:
        """What can be shown now."""
        if self._bytes is None:
            return data
        data = self._held + data
        kept, at = [], 0
        for match in self._bytes.finditer(data):
            kept += [data[at : match.start()], MASK.encode()]
            at = match.end()
        rest = data[at:]
        cut = len(rest) - self._open_end(rest)
        self._held = rest[cut:]
        return b"".join([*kept, rest[:cut]])

    def flush(self) -> bytes:
        held, self._held = self._held, b""
        return held

    def _open_end(self, data: bytes) -> int:
        """How many bytes at the end are the beginning of a value."""
        longest = 0
        for part in self._parts:
            for length in range(min(len(part) - 1, len(data)), longest, -1):
                if data.endswith(part[:length]):
                    longest = length
                    break
        return longest
