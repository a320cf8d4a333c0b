"""Removes the values of secrets from the log of a server."""

from __future__ import annotations

import logging
import threading
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field

from tpufleet.model.values.redaction import MASK, redactable

MIN_LENGTH = 8  # shorter values are in ordinary messages by chance
# Of one user, or shared. A value of 64 KiB and its lines, at most 3,856 parts, are below both.
MAX_USER_PARTS, MAX_USER_CHARACTERS = 4_000, 1 << 20
MAX_PARTS, MAX_CHARACTERS = 100_000, 64 << 20
# This much of the beginning of a longer value is enough to recognise it.
_NEEDLE_LENGTH = 256
_MAX_OWNERS_SHOWN = 3

Owner = str | None  # None: shared by all users


@dataclass
class _Group:
    """Parts that have their first `MIN_LENGTH` characters in common, prepared for lookup."""

    # Sorted, and none is the beginning of another. So the only one that a text can start with is
    # the last one that is not greater than the text.
    needles: list[str] = field(default_factory=list)
    parts: list[list[str]] = field(default_factory=list)  # sorted, by needle
    longest: int = 0

    @classmethod
    def of(cls, parts: Iterable[str]) -> _Group:
        group = cls()
        for part in sorted(parts):
            if not group.needles or not part.startswith(group.needles[-1]):
                group.needles.append(part[:_NEEDLE_LENGTH])
                group.parts.append([])
            group.parts[-1].append(part)
            group.longest = max(group.longest, len(part))
        return group

    def match(self, text: str, start: int) -> tuple[int, set[str]] | None:
        """The end of what is masked from here, and the parts that are there."""
        beginning = text[start : start + _NEEDLE_LENGTH]
        number = bisect_right(self.needles, beginning) - 1
        if number < 0 or not beginning.startswith(self.needles[number]):
            return None
        parts = self.parts[number]
        if len(parts) == 1 and text.startswith(parts[0], start):
            return start + len(parts[0]), {parts[0]}
        # As far as the text agrees with any of them: the neighbours in order agree the most.
        rest = text[start : start + self.longest]
        at = bisect_right(parts, rest)
        length, part = max((_common(rest, each), each) for each in parts[max(at - 1, 0) : at + 1])
        return start + length, {parts[0], part} if length == len(part) else {parts[0]}


