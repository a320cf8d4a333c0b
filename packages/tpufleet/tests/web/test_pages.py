"""The web page in Chromium: journeys of users."""

from __future__ import annotations

import gzip
import re
import shlex
import sys
from pathlib import Path

import httpx
import pytest
from playwright.sync_api import Browser, Page, expect

from tests.polling import wait_until
from tests.server_process import Server
from tests.web.conftest import screenshot, token_of
from tpufleet.client import snapshots
from tpufleet.client.fleet import FleetClient, new_job_id
from tpufleet.model.api_types import NewJob
from tpufleet.model.fleet.pools import Pool
from tpufleet.model.job.jobs import JobState
from tpufleet.service.web.pages import STATIC_FOLDER

WAIT = 120.0
TRAIN = """
import time
from tpufleet import runtime

runtime.install_stop_handler()
newest = runtime.checkpoints.latest()
start = newest.step if newest else 0
for step in range(start + 1, 61):
    runtime.progress(step, total=60, loss=1.0 / step)
    print(f"step {step}", flush=True)
    runtime.checkpoints.save(step, lambda folder: (folder / "state").write_text(str(step)))
    time.sleep(0.1)
"""


def submit(server: Server, script: str, name: str, **fields: object) -> str:
    job = new_job_id()
    spec = {"name": name, "command": ["python", "-c", script], "accelerator": "v5e-1", **fields}
    server.client.submit([NewJob(id=job, spec=spec)])
    return job


def test_a_job_is_submitted_and_watched_through_a_preemption_to_its_end(page: Page, server: Server):
    page.get_by_role("button", name="New job").click()
    dialog = page.get_by_role("dialog")
    dialog.get_by_label("TPU type").fill("v5e-1")
    dialog.get_by_label("Command").fill(f"{shlex.quote(sys.executable)} -c {shlex.quote(TRAIN)}")
    dialog.get_by_label("Name").fill("watched")
    dialog.get_by_label("Tags").fill("tour")
    expect(dialog).to_contain_text("tpu run v5e-1 --name watched --tag tour --detach --")
    dialog.get_by_role("button", name="Submit").click()
    page.wait_for_url(re.compile("#/jobs/[a-z2-7]{12}"))
    job = page.url.rpartition("/")[2]
    page.get_by_role("navigation", name="Pages").get_by_role("link", name="Jobs").click()
    row = page.locator(f'tr[data-job="{job}"]')
    expect(row).to_contain_text("watched")
    expect(row).to_contain_text("running")
    row.get_by_role("link", name="watched").click()
    expect(page.get_by_role("heading", name=re.compile("watched"))).to_be_visible()
    wait_until(
        lambda: (
            (server.client.job(job).row.progress or None) is not None
            and (server.client.job(job).row.progress.step or 0) > 5
        ),  # type: ignore[union-attr]
        WAIT,
        lambda: repr(server.client.job(job).row),
    )
    (slice_row,) = server.client.slices(job=job)
    server.client.inject_fault(slice_row.id, "preempt")
    expect(page.locator(".timeline")).to_contain_text("preempted", timeout=WAIT * 1000)
    expect(page.get_by_role("heading", name=re.compile("watched"))).to_contain_text(
        "succeeded", timeout=WAIT * 1000
    )
    expect(page.locator(".timeline li")).to_have_count(2)
    screenshot(page, "job")
    page.get_by_role("link", name="logs").click()
    expect(page.get_by_role("log")).to_contain_text("step 60")
    page.get_by_label("Search in the log").fill("step 60")
    expect(page.locator(".log div")).to_have_count(1)
    screenshot(page, "logs")
    page.get_by_role("link", name="events").last.click()
    expect(page.locator("table.events")).to_contain_text("preempted")
    page.get_by_role("link", name="config").click()
    expect(page.get_by_label("Configuration")).to_contain_text("v5litepod-1")


