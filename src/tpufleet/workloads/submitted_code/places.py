"""Where a process stands in the gang, and where the outcome of submitted code is left: once for all
attempts in the job's checkpoint folder, and then in the run folder, for the agent to take."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

Outcome = dict[str, Any]


class Place:
    """Where this process stands in the gang, and where outcomes are left."""

    def __init__(
        self, environ: Mapping[str, str], *, run: Path | None, checkpoints: Path | None
    ) -> None:
        self.environ = dict(environ)
        self.run = run
        self._settled = checkpoints / "outcome.json" if checkpoints else None
        self.process_id = int(environ.get("TPUFLEET_PROCESS_ID") or 0)
        self.num_processes = int(environ.get("TPUFLEET_NUM_PROCESSES") or 1)

    @classmethod
    def from_environment(cls, environ: Mapping[str, str]) -> Place:
        run, checkpoints = environ.get("TPUFLEET_RUN_DIR"), environ.get("TPUFLEET_CHECKPOINT_DIR")
        return cls(
            environ,
            run=Path(run) if run else None,
            checkpoints=Path(checkpoints) if checkpoints and "://" not in checkpoints else None,
        )

    @property
    def stopping(self) -> bool:
        return self.run is not None and (self.run / "stop").exists()

    def settled(self) -> Outcome | None:
        """What an earlier attempt came to, if one came to its end."""
        try:
            return json.loads(self._settled.read_text()) if self._settled else None
        except FileNotFoundError:
            return None

    def settle(self, outcome: Outcome) -> Outcome:
        """The outcome that counts: the first that was settled, by whichever attempt or process."""
        if self._settled is None:
            return outcome
        draft = self._settled.with_name(f".outcome.{os.getpid()}")
        draft.parent.mkdir(parents=True, exist_ok=True)
        _write(draft, outcome)
        try:
            os.link(draft, self._settled)
        except FileExistsError:
            return json.loads(self._settled.read_text())
        finally:
            draft.unlink()
        return outcome

    def hand_over(self, outcome: Outcome) -> None:
        """Into the run folder; from there the agent takes it to the control plane."""
        if self.run is None:
            print(json.dumps(outcome))
            return
        draft = self.run / ".result"
        _write(draft, outcome)
        os.replace(draft, self.run / "result")


def _write(path: Path, outcome: Outcome) -> None:
    with path.open("wb") as file:
        file.write(json.dumps(outcome, ensure_ascii=False).encode())
        file.flush()
        os.fsync(file.fileno())
