"""`tpu top` through Textual's pilot, against a real server."""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
from collections.abc import Awaitable, Callable
from datetime import timedelta
from html import unescape
from pathlib import Path

import pytest

from tests.polling import Patience

pytest.importorskip("textual", reason="the extra `top` is not installed")

from textual.pilot import Pilot
from textual.widgets import DataTable, Input, Static

from tests.service.harness import SPEC, ServiceHarness
from tests.views.cli_runner import Tpu
from tests.views.job_scenarios import end_job, record_event, start_job
from tests.views.test_terminal_output import FAILURE
from tpufleet.errors import install_command
from tpufleet.model.api_types import NewJob
from tpufleet.model.fleet.hosts import Phase, Progress
from tpufleet.model.inbox import InboxMessageKind
from tpufleet.model.job.jobs import JobId, JobState
from tpufleet.stores.base import JobQuery
from tpufleet.views.top.app import KEYS, MAX_JOBS, TopApp
from tpufleet.views.top.dialogs import LogDialog, TextDialog

SNAPSHOTS = Path(__file__).parent / "snapshots"
NARROW = (80, 24)


def run(
    world: ServiceHarness,
    journey: Callable[[Pilot[None]], Awaitable[None]],
    size: tuple[int, int] = NARROW,
    **options: object,
) -> None:
    """The application of the user mel, driven by this journey."""
    app = TopApp(
        world.client(),
        world.client,
        now=world.clock.now,
        **options,  # type: ignore[arg-type]
    )

    async def drive() -> None:
        async with app.run_test(size=size, notifications=True) as pilot:
            await journey(pilot)

    asyncio.run(drive())


def screen_text(pilot: Pilot[None]) -> str:
    """The screen as lines of text, from the picture that Textual draws of it."""
    return text_of_svg(pilot.app.export_screenshot())


def text_of_svg(svg: str) -> str:
    rows: dict[float, list[tuple[float, str]]] = {}
    pattern = r'<text class="[^"]*" x="([\d.]+)" y="([\d.]+)"[^>]*clip-path[^>]*>([^<]*)</text>'
    for x, y, shown in re.findall(pattern, svg):
        rows.setdefault(float(y), []).append((float(x), unescape(shown).replace("\xa0", " ")))
    lines = ("".join(part for _, part in sorted(parts)) for _, parts in sorted(rows.items()))
    return "\n".join(line.rstrip() for line in lines)


async def until(pilot: Pilot[None], condition: Callable[[], object], timeout: float = 60) -> None:
    patience = Patience(timeout)
    while not condition():
        assert not patience.is_over, screen_text(pilot)
        await pilot.pause(0.02)


async def until_shown(pilot: Pilot[None], *expected: str) -> None:
    await until(pilot, lambda: all(each in screen_text(pilot) for each in expected))


async def press_line(pilot: Pilot[None], line: str) -> None:
    for field in pilot.app.screen.query(Input):
        if field.has_focus:
            field.value = line
    await pilot.press("enter")


@pytest.fixture
def fleet(world: ServiceHarness) -> ServiceHarness:
    """A running, a failed and a waiting job of mel, and one of mo."""
    world.submit("job-old", name="baseline", tags=["paper"])
    world.add_slice("slice-9", "job-old")
    world.add_attempt("job-old", 0, "slice-9")
    end_job(world, "job-old", JobState.FAILED, reason=FAILURE)
    start_job(world, "job-run", name="resnet-50-large-batch", tags=["sweep-1", "paper"])
    progress = Progress(step=30, total=120, at=world.clock.now(), metrics={"loss": 0.25})
    world.send_heartbeat(
        "slice-1/0", phase=Phase.RUNNING, attempt_id="job-run.0", progress=progress
    )
    world.submit("job-wait", name="waiting-one", tags=["sweep-1"])
    world.submit("job-mo", by="mo", name="of-another-user")
    record_event(world, "job-run", "all 4 hosts of slice-1 run")
    world.clock.advance(timedelta(minutes=5))
    return world


def test_the_jobs_fit_a_small_terminal_and_match_the_picture(fleet):
    async def journey(pilot: Pilot[None]) -> None:
        await until_shown(pilot, "baseline", "30/120", "waiting-one", "1 running")
        compare_picture(pilot, "top-80x24")

    run(fleet, journey)


