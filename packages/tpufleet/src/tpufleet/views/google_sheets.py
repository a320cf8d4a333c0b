"""Writes the inventory to a Google Sheet, through Google's own client. One way: nothing is read.

https://developers.google.com/workspace/sheets/api/reference/rest/v4/spreadsheets.values
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from tpufleet.errors import (
    BadInput,
    FleetError,
    Forbidden,
    NotFound,
    Unreachable,
    optional_packages,
)

SCOPE = "https://www.googleapis.com/auth/spreadsheets"
_URL = re.compile(r"https://docs\.google\.com/spreadsheets/d/([A-Za-z0-9_-]+)")
_ID = re.compile(r"[A-Za-z0-9_-]{20,}")


def spreadsheet_id(written: str) -> str:
    """From an id, or from the address in a browser."""
    match = _URL.match(written)
    if match is None and not _ID.fullmatch(written):
        raise BadInput(
            f"{written[:80]!r} is not a spreadsheet; pass its id, or its address "
            "https://docs.google.com/spreadsheets/d/…"
        )
    return match[1] if match else written


def write_sheet(
    spreadsheet: str,
    tab: str,
    rows: Sequence[Sequence[str]],
    *,
    endpoint: str | None = None,  # of another server than Google's
    credentials: Any = None,  # None: those of this machine
) -> None:
    """Replace the content of a tab. Values are stored as text, so none becomes a formula."""
    with optional_packages("--sheet", "sheets"):
        import google.auth
        from google.auth.exceptions import GoogleAuthError
        from googleapiclient.discovery import build
        from googleapiclient.errors import HttpError
    try:
        if credentials is None:
            credentials, _ = google.auth.default(scopes=[SCOPE])
        options = {} if endpoint is None else {"client_options": {"api_endpoint": endpoint}}
        service = build(
            "sheets",
            "v4",
            credentials=credentials,
            cache_discovery=False,
            static_discovery=True,
            **options,
        )
        quoted = "'" + tab.replace("'", "''") + "'"
        values = service.spreadsheets().values()
        sheet = {"spreadsheetId": spreadsheet, "range": quoted}
        values.clear(**sheet, body={}).execute(num_retries=3)
        body = {"values": [list(row) for row in rows]}
        values.update(**sheet, valueInputOption="RAW", body=body).execute(num_retries=3)
    except HttpError as error:
        raise _translated(error, spreadsheet, tab) from error
    except GoogleAuthError as error:
        raise Forbidden(
            f"no Google credentials: {error}\n  next: gcloud auth application-default login "
            f"--scopes={SCOPE},https://www.googleapis.com/auth/cloud-platform"
        ) from error
    except OSError as error:
        raise Unreachable(f"cannot reach Google Sheets: {error}") from error


def _translated(error: Any, spreadsheet: str, tab: str) -> FleetError:
    status = int(error.status_code)
    kind: type[FleetError] = Unreachable
    hint = "retry later"
    if status in (401, 403):
        kind, hint = Forbidden, "share the sheet with the account of your credentials, as editor"
    elif status in (400, 404):
        kind, hint = NotFound, f"check that {spreadsheet} exists, with a tab {tab!r}"
    return kind(f"Google Sheets: {getattr(error, 'reason', error)}\n  next: {hint}")
