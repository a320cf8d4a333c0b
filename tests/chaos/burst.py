"""Many small jobs that are sent while things die. What was acknowledged is never forgotten."""

from __future__ import annotations

import threading

from tests.chaos.chaos_run import ChaosRun
from tests.polling import wait_until
from tpufleet.errors import Conflict, Unreachable
from tpufleet.model.api_types import NewJob
from tpufleet.model.fleet.pools import Pool
from tpufleet.model.job.jobs import JobState

POOL = "burst"


class Burst:
    """They share one slice, so most of them wait. Each notes down that it ran."""

    def __init__(self, run: ChaosRun, count: int) -> None:
        self.acknowledged: list[str] = []
        self._run = run
        self._folder = run.folder / "burst"
        self._folder.mkdir()
        self._folder.chmod(0o777)
        pool = Pool(name=POOL, provider="local", accelerator="v5litepod-1", largest=1)
        run.call(lambda client: client.put_pool(pool), run.patience)
        self._sender = threading.Thread(target=self._send, args=(count,), daemon=True)
        self._sender.start()

    def finish(self, within: float) -> None:
        """Every acknowledged job is known. Those that have not run are cancelled."""
        self._sender.join(within)
        store = self._run.store
        lost = [name for name in self.acknowledged if store.job(name) is None]
        assert not lost, self._run.failure_report(f"acknowledged jobs are lost: {lost}")
        for name in self.acknowledged:
            self._run.call(lambda client, name=name: _cancel(client, name), within)
        wait_until(self._all_ended, within, lambda: self._run.failure_report(str(self._states())))
        for name in self.acknowledged:
            job, ran = store.job(name), self._times_run(name)
            attempts = len(store.attempts(name))
            assert job is not None and job.state in (JobState.SUCCEEDED, JobState.CANCELLED), (
                self._run.failure_report(f"{name} is {job and job.state}: {job and job.reason}")
            )
            assert ran <= attempts, self._run.failure_report(
                f"{name} ran {ran} times in {attempts} attempts"
            )
            assert ran or job.state is not JobState.SUCCEEDED, self._run.failure_report(
                f"{name} succeeded and never ran"
            )
        self._run.call(lambda client: client.delete_pool(POOL), within)

    def _send(self, count: int) -> None:
        for number in range(count):
            name = f"burst-{self._run.seed}-{number}"
            script = f"echo $TPUFLEET_ATTEMPT >> {self._folder}/{name}; sleep 0.2"
            spec = {
                "name": name,
                "command": ["sh", "-c", script],
                "accelerator": "v5litepod-1",
                "pool": POOL,
                "retries": {"failure": 60, "setup": 60, "infrastructure": 60},
                "crash_loop": 1000,
            }
            new = NewJob(id=name, spec=spec)
            self._run.call(lambda client, new=new: client.submit([new]), self._run.patience)
            self.acknowledged.append(name)

    def _times_run(self, name: str) -> int:
        path = self._folder / name
        return len(path.read_text().split()) if path.exists() else 0

    def _states(self) -> dict[str, str]:
        jobs = [self._run.store.job(name) for name in self.acknowledged]
        return {job.id: f"{job.state}: {job.reason}" for job in jobs if job and not job.ended}

    def _all_ended(self) -> bool:
        try:
            return not self._states()
        except Unreachable:
            return False


def _cancel(client, name: str) -> None:
    try:
        client.cancel(name)
    except Conflict:
        return  # it has ended
