"""The application behind `tpu top`. Server-sent events say what changed; then the visible table is
asked for again."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from rich.text import Text
from textual.app import App, ComposeResult
from textual.binding import Binding
from textual.events import Resize
from textual.message import Message
from textual.widgets import DataTable, Input, Static

from tpufleet.errors import BadInput, FleetError
from tpufleet.model.api_types import JobChanges, JobRow
from tpufleet.model.events import Event
from tpufleet.model.job.jobs import ENDED_STATES, JobId
from tpufleet.views import text
from tpufleet.views.cli.jobs.jobs import names_owner
from tpufleet.views.cli.jobs.resume import changes_from_line
from tpufleet.views.top import tables
from tpufleet.views.top.dialogs import LineDialog, LogDialog, QuestionDialog, TextDialog
from tpufleet.views.top.tables import COLUMNS, FleetView, Tab, TableRow

if TYPE_CHECKING:
    from tpufleet.client.fleet import FleetClient

MAX_JOBS = 200
EVENTS_AT_START = 100
# Many events come at once; the server is asked once for all of them.
REFRESH_AFTER_SECONDS = 0.3
# Progress of running jobs makes no event.
PROGRESS_SECONDS = 5.0
RECONNECT_SECONDS = 5.0
KEYS = "/filter l:logs w:why r:resume R:rerun c:cancel t:tag n:note q"


class TopApp(App[None]):
    TITLE = "tpu top"
    ENABLE_COMMAND_PALETTE = False
    CSS = """
    #bar, #keys, #query { height: 1; background: $primary-background; text-wrap: nowrap;
                          text-overflow: ellipsis; }
    #query { display: none; text-style: bold; }
    #query.set { display: block; }
    #detail { height: 2; color: $text-muted; }
    #filter { display: none; height: 3; }
    #filter.open { display: block; }
    DataTable { height: 1fr; }
    ModalScreen { align: center middle; }
    .dialog { width: 90%; max-width: 100; height: auto; border: round $primary; padding: 0 1;
              background: $surface; }
    .page { width: 100%; height: 100%; background: $surface; }
    .title { text-style: bold; width: 100%; }
    .hint { color: $text-muted; }
    """
    BINDINGS = [
        Binding("q,ctrl+c", "quit", "Quit"),
        *(Binding(str(at + 1), f"show('{tab.name}')", tab) for at, tab in enumerate(Tab)),
        Binding("tab", "next_tab", "Next tab", priority=True),
        Binding("slash", "filter", "Filter"),
        Binding("a", "all_users", "All users"),
        Binding("l", "logs", "Logs"),
        Binding("w,enter", "why", "Why"),
        Binding("r", "resume", "Resume"),
        Binding("R", "rerun", "Rerun with edits"),
        Binding("c", "cancel", "Cancel"),
        Binding("t", "tag", "Tag"),
        Binding("n", "note", "Note"),
        Binding("escape", "clear_filter", "Clear the filter"),
    ]

    class Changed(Message):
        """The stream sent something."""

        def __init__(self, item: Event | JobRow | FleetError) -> None:
            super().__init__()
            self.item = item

    def __init__(
        self,
        client: FleetClient,
        connect: Callable[[], FleetClient],
        *,
        query: str = "",
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        super().__init__()
        self._client, self._connect, self._now = client, connect, now
        self._user = client.me().name
        self._query, self._everybody = query, False
        self._tab = Tab.JOBS
        self._view = FleetView()
        self._rows: list[TableRow] = []
        self._left_at: dict[Tab, str] = {}  # the row of the cursor in tabs that are not shown
        self._problem = ""
        self._valid_query = ""  # the last one that the server understood
        self._wrong_filter = ""  # why the line that is open was not
        self._refresh_due = False
        self._stopped = threading.Event()

    # The screen

    def compose(self) -> ComposeResult:
        yield Static(id="bar")
        yield Static(id="query")
        yield DataTable(cursor_type="row", zebra_stripes=False, id="table")
        yield Static(id="detail")
        yield Input(
            self._query, placeholder="tag:sweep-* loss<0.3 state:failed since:7d", id="filter"
        )
        yield Static(Text(KEYS), id="keys")

    def on_mount(self) -> None:
        self._table.focus()
        self._show()
        self._refresh()
        threading.Thread(target=self._follow, name="events", daemon=True).start()
        self.set_interval(PROGRESS_SECONDS, self._refresh)

    def on_unmount(self) -> None:
        self._stopped.set()
        self._client.close()

    def on_resize(self, _: Resize) -> None:
        self.call_after_refresh(self._show)

    @property
    def _table(self) -> DataTable[Text]:
        return self.query_one("#table", DataTable)

    @property
    def _selected(self) -> TableRow | None:
        at = self._table.cursor_row
        return self._rows[at] if 0 <= at < len(self._rows) else None

    def _show(self) -> None:
        """Draw what is known, and keep the cursor on its row."""
        if not self.is_running:
            return  # the screen is being closed, and an answer came late
        table, now = self._table, self._now()
        selected = self._left_at.pop(self._tab, self._selected and self._selected.key)
        self._rows = self._view.rows(self._tab, now)
        # The table pads each cell by one on both sides; two more columns are for a scrollbar.
        widths = tables.widths(self._tab, self._rows, max(self.size.width - 4, 20))
        table.clear(columns=True)
        for title, width in widths.items():
            table.add_column(title, width=width, key=title)
        kept = [at for at, title in enumerate(COLUMNS[self._tab].titles) if title in widths]
        for row in self._rows:
            table.add_row(*(_cell(row.cells[at]) for at in kept), key=row.key)
        if selected is not None:
            keys = [row.key for row in self._rows]
            if selected in keys:
                table.move_cursor(row=keys.index(selected), scroll=True)
        self._show_bars()

    def _show_bars(self) -> None:
        if not self.is_running:
            return  # the screen is being closed
        bar = Text()
        for at, tab in enumerate(Tab):
            style = "reverse bold" if tab is self._tab else ""
            bar.append(f" {at + 1} {tab} ", style=style)
        whose = "all users" if self._all_users else self._user
        counts = self._view.counts(MAX_JOBS)
        named = f"  {whose}: {counts}"
        bar.append(named if bar.cell_len + len(named) <= self.size.width else f"  {counts}")
        self.query_one("#bar", Static).update(bar)
        line = self.query_one("#query", Static)
        line.set_class(bool(self._query), "set")
        line.update(Text(f" filter: {text.one_line(self._query)}"))
        detail = self._selected.detail if self._selected is not None else self._empty()
        problem = self._wrong_filter or self._problem
        shown = Text(text.one_line(problem or detail))
        shown.stylize("red" if problem else "")
        self.query_one("#detail", Static).update(shown)

    def _empty(self) -> str:
        if self._tab is Tab.JOBS:
            hint = "`tpu run v5e-16 -- CMD` starts one; a shows all users"
            return "no jobs match" if self._query else f"no jobs; {hint}"
        return {Tab.SLICES: "no slices", Tab.QUEUE: "no jobs wait"}.get(self._tab, "no events")

    def on_data_table_row_highlighted(self, _: DataTable.RowHighlighted) -> None:
        self._show_bars()

    # Data

    def _follow(self) -> None:
        """In a thread of its own: events as they happen."""
        after: int | None = None
        while not self._stopped.is_set():
            try:
                if after is None:
                    page = self._client.events(limit=EVENTS_AT_START, newest=True)
                    after = page.last
                    for event in page.events:
                        self.post_message(self.Changed(event))
                for item in self._client.stream(after=after):
                    if isinstance(item, Event):
                        after = item.seq
                    self.post_message(self.Changed(item))
            except FleetError as error:
                if not self._stopped.is_set():
                    self.post_message(self.Changed(error))
            self._stopped.wait(RECONNECT_SECONDS)

    def on_top_app_changed(self, message: Changed) -> None:
        item = message.item
        if isinstance(item, FleetError):
            self._problem = str(item)
            self._show_bars()
            return
        if isinstance(item, Event):
            self._view.add_event(item)
        elif item.id in self._view.jobs:
            self._view.jobs[item.id] = item
        if not self._refresh_due:
            self._refresh_due = True
            self.set_timer(REFRESH_AFTER_SECONDS, self._refresh)

    @property
    def _all_users(self) -> bool:
        return self._everybody or names_owner(self._query)

    def _refresh(self) -> None:
        self._refresh_due = False
        self.run_worker(self._fetch, thread=True, exclusive=True, group="fetch")

    def _fetch(self) -> None:
        """Ask for the jobs, which names come from, and for the visible table."""
        tab, query = self._tab, self._query
        owner = None if self._all_users else self._user
        try:
            jobs = self._client.jobs(owner=owner, query=query or None, limit=MAX_JOBS).jobs
            slices = self._client.slices() if tab is Tab.SLICES else None
            queue = self._client.queue() if tab is Tab.QUEUE else None
        except FleetError as error:
            if not self._stopped.is_set():
                self.call_from_thread(self._fetched, query, None, None, None, error)
            return
        if not self._stopped.is_set():
            self.call_from_thread(self._fetched, query, jobs, slices, queue, None)

    def _fetched(
        self, query: str, jobs: Any, slices: Any, queue: Any, problem: FleetError | None
    ) -> None:
        if query != self._query or not self.is_running:
            return  # asked before the filter changed, or the screen is being closed
        if isinstance(problem, BadInput) and query != self._valid_query:
            # What is listed stays filtered as before, and the line stays open to be corrected.
            self._query, self._wrong_filter = self._valid_query, str(problem)
            self.action_filter()
        else:
            self._problem = "" if problem is None else str(problem)
            self._valid_query = query if problem is None else self._valid_query
        if jobs is not None:
            self._view.jobs = {row.id: row for row in jobs}
        if slices is not None:
            self._view.slices = slices
        if queue is not None:
            self._view.queue = queue
        self._show()

    # Tabs and filter

    def action_show(self, name: str) -> None:
        if self._selected is not None:
            self._left_at[self._tab] = self._selected.key
        self._tab = Tab[name]
        self._show()
        self._refresh()

    def action_next_tab(self) -> None:
        order = list(Tab)
        self.action_show(order[(order.index(self._tab) + 1) % len(order)].name)

    def action_filter(self) -> None:
        field = self.query_one("#filter", Input)
        field.add_class("open")
        field.focus()

    def action_clear_filter(self) -> None:
        field = self.query_one("#filter", Input)
        if field.has_class("open"):
            field.value = self._query
        elif self._query:
            field.value = self._query = ""
            self._refresh()
        self._close_filter()

    def on_input_submitted(self, event: Input.Submitted) -> None:
        self._query = event.value.strip()
        self._close_filter()
        self._refresh()

    def _close_filter(self) -> None:
        self._wrong_filter = ""
        self.query_one("#filter", Input).remove_class("open")
        self._table.focus()
        self._show_bars()

    def action_all_users(self) -> None:
        self._everybody = not self._everybody
        self._refresh()

    # Actions on the selected job

    @property
    def _job(self) -> JobId | None:
        row = self._selected
        if row is None or row.job_id is None:
            self.notify("no job is selected", severity="warning")
            return None
        return row.job_id

    def _job_name(self, job_id: JobId) -> str:
        known = self._view.jobs.get(job_id)
        return known.name if known is not None else job_id

    def _call(self, action: Callable[[], str]) -> None:
        """Ask the server in a thread, and show the answer or the error."""

        def run() -> None:
            try:
                message, severity = action(), "information"
            except FleetError as error:
                message, severity = str(error), "error"
            if not self._stopped.is_set():
                self.call_from_thread(self._answered, message, severity)

        self.run_worker(run, thread=True, group="actions")

    def _answered(self, message: str, severity: Any) -> None:
        if message:
            self.notify(text.without_control_characters(message), severity=severity, markup=False)
        self._refresh()

    def action_logs(self) -> None:
        if (job_id := self._job) is not None:
            self.push_screen(LogDialog(self._job_name(job_id), job_id, self._connect))

    def action_why(self) -> None:
        if (job_id := self._job) is None:
            return

        def explain() -> str:
            shown = Text()
            for line, style in text.explanation_lines(self._client.why(job_id)):
                shown.append(f"{line}\n", style=style)
            title = f"why {self._job_name(job_id)}"
            self.call_from_thread(self.push_screen, TextDialog(title, shown))
            return ""

        self._call(explain)

    def action_resume(self) -> None:
        self._resubmit("resume", "from its last checkpoint")

    def action_rerun(self) -> None:
        self._resubmit("rerun", "from the beginning")

    def _resubmit(self, verb: str, how: str) -> None:
        if (job_id := self._job) is None:
            return

        def send(line: str | None) -> None:
            if line is None:
                return

            def call() -> str:
                changes = changes_from_line(self._client.job(job_id).job.spec, line)
                send = self._client.resume if verb == "resume" else self._client.rerun
                row = send(job_id, changes)
                return f"{verb}: {row.name} ({row.id})"

            self._call(call)

        title = f"{verb.capitalize()} {self._job_name(job_id)} {how}"
        hint = "changes: lr=0.1 --type v5e-16 --tag T, or none"
        self.push_screen(LineDialog(title, hint), send)

    def action_cancel(self) -> None:
        if (job_id := self._job) is None:
            return

        known = self._view.jobs.get(job_id)
        if known is not None and known.state in ENDED_STATES:
            self.notify(f"{known.name} has already {known.state}", severity="warning")
            return

        def answered(yes: bool | None) -> None:
            if yes:
                self._call(lambda: f"cancelling {self._client.cancel(job_id).name}")

        self.push_screen(QuestionDialog(f"Cancel {self._job_name(job_id)} ({job_id})?"), answered)

    def action_tag(self) -> None:
        if (job_id := self._job) is None:
            return

        def send(line: str | None) -> None:
            words = (line or "").split()
            if not words:
                return
            added = tuple(word for word in words if not word.startswith("-"))
            removed = tuple(word[1:] for word in words if word.startswith("-"))
            changes = JobChanges(add_tags=added, remove_tags=removed)
            self._change(job_id, changes, lambda row: f"tags: {', '.join(row.tags) or 'none'}")

        self.push_screen(
            LineDialog(f"Tags of {self._job_name(job_id)}", "TAG adds, -TAG removes"), send
        )

    def action_note(self) -> None:
        if (job_id := self._job) is None:
            return
        known = self._view.jobs.get(job_id)

        def send(line: str | None) -> None:
            if line is not None:
                self._change(job_id, JobChanges(notes=line), lambda _: "notes changed")

        before = known.notes if known is not None else ""
        dialog = LineDialog(f"Note of {self._job_name(job_id)}", "empty removes it", before)
        self.push_screen(dialog, send)

    def _change(
        self, job_id: JobId, changes: JobChanges, describe: Callable[[JobRow], str]
    ) -> None:
        def call() -> str:
            row = self._client.change_job(job_id, changes)
            return f"{row.name}: {describe(row)}"

        self._call(call)


def _cell(cell: tables.Cell) -> Text:
    style = "" if isinstance(cell, str) else cell[1]
    return Text(tables.shown(cell), style=style, no_wrap=True, overflow="ellipsis")
