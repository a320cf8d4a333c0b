"""An engine that is being opened while the first units are claimed and tokenized."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tpufleet_activations.daemon_threads import DaemonThreads
from tpufleet_activations.model import engines
from tpufleet_activations.pipeline import batches
from tpufleet_activations.pipeline.calibration import Calibration


class OpeningEngine:
    """Opens an engine in a thread. What needs it waits, or raises why it could not be opened."""

    def __init__(
        self,
        open_engine: Callable[[], engines.Engine],
        calibrate: Callable[[engines.Engine], Calibration | None] = lambda engine: None,
    ):
        def open_and_calibrate() -> tuple[engines.Engine, Calibration | None]:
            engine = open_engine()
            return engine, calibrate(engine)

        with DaemonThreads(1, "extract-engine") as thread:
            self._opened = thread.submit(open_and_calibrate)

    @property
    def _engine(self) -> engines.Engine:
        return self._opened.result()[0]

    @property
    def row_multiple(self) -> int:
        return self._engine.row_multiple

    @property
    def varlen(self) -> bool:
        return self._engine.varlen

    @property
    def sums_rows(self) -> bool:
        return self._engine.sums_rows

    @property
    def programs(self) -> int:
        return self._engine.programs

    @property
    def compile_seconds(self) -> float:
        return self._engine.compile_seconds

    @property
    def calibration(self) -> Calibration | None:
        return self._opened.result()[1]

    def start(self, batch: batches.Batch) -> Callable[[], list[engines.OutputBlock]]:
        return self._engine.start(batch)

    def rows(self, count: int) -> frozenset[int]:
        return self._engine.rows(count)

    def flops(self, batch: batches.Batch) -> float:
        return self._engine.flops(batch)

    def peak_flops(self) -> float | None:
        return self._engine.peak_flops()

    def compile_ahead(self, ahead: Sequence[batches.Batch]) -> None:
        self._engine.compile_ahead(ahead)

    def finish_saving(self) -> None:
        self._engine.finish_saving()
