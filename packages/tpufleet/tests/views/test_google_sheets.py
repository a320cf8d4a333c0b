"""The inventory in a Google Sheet, against a server that speaks the documented HTTP API.

https://developers.google.com/workspace/sheets/api/reference/rest/v4/spreadsheets.values
"""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlsplit

import pytest

from tpufleet.errors import BadInput, Forbidden, NotFound, Unreachable
from tpufleet.views.google_sheets import spreadsheet_id, write_sheet

pytest.importorskip("googleapiclient")
SHEET = "1aBcDeFgHiJkLmNoPqRsTuVwXyZ"


class FakeSheets:
    """`values.clear` (POST …:clear) and `values.update` (PUT …?valueInputOption=) of one sheet."""

    def __init__(self) -> None:
        self.tabs: dict[str, list[list[str]]] = {"TPUs": [["old", "row"], ["stays", "not"]]}
        self.status = 200
        self.options: list[str] = []
        fake = self

        class Handler(BaseHTTPRequestHandler):
            def _handle(self) -> None:
                size = int(self.headers.get("Content-Length") or 0)
                status, answer = fake.respond(self.command, self.path, self.rfile.read(size))
                body = json.dumps(answer).encode()
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            do_POST = do_PUT = do_GET = _handle

            def log_message(self, *_: object) -> None:
                """Quiet."""

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True).start()
        self.url = f"http://127.0.0.1:{self.server.server_port}"

    def respond(self, method: str, target: str, body: bytes) -> tuple[int, dict]:
        if self.status != 200:
            return self.status, _error(self.status, "refused")
        parts = urlsplit(target)
        path = unquote(parts.path)
        prefix = f"/v4/spreadsheets/{SHEET}/values/"
        if not path.startswith(prefix):
            return 404, _error(404, "Requested entity was not found.")
        cells, _, verb = path.removeprefix(prefix).partition(":")
        tab = cells.strip("'").replace("''", "'")
        if tab not in self.tabs:
            return 400, _error(400, f"Unable to parse range: {cells}")
        if (method, verb) == ("POST", "clear"):
            self.tabs[tab] = []
            return 200, {"spreadsheetId": SHEET, "clearedRange": cells}
        assert method == "PUT"
        self.options += parse_qs(parts.query)["valueInputOption"]
        self.tabs[tab] = json.loads(body)["values"]
        return 200, {"spreadsheetId": SHEET, "updatedRows": len(self.tabs[tab])}


def _error(code: int, message: str) -> dict:
    return {"error": {"code": code, "message": message, "status": "ERROR"}}


@pytest.fixture
def sheets():
    fake = FakeSheets()
    yield fake
    fake.server.shutdown()
    fake.server.server_close()


def write(sheets, rows, tab="TPUs", sheet=SHEET):
    from google.auth.credentials import AnonymousCredentials

    write_sheet(sheet, tab, rows, endpoint=sheets.url, credentials=AnonymousCredentials())


def test_the_tab_is_replaced_as_text(sheets):
    write(sheets, [["id", "note"], ["s-1", "=1+1"]])
    assert sheets.tabs["TPUs"] == [["id", "note"], ["s-1", "=1+1"]]
    assert sheets.options == ["RAW"]  # a formula would be USER_ENTERED


@pytest.mark.parametrize(
    ("status", "error"), [(403, Forbidden), (404, NotFound), (400, NotFound), (409, Unreachable)]
)
def test_errors_of_google_are_translated(sheets, status, error):
    sheets.status = status
    with pytest.raises(error, match="Google Sheets"):
        write(sheets, [])


def test_a_missing_tab_is_named(sheets):
    with pytest.raises(NotFound, match='with a tab "Ada\'s"'):
        write(sheets, [], tab="Ada's")


def test_a_spreadsheet_is_named_by_id_or_address():
    assert spreadsheet_id(SHEET) == SHEET
    assert spreadsheet_id(f"https://docs.google.com/spreadsheets/d/{SHEET}/edit#gid=0") == SHEET
    with pytest.raises(BadInput, match="is not a spreadsheet"):
        spreadsheet_id("my sheet")
