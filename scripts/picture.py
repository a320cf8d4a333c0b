"""Create docs/demo.svg: run `tpu demo` in a real terminal (tmux) and draw its screen.

    .venv/bin/python scripts/picture.py [docs/demo.svg]

Needs tmux, and the environment that `./tpu demo` sets up.
"""

from __future__ import annotations

import io
import re
import shlex
import subprocess
import sys
import time
from pathlib import Path

from rich.console import Console
from rich.terminal_theme import MONOKAI
from rich.text import Text

ROOT = Path(__file__).resolve().parents[1]
SOCKET = (
    "tmux",
    "-L",
    "tpufleet-picture",
)  # a separate server; other tmux sessions are not touched
WIDTH, HEIGHT = 112, 60
TIMEOUT_SECONDS = 300.0


def screen_after(command: str) -> str:
    """The screen of a terminal, with colours, after the command has exited."""
    shell = f"clear; {command}; sleep 1; tmux -L {SOCKET[2]} wait-for -S done; sleep 60"
    size = ("-x", str(WIDTH), "-y", str(HEIGHT))
    start = (*SOCKET, "-f", "/dev/null", "new-session", "-d", *size, "sh", "-c", shell)
    subprocess.run(start, check=True, cwd=ROOT)
    try:
        subprocess.run((*SOCKET, "wait-for", "done"), check=True, timeout=TIMEOUT_SECONDS)
        capture = (*SOCKET, "capture-pane", "-e", "-p", "-S", "-")
        return subprocess.run(capture, check=True, capture_output=True, text=True).stdout
    finally:
        subprocess.run((*SOCKET, "kill-server"), check=False)


def draw(screen: str, title: str, target: Path) -> None:
    console = Console(record=True, width=WIDTH, file=io.StringIO(), color_system="truecolor")
    # As one text: tmux emits a colour only where it changes, possibly lines before.
    shown = Text.from_ansi(f"\x1b[1m$ {title}\x1b[0m\n{screen.rstrip()}")
    console.print(shown, no_wrap=True, crop=True, highlight=False)
    svg = console.export_svg(title=title, theme=MONOKAI, unique_id="demo")
    svg = re.sub(r"@font-face \{.*?\}", "", svg, flags=re.DOTALL)  # no external fonts
    target.write_text("\n".join(line.rstrip() for line in svg.splitlines()) + "\n")


def main() -> None:
    target = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "docs" / "demo.svg"
    tpu = Path(sys.executable).with_name("tpu")
    start = time.monotonic()
    screen = screen_after(f"{shlex.quote(str(tpu))} demo")
    if "bit for bit" not in screen:
        sys.exit(f"the demo failed:\n{screen}")
    draw(screen, "tpu demo", target)
    print(f"wrote {target} ({time.monotonic() - start:.0f} s)")


if __name__ == "__main__":
    main()
