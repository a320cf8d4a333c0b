"""The page in Chromium, with the data of a lab: pages, rights and actions on the fleet."""

from __future__ import annotations

import re
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, Locator, Page, Route, expect

from tests.web import lab
from tests.web.conftest import open_page, screenshot
from tpufleet.client.fleet import FleetClient
from tpufleet.model.api_types import JobChanges
from tpufleet.model.people.users import Role

OLD_JOBS = 10_000
FIRST_PAINT_SECONDS = 5.0  # bench/web.py measures it; here the machine is busy with other tests
IDS = {each.name: each.id for each in lab.LAB}
SWEEP = ("lab-baseline", "lab-sweep-lr-3e-3", "lab-sweep-lr-1e-3")
PAGES = {
    "jobs": "jobs",
    "queue": "queue",
    "fleet": "fleet",
    "inventory": "inventory",
    "reservations": "reservations",
    "reservation": f"reservations/{lab.RESERVED}",
    "pools": "pools",
    "pool": "pools/lab",
    "pool-events": "pools/lab/events",
    "usage": "usage",
    "events": "events",
    "users": "people/users",
    "tokens": "people/tokens",
    "sessions": "people/sessions",
    "user-events": "people/events?user=grace",
    "token": "people/tokens/grace-laptop",
    "audit": "people/audit",
    "job": f"jobs/{IDS['gemma-2b-finetune-lora-r16-alpha32-warmup500-seed1234']}",
    "waiting-job": f"jobs/{IDS['moe-8x7b-pretrain']}",
    "failed-job": f"jobs/{IDS['llama-7b-out-of-memory']}",
    "diff": f"jobs/{IDS['lab-sweep-lr-3e-3']}/diff",
    "metrics": f"jobs/{IDS['diffusion-256']}/metrics",
    "compare": "compare/" + "/".join(IDS[name] for name in SWEEP),
    "slice": f"slices/tpf-{IDS['diffusion-256']}-3",
}
PAGES_BY_DEFAULT = ("jobs", "queue", "fleet", "pool", "usage", "users", "job", "metrics")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[lab.LabServer]:
    with lab.lab_server(tmp_path_factory.mktemp("lab") / "home", ended=OLD_JOBS) as server:
        yield server


@pytest.fixture
def page(browser: Browser, server: lab.LabServer) -> Iterator[Page]:
    with server.client("ada") as client:
        link = client.login_link().path
    yield from open_page(browser, server.url + link)


@pytest.fixture
def member(browser: Browser, server: lab.LabServer) -> Iterator[Page]:
    with server.client("mei") as client:
        link = client.login_link().path
    yield from open_page(browser, server.url + link)


def go(page: Page, server: lab.LabServer, name: str) -> None:
    page.goto(f"{server.url}/#/{PAGES.get(name, name)}")
    page.get_by_role("heading", level=1).first.wait_for(state="attached")


def row(page: Page, text: str) -> Locator:
    return page.locator("tbody tr", has_text=text)


def waiting(page: Page, name: str) -> Locator:
    """A job in the queue."""
    return page.locator(f'tr[data-row="{IDS[name]}"]')


def dialog(page: Page) -> Locator:
    return page.get_by_role("dialog")


LOOKS = (("light", 1280), ("dark", 390))


@pytest.mark.parametrize(
    "every", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["in turn", "all"]
)
def test_every_page_is_accessible_and_fits_a_phone(page: Page, server: lab.LabServer, every: bool):
    for number, name in enumerate(PAGES if every else PAGES_BY_DEFAULT):
        go(page, server, name)
        page.wait_for_load_state("networkidle") if name == "compare" else None
        expect(page.locator("main")).not_to_contain_text("Loading…")
        for scheme, width in LOOKS if every else (LOOKS[number % 2],):
            page.emulate_media(color_scheme=scheme)  # type: ignore[arg-type]
            page.set_viewport_size({"width": width, "height": 800})
            found = Axe().run(page)
            assert found.violations_count == 0, f"{name}, {scheme}\n{found.generate_report()}"
            screenshot(page, f"{name}-{width}-{scheme}")
            scroll = page.evaluate("document.documentElement.scrollWidth")
            assert scroll <= width, f"{name} is {scroll} pixels wide, on a screen of {width}"


