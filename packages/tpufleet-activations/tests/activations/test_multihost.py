"""Rows are stored under the right sample for any samples, batches, hosts and devices.

Only the devices are fake: each returns the token ids as activations, so that a row that is
lost, doubled, or stored under another sample's name is seen.
"""

from __future__ import annotations

import json
import threading
import uuid
from datetime import timedelta

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tpufleet.runtime.units import Units
from tpufleet_activations import plans
from tpufleet_activations.io import datasets, unit_writer, verification
from tpufleet_activations.io.storage import LocalFolder
from tpufleet_activations.model import engines
from tpufleet_activations.pipeline import batches, gangs, locations, planning, workers

SITE, WIDTH = "resid_post.0", 16


class Devices:
    """The devices of one host among several, each with an equal share of a batch's rows."""

    compute_type = "f32"
    programs, compile_seconds = 0, 0.0
    calibration = None

    def __init__(self, host: int, hosts: int, each: int):
        self.row_multiple = hosts * each
        self.varlen = False
        self._mine = range(host * each, (host + 1) * each)

    def rows(self, count: int) -> frozenset[int]:
        height = count // self.row_multiple
        return frozenset(row for n in self._mine for row in range(n * height, (n + 1) * height))

    def start(self, batch: batches.Batch):
        height = len(batch.tokens) // self.row_multiple
        wide = np.repeat(batch.tokens[:, :, None], WIDTH, axis=2).astype(np.float32)
        blocks = [
            engines.OutputBlock(n * height, {SITE: wide[n * height : (n + 1) * height]})
            for n in self._mine
        ]
        return lambda: blocks

    def compile_ahead(self, batches) -> None:
        """There is nothing to compile."""

    def finish_saving(self) -> None:
        """Nor to save."""

    def flops(self, batch: batches.Batch) -> float:
        return 1.0

    def peak_flops(self) -> None:
        return None


class Host:
    """One of a gang: it runs every unit and hands in its part."""

    def __init__(self, part: int, parts: int, claims: list, files: dict):
        self.part, self.parts, self._claims, self._files = part, parts, claims, files

    def claims(self):
        return iter(self._claims)

    def should_stop(self) -> bool:
        return False

    def commit(self, claim, files, outcome) -> None:
        self._files.setdefault(claim.unit, {})[self.part] = files


def plan_for(folder, model_folder, lengths, **more) -> tuple[LocalFolder, plans.ExtractionPlan]:
    lines = [json.dumps({"tokens": [(7 * n + i) % 61 for i in range(k)]}) for n, k in lengths]
    (folder / "data.jsonl").write_text("\n".join(lines))
    storage = LocalFolder(folder / "set")
    plan = planning.make_plan(
        model=str(model_folder),
        data={"kind": "jsonl", "path": str(folder / "data.jsonl")},
        choices=[SITE],
        dtype="f32",
        max_length=40,
        **more,
    )
    return storage, plans.write(storage, plan)


def assert_every_row_is_where_its_label_says(storage, lengths):
    report = verification.verify(storage)
    assert report.intact, report.problems
    dataset = datasets.Dataset(storage)
    assert list(dataset) == [n for n, _ in lengths]
    for n, k in lengths:
        wanted = [(7 * n + i) % 61 for i in range(k)]
        assert dataset.tokens(n).tolist() == wanted
        assert dataset.positions(n).tolist() == list(range(k))
        assert dataset.read(n, SITE)[:, WIDTH - 1].tolist() == wanted


