"""Logs: the offset protocol, reading, tailing and following."""

from __future__ import annotations

import random
import threading
from dataclasses import replace
from datetime import timedelta

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.examples import examples
from tests.polling import wait_until
from tests.service.harness import ServiceHarness
from tpufleet.errors import BadInput, NotFound
from tpufleet.model.fleet.hosts import HostId, Progress
from tpufleet.model.job.attempts import AttemptId, AttemptState
from tpufleet.model.job.jobs import JobState
from tpufleet.service.api.agents import LATE_OUTPUT
from tpufleet.service.files.logs import LogFiles, LogGap
from tpufleet.stores.base import ChangeSet

ATTEMPT, HOST = AttemptId("job-1.0"), HostId("s1/0")


@pytest.fixture
def running(service: ServiceHarness) -> ServiceHarness:
    service.submit("job-1")
    service.add_slice("s1", "job-1")
    service.add_attempt("job-1", 0, "s1")
    return service


def end_attempt(service: ServiceHarness, number: int, *slices: str) -> None:
    ended_at = service.clock.now()
    service.add_attempt("job-1", number, *slices, state=AttemptState.ENDED, ended_at=ended_at)
    service.clock.advance(timedelta(seconds=5))


def test_bytes_that_are_already_there_are_skipped(running):
    assert running.send_log(ATTEMPT, HOST, 0, b"one\n").json() == {"size": 4}
    assert running.send_log(ATTEMPT, HOST, 0, b"one\n").json() == {"size": 4}
    assert running.send_log(ATTEMPT, HOST, 2, b"e\ntwo\n").json() == {"size": 8}
    assert "".join(running.client().logs("job-1", host=0)) == "one\ntwo\n"


def test_a_gap_is_refused_with_the_place_to_go_on_from(running):
    running.send_log(ATTEMPT, HOST, 0, b"one\n")
    answer = running.send_log(ATTEMPT, HOST, 9, b"late\n")
    assert answer.status_code == 409
    assert answer.json()["size"] == 4
    assert running.send_log(ATTEMPT, HOST, 4, b"two\n").json() == {"size": 8}


def test_chunks_that_arrive_at_once_and_in_any_order_make_the_log_they_were_cut_from(tmp_path):
    files = LogFiles(tmp_path)
    whole = "".join(f"line {number}\n" for number in range(3000)).encode()
    seed = random.Random(7)

    def send() -> None:
        at = 0
        while at < len(whole):
            size = seed.randrange(1, 900)
            try:
                at = files.append(ATTEMPT, HOST, at, whole[at : at + size])
            except LogGap as gap:
                at = gap.size

    senders = [threading.Thread(target=send) for _ in range(6)]
    for sender in senders:
        sender.start()
    for sender in senders:
        sender.join()
    assert files.path(ATTEMPT, HOST).read_bytes() == whole


def test_a_log_is_taken_for_an_attempt_of_the_slice_only(running):
    running.add_slice("s2", None)
    assert running.send_log(ATTEMPT, "s2/0", 0, b"x").status_code == 403
    assert running.send_log("job-1.7", HOST, 0, b"x").status_code == 404


def test_a_slice_adds_nothing_to_the_log_of_its_previous_user(running):
    """A pool keeps its slices: the next user's job may read the token of the slice."""
    attempt = running.store.attempt(ATTEMPT)
    ended = replace(attempt, state=AttemptState.ENDED, ended_at=running.clock.now())
    running.store.commit(ChangeSet(attempts=[ended]))
    assert running.send_log(ATTEMPT, HOST, 0, b"the end").status_code == 200, "shortly afterwards"
    running.submit("job-2", by="mo")
    running.add_slice("s1", "job-2", with_hosts=False)
    assert running.send_log(ATTEMPT, HOST, 7, b"forged").status_code == 403
    running.add_slice("s1", None, with_hosts=False)
    running.clock.advance(LATE_OUTPUT + timedelta(seconds=1))
    assert running.send_log(ATTEMPT, HOST, 7, b"forged").status_code == 403
    assert "".join(running.client().logs("job-1", host=0)) == "the end\n"


def test_an_attempt_id_never_leads_out_of_the_folder(running):
    files = LogFiles(running.folder / "logs")
    for attempt in ("../x.0", "job-1", "", "a/b.0", "job-1.0/..", "job-1.x", "..0"):
        assert running.send_log(attempt, HOST, 0, b"x").status_code in (400, 404)
        with pytest.raises(BadInput):
            files.path(attempt, HOST)