def test_ten_thousand_jobs_are_listed_searched_and_paged(page: Page, server: lab.LabServer):
    page.goto("about:blank")
    page.goto(f"{server.url}/#/jobs")
    page.locator("table.jobs").wait_for()
    paint = page.evaluate("performance.getEntriesByName('first-contentful-paint')[0].startTime")
    assert paint / 1000 < FIRST_PAINT_SECONDS
    rows = page.locator("table.jobs tbody tr")
    expect(rows).to_have_count(100)
    page.get_by_role("button", name="Older jobs").click()
    expect(rows).to_have_count(200)
    page.get_by_label("Search jobs").fill("tag:sweep-42 state:failed")
    page.keyboard.press("Enter")
    expect(rows).to_have_count(11)
    page.get_by_role("button", name="save").click()
    dialog(page).get_by_label("Name").fill("sweep42")
    expect(dialog(page)).to_contain_text("tpu config view save sweep42 'tag:sweep-42 state:failed'")
    dialog(page).get_by_role("button", name="Save", exact=True).click()
    expect(page.get_by_role("navigation", name="Views")).to_contain_text("sweep42")


def test_the_list_is_used_with_the_keyboard(page: Page, server: lab.LabServer):
    go(page, server, "jobs?q=tag:sweep-lr")
    rows = page.locator("table.jobs tbody tr")
    expect(rows).to_have_count(3)
    page.keyboard.press("j")
    page.keyboard.press("x")
    page.keyboard.press("j")
    page.keyboard.press("x")
    expect(page.get_by_role("toolbar", name="Chosen jobs")).to_contain_text("2 jobs chosen")
    page.keyboard.press("/")
    expect(page.get_by_label("Search jobs")).to_be_focused()
    page.keyboard.press("Escape")
    page.keyboard.press("o")
    page.wait_for_url(re.compile("#/jobs/[a-z2-7]{12}$"))


def test_a_running_job_that_is_silent_says_for_how_long(page: Page, server: lab.LabServer):
    at = (datetime.now(UTC) - timedelta(minutes=25, seconds=10)).isoformat()

    def with_silent_jobs(route: Route) -> None:
        answer = route.fetch()
        rows = answer.json()["jobs"]
        rows[0]["progress"] |= {"at": at}
        rows[1]["progress"] |= {"step": None, "message": "", "checkpoint_step": 40, "at": at}
        rows[2]["progress"] = {"step": None, "message": "", "at": None, "output_at": at}
        route.fulfill(response=answer, json={"jobs": rows[:3], "next": None})

    page.route(re.compile(r"/api/v1/jobs\?"), with_silent_jobs)
    go(page, server, "jobs?q=state:running owner:*")
    progress = page.locator("table.jobs tbody td[data-label=Progress]")
    expect(progress.first).to_contain_text("25 min ago")
    expect(progress.nth(1)).to_contain_text(re.compile("checkpoint 40.*25 min ago"))
    expect(progress.last).to_have_text("no output for 25 min")


def test_the_recovery_of_an_attempt_has_a_line_of_its_own(page: Page, server: lab.LabServer):
    def with_recovery(route: Route) -> None:
        detail = (answer := route.fetch()).json()
        attempt = next(each for each in detail["attempts"] if each["message"])
        parts = {"stop": 1.5, "slice": 8.5}
        detail["recoveries"] = [{"attempt": attempt["number"], "seconds": 10.0, "parts": parts}]
        route.fulfill(response=answer, json=detail)

    page.route(re.compile(rf"/api/v1/jobs/{IDS['llama-7b-out-of-memory']}$"), with_recovery)
    go(page, server, "failed-job")
    expect(page.locator(".timeline")).to_contain_text("next step 10.0 s after the fault")
    assert "\nnext step 10.0 s after the fault" in page.locator(".timeline").inner_text()


