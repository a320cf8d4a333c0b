"""Pictures of the web page and of a notebook, from the lab of `tests/web/lab.py`, in Chromium.

Called by `scripts/pictures.py`. The server, the page and the kernel are real; the lab's cloud and
its hosts are in memory, so the pictures are the same on every machine, apart from times.
"""

from __future__ import annotations

import asyncio
import contextlib
import html
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from playwright.sync_api import Browser, Page, sync_playwright

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

# The root of the clone is not on the path of a script.
from tests.repository import TEST_ROOTS  # noqa: E402

sys.path[1:1] = map(str, TEST_ROOTS)

from tests.web import lab  # noqa: E402

PICTURES = ROOT / "docs" / "pictures"
IDS = {each.name: each.id for each in lab.LAB}
SWEEP = ("lab-baseline", "lab-sweep-lr-3e-3", "lab-sweep-lr-1e-3")
WIDTH, HEIGHT = 1280, 760
# name of the picture → path of the page, its height, what to do before
PAGES: dict[str, tuple[str, int, Callable[[Page], None]]] = {
    "web-fleet": ("fleet", 830, lambda page: page.get_by_role("button", name="By user").click()),
    "web-jobs": ("jobs", HEIGHT, lambda page: None),
    "web-job": (f"jobs/{IDS['vit-l16-imagenet21k']}", 700, lambda page: None),
    "web-waiting": (f"jobs/{IDS['moe-8x7b-pretrain']}", 640, lambda page: None),
    "web-compare": (
        "compare/" + "/".join(IDS[name] for name in SWEEP), 1010, lambda page: None,
    ),
    "web-reservations": ("reservations", 660, lambda page: None),
    "web-conflict": ("reservations?", 620, lambda page: _start_reserving(page)),
    "web-queue": ("queue", 560, lambda page: None),
}  # fmt: skip
CELLS = (
    "import tpufleet\ntpufleet.connect(SERVER, TOKEN);",
    'job = tpufleet.job("grace/lab-sweep-lr-3e-3")\njob',
    "print(job.why())",
    "job.metrics().tail(3)",
)
NOTEBOOK_STYLE = """
body { margin: 0; padding: 18px; font: 14px/1.45 system-ui, sans-serif; width: 860px }
.cell { display: grid; grid-template-columns: 56px 1fr; gap: 6px 10px; margin-bottom: 14px }
.mark { color: #59636e; font: 12.5px ui-monospace, monospace; padding-top: 9px; text-align: right }
pre { margin: 0; font: 13px/1.5 ui-monospace, monospace; white-space: pre-wrap }
.code { background: #f6f8fb; border: 1px solid #dde2ea; border-radius: 4px; padding: 8px 10px }
.out { padding: 2px 10px; overflow: hidden }
table { border-collapse: collapse } .dataframe, .dataframe :is(th, td) { border: 0 }
th, td { padding: 3px 12px 3px 0; font-size: 13px }
"""


def draw_page() -> None:
    with _lab() as server, _chromium() as browser, browser.new_context() as context:
        page = context.new_page()
        with server.client("ada") as client:
            page.goto(server.url + client.login_link().path)
        page.get_by_role("navigation", name="Pages").wait_for()
        for name, (path, height, prepare) in PAGES.items():
            page.set_viewport_size({"width": WIDTH, "height": height})
            page.goto(f"{server.url}/#/{path}")
            page.get_by_role("heading", level=1).first.wait_for(state="attached")
            page.wait_for_load_state("load")
            page.wait_for_timeout(1500)  # charts, and the answers of all requests
            prepare(page)
            page.wait_for_timeout(300)
            _save(page, name)