def test_a_host_id_never_leads_out_of_the_folder(running):
    files = LogFiles(running.folder / "logs")
    for host in ("../../x/0", "s1", "", "/0", "s1/..", "s1/0/..", ".ssh/0", "a\0/0"):
        with running.http(running.slice_token("s1")) as http:
            params = {"attempt": ATTEMPT, "host": host, "offset": 0}
            assert http.post("/agent/logs", params=params, content=b"x").status_code in (400, 401)
        with pytest.raises(BadInput):
            files.path(ATTEMPT, host)


def test_a_log_is_refused_of_a_host_that_does_not_exist(running):
    """Its slice has four."""
    slice_id = HOST.partition("/")[0]
    for host in (f"{slice_id}/4", f"{slice_id}/99", f"{slice_id}/00"):
        assert running.send_log(ATTEMPT, host, 0, b"forged").status_code in (400, 401)
    assert running.send_log(ATTEMPT, f"{slice_id}/3", 0, b"x").status_code == 200


def test_an_offset_is_a_whole_number(running):
    with running.http(running.slice_token("s1")) as http:
        for offset in ("-1", "x", "", "1e3", "9" * 30):
            params = {"attempt": ATTEMPT, "host": HOST, "offset": offset}
            assert http.post("/agent/logs", params=params, content=b"x").status_code == 400


def test_a_chunk_that_is_too_large_is_refused_in_words(running):
    answer = running.send_log(ATTEMPT, HOST, 0, b"x" * (4 * 1024 * 1024 + 1))
    assert answer.status_code == 413
    assert "larger than" in answer.json()["error"]["message"]


def test_lines_of_several_hosts_say_which_host(running):
    running.send_log(ATTEMPT, "s1/0", 0, b"zero\n\nand more")
    running.send_log(ATTEMPT, "s1/2", 0, b"two\n")
    text = "".join(running.client().logs("job-1"))
    assert text == "[0] zero\n[0] \n[0] and more\n[2] two\n"
    assert "".join(running.client().logs("job-1", host=2)) == "two\n"
    with pytest.raises(NotFound, match="0 to 3"):
        list(running.client().logs("job-1", host=4))
    with pytest.raises(NotFound, match="no attempt named 3"):
        list(running.client().logs("job-1", attempt=3))


def test_a_tail_is_the_last_lines_of_each_host(running):
    running.send_log(ATTEMPT, "s1/0", 0, b"a\nb\nc\n")
    running.send_log(ATTEMPT, "s1/1", 0, b"d\ne")
    assert "".join(running.client().logs("job-1", tail=1)) == "[0] c\n[1] e\n"


@settings(max_examples=examples(60), deadline=None)
@given(
    lines=st.lists(st.binary(max_size=40).map(lambda text: text.replace(b"\n", b"")), max_size=30),
    ends=st.booleans(),
    count=st.integers(0, 35),
    long=st.integers(0, 30),
)
def test_a_tail_is_what_splitting_the_whole_log_would_give(
    tmp_path_factory, lines, ends, count, long
):
    if long < len(lines):
        lines[long] = b"x" * 70_000  # more than one block
    data = b"\n".join(lines) + (b"\n" if ends and lines else b"")
    files = LogFiles(tmp_path_factory.mktemp("logs"))
    files.append(ATTEMPT, HOST, 0, data)
    pieces = data.removesuffix(b"\n").split(b"\n") if data else []
    tail = data[files.tail_offset(ATTEMPT, HOST, count) :]
    found = tail.removesuffix(b"\n").split(b"\n") if tail else []
    assert found == (pieces[-count:] if count else [])


def test_following_tells_every_line_of_every_host_and_attempt_and_then_ends(running):
    running.send_log(ATTEMPT, "s1/0", 0, b"first\nhal")
    followed = []
    reader = threading.Thread(
        target=lambda: followed.extend(running.client().follow_logs("job-1")), daemon=True
    )
    reader.start()
    wait_until(lambda: followed)
    running.send_log(ATTEMPT, "s1/0", 9, b"f\n")
    running.send_log(ATTEMPT, "s1/3", 0, b"three, without an end")
    end_attempt(running, 0, "s1")
    running.add_slice("s2", "job-1")
    running.add_attempt("job-1", 1, "s2")
    running.send_log("job-1.1", "s2/0", 0, "again ✓ \u2028 and \r\n".encode())
    end_attempt(running, 1, "s2")
    running.end_job("job-1", JobState.SUCCEEDED)
    reader.join(timeout=900)
    assert not reader.is_alive()
    lines = [(line.attempt, line.host, line.line) for line in followed]
    assert [line for line in lines if line[:2] == (0, 0)] == [(0, 0, "first"), (0, 0, "half")]
    assert [line for line in lines if line[:2] == (0, 3)] == [(0, 3, "three, without an end")]
    assert lines[-1] == (1, 0, "again ✓ \u2028 and ")
    assert len(lines) == 4