def test_an_elastic_job_says_on_how_many_slices_it_runs(page: Page, server: lab.LabServer):
    def elastic(route: Route) -> None:
        detail = (answer := route.fetch()).json()
        detail["job"]["spec"]["slices"] = {"min": 2, "max": 4}
        detail["row"]["slices"] = 4
        detail["attempts"][-1]["slices"] = ["a", "b", "c"]
        route.fulfill(response=answer, json=detail)

    page.route(re.compile(rf"/api/v1/jobs/{IDS['diffusion-256']}$"), elastic)
    go(page, server, f"jobs/{IDS['diffusion-256']}")
    expect(page.locator("header.title p").first).to_contain_text("3 of 2–4 × ")
    expect(page.locator(".timeline li").last).to_contain_text("on 3 of 4 slices")


def test_a_waiting_job_shows_zones_answers_and_prices(page: Page, server: lab.LabServer):
    go(page, server, "waiting-job")
    table = page.locator("table.sources")
    expect(table.locator("tbody tr")).to_have_count(3)
    expect(table).to_contain_text("no v6e-256 in us-central1-a")
    expect(table).to_contain_text("$359.24/h")


def test_a_job_shows_cost_goodput_and_what_differs_from_its_parent(
    page: Page, server: lab.LabServer
):
    go(page, server, "job")
    cost = page.get_by_role("region", name="Cost")
    expect(cost).to_contain_text("Goodput")
    expect(cost).to_contain_text(re.compile(r"\$4\d\d\.\d\d"))
    go(page, server, "diff")
    expect(page.locator("table.config")).to_contain_text("0.003")
    expect(page.locator(".diff .added").first).to_contain_text("def main(lr=0.003")


def test_jobs_are_compared_by_curves_config_and_code(page: Page, server: lab.LabServer):
    go(page, server, "compare")
    expect(page.locator("table.compared tbody tr")).to_have_count(3)
    expect(page.locator("figure canvas")).to_have_count(2)
    expect(page.locator("table.config")).to_contain_text("batch")
    expect(page.locator(".diff")).to_have_count(2)


def test_the_queue_is_reordered_and_held(page: Page, server: lab.LabServer):
    go(page, server, "queue")
    jobs = page.locator("table.queue").first.locator("tbody tr")
    expect(jobs).to_have_count(3)
    # That of grace before it waits for the quota of the pool, and takes no slice meanwhile.
    expect(jobs.nth(1)).to_contain_text("behind ada/tokenizer-tests until")
    second = "queue-ablation-depth-12"
    waiting(page, second).get_by_role("button", name="move queue-ablation-depth-12 up").click()
    expect(dialog(page)).to_contain_text(f"tpu queue move {IDS[second]} --before")
    dialog(page).get_by_role("button", name="Move up", exact=True).click()
    expect(jobs.nth(1)).to_contain_text(second)
    waiting(page, second).get_by_role("button", name="Hold").click()
    dialog(page).get_by_role("button", name="Hold", exact=True).click()
    expect(waiting(page, second)).to_contain_text("held")
    waiting(page, second).get_by_role("button", name="Release").click()
    dialog(page).get_by_role("button", name="Release", exact=True).click()
    expect(waiting(page, second).get_by_role("button", name="Hold")).to_be_visible()


def test_a_member_moves_only_their_own_jobs(member: Page, server: lab.LabServer):
    go(member, server, "queue")
    expect(waiting(member, "queue-distill")).to_be_visible()
    expect(waiting(member, "queue-distill").get_by_role("button")).to_have_count(0)
    up = member.get_by_role("button", name=re.compile("move queue-ablation-depth-.. up"))
    expect(up.first).to_be_disabled()  # a job of grace is ahead
    expect(up.last).to_be_enabled()  # a job of their own is


