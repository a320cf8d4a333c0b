"""The table that `tpu run` shows while a job waits: where it looks for capacity, what each source
answered, the price, and when it is tried again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from tpufleet.model.api_types import JobExplanation, JobRow, SourceState, SourceStatus
from tpufleet.model.fleet.slices import SIMULATED_PROVIDERS
from tpufleet.model.tpu import prices, type_lookup
from tpufleet.model.tpu.prices import Price
from tpufleet.views import text
from tpufleet.views.cli import connection

MAX_ROWS = 8  # the rest is counted, so that events stay visible
TITLES = ("ZONE", "CAPACITY", "STATE", "USD/H", "NEXT TRY", "ANSWER")
_STYLES = {
    SourceState.REFUSED: text.AMBER,
    SourceState.REQUESTED: text.BUSY,
    SourceState.BOOTING: text.BUSY,
    SourceState.READY: text.GOOD,
    SourceState.UNTRIED: text.QUIET,
}


def render(row: JobRow, explanation: JobExplanation) -> list[Any]:
    """What rich draws; nothing where the sources are not known."""
    from rich.table import Table
    from rich.text import Text

    if not explanation.sources:
        return []
    now = datetime.now(UTC)
    table = Table(box=None, pad_edge=False, header_style="bold")
    for title in TITLES:
        table.add_column(title, no_wrap=True, overflow="ellipsis", ratio=None)
    known = prices.price_table(connection.settings().prices)
    shown = chosen(explanation.sources)
    for source in shown:
        style = _STYLES[source.state]
        table.add_row(*(Text(cell, style=style) for cell in cells(row, source, known, now)))
    hidden = len(explanation.sources) - len(shown)
    rest = [Text(f"{text.counted(hidden, 'source')} more", style=text.QUIET)] if hidden else []
    return [Text(text.one_line(explanation.message), style="bold"), table, *rest]


def chosen(sources: Sequence[SourceStatus]) -> Sequence[SourceStatus]:
    """Those that were tried before the others, in the order of the job."""
    tried = [each for each in sources if each.state is not SourceState.UNTRIED]
    kept = [*tried, *(each for each in sources if each not in tried)][:MAX_ROWS]
    return [each for each in sources if each in kept]


def cells(
    row: JobRow, source: SourceStatus, known: Mapping[tuple[str, str], Price], now: datetime
) -> tuple[str, ...]:
    simulated = source.provider in SIMULATED_PROVIDERS
    kind = f"{source.capacity}, simulated" if simulated else source.capacity.value
    return (
        source.zone,
        kind,
        source.state.value,
        "-" if simulated else _hourly(row, source, known),
        text.age(source.retry_at, now) if source.retry_at is not None else "-",
        text.one_line(source.message) or "-",
    )


def _hourly(row: JobRow, source: SourceStatus, known: Mapping[tuple[str, str], Price]) -> str:
    accelerator = type_lookup.find(row.accelerator)
    price = known.get((accelerator.generation, source.capacity))
    return prices.amount(price.usd * accelerator.chips * row.slices) if price is not None else "-"