def _common(one: str, other: str) -> int:
    """How many characters they have in common at the beginning."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


@dataclass
class _OwnerValues:
    sources: OrderedDict[str, tuple[str, list[str]]] = field(default_factory=OrderedDict)
    parts: int = 0
    characters: int = 0


class SecretValues:
    """Those that a server has read or received. The limits are per user first, so that nobody can
    displace the values of others. Adding one is cheap: lookups prepare what they need."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._owners: dict[Owner, _OwnerValues] = {}
        self._holders: dict[str, dict[tuple[Owner, str], None]] = {}  # by part
        self._by_prefix: dict[str, dict[str, None]] = {}
        self._groups: dict[str, _Group] = {}  # of those in `_by_prefix` that were looked up
        self._parts = self._characters = 0

    def __len__(self) -> int:
        return self._parts

    def remember(self, owner: Owner, source: str, value: str) -> None:
        """It is masked from now on, instead of the former value of this source."""
        with self._lock:
            known = self._owners.get(owner)
            if known is not None and source in known.sources:
                if known.sources[source][0] == value:
                    known.sources.move_to_end(source)
                    return
                self._drop(owner, source)
            parts = [part for part in redactable([value]) if len(part) >= MIN_LENGTH]
            if not parts:
                return
            self._add(owner, source, value, parts)
            self._enforce_limits(owner)

    def forget(self, owner: Owner, source: str) -> None:
        with self._lock:
            if owner in self._owners and source in self._owners[owner].sources:
                self._drop(owner, source)

    def forget_all(self, owner: Owner) -> None:
        with self._lock:
            while owner in self._owners:
                self._drop_oldest(owner)

    def redact(self, text: str) -> str:
        if not self._parts:
            return text
        shown, masked_from, masked_to, owners, at = [], 0, 0, dict[Owner, None](), 0
        # Within a match too: the beginning of one value can be the end of another.
        for start in range(len(text) - MIN_LENGTH + 1):
            prefix = text[start : start + MIN_LENGTH]
            if prefix not in self._by_prefix:
                continue
            match = self._group(prefix).match(text, start)
            if match is None:
                continue
            end, parts = match
            if start >= masked_to:
                if owners:
                    shown += [text[at:masked_from], _mask(owners)]
                    at = masked_to
                masked_from, owners = start, {}
            masked_to = max(masked_to, end)
            for part in parts:
                owners.update(self._owners_of(part))
            if masked_to == len(text):
                break
        if owners:
            shown += [text[at:masked_from], _mask(owners)]
            at = masked_to
        return "".join([*shown, text[at:]])

    def _group(self, prefix: str) -> _Group:
        group = self._groups.get(prefix)
        if group is None:
            with self._lock:
                group = _Group.of(self._by_prefix.get(prefix, ()))
                if group.needles:
                    self._groups[prefix] = group
        return group

    def _owners_of(self, part: str) -> dict[Owner, None]:
        with self._lock:
            # Forgotten meanwhile: masked all the same.
            return dict.fromkeys(owner for owner, _ in self._holders.get(part, {(None, ""): None}))

    def _add(self, owner: Owner, source: str, value: str, parts: list[str]) -> None:
        known = self._owners.setdefault(owner, _OwnerValues())
        known.sources[source] = (value, parts)
        self._count(known, parts, 1)
        for part in parts:
            self._holders.setdefault(part, {})[owner, source] = None
            prefix = part[:MIN_LENGTH]
            self._by_prefix.setdefault(prefix, {})[part] = None
            self._groups.pop(prefix, None)

    def _drop(self, owner: Owner, source: str) -> None:
        known = self._owners[owner]
        _, parts = known.sources.pop(source)
        self._count(known, parts, -1)
        if not known.sources:
            del self._owners[owner]
        for part in parts:
            holders = self._holders[part]
            del holders[owner, source]
            if holders:
                continue
            del self._holders[part]
            prefix = part[:MIN_LENGTH]
            del self._by_prefix[prefix][part]
            if not self._by_prefix[prefix]:
                del self._by_prefix[prefix]
            self._groups.pop(prefix, None)

    def _count(self, known: _OwnerValues, parts: list[str], sign: int) -> None:
        characters = sign * sum(map(len, parts))
        known.parts += sign * len(parts)
        known.characters += characters
        self._parts += sign * len(parts)
        self._characters += characters

    def _enforce_limits(self, owner: Owner) -> None:
        known = self._owners[owner]
        while known.parts > MAX_USER_PARTS or known.characters > MAX_USER_CHARACTERS:
            self._drop_oldest(owner)
        while self._parts > MAX_PARTS:
            self._drop_oldest(max(self._owners, key=lambda each: self._owners[each].parts))
        while self._characters > MAX_CHARACTERS:
            self._drop_oldest(max(self._owners, key=lambda each: self._owners[each].characters))

    def _drop_oldest(self, owner: Owner) -> None:
        self._drop(owner, next(iter(self._owners[owner].sources)))


def _mask(owners: Iterable[Owner]) -> str:
    """Names the owners, so that one whose secret is ordinary text can be asked to change it."""
    names = sorted(owner for owner in owners if owner is not None)
    if not names:
        return f"{MASK}(shared secret)"
    more = ", …" if len(names) > _MAX_OWNERS_SHOWN else ""
    return f"{MASK}(secret of {', '.join(names[:_MAX_OWNERS_SHOWN])}{more})"


_values = SecretValues()
remember = _values.remember
forget = _values.forget
forget_all = _values.forget_all
redact = _values.redact


class RedactionFilter(logging.Filter):
    def filter(self, record: logging.LogRecord) -> bool:
        if _values:
            record.msg, record.args = redact(record.getMessage()), ()
            if record.exc_info and not record.exc_text:
                record.exc_text = redact(logging.Formatter().formatException(record.exc_info))
        return True