def test_the_jobs_on_a_wide_terminal_have_all_columns(fleet):
    async def journey(pilot: Pilot[None]) -> None:
        await until_shown(pilot, "TAGS", "OWNER", "sweep-1,paper", "30/120")
        compare_picture(pilot, "top-160x40")

    run(fleet, journey, size=(160, 40))


def compare_picture(pilot: Pilot[None], name: str) -> None:
    """By its text: colours and fonts belong to Textual and change with its version. Write the
    pictures anew with UPDATE_SNAPSHOTS=1."""
    file = SNAPSHOTS / f"{name}.svg"
    svg = pilot.app.export_screenshot(title="tpu top")
    if "UPDATE_SNAPSHOTS" in os.environ:
        SNAPSHOTS.mkdir(exist_ok=True)
        file.write_text(re.sub(r"@font-face \{.*?\}", "", svg, flags=re.DOTALL))
    assert text_of_svg(svg) == text_of_svg(file.read_text()), screen_text(pilot)
    lines = screen_text(pilot).splitlines()
    assert all(len(line) <= pilot.app.size.width for line in lines)


def test_every_key_is_on_the_screen_at_80_columns():
    assert len(KEYS) <= 80
    for word in ("filter", "logs", "why", "resume", "rerun", "cancel", "tag", "note"):
        assert word in KEYS


def test_events_change_the_screen_without_a_key(fleet):
    async def journey(pilot: Pilot[None]) -> None:
        await until_shown(pilot, "waiting-one", "1 running")
        await asyncio.to_thread(fleet.submit, "job-new", name="just-submitted")
        await until_shown(pilot, "just-submitted")
        await asyncio.to_thread(end_job, fleet, "job-run", JobState.SUCCEEDED, reason="done")
        await asyncio.to_thread(record_event, fleet, "job-run", "job finished", "succeeded")
        await until_shown(pilot, "succeeded")
        await pilot.press("4")
        await until_shown(pilot, "job finished", "all 4 hosts of slice-1 run")

    run(fleet, journey)


def test_slices_queue_and_events_are_tabs(fleet):
    async def journey(pilot: Pilot[None]) -> None:
        await until_shown(pilot, "waiting-one")
        await pilot.press("2")
        await until_shown(pilot, "slice-1", "local-a", "ready")
        await pilot.press("3")
        await until_shown(pilot, "waiting-one", "BECAUSE")
        await pilot.press("tab")
        await until_shown(pilot, "MESSAGE", "all 4 hosts")
        await pilot.press("1")
        await until_shown(pilot, "baseline")

    run(fleet, journey)


def test_the_cursor_stays_at_its_row_when_another_tab_was_shown(fleet):
    async def journey(pilot: Pilot[None]) -> None:
        app = pilot.app
        assert isinstance(app, TopApp)
        await until(pilot, lambda: len(app._rows) > 2)
        await pilot.press("down", "down")
        chosen = app._selected
        assert chosen is not None
        await pilot.press("2")
        await until_shown(pilot, "slice-1", "local-a")
        await pilot.press("1")
        await until(pilot, lambda: app._selected is not None and app._selected.key == chosen.key)

    run(fleet, journey)


@pytest.mark.parametrize("wrong", ["state:nonsense", "loss<<3", "since:", "foo:bar"])
def test_a_filter_that_is_not_understood_can_be_corrected(fleet, wrong):
    """The list stays filtered as before; the line stays open, with the reason above it."""

    async def journey(pilot: Pilot[None]) -> None:
        await until_shown(pilot, "baseline")
        await pilot.press("slash")
        await press_line(pilot, "tag:sweep-*")
        await until_shown(pilot, " filter: tag:sweep-*")
        await until(pilot, lambda: "baseline" not in screen_text(pilot))
        await pilot.press("slash")
        await press_line(pilot, wrong)
        field = pilot.app.query_one("#filter", Input)
        await until(pilot, lambda: f"'{wrong}': " in screen_text(pilot) and field.has_focus)
        assert field.value == wrong
        assert " filter: tag:sweep-*" in screen_text(pilot)
        assert "waiting-one" in screen_text(pilot) and "baseline" not in screen_text(pilot)
        await press_line(pilot, "tag:paper")
        await until_shown(pilot, " filter: tag:paper", "baseline")
        assert f"'{wrong}': " not in screen_text(pilot)
        await pilot.press("slash")
        await press_line(pilot, wrong)
        await until_shown(pilot, f"'{wrong}': ")
        await pilot.press("escape")
        await until(pilot, lambda: f"'{wrong}': " not in screen_text(pilot))
        assert " filter: tag:paper" in screen_text(pilot)

    run(fleet, journey)


