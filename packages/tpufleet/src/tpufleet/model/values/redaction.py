"""Removes the values of secrets from text and from output that arrives in pieces."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterable

MASK = "***"
# Shorter values, such as `1` or `true`, are in every output by chance.
MIN_VALUE_LENGTH = 6
MIN_LINE_LENGTH = 16

# A longer value is masked piece by piece, so that the time for it, and what is held back of the
# output, do not grow with its length.
PIECE_LENGTH = 256

_Range = tuple[int, int]  # start, end


def redactable(values: Iterable[str]) -> list[str]:
    """The values, and the lines of values of several lines, as far as they are long enough, in
    pieces."""
    parts: dict[str, None] = {}
    for value in values:
        value = value.strip("\n")
        if len(value) >= MIN_VALUE_LENGTH:
            parts |= dict.fromkeys(_pieces(value))
        for line in value.splitlines() if "\n" in value else ():
            if len(line.strip()) >= MIN_LINE_LENGTH:
                parts |= dict.fromkeys(_pieces(line.strip()))
    return list(parts)


def _pieces(value: str) -> list[str]:
    """Without gaps; the last one overlaps the one before it, so that none is short."""
    starts = range(0, max(len(value) - PIECE_LENGTH, 0), PIECE_LENGTH)
    return [*(value[at : at + PIECE_LENGTH] for at in starts), value[-PIECE_LENGTH:]]


class Redactor:
    """Masks every byte of every occurrence, also where occurrences overlap; ranges that touch
    become one mask. `text` and `data` are independent of the output that is fed."""

    def __init__(self, values: Iterable[str]) -> None:
        self._parts = sorted(part.encode() for part in redactable(values))
        self._longest = max(map(len, self._parts), default=0)
        self._by_beginning: dict[bytes, list[bytes]] = {}  # sorted
        for part in self._parts:
            self._by_beginning.setdefault(part[:MIN_VALUE_LENGTH], []).append(part)
        self._shorter = _shorter_parts(self._parts)
        self._beginnings = _beginnings(self._parts)
        # The end of what was fed, while it may be the beginning of a part, and that part.
        self._held, self._expected = b"", b""
        self._masked_bytes = 0  # of what is held: the end of an occurrence that began before it
        self._after_mask = False  # what was shown last is a mask

    def text(self, text: str) -> str:
        if not self._parts:
            return text
        return self.data(text.encode(errors="surrogatepass")).decode(errors="surrogatepass")

    def data(self, data: bytes) -> bytes:
        """The whole of it, which nothing follows."""
        return _mask(data, self._occurrences(data))

    def feed(self, data: bytes) -> bytes:
        """What can be shown now: all but an end that may be the beginning of a part."""
        if not self._parts:
            return data
        size = len(self._held) + len(data)
        if size < len(self._expected) and self._expected.startswith(data, len(self._held)):
            self._held += data
            return b""
        data = self._held + data
        cut, self._expected = self._open_end(data)
        return self._show(data, cut)

    def flush(self) -> bytes:
        """What is held back, because nothing follows it."""
        shown = self._show(self._held, len(self._held))
        self._expected, self._masked_bytes, self._after_mask = b"", 0, False
        return shown

    def _show(self, data: bytes, cut: int) -> bytes:
        """What is before `cut`; hold the rest."""
        ranges = self._occurrences(data, self._masked_bytes)
        shown = _mask(data[:cut], [each for each in ranges if each[0] < cut])
        if cut and self._after_mask and ranges and ranges[0][0] == 0:
            shown = shown[len(MASK) :]
        if cut:
            end = max((end for start, end in ranges if start < cut), default=0)
            self._after_mask, self._masked_bytes = end >= cut, max(end - cut, 0)
        self._held = data[cut:]
        return shown

    def _occurrences(self, data: bytes, masked: int = 0) -> list[_Range]:
        """Ranges that cover all occurrences, and so many bytes at the beginning; sorted, and apart
        from each other."""
        ranges: list[_Range] = [(0, masked)] if masked else []
        for match in self._beginnings.finditer(data):
            start = match.start()
            parts = self._by_beginning.get(data[start : start + MIN_VALUE_LENGTH])
            part = self._longest_of(parts, data[start : start + self._longest]) if parts else b""
            end = start + len(part)
            if part and ranges and start <= ranges[-1][1]:
                ranges[-1] = (ranges[-1][0], max(end, ranges[-1][1]))
            elif part:
                ranges.append((start, end))
        return ranges

    def _longest_of(self, parts: list[bytes], text: bytes) -> bytes:
        """The longest of the sorted parts that the text begins with. It is the last one that is not
        greater than the text, or a part with which that one begins."""
        number = bisect_right(parts, text) - 1
        part = parts[number] if number >= 0 else b""
        while not text.startswith(part):
            part = self._shorter.get(part, b"")
        return part

    def _open_end(self, data: bytes) -> tuple[int, bytes]:
        """Where the longest end that is the beginning of a part starts, and the part."""
        for start in range(max(len(data) - self._longest + 1, 0), len(data)):
            end = data[start:]
            number = bisect_right(self._parts, end)  # those that begin with it follow it
            if number < len(self._parts) and self._parts[number].startswith(end):
                return start, self._parts[number]
        return len(data), b""


def _beginnings(parts: Iterable[bytes]) -> re.Pattern[bytes]:
    """Matches, without length, where a part may start: by the bytes that any part has at each of
    the first positions. So most output is passed over fast, however many parts there are."""
    columns = zip(*(part[:MIN_VALUE_LENGTH] for part in parts), strict=True)
    classes = [b"[%s]" % b"".join(b"\\x%02x" % byte for byte in set(each)) for each in columns]
    if not classes:
        return re.compile(b"(?!)")
    return re.compile(b"%s(?=%s)" % (classes[0], b"".join(classes[1:])))


def _shorter_parts(parts: Iterable[bytes]) -> dict[bytes, bytes]:
    """By part, of sorted ones: the longest other part that it begins with."""
    shorter: dict[bytes, bytes] = {}
    nested: list[bytes] = []
    for part in parts:
        while nested and not part.startswith(nested[-1]):
            nested.pop()
        if nested:
            shorter[part] = nested[-1]
        nested.append(part)
    return shorter


def _mask(data: bytes, ranges: Iterable[_Range]) -> bytes:
    shown, at = [], 0
    for start, end in ranges:
        shown += [data[at:start], MASK.encode()]
        at = end
    return b"".join([*shown, data[at:]])
