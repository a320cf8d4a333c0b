"""Sizes and numbers of batches are chosen for the devices; what is stored does not change."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import jax
import numpy as np
import pytest

from tests.activations.test_workers import make, settings  # noqa: F401
from tests.activations.tiny_model import tpu
from tpufleet.errors import BadInput
from tpufleet_activations import plans
from tpufleet_activations.io import datasets, verification
from tpufleet_activations.io.storage import LocalFolder
from tpufleet_activations.pipeline import batches, calibration, extraction
from tpufleet_activations.pipeline.calibration import Calibration

HOUR = 3600.0


class Device:
    """An accelerator with a rate for each size of a batch, and memory for the smaller ones."""

    varlen, row_multiple, device_kind, vocabulary = True, 1, "NVIDIA H200", 151_936

    def __init__(self, rates, memory=1 << 30, platform="gpu"):
        self.platform = platform
        self.rates, self.memory, self.now, self.sizes = rates, memory, 0.0, []
        self.findings = {}

    def start(self, batch):
        size = batch.tokens.size
        if size > self.memory:
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 9 bytes")
        self.sizes.append(size)
        self.now += batch.real_tokens / self.rates[size]
        return lambda: None

    def is_out_of_memory(self, error):
        return "RESOURCE_EXHAUSTED" in str(error)

    def finding(self, parts, find, *, renew):
        key = repr(parts)
        if renew or not self.findings.get(key):
            self.findings[key] = find()
        return self.findings[key]


def plan(hours: float, rate: float = 700_000, **changes) -> plans.ExtractionPlan:
    """As long as this at a rate, with samples of 512 tokens."""
    tokens = int(hours * HOUR * rate)
    body = {
        **dict.fromkeys(("model", "model_digest", "tokenizer", "tokenizer_digest"), "x"),
        "data": {},
        "data_digest": "x",
        "samples": tokens // 512,
        "unit_samples": 1000,
        "sites": ("resid_post.23",),
        "widths": {"resid_post.23": 896},
        "batching": "auto",
        "batch_tokens": 32768,
        "buckets": (256, 512, 1024, 2048),
        "estimate": {"tokens": tokens, "default_batch": True},
    }
    return plans.ExtractionPlan(**{**body, **changes})


# As measured: an H200 with the shape of Qwen2.5-0.5B. The largest is assumed.
H200 = {16384: 648_900, 32768: 670_993, 65536: 680_103, 131072: 681_000}
EQUAL = {16384: 1e4, 32768: 1e4, 65536: 1e4}


@pytest.mark.parametrize(
    "rates, hours, force, tried, chosen",
    [
        (H200, 0.01, False, {32768}, 32768),
        (H200, 2.0, False, {32768, 65536, 131072}, 65536),
        (H200, 0.05, True, {32768, 65536, 131072}, 65536),
        (EQUAL, 2.0, False, {16384, 32768, 65536}, 16384),
        (
            {8192: 9e5, 16384: 9e5, 32768: 7e5, 65536: 5e5},
            2.0,
            False,
            {8192, 16384, 32768, 65536},
            8192,
        ),
    ],
    ids=["short run", "long run", "forced", "alike", "faster with small ones"],
)
def test_the_smallest_batch_near_the_best_rate_is_chosen(
    tmp_path, rates, hours, force, tried, chosen
):
    device = Device(rates)
    found = calibration.calibrate(
        device, plan(hours), LocalFolder(tmp_path), force=force, clock=lambda: device.now
    )
    assert (found.batch_tokens, found.origin, set(found.rates)) == (chosen, "measured", tried)
    assert found.tokens_per_second == pytest.approx(rates[chosen])


class PageLocking(Device):
    """Allocates page-locked memory when more batches are in flight than ever before."""

    in_flight = most = 0

    def start(self, batch):
        done = super().start(batch)
        self.in_flight += 1
        if self.in_flight > self.most:
            self.most, self.now = self.in_flight, self.now + 0.1

        def finish():
            self.in_flight -= 1
            return done()

        return finish


def test_the_rate_is_that_of_a_device_whose_memory_is_allocated(tmp_path):
    device = PageLocking(H200)
    found = calibration.calibrate(
        device, plan(0.01), LocalFolder(tmp_path), clock=lambda: device.now
    )
    assert found.tokens_per_second == pytest.approx(H200[32768])
    assert found.batches_in_flight(3, 7168, 128 << 30) == 3


def test_a_size_that_was_given_is_kept(tmp_path):
    given = plan(2.0, estimate={"tokens": 10**12, "default_batch": False})
    device = Device({32768: 7e5})
    found = calibration.calibrate(
        device, given, LocalFolder(tmp_path), force=True, clock=lambda: device.now
    )
    assert found.batch_tokens == 32768 and list(found.rates) == [32768]


def test_batches_that_do_not_fit_the_devices_are_halved(tmp_path, caplog):
    device = Device({4096: 4e4, 8192: 5e4}, memory=10_000)
    found = calibration.calibrate(
        device, plan(0.01), LocalFolder(tmp_path), clock=lambda: device.now
    )
    assert found.batch_tokens == 8192
    assert "trying 8192" in caplog.text


def test_a_model_without_memory_for_any_batch_is_an_error(tmp_path):
    device = Device({}, memory=100)
    with pytest.raises(BadInput, match="--mesh fsdp=N"):
        calibration.calibrate(device, plan(0.01), LocalFolder(tmp_path), clock=lambda: device.now)


def test_another_error_is_not_taken_for_a_lack_of_memory(tmp_path):
    with pytest.raises(KeyError):
        calibration.calibrate(Device({}), plan(0.01), LocalFolder(tmp_path), clock=lambda: 0.0)


def test_workers_with_the_same_devices_use_the_same_batches(tmp_path):
    first, second = Device(EQUAL), Device(H200)
    for device, origin in ((first, "measured"), (second, "dataset")):
        found = calibration.calibrate(
            device, plan(2.0), LocalFolder(tmp_path), clock=lambda device=device: device.now
        )
        assert (found.batch_tokens, found.origin) == (16384, origin)
    assert second.sizes == []
    other = Device(H200)
    other.device_kind = "NVIDIA A100"
    found = calibration.calibrate(other, plan(2.0), LocalFolder(tmp_path), clock=lambda: other.now)
    assert found.batch_tokens == 65536


def test_the_next_run_measures_nothing(tmp_path):
    device, computed = Device(H200), []
    for dataset in ("a", "b"):
        found = calibration.calibrate(
            device, plan(0.01), LocalFolder(tmp_path / dataset), clock=lambda: device.now
        )
        assert found.tokens_per_second == pytest.approx(670_993)
        computed.append(len(device.sizes))
    assert computed[0] == computed[1] > 0
    device.rates = {size: rate / 2 for size, rate in H200.items()}  # was measured while throttled
    found = calibration.calibrate(
        device, plan(0.01), LocalFolder(tmp_path / "c"), force=True, clock=lambda: device.now
    )
    assert found.tokens_per_second == pytest.approx(H200[65536] / 2)


@pytest.mark.parametrize("platform, tried", [("gpu", 3), ("tpu", 1)])
def test_other_sizes_are_tried_in_shorter_runs_where_they_compile_fast(tmp_path, platform, tried):
    device = Device(H200, platform=platform)
    found = calibration.calibrate(
        device, plan(230 / HOUR), LocalFolder(tmp_path), clock=lambda: device.now
    )
    assert len(found.rates) == tried


@pytest.mark.parametrize(
    "batching, tokens, size",
    [("auto", 4e6, 32768), ("auto", 50e3, 16384), ("bucket", 4e6, 8192)],
)
def test_packed_batches_have_one_shape_to_fill(batching, tokens, size):
    given = plan(
        1.0,
        batching=batching,
        batch_tokens=batches.choose_batch_tokens(tokens, 16),
        estimate={"tokens": tokens, "default_batch": True},
    )
    assert calibration.starting_size(given, varlen=True) == size


@pytest.mark.parametrize(
    "rate, token_bytes, memory, expected",
    [
        (680_000, 896 * 2, 128e9, 3),
        (0, 896 * 2, 128e9, 3),
        (5_000, 896 * 2, 128e9, 2),
        (9_000_000, 896 * 2, 1e12, 8),
        (9_000_000, 80 * 8192 * 2, 128e9, 2),
    ],
    ids=["H200", "not measured", "slow", "fast", "large activations"],
)
def test_batches_in_flight_follow_the_rate_and_the_memory(rate, token_bytes, memory, expected):
    chosen = Calibration(batch_tokens=32768, origin="measured", rates={32768: rate})
    assert chosen.batches_in_flight(3, token_bytes, memory) == expected


@pytest.mark.slow
@pytest.mark.parametrize("batching", ["bucket", "pack"])
@pytest.mark.parametrize("size", [1024])
def test_what_is_stored_does_not_depend_on_the_size_of_batches(make, size, batching):  # noqa: F811
    default, other = (make(name, batching=batching, unit_samples=12) for name in ("a", "b"))
    before = extraction.run(default, settings())
    assert other.create("calibration/cpu-x-8.json", json.dumps({"batch_tokens": size}).encode())
    meter = extraction.run(other, settings(calibrate=True))
    assert meter.snapshot()["calibration"]["batch_tokens"] == size
    assert meter.padding() > before.padding()  # other shapes
    assert verification.verify(other).intact
    ours, theirs = datasets.Dataset(default), datasets.Dataset(other)
    for sample in ours:
        assert ours.metadata(sample) == theirs.metadata(sample)
        np.testing.assert_array_equal(ours.tokens(sample), theirs.tokens(sample))
        for site in ours.sites:
            mine = ours.read(sample, site)
            gap = np.linalg.norm(mine - theirs.read(sample, site))
            assert gap <= 1e-5 * np.linalg.norm(mine)


@pytest.mark.slow
def test_a_run_says_what_was_chosen(make):  # noqa: F811
    folder = make("a")
    status, output = tpu("run", folder.path, "--mesh", "data=8", "--calibrate", "--json", "--quiet")
    assert status == 0
    chosen = json.loads(output)["calibration"]
    assert (chosen["batch_tokens"], chosen["origin"]) == (256, "measured")
    assert chosen["batches_in_flight"] >= 2 and chosen["rates"]["256"] > 0
    status, output = tpu("run", make("b").path, "--mesh", "data=8", "--calibrate", "--quiet")
    assert status == 0
    assert re.search(r"batches of 256 tokens, \d+ in flight", output.splitlines()[-1])


def test_cpus_are_not_calibrated_unless_asked_to(make):  # noqa: F811
    meter = extraction.run(make("a"), settings())
    assert meter.snapshot()["calibration"] == {}


def test_a_typical_batch_has_a_shape_that_the_run_uses():
    bucketed = calibration.typical_batch(
        replace(plan(1.0), batching="bucket"), 32768, 1000, varlen=False, multiple=4
    )
    assert bucketed.tokens.shape == (64, 512) and bucketed.real_tokens == 32768
    packed = calibration.typical_batch(plan(1.0), 32768, 1000, varlen=True, multiple=1)
    assert packed.tokens.shape == (1, 32768) and packed.segments is not None
    assert len(np.unique(packed.tokens)) == 1000  # equal rows would be faster