IGNORED_IN_PART = {
    ".gitignore": "# data\n*.ckpt\n!best.ckpt\ndata/\n/secrets.env\nlogs/*\n!logs/README\n*.LOG\n"
    "build\ndeep/**/x.bin\nspace\\ .txt\n[ab].csv\n",
    ".tpuignore": "!data/\ndata/*.bin\nnotes\n",
    "secrets.env": "PASSWORD=1",
    "lib/secrets.env": "sent: the pattern is for the top folder",
    "a.ckpt": "x", "best.ckpt": "x", "lib/b.ckpt": "x",
    "data/small.csv": "1", "data/large.bin": "1",
    "logs/1.txt": "x", "logs/README": "x", "lower.log": "x", "upper.LOG": "x",
    "build": "x", "lib/build/out.o": "x", "deep/x.bin": "x", "deep/a/b/x.bin": "x",
    "space .txt": "x", "a.csv": "x", "c.csv": "x", "notes/1.md": "x",
    "lib/.gitignore": "*.tmp\n!wanted.ckpt\n", "lib/x.tmp": "x", "x.tmp": "x",
    "lib/wanted.ckpt": "x", "lib/below/wanted.ckpt": "x",
    "environment/pyvenv.cfg": "x", "environment/bin/python": "x",
    "__pycache__/train.pyc": "x", "node_modules/package.json": "{}",
}  # fmt: skip


def test_a_folder_is_sent_with_a_job_and_used_again_by_the_next(
    page: Page, server: Server, tmp_path: Path
):
    deep = "a-folder-with-a-name-of-some-length/" * 4
    for path, content in {
        "project/train.py": "import lib.data; print('sum', lib.data.total)",
        "project/lib/data.py": "total = 6 * 7",
        "project/run.sh": "#!/bin/sh\nexec python train.py",
        f"project/{deep}größe.txt": "x" * 1000,
        "project/.git/config": "not sent",
        **{f"project/{path}": content for path, content in IGNORED_IN_PART.items()},
    }.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(content)
    (tmp_path / "project/run.sh").chmod(0o755)
    page.get_by_role("button", name="New job").click()
    dialog = page.get_by_role("dialog")
    dialog.get_by_label("TPU type").fill("v5e-1")
    dialog.get_by_label("Command").fill("./run.sh; find . -name '*.txt'; ls -d .git")
    dialog.get_by_label("Name").fill("with-code")
    dialog.get_by_label("Code").select_option("folder")
    dialog.get_by_role("button", name="Submit").click()
    expect(dialog.get_by_role("alert")).to_contain_text("choose a folder")
    dialog.get_by_label("Folder").set_input_files(tmp_path / "project")
    expect(dialog).to_contain_text("cd project && tpu run v5e-1 --name with-code --detach --")
    dialog.get_by_role("button", name="Submit").click()
    page.wait_for_url(re.compile("#/jobs/[a-z2-7]{12}"))
    first = page.url.rpartition("/")[2]
    wait_until(lambda: server.client.job(first).job.ended, WAIT)
    log = "".join(server.client.logs(first))
    assert "sum 42" in log and f"./{deep}größe.txt" in log
    assert "cannot access '.git'" in log
    assert server.client.job(first).job.snapshot == snapshots.scan(tmp_path / "project").digest

    page.get_by_role("navigation", name="Pages").get_by_role("link", name="Jobs").click()
    page.get_by_role("button", name="New job").click()
    dialog.get_by_label("TPU type").fill("v5e-1")
    dialog.get_by_label("Command").fill("python train.py")
    dialog.get_by_label("Code").select_option(f"job:{first}")
    expect(dialog).to_contain_text(f"tpu rerun {first} --type v5e-1 --detach -- python train.py")
    dialog.get_by_role("button", name="Submit").click()
    page.wait_for_url(re.compile(f"#/jobs/(?!{first})[a-z2-7]{{12}}"))
    second = page.url.rpartition("/")[2]
    wait_until(lambda: server.client.job(second).job.ended, WAIT)
    assert server.client.job(second).job.state is JobState.SUCCEEDED
    assert server.client.job(second).job.snapshot == server.client.job(first).job.snapshot


