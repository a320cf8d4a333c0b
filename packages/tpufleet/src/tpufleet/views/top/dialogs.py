"""Screens over the tables of `tpu top`: a line to type, a question, a page of text, live logs."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

from rich.text import Text
from textual.app import ComposeResult
from textual.binding import Binding
from textual.containers import Vertical, VerticalScroll
from textual.message import Message
from textual.screen import ModalScreen
from textual.widgets import Input, Label, RichLog, Static

from tpufleet.errors import FleetError
from tpufleet.views import text

if TYPE_CHECKING:
    from tpufleet.client.fleet import FleetClient

LOG_TAIL = 500  # lines shown at first
KEPT_LINES = 10_000


class LineDialog(ModalScreen[str | None]):
    """Asks for one line; Escape gives None."""

    BINDINGS = [Binding("escape", "dismiss(None)", "Back")]

    def __init__(self, title: str, hint: str, value: str = "") -> None:
        super().__init__()
        self._title, self._hint, self._value = title, hint, value

    def compose(self) -> ComposeResult:
        with Vertical(classes="dialog"):
            yield Label(Text(self._title), classes="title")
            yield Input(self._value, id="line")
            yield Label(Text(f"{self._hint}  ·  Enter: do it, Esc: back"), classes="hint")

    def on_input_submitted(self, event: Input.Submitted) -> None:
        event.stop()
        self.dismiss(event.value)


class QuestionDialog(ModalScreen[bool]):
    """Answered with y; anything else means no."""

    BINDINGS = [
        Binding("y", "dismiss(True)", "Yes"),
        Binding("n,escape,enter", "dismiss(False)", "No"),
    ]

    def __init__(self, question: str) -> None:
        super().__init__()
        self._question = question

    def compose(self) -> ComposeResult:
        with Vertical(classes="dialog"):
            yield Label(Text(self._question), classes="title")
            yield Label(Text("y: yes    n, Esc: no"), classes="hint")


class TextDialog(ModalScreen[None]):
    """A page of text that scrolls."""

    BINDINGS = [Binding("escape,q", "dismiss", "Back")]

    def __init__(self, title: str, lines: Text) -> None:
        super().__init__()
        self._title, self._lines = title, lines

    def compose(self) -> ComposeResult:
        with Vertical(classes="page"):
            yield Label(Text(f"{self._title}  ·  Esc: back"), classes="title")
            with VerticalScroll():
                yield Static(self._lines, id="text")

    def on_mount(self) -> None:
        self.query_one(VerticalScroll).focus()


class LogDialog(ModalScreen[None]):
    """Follows the output of host 0 of one job."""

    BINDINGS = [Binding("escape,q", "dismiss", "Back")]

    class Line(Message):
        def __init__(self, line: str) -> None:
            super().__init__()
            self.line = line

    def __init__(self, name: str, job_id: str, connect: Callable[[], FleetClient]) -> None:
        super().__init__()
        self._job_name, self._job_id = name, job_id
        self._client = connect()  # of its own: closing it ends the stream

    def compose(self) -> ComposeResult:
        with Vertical(classes="page"):
            yield Label(Text(f"logs of {self._job_name}, host 0  ·  Esc: back"), classes="title")
            yield RichLog(max_lines=KEPT_LINES, wrap=True, min_width=20, id="log")

    def on_mount(self) -> None:
        self.query_one(RichLog).focus()
        threading.Thread(target=self._follow, name="logs", daemon=True).start()

    def on_unmount(self) -> None:
        self._client.close()

    def _follow(self) -> None:
        try:
            for line in self._client.follow_logs(self._job_id, host=0, tail=LOG_TAIL):
                self.post_message(self.Line(line.line))
            end = "— the job has ended —"
        except FleetError as error:
            end = f"error: {error}"
        self.post_message(self.Line(end))

    def on_log_dialog_line(self, event: Line) -> None:
        if (shown := text.program_output(event.line.rstrip("\r"))) is not None:
            self.query_one(RichLog).write(Text.from_ansi(shown))
