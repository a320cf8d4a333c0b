"""A real server and a real browser."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, expect, sync_playwright

from tests.providers.local.test_isolation import stop_all
from tests.server_process import Server
from tpufleet.service.web.pages import STATIC_FOLDER

expect.set_options(timeout=60_000)  # the machine may be busy with other tests
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """Per file: Playwright occupies the thread's event loop, which tests of other files need."""
    if CHROMIUM is None:
        pytest.skip("needs Chromium: apt-get install chromium")
    if not (STATIC_FOLDER / "index.html").is_file():
        pytest.skip("the web page was not built: scripts/build-web")
    sandbox = [] if os.geteuid() else ["--no-sandbox"]
    with sync_playwright() as playwright:
        made = playwright.chromium.launch(executable_path=CHROMIUM, args=sandbox)
        yield made
        made.close()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    server = Server(tmp_path_factory.mktemp("web") / "home")
    server.start()
    yield server
    stop_all(server)
    server.cleanup()


@pytest.fixture
def page(browser: Browser, server: Server) -> Iterator[Page]:
    """Logged in as the admin."""
    yield from open_page(browser, server.url + server.client.login_link().path)


def open_page(browser: Browser, link: str) -> Iterator[Page]:
    """In a browser of its own. Fails on script errors and on breaches of the content policy."""
    with browser.new_context(viewport={"width": 1280, "height": 800}) as context:
        page = context.new_page()
        problems: list[str] = []
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on(
            "console",
            lambda message: (
                problems.append(message.text) if "Content Security Policy" in message.text else None
            ),
        )
        page.set_default_timeout(60_000)
        page.goto(link)
        page.get_by_role("navigation", name="Pages").wait_for()
        yield page
        assert problems == []


def token_of(server: Server, name: str, role: str) -> str:
    server.client.put_user(name, role)  # type: ignore[arg-type]
    return server.client.create_token(name).token


def screenshot(page: Page, name: str) -> None:
    """For people who look at the page: set TPUFLEET_SCREENSHOTS to a folder."""
    folder = os.environ.get("TPUFLEET_SCREENSHOTS")
    if folder:
        page.screenshot(path=Path(folder) / f"{name}.png", full_page=True)