def test_a_job_is_cancelled_and_run_again_from_the_page(page: Page, server: Server):
    job = submit(server, "import time; time.sleep(600)", "stopped")
    page.goto(f"{server.url}/#/jobs/{job}")
    page.get_by_role("button", name="Cancel").click()
    dialog = page.get_by_role("dialog")
    expect(dialog).to_contain_text(f"tpu cancel {job}")
    screenshot(page, "confirm")
    dialog.get_by_role("button", name="Keep").click()
    assert server.client.job(job).row.state != "cancelled"
    page.get_by_role("button", name="Cancel").click()
    dialog.get_by_role("button", name="Cancel job").click()
    expect(page.get_by_role("heading", level=1)).to_contain_text("cancelled", timeout=WAIT * 1000)
    page.get_by_role("button", name="Rerun").click()
    dialog.get_by_role("button", name="Rerun", exact=True).click()
    page.wait_for_url(re.compile(rf"#/jobs/(?!{job})"))
    again = page.url.rpartition("/")[2]
    assert server.client.job(again).row.parent == job
    server.client.cancel(again)


def test_several_jobs_are_cancelled_together(page: Page, server: Server):
    jobs = [submit(server, "import time; time.sleep(600)", f"bulk-{n}") for n in range(2)]
    for n in range(2):
        page.get_by_label(f"choose bulk-{n}").check()
    toolbar = page.get_by_role("toolbar", name="Chosen jobs")
    toolbar.get_by_role("button", name="Cancel").click()
    page.get_by_role("dialog").get_by_role("button", name="Cancel jobs").click()
    expect(page.get_by_role("status").last).to_contain_text("cancelled 2 jobs")
    for job in jobs:
        wait_until(
            lambda job=job: server.client.job(job).row.state == "cancelled",
            WAIT,
            lambda job=job: repr(server.client.job(job).row),
        )


def test_several_jobs_are_run_again_together(page: Page, server: Server):
    jobs = [submit(server, "pass", f"again-{n}") for n in range(2)]
    for job in jobs:
        wait_until(lambda job=job: server.client.job(job).job.ended, WAIT)
    for n in range(2):
        page.get_by_label(f"choose again-{n}").check()
    page.get_by_role("toolbar", name="Chosen jobs").get_by_role("button", name="Rerun").click()
    dialog = page.get_by_role("dialog")
    expect(dialog).to_contain_text(f"tpu rerun --detach {jobs[0]}")
    dialog.get_by_role("button", name="Rerun", exact=True).click()
    expect(page.get_by_role("status").last).to_contain_text("submitted 2 jobs again")
    children = [server.client.jobs(parent=job).jobs for job in jobs]
    assert [len(each) for each in children] == [1, 1]


def test_jobs_are_searched_with_the_query_language(page: Page, server: Server):
    submit(server, "pass", "needle", tags=["rare"])
    submit(server, "pass", "hay")
    page.get_by_label("Search jobs").fill("tag:rare")
    page.keyboard.press("Enter")
    expect(page.locator("table.jobs tbody tr")).to_have_count(1)
    expect(page.locator("table.jobs")).to_contain_text("needle")
    page.get_by_label("Search jobs").fill("state:no-such-state")
    page.keyboard.press("Enter")
    expect(page.get_by_role("alert")).to_contain_text("no-such-state")


def test_two_users_have_different_rights(browser: Browser, server: Server):
    job = submit(server, "import time; time.sleep(600)", "of-the-admin")
    with browser.new_context() as context:
        page = context.new_page()
        page.goto(server.url)
        page.get_by_label("Token").fill("tpf_wrong")
        page.get_by_role("button", name="Log in").click()
        expect(page.get_by_role("alert")).to_contain_text("unknown token")
        page.get_by_label("Token").fill(token_of(server, "grace", "member"))
        page.get_by_role("button", name="Log in").click()
        page.goto(f"{server.url}/#/jobs/{job}")
        expect(page.get_by_role("heading", name=re.compile("of-the-admin"))).to_be_visible()
        expect(page.get_by_role("button", name="Cancel")).to_have_count(0)
        page.get_by_role("link", name="Users").click()
        expect(page.get_by_role("heading", name="My tokens")).to_be_visible()
        page.get_by_role("button", name="log out").click()
        expect(page.get_by_label("Token")).to_be_visible()
        page.reload()
        expect(page.get_by_label("Token")).to_be_visible()
    server.client.cancel(job)


