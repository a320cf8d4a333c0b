"""Where a process stands in the gang, and where the outcome of submitted code is left: once for all
attempts in the job's checkpoint folder, and then in the run folder, for the agent to take."""

from __future__ import annotations

import hmac
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

Outcome = dict[str, Any]


class Place:
    """Where this process stands in the gang, and where outcomes are left."""

    def __init__(
        self, environ: Mapping[str, str], key: str, *, run: Path | None, checkpoints: Path | None
    ) -> None:
        self.environ = dict(environ)
        self._key = key.encode()  # known to the supervisors of this job, and not to its code
        self.run = run
        self._settled = checkpoints / "outcome.json" if checkpoints else None
        self.process_id = int(environ.get("TPUFLEET_PROCESS_ID") or 0)
        self.num_processes = int(environ.get("TPUFLEET_NUM_PROCESSES") or 1)

    @classmethod
    def from_environment(cls, environ: Mapping[str, str], key: str) -> Place:
        run, checkpoints = environ.get("TPUFLEET_RUN_DIR"), environ.get("TPUFLEET_CHECKPOINT_DIR")
        return cls(
            environ,
            key,
            run=Path(run) if run else None,
            checkpoints=Path(checkpoints) if checkpoints and "://" not in checkpoints else None,
        )

    @property
    def stopping(self) -> bool:
        return self.run is not None and (self.run / "stop").exists()

    def has_a_say(self, outcome: Outcome) -> bool:
        """The outcome is that of the first process, unless the code of another failed."""
        return self.process_id == 0 or outcome["status"] == "failed"

    def settled(self) -> Outcome | None:
        """What an earlier attempt came to, if one came to its end. What code wrote there, its own
        or that of another job, has no seal and does not count."""
        try:
            written = self._settled.read_bytes() if self._settled else b""
        except FileNotFoundError:
            return None
        seal, _, data = written.partition(b"\n")
        return json.loads(data) if hmac.compare_digest(seal, self._seal(data)) else None

    def settle(self, outcome: Outcome) -> Outcome:
        """The outcome that counts: the first that was settled, by whichever attempt or process."""
        if self._settled is None:
            return outcome
        draft = self._settled.with_name(f".outcome.{self.process_id}.{os.getpid()}")
        draft.parent.mkdir(parents=True, exist_ok=True)
        data = _encoded(outcome)
        _write(draft, self._seal(data) + b"\n" + data)
        try:
            os.link(draft, self._settled)
        except FileExistsError:
            known = self.settled()
            if known is None:
                os.replace(draft, self._settled)
            outcome = outcome if known is None else known
        finally:
            draft.unlink(missing_ok=True)
        return outcome

    def _seal(self, data: bytes) -> bytes:
        return hmac.new(self._key, data, "sha256").hexdigest().encode()

    def hand_over(self, outcome: Outcome) -> None:
        """Into the run folder; from there the agent takes it to the control plane."""
        if self.run is None:
            print(json.dumps(outcome))
            return
        draft = self.run / ".result"
        _write(draft, _encoded(outcome))
        os.replace(draft, self.run / "result")


def _encoded(outcome: Outcome) -> bytes:
    return json.dumps(outcome, ensure_ascii=False).encode()


def _write(path: Path, data: bytes) -> None:
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