def reserve(page: Page, pool: str, start: datetime, length: str, slices: str, note: str) -> None:
    page.get_by_role("button", name="Reserve", exact=True).click()
    dialog(page).get_by_label("Pool").select_option(pool)
    dialog(page).get_by_label("From").fill(start.strftime("%Y-%m-%dT%H:%M"))
    dialog(page).get_by_label("For", exact=True).select_option(length)
    dialog(page).get_by_label("Slices").fill(slices)
    dialog(page).get_by_label("What for").fill(note)


def test_a_reservation_conflicts_is_extended_and_broken(
    page: Page, member: Page, server: lab.LabServer
):
    start = datetime.now().replace(minute=0, second=0, microsecond=0) + timedelta(days=5)
    go(member, server, "reservations")
    reserve(member, "lab", start, "4h", "2", "rehearsal")
    line = f"tpu reserve lab --from '{start:%Y-%m-%d %H:%M}' --for 4h --slices 2 --note rehearsal"
    expect(dialog(member)).to_contain_text(line)
    dialog(member).get_by_role("button", name="Reserve", exact=True).click()
    expect(row(member, "rehearsal")).to_contain_text("coming")
    # Another user sees the conflict while typing, and the server's answer after trying.
    go(page, server, "reservations")
    expect(row(page, "rehearsal")).to_be_visible()
    reserve(page, "lab", start + timedelta(hours=1), "1h", "4", "clash")
    expect(dialog(page)).to_contain_text("Conflict: 2 of 4 slices are left then. mei has 2 from")
    dialog(page).get_by_role("button", name="Reserve", exact=True).click()
    expect(dialog(page).get_by_role("alert")).to_contain_text("2 of 4 slices left to reserve then")
    dialog(page).get_by_role("button", name="Close", exact=True).click()
    row(member, "rehearsal").get_by_role("button", name="Extend").click()
    dialog(member).get_by_role("button", name="Extend", exact=True).click()
    expect(member.get_by_role("status").last).to_contain_text("it now ends")
    expect(row(member, "demo for visitors").get_by_role("button")).to_have_count(0)
    target = row(page, "rehearsal")
    target.get_by_role("button", name="Break").click()
    dialog(page).get_by_label("Reason").fill("maintenance")
    expect(dialog(page)).to_contain_text("--reason maintenance")
    dialog(page).get_by_role("button", name="Break", exact=True).click()
    expect(target).to_have_count(0)
    expect(page.get_by_role("region", name="Calendar")).to_contain_text("grace")


@pytest.mark.slow
def test_a_reservation_has_its_events(page: Page, member: Page, server: lab.LabServer):
    start = datetime.now().replace(minute=0, second=0, microsecond=0) + timedelta(days=9)
    go(member, server, "reservations")
    reserve(member, "lab", start, "1h", "1", "poster session")
    dialog(member).get_by_role("button", name="Reserve", exact=True).click()
    row(member, "poster session").get_by_role("link", name="Events").click()
    expect(member.get_by_role("heading", level=1)).to_contain_text("poster session")
    expect(member.locator("table.events")).to_contain_text("mei reserved 1 slice from")
    made = member.url.rpartition("/")[2]
    expect(member.locator("main")).to_contain_text(f"tpu events reservation:{made}")
    go(page, server, f"reservations/{made}")
    page.get_by_role("button", name="Break").click()
    dialog(page).get_by_label("Reason").fill("power cut")
    dialog(page).get_by_role("button", name="Break", exact=True).click()
    expect(page.locator(".facts")).to_contain_text("ada: power cut")
    expect(member.locator("table.events tbody tr")).to_have_count(2)
    expect(member.locator("table.events")).to_contain_text("broke the reservation of mei: power")


