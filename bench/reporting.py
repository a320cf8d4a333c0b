"""How a benchmark runs and tells its result: a small table for people, last one JSON line for
programs."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import yardstick


@dataclass(frozen=True, kw_only=True)
class Measure:
    """One figure. The first of a benchmark is its headline."""

    name: str
    ours: float
    unit: str
    goal: float | None = None  # None: told, not judged
    more_is_better: bool = False
    anchor: float | None = None  # the peer's figure, in the same unit
    peer: str = ""

    @property
    def met(self) -> bool:
        if self.goal is None:
            return True
        return self.ours >= self.goal if self.more_is_better else self.ours <= self.goal

    @property
    def ratio(self) -> float | None:
        """How many times better than the peer."""
        if self.anchor is None or not self.ours or not self.anchor:
            return None
        better = self.ours / self.anchor if self.more_is_better else self.anchor / self.ours
        return round(better, 1)


def run_benchmark(main: Callable[[], None]) -> None:
    """SIGTERM ends it as Ctrl-C does: what it started is stopped, and its files are deleted."""

    def stop(*_: object) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # do not interrupt the cleanup
        sys.exit(128 + signal.SIGTERM)

    signal.signal(signal.SIGTERM, stop)
    main()


def report(name: str, measures: Sequence[Measure], **more: Any) -> None:
    """`more` goes into the JSON line as it is."""
    _table(name, measures)
    head = measures[0]
    print(
        json.dumps(
            {
                "name": name,
                "ours": round(head.ours, 3),
                "unit": head.unit,
                "anchor": head.anchor,
                "peer": head.peer,
                "ratio": head.ratio,
                "goal": head.goal,
                "met": all(measure.met for measure in measures),
                "yardstick_ms": round(yardstick.milliseconds(), 2),
                "measures": [_plain(measure) for measure in measures],
                **more,
            }
        ),
        flush=True,
    )


def _plain(measure: Measure) -> dict[str, Any]:
    plain = asdict(measure) | {"ratio": measure.ratio, "met": measure.met}
    return plain | {"ours": round(measure.ours, 3)}


def _table(name: str, measures: Sequence[Measure]) -> None:
    rows = [("", "ours", "goal", "", "peer, by its published or earlier figure", "times better")]
    for measure in measures:
        sign = "≥" if measure.more_is_better else "≤"
        goal = "" if measure.goal is None else f"{sign} {measure.goal:g} {measure.unit}"
        peer = (
            "" if measure.anchor is None else (f"{measure.peer}: {measure.anchor:g} {measure.unit}")
        )
        verdict = "" if measure.goal is None else ("met" if measure.met else "MISSED")
        ratio = "" if measure.ratio is None else f"{measure.ratio:g}"
        rows.append(
            (measure.name, f"{measure.ours:.4g} {measure.unit}", goal, verdict, peer, ratio)
        )
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    print(f"== {name}")
    for row in rows:
        cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        print("  ".join(cells).rstrip())