def test_a_long_filter_is_shown_on_a_line_of_its_own(fleet):
    query = "tag:sweep-1 state:running name:resnet-50-large-batch since:7d"

    async def journey(pilot: Pilot[None]) -> None:
        await until_shown(pilot, f" filter: {query}", "1 running")

    run(fleet, journey, query=query)


def test_the_filter_is_a_query_and_escape_clears_it(fleet):
    def names(pilot: Pilot[None]) -> set[str]:
        table = pilot.app.query_one(DataTable)
        return {str(table.get_row_at(at)[0]) for at in range(table.row_count)}

    async def journey(pilot: Pilot[None]) -> None:
        mine = {"baseline", "resnet-50-large-batch", "waiting-one"}
        await until(pilot, lambda: names(pilot) == mine)
        await pilot.press("slash")
        await press_line(pilot, "tag:sweep-* state:live -name:wait*")
        await until(pilot, lambda: names(pilot) == {"resnet-50-large-batch"})
        await until_shown(pilot, "filter: tag:sweep-*")
        await pilot.press("slash")
        await press_line(pilot, "owner:mo")
        await until(pilot, lambda: names(pilot) == {"of-another-user"})
        await pilot.press("slash")
        await press_line(pilot, "state:asleep")
        await until(pilot, lambda: pilot.app.query_one("#filter").has_class("open"))
        await until_shown(pilot, "asleep")
        await pilot.press("escape")
        assert names(pilot) == {"of-another-user"}
        await pilot.press("escape")
        await until(pilot, lambda: names(pilot) == mine)
        await pilot.press("a")
        await until(pilot, lambda: names(pilot) == {*mine, "of-another-user"})

    run(fleet, journey)


async def select(pilot: Pilot[None], name: str) -> None:
    table = pilot.app.query_one(DataTable)

    def position() -> int | None:
        shown = [str(table.get_row_at(at)[0]) for at in range(table.row_count)]
        return next((at for at, each in enumerate(shown) if each.endswith(name)), None)

    await until(pilot, lambda: position() is not None)
    table.move_cursor(row=position())
    await pilot.pause()


def job(world: ServiceHarness, job_id: str):
    found = world.store.job(JobId(job_id))
    assert found is not None
    return found


def test_keys_tag_note_and_cancel_the_selected_job(fleet):
    def cancelled() -> list[str | None]:
        inbox = fleet.store.inbox()
        return [each.job_id for each in inbox if each.kind is InboxMessageKind.CANCEL]

    async def journey(pilot: Pilot[None]) -> None:
        await select(pilot, "waiting-one")
        await pilot.press("t")
        await until_shown(pilot, "Tags of waiting-one")
        await press_line(pilot, "new-tag -sweep-1")
        await until(pilot, lambda: job(fleet, "job-wait").spec.tags == ("new-tag",))
        await pilot.press("n")
        await until_shown(pilot, "Note of waiting-one")
        await press_line(pilot, "why so slow?")
        await until(pilot, lambda: job(fleet, "job-wait").spec.notes == "why so slow?")
        await pilot.press("c")
        await until_shown(pilot, "Cancel waiting-one (job-wait)?")
        await pilot.press("enter")
        await pilot.press("c")
        await until_shown(pilot, "Cancel waiting-one (job-wait)?")
        assert not cancelled(), "Enter does not mean yes"
        await pilot.press("y")
        await until(pilot, lambda: cancelled() == ["job-wait"])

    run(fleet, journey)


