"""Leader election while the Kubernetes API fails. tests/k8s has the rest, on a real one."""

from __future__ import annotations

from tpufleet.clocks import ManualClock
from tpufleet_gke.provisioner.kube.leader_election import LeaderElector


class FailsOnce:
    """Raises an unexpected error once, then has no lease."""

    def __init__(self) -> None:
        self.calls = 0

    def find(self, *_: object) -> None:
        self.calls += 1
        if self.calls == 1:
            raise RuntimeError("unexpected")

    def create(self, *_: object) -> None:
        return


def test_leader_election_continues_after_an_unexpected_error():
    elector = LeaderElector(
        FailsOnce(),  # type: ignore[arg-type]  # a fake
        ManualClock(),
        name="l",
        namespace="n",
        identity="us",
    )
    elector.acquire_or_renew()
    assert not elector.leading
    elector.acquire_or_renew()
    assert elector.leading