@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    sizes=st.lists(st.integers(0, 40), min_size=1, max_size=30).filter(any),
    unit_samples=st.integers(1, 12),
    batch_tokens=st.integers(1, 300),
    batching=st.sampled_from(["bucket", "pack"]),
    hosts=st.integers(1, 4),
    each=st.integers(1, 3),
)
def test_no_sample_is_lost_or_mislabeled_for_any_samples_batches_and_hosts(
    tmp_path_factory, model_folder, sizes, unit_samples, batch_tokens, batching, hosts, each
):
    lengths = list(enumerate(sizes))
    storage, plan = plan_for(
        tmp_path_factory.mktemp("hosts"),
        model_folder,
        lengths,
        unit_samples=unit_samples,
        batch_tokens=batch_tokens,
        batching=batching,
    )
    units, files = Units(storage, count=plan.units, worker="gang"), {}
    claims = [units.claim() for _ in range(plan.units)]
    for host in range(hosts):
        coordinator = Host(host, hosts, claims, files)
        workers.Worker(
            storage,
            plan,
            locations.resolve_plan(plan),
            workers.OpenedEngine(Devices(host, hosts, each)),
            coordinator,
        ).run()
    for claim in claims:
        parts = [file for host in range(hosts) for file in files[claim.unit][host]]
        units.commit(claim, unit_writer.commit_outcome(plan, claim.unit, parts))
    assert_every_row_is_where_its_label_says(storage, lengths)


def test_a_worker_whose_units_were_taken_over_leaves_no_files(tmp_path, model_folder):
    lengths = [(n, 5 + n) for n in range(4)]
    storage, plan = plan_for(tmp_path, model_folder, lengths, unit_samples=2)
    stolen = threading.Event()

    class Slow(LocalFolder):
        def upload(self, draft, name):
            assert stolen.wait(900)
            super().upload(draft, name)

    def work(where, name, **options) -> workers.Worker:
        units = Units(where, count=plan.units, worker=name, **options)
        coordinator = gangs.SoloCoordinator(units, lambda: False, poll=0.02)
        return workers.Worker(
            where,
            plan,
            locations.resolve_plan(plan),
            workers.OpenedEngine(Devices(0, 1, 1)),
            coordinator,
        )

    slow = work(Slow(storage.path), "slow")
    thread = threading.Thread(target=slow.run)
    thread.start()
    held = Units(storage, count=plan.units, worker="reader")
    while not held.open_claims():
        stolen.wait(0.02)
    work(storage, "quick", steal_after=timedelta(seconds=0.1)).run()
    stolen.set()
    thread.join(900)
    assert slow.meter.fenced > 0 and not thread.is_alive()
    assert_every_row_is_where_its_label_says(storage, lengths)
    assert verification.verify(storage).leftovers == ()
    assert {commit.worker for commit in held.committed().values()} == {"quick"}


def test_a_gang_coordinates_through_the_storage_alone(tmp_path, model_folder):
    lengths = [(n, 3 + n % 7) for n in range(9)]
    storage, plan = plan_for(tmp_path, model_folder, lengths, unit_samples=4, batch_tokens=64)
    units = Units(storage, count=plan.units, worker="gang")
    quick = {"gang": uuid.uuid4().hex, "parts": 2, "poll": 0.02, "timeout": 200.0}
    coordinators = [
        gangs.GangLeader(units, lambda: False, **quick),
        gangs.GangMember(storage, part=1, **quick),
    ]
    threads = [
        threading.Thread(
            target=workers.Worker(
                storage,
                plan,
                locations.resolve_plan(plan),
                workers.OpenedEngine(Devices(n, 2, 1)),
                coordinator,
            ).run
        )
        for n, coordinator in enumerate(coordinators)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(900)
    assert_every_row_is_where_its_label_says(storage, lengths)
    assert {len(datasets.Dataset(storage).files(unit)) for unit in range(plan.units)} == {2}
    storage.create("gangs/notes.json", b"of somebody else")
    assert verification.delete_leftovers(storage), "claims and parts of the gang are deleted"
    assert storage.names("gangs/") == ["gangs/notes.json"]


def test_a_gang_member_fails_when_its_leader_is_gone(tmp_path):
    member = gangs.GangMember(
        LocalFolder(tmp_path), gang="g", part=1, parts=2, poll=0.01, timeout=0.1
    )
    with pytest.raises(gangs.GangLost, match="another process of the gang"):
        for claim in member.claims():
            assert claim is None
