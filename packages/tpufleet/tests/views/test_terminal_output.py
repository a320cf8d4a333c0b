"""The same commands on a terminal: colours and bars; and in a pipe that is closed early."""

from __future__ import annotations

import os
import pty
import re
import signal
import subprocess
import sys
import threading
from datetime import timedelta

import pytest

from tests.polling import wait_until
from tests.views.cli_runner import Tpu
from tests.views.job_scenarios import end_job, start_job
from tpufleet.model.api_types import JobChanges
from tpufleet.model.fleet.hosts import Phase, Progress
from tpufleet.model.fleet.pools import CapacityRefusal, Pool
from tpufleet.model.fleet.server_status import CONTROLLER_REPORT, ControllerReport, ProviderHealth
from tpufleet.model.fleet.slices import SliceState
from tpufleet.model.job.jobs import Capacity, JobState
from tpufleet.model.values import encoding
from tpufleet.stores.base import ChangeSet, JobQuery

AMBER = "\x1b[38;5;208m"


class Terminal:
    """A command on a pseudo-terminal."""

    def __init__(self, tpu: Tpu, *args: str, columns: int = 160) -> None:
        ours, theirs = pty.openpty()
        environ = {**os.environ, **tpu.environ, "TERM": "xterm-256color", "COLUMNS": str(columns)}
        environ.pop("NO_COLOR", None)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tpufleet", *args],
            env=environ, stdin=theirs, stdout=theirs, stderr=theirs,
        )  # fmt: skip
        os.close(theirs)
        self._ours = ours
        self.shown = ""
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        while True:
            try:
                piece = os.read(self._ours, 65536)
            except OSError:  # Linux says so when the other side is closed
                break
            if not piece:
                break
            self.shown += piece.decode(errors="replace")
        os.close(self._ours)

    def wait_for(self, text: str) -> None:
        wait_until(lambda: text in self.shown, describe=lambda: self.shown)

    def interrupt(self) -> None:
        """Ctrl-C."""
        self._process.send_signal(signal.SIGINT)

    def end(self) -> int:
        status = self._process.wait(timeout=900)
        self._reader.join(timeout=900)
        return status


def test_tables_have_colours_on_a_terminal_only(world, tpu):
    world.submit()
    world.change_job("job-1", state=JobState.RECOVERING, reason="preempted; \x1b[2Jasking again")
    screen = Terminal(tpu, "jobs")
    assert screen.end() == 0
    assert f"{AMBER}recovering" in screen.shown
    assert "\x1b[2J" not in screen.shown
    assert "\x1b" not in tpu.ok("jobs")


ATTACK = "\x1b]0;PWNED\x07\x1b]52;c;cHduZWQ=\x07\x1b[2J\x9b2J\x08\u202e\u2066"


def test_logs_reach_a_terminal_without_control_sequences_unless_raw(world, tpu):
    start_job(world)
    world.send_log("job-1.0", "slice-1/0", 0, f"a{ATTACK}\x1b[31mred\x1b[0mz\n".encode())
    end_job(world, "job-1", JobState.SUCCEEDED)
    for follow in ((), ("--follow",)):
        screen = Terminal(tpu, "logs", *follow, "job-1")
        assert screen.end() == 0
        assert "a\x1b[31mred\x1b[0mz" in screen.shown
        assert not any(sign in screen.shown for sign in ("PWNED", "\x1b]", "\x1b[2J", *ATTACK[-4:]))
        raw = Terminal(tpu, "logs", "--raw", *follow, "job-1")
        assert raw.end() == 0 and ATTACK in raw.shown
        assert ATTACK in tpu.ok("logs", "--raw", *follow, "job-1")
        assert tpu.ok("logs", *follow, "job-1") == "[0] aredz\n", "a pipe may end in a terminal"


CONNECTED = (
    "[Gloo] Rank 0 is connected to 1 peer ranks. Expected number of connected peer ranks is : 1"
)


def test_logs_leave_out_how_many_processes_jax_connected_unless_raw(world, tpu):
    start_job(world)
    pieces = f"[Gloo] Rank {CONNECTED}\n{CONNECTED[len('[Gloo] Rank ') :]}\n"  # of two threads
    lines = (f"{CONNECTED}\n" * 3, f"{CONNECTED}{CONNECTED}\n", "step 1\n", f"seen: {CONNECTED}\n")
    world.send_log("job-1.0", "slice-1/0", 0, "".join((pieces, *lines)).encode())
    end_job(world, "job-1", JobState.SUCCEEDED)
    for follow in ((), ("--follow",)):
        shown = tpu.ok("logs", *follow, "job-1").splitlines()
        assert shown == ["[0] step 1", f"[0] seen: {CONNECTED}"]
        assert len(tpu.ok("logs", "--raw", *follow, "job-1").splitlines()) == 8