def test_following_across_restarts_of_the_server_neither_repeats_nor_loses_a_line(running):
    expected = [f"line {number}" for number in range(60)]
    followed: list[str] = []

    def read() -> None:
        client = running.client(sleep=lambda _: threading.Event().wait(0.02))
        followed.extend(line.line for line in client.follow_logs("job-1", host=0))

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    offset = 0
    for part in range(3):
        chunk = "".join(f"{line}\n" for line in expected[part * 20 : part * 20 + 20]).encode()
        cut = len(chunk) // 2
        running.send_log(ATTEMPT, HOST, offset, chunk[:cut])
        running.stop()
        running.start()
        running.send_log(ATTEMPT, HOST, offset + cut, chunk[cut:])
        offset += len(chunk)
    end_attempt(running, 0, "s1")
    running.end_job("job-1")
    reader.join(timeout=900)
    assert followed == expected


def test_following_from_a_tail_begins_there(running):
    running.send_log(ATTEMPT, HOST, 0, b"a\nb\nc\n")
    end_attempt(running, 0, "s1")
    running.end_job("job-1")
    lines = [line.line for line in running.client().follow_logs("job-1", tail=2)]
    assert lines == ["b", "c"]


def test_following_a_job_that_ended_before_it_began_ends_at_once(service):
    service.submit("job-1")
    service.end_job("job-1", JobState.CANCELLED)
    assert list(service.client().follow_logs("job-1")) == []


def test_a_line_longer_than_a_block_is_told_in_pieces(running):
    running.send_log(ATTEMPT, HOST, 0, b"x" * 200_000 + b"\nend\n")
    end_attempt(running, 0, "s1")
    running.end_job("job-1")
    lines = [line.line for line in running.client().follow_logs("job-1")]
    assert "".join(lines[:-1]) == "x" * 200_000
    assert lines[-1] == "end"


def test_a_reader_who_leaves_is_forgotten(running):
    lines = running.client().follow_logs("job-1")
    running.send_log(ATTEMPT, HOST, 0, b"a\n")
    assert next(lines).line == "a"
    assert running.app.state.hub.streams_by_caller.total() == 1
    lines.close()
    wait_until(lambda: running.app.state.hub.streams_by_caller.total() == 0)


def test_a_progress_bar_moves_while_it_is_followed(tmp_path):
    """As tqdm writes: a carriage return before each drawing, and a line end after the last."""
    files, shown, offset = LogFiles(tmp_path), [], 0
    writes = [
        b"start\n\r 0%|     |", b"\r 10%|#    |\r 20%|#    |", b"\r 30%|##   |", b"\r",
        b"100%|#####|\n", b"done\r\n",
    ]  # fmt: skip
    size = 0
    for data in writes:
        size = files.append(ATTEMPT, HOST, size, data)
        found = files.lines(ATTEMPT, HOST, offset, complete=False)
        offset = found.end
        shown += [line for line, _ in found.lines]
    assert shown == ["start", " 10%|#    |", " 20%|#    |", "100%|#####|", "done"]
    whole = files.lines(ATTEMPT, HOST, 0, complete=True)
    assert [line for line, _ in whole.lines] == ["start", "100%|#####|", "done"]


def test_why_tells_when_the_last_output_came(running):
    running.change_job("job-1", state=JobState.RUNNING)
    running.add_attempt("job-1", 0, "s1", running_at=running.clock.now())
    running.clock.advance(timedelta(minutes=12))
    assert "no output of host 0 for 12 min" in running.client().why("job-1").details
    assert running.client().job("job-1").row.progress.output_at < running.clock.now()
    at = running.clock.now() - timedelta(minutes=25)
    running.send_heartbeat(HOST, attempt_id=ATTEMPT, progress=Progress(output_at=at))
    wait_until(lambda: "last output of host 0 25 min ago" in running.client().why("job-1").details)