def test_an_adopted_node_is_given_back_by_an_admin(page: Page, member: Page, server: lab.LabServer):
    go(member, server, "inventory")
    expect(row(member, "mei-by-hand")).to_be_visible()
    expect(member.get_by_role("button", name="Give back")).to_have_count(0)
    go(member, server, f"slices/{lab.ADOPTED}")
    expect(member.locator(".facts")).to_contain_text("mei-by-hand")
    expect(member.get_by_role("button", name="Give back")).to_have_count(0)
    go(page, server, f"slices/{lab.ADOPTED}")
    expect(page.get_by_role("button", name="Give back")).to_be_visible()
    go(page, server, "inventory")
    page.get_by_label("Filter the inventory").fill("mei-by-hand")
    page.get_by_role("button", name="give mei-by-hand back").click()
    expect(dialog(page)).to_contain_text("tpu adopt undo mei-by-hand")
    expect(dialog(page)).to_contain_text("The TPU VM itself keeps running")
    dialog(page).get_by_role("button", name="Give back", exact=True).click()
    expect(page.get_by_role("status").last).to_contain_text("gave mei-by-hand back")
    expect(row(page, "mei-by-hand")).to_have_count(0)
    go(member, server, "inventory")
    expect(row(member, lab.BUSY_NODE)).to_be_visible()
    expect(row(member, "mei-by-hand")).to_have_count(0)


@pytest.mark.parametrize("where", ["inventory", "slice"])
def test_a_node_on_which_a_job_runs_is_not_given_back(
    page: Page, server: lab.LabServer, where: str
):
    go(page, server, "inventory")
    busy = row(page, lab.BUSY_NODE)
    if where == "slice":
        busy.locator("a[href^='#/slices/']").click()
        page.get_by_role("button", name="Give back").click()
    else:
        busy.get_by_role("button", name=f"give {lab.BUSY_NODE} back").click()
    dialog(page).get_by_role("button", name="Give back", exact=True).click()
    job = IDS["kernels-on-a-node"]
    expect(dialog(page).get_by_role("alert")).to_contain_text(
        f"job {job} runs on {lab.BUSY_NODE}; wait for its end, or run `tpu cancel {job}`"
    )
    dialog(page).get_by_role("button", name="Close", exact=True).click()
    with server.client("ada") as client:
        states = {each.node: each.state for each in client.inventory().rows}
    assert states[lab.BUSY_NODE] == "running"


def test_who_is_no_longer_an_admin_is_refused(browser: Browser, server: lab.LabServer):
    """The page still shows the button of the role it was opened with."""
    with server.client("ada") as ada:
        ada.put_user("rosa", Role.ADMIN)
        with FleetClient(server.url, ada.create_token("rosa").token, timeout=900) as rosa:
            link = rosa.login_link().path
        for page in open_page(browser, server.url + link):
            go(page, server, "inventory")
            give_back = page.get_by_role("button", name=f"give {lab.BUSY_NODE} back")
            expect(give_back).to_be_visible()
            ada.put_user("rosa", Role.MEMBER)
            give_back.click()
            dialog(page).get_by_role("button", name="Give back", exact=True).click()
            expect(dialog(page).get_by_role("alert")).to_contain_text("requires the admin role")
            dialog(page).get_by_role("button", name="Close", exact=True).click()
            expect(row(page, lab.BUSY_NODE)).to_be_visible()
        ada.delete_user("rosa")


def test_notes_in_the_inventory_are_edited(page: Page, server: lab.LabServer):
    go(page, server, "inventory")
    page.get_by_label("Filter the inventory").fill("v4-32")
    expect(page.locator("table.inventory tbody tr")).to_have_count(2)
    page.get_by_role("button", name="edit tpf-paper-9b40").click()
    dialog(page).get_by_label("Alias").fill("spare")
    expect(dialog(page)).to_contain_text("tpu inventory set tpf-paper-9b40 --alias spare")
    dialog(page).get_by_role("button", name="Save", exact=True).click()
    expect(row(page, "tpf-paper-9b40")).to_contain_text("spare")
    row(page, "tpf-paper-9b40").get_by_role("link", name="tpf-paper-9b40").click()
    expect(page.get_by_role("heading", level=1)).to_contain_text("spare")
    page.get_by_role("button", name="Release").click()
    expect(dialog(page)).to_contain_text("tpu reserve end tpf-paper-9b40")