@pytest.mark.parametrize(
    "command", ["show job-1", "why job-1", "events job-1", "jobs -v", "compare job-1 job-2"]
)
def test_texts_of_users_reach_no_output_with_control_characters(world, tpu, command):
    world.submit(notes=ATTACK)
    world.submit("job-2", notes="other")
    world.client("mel").change_job("job-1", JobChanges(notes=f"again {ATTACK}"))
    world.change_job("job-1", reason=f"waits {ATTACK}")
    shown = tpu.ok(*command.split())
    assert not any(sign in shown for sign in ATTACK if not sign.isprintable())


FAILURE = (
    "jaxlib.xla_extension.XlaRuntimeError: INTERNAL: during context [pre-optimization]: RET_CHECK "
    "failure (exit status 1, host 2 of tpf-k3f9xq2m7abc-1a2b3c4d); retries.failure is 0"
)


@pytest.mark.parametrize("columns", [60, 80, 100, 120, 160, 200])
@pytest.mark.parametrize("who", [(), ("--all-users",)], ids=["mine", "all users"])
def test_each_job_takes_one_line_at_any_width(world, tpu, columns, who):
    for number in range(5):
        world.submit(f"abcdefghijk{number}", name=f"a-rather-long-name-of-an-experiment-{number}")
        world.change_job(f"abcdefghijk{number}", state=JobState.FAILED, reason=FAILURE)
    screen = Terminal(tpu, "jobs", *who, columns=columns)
    assert screen.end() == 0
    lines = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", screen.shown).split("\r\n")
    assert len(lines) == 7 and lines[-1] == "", "a title and five jobs"
    assert all(len(line) <= columns for line in lines)
    for number, line in zip(reversed(range(5)), lines[1:-1], strict=True):
        assert line.startswith(f"abcdefghijk{number}"[: 8 if columns < 80 else None])
        assert columns < 80 or ("failed" in line and "jaxlib.xla_ext" in line)
    assert columns < 120 or not who or "mel" in lines[1]


@pytest.mark.parametrize("columns", [80, 120])
def test_the_last_column_of_a_table_is_never_one_letter_wide(world, tpu, columns):
    world.submit("job-1")
    world.add_slice("tpf-a-rather-long-name-of-a-slice-1", "job-1", reason=FAILURE)
    screen = Terminal(tpu, "show", "job-1", columns=columns)
    assert screen.end() == 0
    lines = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", screen.shown).split("\r\n")
    titles = next(line for line in lines if line.startswith("SLICE"))
    table = lines[lines.index(titles) + 1 : -1]
    assert len(table) <= len(FAILURE) // 15, "at least about 15 letters per line"


LISTINGS = ["inventory", "find", "slices", "queue", "reservations", "pool list", "jobs"]


@pytest.mark.parametrize("columns", [80, 140])
@pytest.mark.parametrize("listing", LISTINGS)
def test_every_listing_fits_a_narrow_and_a_wide_terminal(world, tpu, listing, columns):
    name = "a-rather-long-name-of-a-pool"
    pool = Pool(name=name, provider="local", accelerator="v5litepod-16", largest=4)
    world.store.commit(ChangeSet(pools=[pool]))
    for number in range(3):
        job = world.submit(f"abcdefghijk{number}", name=f"a-rather-long-name-of-a-job-{number}")
        world.add_slice(f"tpf-a-rather-long-name-of-a-slice-{number}", job, reason=FAILURE)
    for number in range(2):
        world.submit(f"waiting{number}", name=f"waiting-with-a-rather-long-name-{number}")
    screen = Terminal(tpu, *listing.split(), columns=columns)
    assert screen.end() == 0
    lines = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", screen.shown).split("\r\n")
    wide = [line for line in lines if len(line) > columns]
    assert not wide
    assert "litepod" not in screen.shown, "types are shown as users write them"
    if listing in ("inventory", "slices"):
        shown = [line for line in lines if "tpf-a-rather" in line]
        assert len(shown) == 3, "one line each"
        assert all("ready" in line or "running" in line for line in shown)


def shown_lines(tpu: Tpu, *args: str, columns: int) -> list[str]:
    screen = Terminal(tpu, *args, columns=columns)
    assert screen.end() == 0, screen.shown
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", screen.shown).split("\r\n")


def test_slices_held_after_a_failure_are_listed_with_whole_names_at_80_columns(world, tpu):
    until = world.clock.now() + timedelta(minutes=5)
    name = "tpf-gxkh3yhnvhaq-34fc8949"
    world.add_slice(name, None, pool="lab", reserved_for="mel", reserved_until=until,
                    reason="held for mel after job abcdefghijkl failed")  # fmt: skip
    _, row, *rest = shown_lines(tpu, "reserve", "list", columns=80)
    assert row.startswith(f"{name}  ") and "reserved(error)" in row and "held for" in row
    assert rest == [""], "one line each"


