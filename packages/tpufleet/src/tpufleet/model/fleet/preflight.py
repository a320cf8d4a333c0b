"""Results of the checks that a cloud project passes before the first slice is paid for."""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum

import msgspec


class CheckStatus(StrEnum):
    OK = "ok"
    WARNING = "warning"  # works, but not as most users expect; or cannot be checked
    FAILED = "failed"
    SKIPPED = "skipped"


class Check(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    status: CheckStatus
    message: str
    fix: str = ""  # a command that can be pasted, or what to write where


def ok(name: str, message: str) -> Check:
    return Check(name=name, status=CheckStatus.OK, message=message)


def warning(name: str, message: str, fix: str = "") -> Check:
    return Check(name=name, status=CheckStatus.WARNING, message=message, fix=fix)


def failed(name: str, message: str, fix: str) -> Check:
    return Check(name=name, status=CheckStatus.FAILED, message=message, fix=fix)


def skipped(name: str, message: str) -> Check:
    return Check(name=name, status=CheckStatus.SKIPPED, message=message)


def passed(checks: Iterable[Check]) -> bool:
    return not any(check.status is CheckStatus.FAILED for check in checks)