def test_a_pool_change_that_fails_queued_jobs_is_confirmed(page: Page, server: Server):
    pool = Pool(name="small", provider="local", accelerator="v5litepod-1", largest=1)
    server.client.put_pool(pool)
    blocker = submit(server, "import time; time.sleep(600)", "blocker", pool="small")
    with FleetClient(server.url, token_of(server, "grace", "member")) as grace:
        spec = {"name": "queued", "command": ["true"], "accelerator": "v5e-1", "pool": "small"}
        job = NewJob(id=new_job_id(), spec=spec)
        grace.submit([job])
        page.goto(f"{server.url}/#/pools/small")
        page.get_by_role("button", name="Edit").click()
        dialog = page.get_by_role("dialog")
        token_of(server, "ada", "member")
        dialog.get_by_label("Members").fill("ada")
        dialog.get_by_role("button", name="Save").click()
        expect(dialog.get_by_role("alert")).to_contain_text("fails 1 queued job in the pool")
        screenshot(page, "pool-change")
        assert grace.job(job.id).job.state == "queued"
        dialog.get_by_role("button", name="Save").click()
        expect(dialog).to_have_count(0)
        wait_until(lambda: grace.job(job.id).job.state == "failed")
        server.client.cancel(blocker)


def test_the_jobs_of_a_deleted_user_are_taken_over_only_when_asked(page: Page, server: Server):
    with FleetClient(server.url, token_of(server, "former", "member")) as former:
        spec = {"name": "old", "command": ["true"], "accelerator": "v5e-1"}
        former.submit([NewJob(id=new_job_id(), spec=spec)])
    server.client.delete_user("former")
    page.goto(f"{server.url}/#/people/users")
    page.get_by_role("button", name="Create a user").click()
    dialog = page.get_by_role("dialog")
    dialog.get_by_label("Name").fill("former")
    dialog.get_by_role("button", name="Create").click()
    expect(dialog.get_by_role("alert")).to_contain_text("a deleted user former has jobs here")
    dialog.get_by_label("Jobs of a deleted user who was called so").select_option("take-over")
    expect(dialog).to_contain_text("tpu user add former --role member --take-over")
    dialog.get_by_role("button", name="Create").click()
    expect(dialog).to_have_count(0)
    assert "former" in {user.name for user in server.client.users()}


def test_text_of_jobs_is_never_markup(page: Page, server: Server):
    script = "print('<img src=x onerror=alert(1)>'); raise SystemExit('<script>x</script>')"
    job = submit(server, script, "hostile", notes="<b>bold</b>")
    page.goto(f"{server.url}/#/jobs/{job}/logs")
    expect(page.get_by_role("log")).to_contain_text("<img src=x onerror=alert(1)>")
    assert page.locator(".log img").count() == 0


def test_text_of_jobs_is_shown_without_colours_and_in_its_own_order(page: Page, server: Server):
    script = r"print('\x1b[31mred\x1b[0m \x1b]0;title\x07and \u202etfel')"
    job = submit(server, script, "coloured", notes="from \u202eright to left")
    page.goto(f"{server.url}/#/jobs/{job}/logs")
    expect(page.get_by_text("red and tfel", exact=True)).to_be_visible()
    page.goto(f"{server.url}/#/jobs/{job}")
    expect(page.get_by_text("from right to left", exact=True)).to_be_visible()


def test_a_login_link_works_once(browser: Browser, server: Server):
    link = server.url + server.client.login_link().path
    with browser.new_context() as first, browser.new_context() as second:
        page = first.new_page()
        page.goto(link)
        page.get_by_role("navigation", name="Pages").wait_for()
        assert "tpl_" not in page.url
        other = second.new_page()
        other.goto(link)
        expect(other.get_by_role("alert")).to_contain_text("login link")