def test_a_pool_shows_all_of_its_configuration_and_its_events(page: Page, server: lab.LabServer):
    go(page, server, "pool")
    expect(page.locator("main")).to_contain_text("Held after a failure")
    expect(page.locator("main")).to_contain_text("--per-user 2")
    page.get_by_role("button", name="Edit").click()
    dialog(page).get_by_label("Slices per user").fill("3")
    dialog(page).get_by_role("button", name="Save", exact=True).click()
    expect(page.locator(".facts")).to_contain_text("3")
    page.get_by_role("link", name="events", exact=True).click()
    expect(page.locator("table.events")).to_contain_text("(by ada)")
    with server.client("ada") as client:
        assert client.pool("lab").slices_per_user == 3
        client.put_pool(lab.POOLS[0])


def test_usage_is_shown_against_budgets_and_quota(page: Page, server: lab.LabServer):
    go(page, server, "usage")
    expect(page.get_by_role("region", name="Slices per user")).to_contain_text("of 2")
    expect(page.get_by_role("region", name="Budgets")).to_contain_text("of $900.00 this month")
    expect(page.locator("table.users")).to_contain_text("Goodput")


def test_an_admin_creates_users_tokens_and_ends_sessions(
    page: Page, browser: Browser, server: lab.LabServer
):
    go(page, server, "users")
    page.get_by_role("button", name="Create a user").click()
    dialog(page).get_by_label("Name").fill("nora")
    expect(dialog(page)).to_contain_text("tpu user add nora --role member")
    dialog(page).get_by_role("button", name="Create", exact=True).click()
    expect(row(page, "nora")).to_contain_text("member")
    page.get_by_role("link", name="tokens", exact=True).click()
    page.get_by_role("button", name="Create a token").click()
    dialog(page).get_by_label("User").select_option("nora")
    expect(dialog(page)).to_contain_text("tpu token create --user nora --expires 90d")
    dialog(page).get_by_role("button", name="Create", exact=True).click()
    shown = page.locator(".secret code")
    token = shown.inner_text()
    with browser.new_context() as context:
        other = context.new_page()
        other.goto(server.url)
        other.get_by_label("Token").fill(token)
        other.get_by_role("button", name="Log in").click()
        other.get_by_role("navigation", name="Pages").wait_for()
        go(page, server, "sessions")
        row(page, "nora").get_by_role("button").click()
        dialog(page).get_by_role("button", name="Log out", exact=True).click()
        expect(row(page, "nora")).to_have_count(0)
        other.reload()
        expect(other.get_by_label("Token")).to_be_visible()
    go(page, server, "tokens")
    row(page, "nora").get_by_role("button", name="Rotate").click()
    dialog(page).get_by_role("button", name="Rotate", exact=True).click()
    expect(shown).not_to_contain_text(token)
    row(page, "nora").first.get_by_role("button", name="Revoke").click()
    dialog(page).get_by_role("button", name="Revoke", exact=True).click()
    expect(page.get_by_role("status").last).to_contain_text("revoked token")
    page.get_by_role("link", name="audit", exact=True).click()
    expect(page.locator("table.audit")).to_contain_text("token.revoke")


@pytest.mark.parametrize(
    ("path", "button", "field", "choice", "slow"),
    [
        ("tokens", "Create a token", "User", "mei", "/api/v1/users"),
        ("jobs", "New job", "Pool", "lab", "/api/v1/pools"),
    ],
)
def test_a_question_waits_for_the_choices_that_it_offers(
    page: Page,
    server: lab.LabServer,
    path: str,
    button: str,
    field: str,
    choice: str,
    slow: str,
):
    held: list[Route] = []
    page.route(f"**{slow}", lambda route: held.append(route))
    with page.expect_request(f"**{slow}"):
        page.goto(f"{server.url}/?late#/{PAGES[path]}")
    expect(page.get_by_role("button", name=button)).to_be_disabled()
    for each in held:
        each.continue_()
    page.unroute(f"**{slow}")
    page.get_by_role("button", name=button).click()
    expect(
        dialog(page).get_by_label(field, exact=True).locator(f"option[value={choice}]")
    ).to_have_count(1)


