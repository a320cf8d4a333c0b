"""Create the pictures in the docs: run commands in a real terminal (tmux) and draw its screen.

    .venv/bin/python scripts/pictures.py [demo | tutorial | gke | top | compare | page | notebook]

`demo` draws docs/demo.svg; `tutorial` follows docs/tutorial.md and `gke` docs/gke-environment.md,
and both draw docs/pictures; `top`, `compare`, `page` and `notebook` show the lab of
`page_pictures.py`. Needs tmux, Chromium for the last two, OpenTofu for `gke`, and the environment
of `./test`.
"""

from __future__ import annotations

import io
import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.terminal_theme import MONOKAI
from rich.text import Text

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
TPU = Path(sys.executable).with_name("tpu")
# A separate server; other tmux sessions are not touched.
TMUX = ("tmux", "-L", "tpufleet-picture")
WIDTH, HEIGHT = 112, 60
TIMEOUT_SECONDS = 300.0
POLL_SECONDS = 0.5
STEPS = 2000  # as in the tutorial: long enough to take the slice away by hand
PREEMPT_AT = 100


def screen_after(command: str, folder: Path) -> str:
    """The screen of a terminal, with colours, after the command has exited."""
    shell = f"clear; {command}; sleep 1; {shlex.join(TMUX)} wait-for -S done; sleep 60"
    size = ("-x", str(WIDTH), "-y", str(HEIGHT))
    start = (*TMUX, "-f", "/dev/null", "new-session", "-d", *size, "sh", "-c", shell)
    subprocess.run(start, check=True, cwd=folder)
    try:
        subprocess.run((*TMUX, "wait-for", "done"), check=True, timeout=TIMEOUT_SECONDS)
        capture = (*TMUX, "capture-pane", "-e", "-p", "-S", "-")
        return subprocess.run(capture, check=True, capture_output=True, text=True).stdout
    finally:
        subprocess.run((*TMUX, "kill-server"), check=False)
        time.sleep(POLL_SECONDS)  # the server exits after the command returns


def draw(screen: str, title: str, target: Path) -> None:
    console = Console(record=True, width=WIDTH, file=io.StringIO(), color_system="truecolor")
    # As one text: tmux emits a colour only where it changes, possibly lines before.
    shown = Text.from_ansi(f"\x1b[1m$ {title}\x1b[0m\n{screen.rstrip()}")
    console.print(shown, no_wrap=True, crop=True, highlight=False)
    svg = console.export_svg(title=title, theme=MONOKAI, unique_id=target.stem)
    svg = re.sub(r"@font-face \{.*?\}", "", svg, flags=re.DOTALL)  # no external fonts
    target.parent.mkdir(exist_ok=True)
    target.write_text("\n".join(line.rstrip() for line in svg.splitlines()) + "\n")
    print(f"wrote {target.relative_to(ROOT)}")


def picture(command: str, target: Path, expected: str, folder: Path = ROOT) -> None:
    screen = screen_after(f"{shlex.quote(str(TPU))} {command}", folder)
    plain = re.sub(r"\x1b\[[0-9;]*m", "", screen)
    if expected not in plain:
        sys.exit(f"`tpu {command}` does not show {expected!r}:\n{plain}")
    draw(screen, f"tpu {command}", target)


def tpu(*arguments: str, folder: Path = ROOT) -> str:
    return subprocess.run(
        [TPU, *arguments], check=True, cwd=folder, stdout=subprocess.PIPE, text=True
    ).stdout


def wait_for_job(name: str, condition: Callable[[dict[str, Any]], bool]) -> None:
    deadline = time.monotonic() + TIMEOUT_SECONDS
    while True:
        jobs = json.loads(tpu("jobs", "--json"))["jobs"]
        job = next(job for job in jobs if job["name"] == name)
        if condition(job):
            return
        if time.monotonic() > deadline:
            sys.exit(f"timed out; {name} is {job['state']}: {job['reason']}")
        time.sleep(POLL_SECONDS)


def steps_of(job: dict[str, Any]) -> int:
    return (job["progress"] or {}).get("step") or 0


def draw_demo() -> None:
    picture("demo", DOCS / "demo.svg", "bit for bit")


def draw_tutorial() -> None:
    """A job that ended, and one whose slice is preempted."""
    with tempfile.TemporaryDirectory(prefix="tpufleet-") as home:
        os.environ["TPUFLEET_HOME"] = home
        try:
            command = 'echo "process $TPUFLEET_PROCESS_ID of $TPUFLEET_NUM_PROCESSES"'
            tpu("run", "v5e-16", "--name", "hello", "--", command)
            steps = f"command=[python, train.py, steps={STEPS}]"
            tpu("submit", "examples/train/job.yaml", "--set", steps)
            wait_for_job("train", lambda job: steps_of(job) >= PREEMPT_AT)
            tpu("doctor", "fault", "train", "preempt")
            wait_for_job("train", lambda job: job["attempts"] == 2 and job["state"] == "running")
            resumed_from = PREEMPT_AT // 2
            wait_for_job("train", lambda job: steps_of(job) > resumed_from)
            picture("jobs", DOCS / "pictures" / "jobs.svg", "running")
            picture("inventory slices", DOCS / "pictures" / "slices.svg", "ready")
            wait_for_job("train", lambda job: job["ended_at"] is not None)
            picture("why train", DOCS / "pictures" / "why.svg", "preempted")
            picture("show train", DOCS / "pictures" / "show.svg", "succeeded")
        finally:
            tpu("serve", "--stop")


def draw_from_lab(name: str) -> None:
    import page_pictures  # needs Playwright

    if name == "compare":
        page_pictures.draw_compare(picture)
    else:
        draws = {
            "page": page_pictures.draw_page,
            "notebook": page_pictures.draw_notebook,
            "top": page_pictures.draw_top,
        }
        draws[name]()


def draw_gke() -> None:
    """An environment that is planned and applied, against the emulated Google Cloud."""
    pictures = DOCS / "pictures"
    with tempfile.TemporaryDirectory(prefix="tpufleet-") as name:
        folder = Path(name)
        tpu("cluster", "init", "--project", "my-project", "--zone", "us-central1-a", folder=folder)
        picture("cluster plan --rehearse", pictures / "cluster-plan.svg", "USD/hour idle", folder)
        apply = "cluster apply --rehearse --yes 2>&1 | tail -n 20"
        picture(apply, pictures / "cluster-apply.svg", "applied", folder)


SETS: dict[str, Callable[[], None]] = {
    "demo": draw_demo,
    "tutorial": draw_tutorial,
    "gke": draw_gke,
    **{name: partial(draw_from_lab, name) for name in ("top", "compare", "page", "notebook")},
}


def main() -> None:
    names = sys.argv[1:] or ["demo", "tutorial"]
    if unknown := set(names) - set(SETS):
        sys.exit(f"no set of pictures is called {', '.join(unknown)}; there are {', '.join(SETS)}")
    for name in names:
        SETS[name]()


if __name__ == "__main__":
    main()