def test_resume_and_rerun_take_edits(fleet):
    async def journey(pilot: Pilot[None]) -> None:
        def children() -> dict[str, list[str]]:
            return {
                str(each.parent_relation): [*each.spec.command, each.spec.accelerator]
                for each in fleet.store.jobs(JobQuery())
                if each.parent == "job-old"
            }

        await select(pilot, "baseline")
        await pilot.press("R")
        await until_shown(pilot, "Rerun baseline from the beginning")
        await press_line(pilot, "lr=0.1 --type v5e-4 --set name=again")
        await until(pilot, lambda: len(children()) == 1)
        await select(pilot, "baseline")
        await pilot.press("r")
        await until_shown(pilot, "Resume baseline from its last checkpoint")
        await press_line(pilot, "")
        await until(pilot, lambda: len(children()) == 2)
        assert children() == {
            "rerun": ["python", "train.py", "lr=0.1", "v5litepod-4"],
            "resume": ["python", "train.py", "v5litepod-16"],
        }
        await pilot.press("R")
        await until_shown(pilot, "from the beginning")
        await press_line(pilot, "--colour red")
        await until_shown(pilot, "no such option")

    run(fleet, journey)


def test_why_and_logs_open_over_the_table(fleet):
    async def journey(pilot: Pilot[None]) -> None:
        await select(pilot, "baseline")
        await pilot.press("w")
        await until(pilot, lambda: isinstance(pilot.app.screen, TextDialog))
        await until_shown(pilot, "why baseline", "RET_CHECK")
        await pilot.press("escape")
        await select(pilot, "resnet-50-large-batch")
        await pilot.press("l")
        await until(pilot, lambda: isinstance(pilot.app.screen, LogDialog))
        gloo = b"[Gloo] Rank 0 is connected to 3 peer ranks. "
        gloo += b"Expected number of connected peer ranks is : 3\n"
        line = gloo + b"10%\rstep 1 \x1b[31mloss\x1b[0m 0.5\x1b]0;title\x07\r\n"
        await asyncio.to_thread(fleet.send_log, "job-run.0", "slice-1/0", 0, line)
        await until_shown(pilot, "logs of resnet-50-large-batch", "step 1 loss 0.5")
        later = b"step 2 loss 0.4\n"
        await asyncio.to_thread(fleet.send_log, "job-run.0", "slice-1/0", len(line), later)
        await until_shown(pilot, "step 2 loss 0.4")
        shown = screen_text(pilot)
        assert not [each for each in ("Gloo", "[31m", "title", "10%", "�") if each in shown]
        await pilot.press("q")
        await until(pilot, lambda: not isinstance(pilot.app.screen, LogDialog))

    run(fleet, journey)


def test_an_unreachable_server_is_shown_and_the_screen_stays(fleet):
    async def journey(pilot: Pilot[None]) -> None:
        await until_shown(pilot, "baseline")
        await asyncio.to_thread(fleet.stop)
        await pilot.press("1")
        await until_shown(pilot, "cannot reach the server", "baseline")
        await asyncio.to_thread(fleet.start)
        await pilot.press("1")
        await until(pilot, lambda: "cannot reach" not in screen_text(pilot))
        assert isinstance(pilot.app.query_one("#detail"), Static)

    run(fleet, journey)


def test_without_a_terminal_the_next_command_is_named(tpu: Tpu):
    refused = tpu("top")
    assert refused.exit_code == 2
    assert (
        refused.stderr == "error: tpu top needs a terminal\n  next: tpu jobs, or tpu jobs --json\n"
    )


def test_without_textual_the_extra_is_named(tmp_path: Path):
    code = (
        "import sys; sys.modules['textual'] = None\n"
        "from tpufleet.__main__ import run; sys.exit(run(['top']))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 2
    assert f"next: {install_command('tpufleet[top]')}" in done.stderr


def test_counts_of_the_newest_jobs_only_say_so(fleet):
    with fleet.client("mel") as client:
        client.submit([NewJob(id=JobId(f"more-{at}"), spec=SPEC) for at in range(MAX_JOBS)])

    async def journey(pilot: Pilot[None]) -> None:
        await until_shown(pilot, "0 running, 200 waiting of the newest 200")

    run(fleet, journey)