def test_settings_and_costs_take_one_line_each_at_80_columns(world, tpu):
    lines = shown_lines(tpu, "config", columns=80)
    assert [line.split()[0] for line in lines if line][:3] == ["KEY", "server", "home"]
    assert any(line.startswith("server ") and "http://" in line for line in lines)
    assert "…" not in "".join(line for line in lines if line.startswith("server "))
    wide = " ".join("\n".join(shown_lines(tpu, "config", columns=120)).split())
    assert "MEANING" in wide and "local, us, cn" in wide
    hour_ago = world.clock.now() - timedelta(hours=1)
    world.submit("abcdefghijkl", name="baseline")
    world.add_slice("s-1", "abcdefghijkl", up_at=hour_ago, ready_at=hour_ago)
    (row,) = [line for line in shown_lines(tpu, "cost", columns=80) if "abcdef" in line]
    assert "abcdefghijkl (baseline)" in row and "…" not in row


def test_a_followed_job_has_a_progress_bar_and_events_above_it(world, tpu):
    screen = Terminal(tpu, "run", "v5e-16", "--", "python", "train.py")
    job = wait_until(lambda: next(iter(world.store.jobs(JobQuery())), None), timeout=900)
    world.add_slice("slice-1", job.id)
    world.add_attempt(job.id, 0, "slice-1")
    world.change_job(job.id, state=JobState.RUNNING)
    progress = Progress(step=30, total=120, at=world.clock.now(), metrics={"loss": 0.25})
    world.send_heartbeat(
        "slice-1/0", phase=Phase.RUNNING, attempt_id=f"{job.id}.0", progress=progress
    )
    wait_until(lambda: "30/120 (25%)  loss 0.25" in screen.shown, timeout=900)
    end_job(world, job.id, JobState.CANCELLED, reason="mel cancelled it")
    assert screen.end() == 1
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", screen.shown)
    assert "submitted" in plain and "━━━" in plain
    assert f"train-{job.id[:4]} cancelled after 1 attempt: mel cancelled it" in plain


def test_a_waiting_job_has_a_table_of_zones_with_their_answers(world, tpu):
    zones, now = ("us-west4-a", "us-east5-b"), world.clock.now()
    report = ControllerReport(
        holder="one", leader_since=now, reported_at=now,
        providers=(ProviderHealth(name="local", zones=zones, default=True),),
    )  # fmt: skip
    world.store.put_metadata(CONTROLLER_REPORT, encoding.to_json(report).decode())
    refusal = CapacityRefusal(
        provider="local", zone="us-west4-a", accelerator="v5litepod-16", capacity=Capacity.SPOT,
        message="no more capacity in the zone", refused_at=now, until=now + timedelta(minutes=9),
    )  # fmt: skip
    world.store.commit(ChangeSet(refusals=[refusal]))
    screen = Terminal(tpu, "run", "v5e-16", "--", "python", "train.py")
    job = wait_until(lambda: next(iter(world.store.jobs(JobQuery())), None), timeout=900)
    wait_until(lambda: "no more capacity in the zone" in screen.shown, timeout=900)
    world.add_slice("slice-1", job.id, state=SliceState.BOOTING, zone="us-east5-b")
    wait_until(lambda: "booting" in screen.shown, timeout=900)
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", screen.shown)
    assert re.search(r"ZONE +CAPACITY +STATE +USD/H +NEXT TRY +ANSWER", plain)
    assert re.search(r"us-west4-a +spot, simulated +refused +- +(in|\d).*no more capacity", plain)
    assert re.search(r"us-east5-b +spot, simulated +not tried", plain)
    assert re.search(r"us-east5-b +spot, simulated +booting", plain)
    end_job(world, job.id, JobState.CANCELLED, reason="mel cancelled it")
    assert screen.end() == 1
    assert "ZONE" not in screen.shown.rpartition("cancelled after")[0][-400:], "it is gone"


def test_a_closed_pipe_causes_no_traceback(world, tpu):
    world.submit()
    world.add_slice("slice-1", "job-1")
    world.add_attempt("job-1", 0, "slice-1")
    for part in range(4):
        lines = (b"x" * 99 + b"\n") * 2000
        world.send_log("job-1.0", "slice-1/0", part * len(lines), lines)
    command = subprocess.Popen(
        [sys.executable, "-m", "tpufleet", "logs", "job-1"],
        env={**os.environ, **tpu.environ},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert command.stdout is not None and command.stderr is not None
    assert command.stdout.read(4) == b"[0] "
    command.stdout.close()
    printed = command.stderr.read()
    assert command.wait(timeout=900) == 1
    assert b"Traceback" not in printed and b"unexpected" not in printed