@pytest.mark.parametrize("answer", ["late", "late refusal"])
def test_a_late_answer_to_the_search_before_is_not_shown(
    page: Page, server: lab.LabServer, answer: str
):
    held: list[Route] = []
    every_job = re.compile(r"/api/v1/jobs\?limit=100$")
    page.route(every_job, lambda route: held.append(route))
    with page.expect_request(every_job):
        page.goto(f"{server.url}/?late#/jobs")
    page.evaluate("() => { location.hash = '#/jobs?q=tag:sweep-lr' }")
    rows = page.locator("table.jobs tbody tr")
    expect(rows).to_have_count(3)
    with page.expect_response(every_job):
        for each in held:
            if answer == "late":
                each.continue_()
            else:
                each.fulfill(status=400, json={"error": {"message": "too late"}})
    page.wait_for_timeout(500)  # the page has rendered what it is going to render
    expect(rows).to_have_count(3)
    expect(page.get_by_role("alert")).to_have_count(0)


@pytest.mark.slow
def test_metrics_come_back_after_an_answer_that_failed(page: Page, server: lab.LabServer):
    failed: list[str] = []

    def fail_once(route: Route) -> None:
        failed.append(route.request.url)
        if len(failed) > 1:
            route.fallback()
        else:
            route.abort()

    page.route("**/metrics", fail_once)
    go(page, server, "metrics")
    expect(page.get_by_role("alert")).to_have_count(1)
    expect(page.locator(".charts")).to_be_visible()
    expect(page.get_by_role("alert")).to_have_count(0)


