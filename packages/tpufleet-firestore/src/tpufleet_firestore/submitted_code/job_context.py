"""This process's rank in the job, and where the outcome of submitted code is stored: first in the
job's checkpoint folder, shared by all attempts, then in the run folder, for the agent to upload."""

from __future__ import annotations

import hmac
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

Outcome = dict[str, Any]


class JobContext:
    def __init__(self, environ: Mapping[str, str], key: str) -> None:
        self.environ = dict(environ)
        self._key = key.encode()  # known to the supervisors of this job, not to its code
        run_dir, checkpoints = (
            environ.get("TPUFLEET_RUN_DIR"),
            environ.get("TPUFLEET_CHECKPOINT_DIR"),
        )
        self.run_dir = Path(run_dir) if run_dir else None
        local = checkpoints if checkpoints and "://" not in checkpoints else None
        self._outcome_path = Path(local, "outcome.json") if local else None
        self.process_id = int(environ.get("TPUFLEET_PROCESS_ID") or 0)
        self.num_processes = int(environ.get("TPUFLEET_NUM_PROCESSES") or 1)

    @property
    def stopping(self) -> bool:
        return self.run_dir is not None and (self.run_dir / "stop").exists()

    def decides(self, outcome: Outcome) -> bool:
        """The outcome is that of process 0, unless the code failed in another process."""
        return self.process_id == 0 or outcome["status"] == "failed"

    def read_outcome(self) -> Outcome | None:
        """The outcome of an earlier attempt. Unsigned files, which any code could have written,
        are ignored."""
        try:
            contents = self._outcome_path.read_bytes() if self._outcome_path else b""
        except FileNotFoundError:
            return None
        signature, _, data = contents.partition(b"\n")
        if not hmac.compare_digest(signature, self._sign(data)):
            return None
        outcome: Outcome = json.loads(data)
        return outcome

    def record_outcome(self, outcome: Outcome) -> Outcome:
        """Store the outcome unless one is stored; returns the stored one."""
        if self._outcome_path is None:
            return outcome
        draft = self._outcome_path.with_name(f".outcome.{self.process_id}.{os.getpid()}")
        draft.parent.mkdir(parents=True, exist_ok=True)
        data = _encode(outcome)
        _write(draft, self._sign(data) + b"\n" + data)
        try:
            os.link(draft, self._outcome_path)
        except FileExistsError:
            existing = self.read_outcome()
            if existing is None:
                os.replace(draft, self._outcome_path)
            else:
                outcome = existing
        finally:
            draft.unlink(missing_ok=True)
        return outcome

    def _sign(self, data: bytes) -> bytes:
        return hmac.new(self._key, data, "sha256").hexdigest().encode()

    def write_result(self, outcome: Outcome) -> None:
        """Into the run folder, from where the agent uploads it to the server."""
        if self.run_dir is None:
            print(json.dumps(outcome))
            return
        draft = self.run_dir / ".result"
        _write(draft, _encode(outcome))
        os.replace(draft, self.run_dir / "result")


def _encode(outcome: Outcome) -> bytes:
    return json.dumps(outcome, ensure_ascii=False).encode()


def _write(path: Path, data: bytes) -> None:
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