def draw_notebook() -> None:
    """A real kernel runs the cells; its outputs are shown as a notebook shows them."""
    import nbformat
    from nbclient import NotebookClient

    with _lab() as server:
        first = f"SERVER, TOKEN = {server.url!r}, {lab.token_of('grace')!r}"
        cells = [nbformat.v4.new_code_cell(source) for source in (first, *CELLS)]
        notebook = nbformat.v4.new_notebook(cells=cells)
        NotebookClient(notebook, timeout=120, kernel_name="python3").execute()
    body = "".join(_cell(number, cell) for number, cell in enumerate(notebook.cells[1:], 1))
    with _chromium() as browser:
        page = browser.new_page(viewport={"width": 900, "height": 300})
        page.set_content(f"<style>{NOTEBOOK_STYLE}</style>{body}")
        page.screenshot(path=PICTURES / "notebook.png", full_page=True)
    print("wrote docs/pictures/notebook.png")


def draw_top() -> None:
    """`tpu top`; Textual draws its own screen."""
    from tpufleet.views.top.app import TopApp

    async def screenshot(server: lab.LabServer) -> str:
        with server.client("grace") as client:
            app = TopApp(client, lambda: server.client("grace"))
            async with app.run_test(size=(120, 24)) as pilot:
                await pilot.pause(3)
                return app.export_screenshot(title="tpu top")

    with _lab() as server:
        svg = asyncio.run(screenshot(server))
    svg = re.sub(r"@font-face \{.*?\}", "", svg, flags=re.DOTALL)  # no external fonts
    target = PICTURES / "top.svg"
    target.write_text("\n".join(line.rstrip() for line in svg.splitlines()) + "\n")
    print(f"wrote {target.relative_to(ROOT)}")


def draw_compare(picture: Callable[[str, Path, str], None]) -> None:
    """`tpu compare` in a terminal."""
    with tempfile.TemporaryDirectory() as home, _lab() as server:
        token = Path(home) / "grace"
        token.write_text(lab.token_of("grace"))
        token.chmod(0o600)
        os.environ |= {"TPUFLEET_SERVER": server.url, "TPUFLEET_TOKEN_FILE": str(token)}
        names = " ".join(f"grace/{name}" for name in SWEEP[:2])
        picture(f"compare {names}", PICTURES / "compare.svg", "lr")


def _cell(number: int, cell: Any) -> str:
    outputs = "".join(_output(output) for output in cell.outputs)
    shown = f'<div class="mark"></div><div class="out">{outputs}</div>' if outputs else ""
    source = f'<pre class="code">{html.escape(cell.source)}</pre>'
    return f'<div class="cell"><div class="mark">[{number}]:</div>{source}{shown}</div>'


def _output(output: Any) -> str:
    data = output.get("data", {})
    if "text/html" in data:
        return str(data["text/html"])
    return f"<pre>{html.escape(output.get('text') or data.get('text/plain', ''))}</pre>"


def _start_reserving(page: Page) -> None:
    page.get_by_role("button", name="Reserve").click()
    dialog = page.get_by_role("dialog")
    busy = page.locator(".calendar .bar", has_text="linus").first.get_attribute("title") or ""
    dialog.get_by_label("From").fill(busy.partition(", ")[2][:16].replace(" ", "T"))
    dialog.get_by_label("Slices").fill("2")
    dialog.get_by_label("What for").fill("demo")


def _save(page: Page, name: str) -> None:
    PICTURES.mkdir(exist_ok=True)
    page.screenshot(path=PICTURES / f"{name}.png")
    print(f"wrote docs/pictures/{name}.png")


@contextlib.contextmanager
def _lab() -> Iterator[lab.LabServer]:
    with (
        tempfile.TemporaryDirectory(prefix="tpufleet-lab-") as home,
        lab.lab_server(Path(home) / "home", ended=300) as server,
    ):
        yield server


@contextlib.contextmanager
def _chromium() -> Iterator[Browser]:
    program = shutil.which("chromium") or shutil.which("chromium-browser")
    if program is None:
        sys.exit("needs Chromium: apt-get install chromium")
    sandbox = [] if os.geteuid() else ["--no-sandbox"]
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=sandbox)
        yield browser
        browser.close()
