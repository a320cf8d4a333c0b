"""Errors of the emulated Compute Engine, by name: of calls and of operations."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

_TEXTS: Mapping[str, Mapping[str, Mapping[str, Any]]] = yaml.safe_load(
    Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8")
)
CALLS, OPERATIONS = _TEXTS["calls"], _TEXTS["operations"]
DOMAIN = "compute.googleapis.com"
ErrorBody = dict[str, Any]


class RestError(Exception):
    """The answer to a call."""

    def __init__(self, status: int, reason: str, message: str) -> None:
        super().__init__(message)
        self.status, self.reason, self.message = status, reason, message

    def body(self) -> dict[str, Any]:
        error: dict[str, Any] = {
            "code": self.status,
            "message": self.message,
            "errors": [{"message": self.message, "domain": "global", "reason": self.reason}],
        }
        if self.reason == "accessNotConfigured":
            error["errors"][0]["domain"] = "usageLimits"
            error["status"] = "PERMISSION_DENIED"
            error["details"] = [
                {
                    "@type": "type.googleapis.com/google.rpc.ErrorInfo",
                    "reason": "SERVICE_DISABLED",
                    "domain": "googleapis.com",
                    "metadata": {"service": DOMAIN, "consumer": "projects/1"},
                }
            ]
        return {"error": error}


def call_error(name: str, /, **values: str) -> RestError:
    entry = CALLS[name]
    return RestError(entry["status"], entry["reason"], _format(entry["message"], values))


def invalid(message: str) -> RestError:
    return RestError(400, "invalid", message)


def invalid_field(field: str, value: object, problem: str = "") -> RestError:
    detail = f". {problem}" if problem else ""
    return invalid(f"Invalid value for field '{field}': '{value}'{detail}")


def required(field: str) -> RestError:
    return RestError(400, "required", f"Required field '{field}' not specified")


def operation_error(name: str, /, **values: str) -> ErrorBody:
    """One of `error.errors` of an operation."""
    entry = OPERATIONS[name]
    body: ErrorBody = {"code": entry["code"], "message": _format(entry["message"], values)}
    if "reason" in entry:
        metadatas = {key: _format(each, values) for key, each in entry["metadatas"].items()}
        info = {
            "reason": _format(entry["reason"], values), "domain": DOMAIN, "metadatas": metadatas,
        }  # fmt: skip
        body["errorDetails"] = [{"errorInfo": info}]
    return body


def quota_error(
    metric: str, quota_id: str, limit: int, region: str, dimensions: Mapping[str, str]
) -> ErrorBody:
    body = operation_error(
        "quota", metric_upper=metric.upper(), limit=f"{float(limit)}", region=region
    )
    info = {
        "metricName": f"{DOMAIN}/{metric}",
        "limitName": quota_id,
        "dimensions": dict(dimensions),
        "limit": float(limit),
    }
    return {**body, "errorDetails": [{"quotaInfo": info}]}


class _Known(dict[str, str]):
    def __missing__(self, key: str) -> str:
        return ""


def _format(text: str, values: Mapping[str, str]) -> str:
    return text.format_map(_Known(values))