def _login_link(server: Server, user: str, role: str = "member") -> str:
    with FleetClient(server.url, token_of(server, user, role)) as client:
        return server.url + client.login_link().path


def _assert_no_code_is_left(page: Page) -> None:
    expect(page).to_have_url(re.compile("#/jobs$"))
    page.go_back()
    page.wait_for_function("!location.href.includes('tpl_')")


@pytest.mark.parametrize("in_same_tab", [False, True], ids=["new tab", "same tab"])
@pytest.mark.parametrize(
    "other_user",
    [pytest.param(False, marks=pytest.mark.slow), True],
    ids=["same user", "another user"],
)
def test_a_login_link_is_redeemed_by_a_browser_that_has_a_session(
    page: Page, server: Server, other_user: bool, in_same_tab: bool
):
    if other_user:
        user, link = "hedy", _login_link(server, "hedy")
    else:
        user = page.locator(".who").inner_text().split()[0]
        link = server.url + server.client.login_link().path
    tab = page if in_same_tab else page.context.new_page()
    tab.set_default_timeout(60_000)
    tab.goto(link)
    expect(tab.locator(".who")).to_contain_text(f"{user} (")
    expect(tab.get_by_role("button", name="New job")).to_be_visible()
    expect(tab.get_by_role("alert")).to_have_count(0)
    # A tab from before has the new session too, also for changes, which need its CSRF token.
    expect(page.locator(".who")).to_contain_text(f"{user} (")
    with page.context.browser.new_context() as other:  # type: ignore[union-attr]
        second = other.new_page()
        second.goto(link)
        expect(second.get_by_role("alert")).to_contain_text("login link")
    _assert_no_code_is_left(tab)
    page.goto(f"{server.url}/#/jobs")
    page.get_by_role("button", name="log out").click()
    expect(page.get_by_label("Token")).to_be_visible()
    page.reload()
    expect(page.get_by_label("Token")).to_be_visible()


def test_a_used_login_link_keeps_the_session_with_a_notice(page: Page, server: Server):
    page.goto(f"{server.url}/#/fleet")
    page.goto(f"{server.url}/#/login/tpl_used")
    expect(page.get_by_role("alert")).to_contain_text("still logged in as")
    expect(page.get_by_role("button", name="New job")).to_be_visible()
    _assert_no_code_is_left(page)


@pytest.mark.parametrize("address", ["foo", "foo/bar", "job/abc", "%"])
def test_an_unknown_address_says_so(page: Page, server: Server, address: str):
    page.goto(f"{server.url}/#/{address}")
    expect(page.get_by_role("heading", name="No such page")).to_be_visible()
    expect(page.locator("main")).to_contain_text(f"#/{address}")
    page.locator("main").get_by_role("link", name="Jobs").click()
    expect(page.get_by_role("button", name="New job")).to_be_visible()


def test_the_page_is_small_and_strict(server: Server):
    if not (STATIC_FOLDER / "index.html").is_file():
        pytest.skip("the web page was not built: scripts/build-web")
    size = sum(
        len(gzip.compress(path.read_bytes())) for path in STATIC_FOLDER.rglob("*") if path.is_file()
    )
    assert size < 200_000
    answer = httpx.get(server.url, timeout=900)
    policy = answer.headers["content-security-policy"]
    assert "default-src 'none'" in policy and "unsafe" not in policy
    assert httpx.get(f"{server.url}/assets/../../auth.py", timeout=900).status_code in (401, 404)


@pytest.mark.parametrize(
    "place, shown",
    [
        ("queue?pool=x%3Bid%0A", "tpu queue --pool 'x;id\n'"),
        ("people/tokens/%24(id)", "tpu user audit --token '$(id)'"),
        ("reservations/%24(id)", "tpu events reservation:'$(id)'"),
    ],
)
def test_a_link_cannot_put_a_program_into_a_command_to_copy(
    page: Page, server: Server, place: str, shown: str
):
    page.goto(f"{server.url}/#/{place}")
    expect(page.locator("body")).to_contain_text(shown.replace("\n", " "), timeout=WAIT * 1000)