@pytest.mark.parametrize("answer", ["no answer", pytest.param("503", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "path",
    [
        "/session",
        pytest.param("/jobs?**", marks=pytest.mark.slow),
        pytest.param("/users", marks=pytest.mark.slow),
        pytest.param("/stream**", marks=pytest.mark.slow),
    ],
)
def test_what_a_server_that_starts_does_not_answer_is_asked_again(
    page: Page, server: lab.LabServer, path: str, answer: str
):
    failed: list[str] = []

    def fail_twice(route: Route) -> None:
        failed.append(route.request.url)
        if len(failed) > 2:
            route.fallback()
        elif answer == "503":
            route.fulfill(status=503, json={"error": {"message": "the database is starting"}})
        else:
            route.abort()

    page.route(f"**/api/v1{path}", fail_twice)
    page.goto(f"{server.url}/?again#/{'people/users' if path == '/users' else 'jobs'}")
    expect(page.locator("tbody tr").first).to_be_visible()
    expect(page.get_by_text("live", exact=True)).to_be_visible()
    expect(page.get_by_role("alert")).to_have_count(0)
    assert len(failed) > 2


@pytest.mark.slow
def test_a_token_has_its_events_for_its_user_and_for_admins(
    page: Page, member: Page, server: lab.LabServer
):
    with server.client("mei") as client:
        made = client.create_token(note="notebook")
    go(member, server, "tokens")
    row(member, "notebook").get_by_role("link", name="Events").click()
    expect(member.locator("main")).to_contain_text("No entries.")
    member.get_by_role("button", name="Rotate").click()
    dialog(member).get_by_role("button", name="Rotate", exact=True).click()
    expect(member.locator(".secret")).to_contain_text("It is shown only now")
    for who in (page, member):
        go(who, server, f"people/tokens/{made.id}")
        who.reload()
        expect(who.locator(".facts")).to_contain_text("notebook")
        expect(who.locator("table.audit")).to_contain_text("token.rotate")
        expect(who.locator("main")).to_contain_text(f"tpu user audit --token {made.id}")
    go(member, server, "people/tokens/ada-laptop")
    expect(member.locator("main")).to_contain_text("belongs to another user")
    expect(member.locator("table.audit")).to_have_count(0)


def test_the_events_of_a_user_are_on_the_page_of_users(page: Page, server: lab.LabServer):
    job = lab.LAB[0]
    with server.client(job.owner) as client:
        client.change_job(job.id, JobChanges(notes="events of a user"))
    go(page, server, "users")
    row(page, job.owner).get_by_role("link", name="Events").click()
    expect(page.get_by_label("User")).to_have_value(job.owner)
    events = page.locator("table.events")
    expect(events).to_contain_text("events of a user")
    expect(page.locator("main")).to_contain_text(f"tpu events user:{job.owner}")
    with server.client("ada") as client:
        assert {each.by for each in client.events(user=job.owner).events} == {job.owner}


def test_several_jobs_are_tagged_after_a_question(page: Page, server: lab.LabServer):
    go(page, server, "jobs?q=tag:diffusion")
    page.get_by_label("choose all jobs on this page").check()
    page.get_by_role("toolbar", name="Chosen jobs").get_by_role("button", name="Tag").click()
    dialog(page).get_by_label("Tags").fill("kept figures")
    expect(dialog(page)).to_contain_text("diffusion-256-ema")
    dialog(page).get_by_role("button", name="Add tags", exact=True).click()
    expect(page.locator("table.jobs .tag", has_text="kept")).to_have_count(2)


def test_ended_jobs_are_archived_and_listed_again(page: Page, server: lab.LabServer):
    """What "clean" did on the page of the former job manager; nothing is deleted."""
    names = ("data-pipeline-typo", "diffusion-128-cancelled", "diffusion-256-ema")
    ended = {IDS[name] for name in names[:2]}  # the last one runs
    search = f"id:{','.join(IDS[name] for name in names)}"
    listed = page.locator("table.jobs tbody tr")
    go(page, server, f"jobs?q={search}")
    expect(listed).to_have_count(3)
    page.get_by_label("choose all jobs on this page").check()
    toolbar = page.get_by_role("toolbar", name="Chosen jobs")
    toolbar.get_by_role("button", name="Archive").click()
    expect(dialog(page)).to_contain_text("Archive 2 ended jobs?")
    expect(dialog(page)).not_to_contain_text("diffusion-256-ema")
    dialog(page).get_by_role("button", name="Archive jobs", exact=True).click()
    expect(page.get_by_role("status").last).to_contain_text("archived 2 jobs")
    expect(listed).to_have_count(1)
    go(page, server, f"jobs?q=is:archived {search}")
    expect(listed).to_have_count(2)
    page.get_by_label("choose all jobs on this page").check()
    toolbar.get_by_role("button", name="Unarchive").click()
    expect(dialog(page)).to_contain_text("tpu archive undo ")
    dialog(page).get_by_role("button", name="Unarchive jobs", exact=True).click()
    expect(page.get_by_role("status").last).to_contain_text("listed 2 jobs again")
    with server.client("ada") as client:
        assert ended <= {row.id for row in client.jobs(query=search).jobs}


def test_a_viewer_sees_everything_and_changes_nothing(browser: Browser, server: lab.LabServer):
    with server.client("tomas") as client:
        link = client.login_link().path
    for page in open_page(browser, server.url + link):
        for name in ("queue", "reservations", "inventory", "pool", "job", "compare", "usage"):
            go(page, server, name)
            expect(page.locator("main")).not_to_contain_text("Loading…")
            expect(page.get_by_role("alert")).to_have_count(0)
            changing = page.locator("main button:not(.cli):not([aria-label]):not([aria-pressed])")
            labels = [text for text in changing.all_inner_texts() if text != "Today"]
            assert labels == [], name
            expect(page.locator("table.inventory button")).to_have_count(0)


def test_times_of_other_days_have_a_date(page: Page, server: lab.LabServer):
    go(page, server, "failed-job")
    day = (datetime.now(UTC) - timedelta(hours=27)).astimezone().strftime("%Y-%m-%d")
    expect(page.locator(".axis")).to_contain_text(day)
