"""Removes the values of secrets from text and from output that arrives in pieces."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterable, Iterator

MASK = "***"
# Shorter values, such as `1` or `true`, are in every output by chance.
MIN_VALUE_LENGTH = 6
MIN_LINE_LENGTH = 16

# Shorter parts are compared at each position where they may start, longer ones are searched for:
# the time for either is linear in the length of the text, whatever it repeats.
_LONG = 256
_COMPARED_BYTES = 4096

_Range = tuple[int, int]  # start, end


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
    """Masks every byte of every occurrence, also where occurrences overlap; ranges that touch
    become one mask. `text` and `data` are independent of the output that is fed."""

    def __init__(self, values: Iterable[str]) -> None:
        self._parts = sorted(part.encode() for part in redactable(values))
        self._short: dict[bytes, list[bytes]] = {}  # by their beginning, sorted
        self._long: dict[bytes, list[_LongPart]] = {}
        for part in self._parts:
            beginning = part[:MIN_VALUE_LENGTH]
            if len(part) < _LONG:
                self._short.setdefault(beginning, []).append(part)
            else:
                self._long.setdefault(beginning, []).append(_LongPart(part))
        short = [part for part in self._parts if len(part) < _LONG]
        self._shorter = _shorter_parts(short)
        self._beginnings = _beginnings(short)
        # The end of what was fed, while it may be the beginning of a value, and that value.
        self._held, self._expected = b"", b""
        self._masked_bytes = 0  # of what is held: the end of an occurrence that began before it
        self._after_mask = False  # what was shown last is a mask

    def text(self, text: str) -> str:
        if not self._parts:
            return text
        return self.data(text.encode(errors="surrogatepass")).decode(errors="surrogatepass")

    def data(self, data: bytes) -> bytes:
        """The whole of it, which nothing follows."""
        return _mask(data, _merged(self._occurrences(data)[0]))

    def feed(self, data: bytes) -> bytes:
        """What can be shown now: all but an end that may be the beginning of a value."""
        if not self._parts:
            return data
        size = len(self._held) + len(data)
        if size < len(self._expected) and self._expected.startswith(data, len(self._held)):
            self._held += data
            return b""
        data = self._held + data
        occurrences, long_parts = self._occurrences(data)
        cut, self._expected = self._open_end(data, long_parts)
        return self._show(data, occurrences, cut)

    def flush(self) -> bytes:
        """What is held back, because nothing follows it."""
        shown = self._show(self._held, self._occurrences(self._held)[0], len(self._held))
        self._expected, self._masked_bytes, self._after_mask = b"", 0, False
        return shown

    def _show(self, data: bytes, occurrences: list[_Range], cut: int) -> bytes:
        """What is before `cut`; hold the rest."""
        if self._masked_bytes:
            occurrences = [(0, self._masked_bytes), *occurrences]
        ranges = _merged(occurrences)
        shown = _mask(data[:cut], [each for each in ranges if each[0] < cut])
        if cut and self._after_mask and ranges and ranges[0][0] == 0:
            shown = shown[len(MASK) :]
        if cut:
            end = max((end for start, end in ranges if start < cut), default=0)
            self._after_mask, self._masked_bytes = end >= cut, max(end - cut, 0)
        self._held = data[cut:]
        return shown

    def _occurrences(self, data: bytes) -> tuple[list[_Range], dict[_LongPart, int]]:
        """Ranges that cover all occurrences, and where each long part may start first."""
        ranges: list[_Range] = []
        for match in self._beginnings.finditer(data):
            start = match.start()
            beginning = data[start : start + MIN_VALUE_LENGTH]
            if beginning in self._short:
                part = self._longest(self._short[beginning], data[start : start + _LONG])
                end = start + len(part)
                if part and ranges and start <= ranges[-1][1]:
                    ranges[-1] = (ranges[-1][0], max(end, ranges[-1][1]))
                elif part:
                    ranges.append((start, end))
        long_parts = {
            part: start
            for beginning, parts in self._long.items()
            if (start := data.find(beginning)) >= 0
            for part in parts
        }
        for long_part, start in long_parts.items():
            ranges += long_part.occurrences(data, start)
        return ranges, long_parts

    def _longest(self, parts: list[bytes], text: bytes) -> bytes:
        """The longest of the sorted parts that the text begins with. It is the last one that is not
        greater than the text, or a part with which that one begins."""
        number = bisect_right(parts, text) - 1
        part = parts[number] if number >= 0 else b""
        while not text.startswith(part):
            part = self._shorter.get(part, b"")
        return part

    def _open_end(self, data: bytes, long_parts: dict[_LongPart, int]) -> tuple[int, bytes]:
        """Where the longest end that is the beginning of a part starts, and the part."""
        starts = [part.open_end(data, start) for part, start in long_parts.items()]
        starts.append(max(len(data) - _LONG + 1, 0))
        for start in range(min(starts), len(data)):
            end = data[start:]
            number = bisect_right(self._parts, end)  # those that begin with it follow it
            if number < len(self._parts) and self._parts[number].startswith(end):
                return start, self._parts[number]
        return len(data), b""


class _LongPart:
    def __init__(self, value: bytes) -> None:
        self._value = value
        self._reversed = value[::-1]

    def occurrences(self, data: bytes, start: int) -> Iterator[_Range]:
        """Ranges that cover them. Only one occurrence in each length of the part is looked at."""
        size = len(self._value)
        first = data.find(self._value, start)
        while first >= 0:
            start = first
            while True:
                # The last one that starts within this one, or directly after it.
                window = data[start + 1 : start + 2 * size][::-1]
                skipped = window.find(self._reversed)  # `rfind` takes quadratic time
                if skipped < 0:
                    break
                start += 1 + len(window) - skipped - size
            yield first, start + size
            first = data.find(self._value, start + size)

    def open_end(self, data: bytes, first: int) -> int:
        """Where the longest end starts that is the beginning of the part, and neither the whole nor
        shorter than `_LONG`; the length of the data if there is none."""
        value, end = self._value, len(data)
        longest = min(len(value) - 1, end - first)
        size = _LONG << max((longest // _LONG).bit_length() - 1, 0)
        while size >= _LONG:
            # Ends of at least `size` bytes, and less than twice as many.
            beginning = value[:size]
            start = data.find(beginning, max(end - longest, end - 2 * size + 1))
            if start >= 0 and value.startswith(data[start:]):
                return start
            following = data.find(beginning, start + 1) if start >= 0 else -1
            if following >= 0:
                start = self._periodic_end(data, start, following - start)
                if start <= end - size:
                    return start
            size //= 2
        return end

    def _periodic_end(self, data: bytes, start: int, period: int) -> int:
        """The same, of the ends that start at `start` or a number of periods later. The beginning
        occurs twice within less than twice its length, so it has this period, and all of its
        occurrences there are one period apart."""
        value, end = self._value, len(data)
        data_end = start + period + _common(data, start, data, start + period)
        value_end = period + _common(value, 0, value, period)
        if data_end == end:  # the first one after which the part is periodic for long enough
            return start + max(-(-(end - value_end - start) // period), 0) * period
        # The period must end in both at the same byte.
        aligned = data_end - value_end
        return aligned if aligned > start and value.startswith(data[aligned:]) else end


def _common(one: bytes, start: int, other: bytes, other_start: int) -> int:
    """How many bytes they have in common from there."""
    length = min(len(one) - start, len(other) - other_start)
    low = 0
    while low < length:
        size = min(_COMPARED_BYTES, length - low)
        one_at, other_at = start + low, other_start + low
        if one[one_at : one_at + size] != other[other_at : other_at + size]:
            break
        low += size
    else:
        return length
    high = low + size  # they differ before this
    while high - low > 1:
        middle = (low + high) // 2
        if one[start + low : start + middle] == other[other_start + low : other_start + middle]:
            low = middle
        else:
            high = middle
    return low


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


def _merged(ranges: Iterable[_Range]) -> list[_Range]:
    """Sorted; those that overlap or touch are one."""
    merged: list[_Range] = []
    for start, end in sorted(ranges):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged


def _mask(data: bytes, ranges: Iterable[_Range]) -> bytes:
    shown, at = [], 0
    for start, end in ranges:
        shown += [data[at:start], MASK.encode()]
        at = end
    return b"".join([*shown, data[at:]])
