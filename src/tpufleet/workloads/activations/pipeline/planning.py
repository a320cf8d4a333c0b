"""What an extraction will take, before anything is spent: samples, tokens, bytes, hours, cost."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from tpufleet.errors import BadInput
from tpufleet.workloads.activations import formatting, inputs, plans, tokenizing
from tpufleet.workloads.activations.io import dtypes, remote_files
from tpufleet.workloads.activations.model import architectures, sites, weights
from tpufleet.workloads.activations.pipeline import batches
from tpufleet.workloads.activations.samples import SampleSource

SHARD_BYTES = 1 << 30
PROBES = 512  # samples that are tokenised to estimate the rest
# A careful guess of what share of peak an unmeasured machine reaches.
UTILISATION = 0.4
# Dense bf16 peak of one chip.
PEAKS = {
    "v2": 45e12,
    "v3": 123e12,
    "v4": 275e12,
    "v5e": 197e12,
    "v5litepod": 197e12,
    "v5p": 459e12,
    "v6e": 918e12,
    "tpu7x": 2307e12,
}
# Types whose names count cores, of which a chip has two: a v4-8 is four chips.
BY_CORES = ("v2", "v3", "v4", "v5p", "tpu7x")


class OverBudget(BadInput):
    """The extraction would cost more than was allowed. Ask for less, or allow more."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Estimate:
    """Sizes are exact when every sample was counted, else scaled from a spread of them."""

    samples: int
    tokens: int
    exact: bool
    skipped: int
    bytes: int
    bytes_if_padded: int
    units: int
    operations: float
    hours: float | None = None
    cost: float | None = None
    why_skipped: str = ""  # the most frequent reason


@dataclass(frozen=True, kw_only=True, slots=True)
class Budget:
    """Limits that a plan must keep; None is no limit."""

    bytes: float | None = None
    hours: float | None = None
    cost: float | None = None

    def check(self, estimate: Estimate) -> None:
        told: dict[str, Callable[[float], str]] = {
            "bytes": formatting.format_bytes,
            "hours": lambda hours: f"{hours:,.2f} hours",
            "cost": lambda dollars: f"{dollars:,.2f} dollars",
        }
        for name, tell in told.items():
            limit, value = getattr(self, name), getattr(estimate, name)
            if limit is not None and value is None:
                price = "a --price and " if name == "cost" else ""
                raise BadInput(f"cannot tell the {name} without {price}--chips or --rate")
            if limit is not None and value > limit:
                raise OverBudget(
                    f"over budget: {tell(value)}, more than the {tell(limit)} allowed; "
                    "nothing was written"
                )


def make_plan(
    *,
    model: str,
    data: Mapping[str, Any],
    choices: Sequence[str],
    tokenizer: str | None = None,
    exact: bool = False,
    shard_bytes: int = SHARD_BYTES,
    unit_samples: int | None = None,
    chips: str | None = None,
    rate: float | None = None,
    price: float | None = None,
    **settings: Any,
) -> plans.ExtractionPlan:
    """A plan with its estimate. `settings` go to `Plan`: dtype, max_length, seed, …"""
    folder = remote_files.model_folder(model)
    arch = architectures.from_folder(folder)
    reader = tokenizing.Tokenizer(remote_files.model_folder(tokenizer) if tokenizer else folder)
    draft = {"dtype": "bf16", "max_length": 2048, "too_long": "skip", "seed": 42, **settings}
    dtypes.stored_dtype(draft["dtype"])
    if draft.get("compression", "none") not in ("none", "zstd"):
        raise BadInput(f"compression {draft['compression']!r} is not one of none, zstd")
    names = sites.resolve(choices, arch)
    widths = {name: sites.width(name, arch) for name in names}
    source = inputs.open_source(data, draft["seed"])
    count = source.count()
    wanted = count if exact else PROBES
    lengths, skipped = measure_lengths(source, reader, draft, wanted, arch.vocabulary)
    row = sum(dtypes.bytes_per_row(width, draft["dtype"]) for width in widths.values())
    mean = sum(lengths) / len(lengths) if lengths else 0.0
    if unit_samples is None:
        unit_samples = int(shard_bytes / max(mean * row, 1.0))
    unit_samples = max(1, min(unit_samples, count or 1))
    share = count / len(lengths) if lengths else 0.0
    depth = sites.layers_needed(names, arch)
    estimate = Estimate(
        samples=count,
        tokens=round(sum(lengths) * share),
        exact=len(lengths) == count,
        skipped=round(skipped.total() * share),
        why_skipped=next((reason for reason, _ in skipped.most_common(1)), ""),
        bytes=round(sum(lengths) * share * row),
        bytes_if_padded=count * draft["max_length"] * row,
        units=-(-count // unit_samples),
        operations=share * sum(arch.flops(length, depth) for length in lengths),
    )
    estimate = with_cost(estimate, chips=chips, rate=rate, price=price)
    return plans.ExtractionPlan(
        model=str(model),
        model_digest=weights.Checkpoint(folder).digest(),
        tokenizer=str(tokenizer or model),
        tokenizer_digest=reader.digest(),
        data=dict(data),
        data_digest=source.digest(),
        samples=count,
        unit_samples=unit_samples,
        sites=names,
        widths=widths,
        buckets=batches.buckets_up_to(draft["max_length"]),
        estimate=asdict(estimate),
        **draft,
    )


def measure_lengths(
    source: SampleSource,
    reader: tokenizing.Tokenizer,
    draft: Mapping[str, Any],
    wanted: int,
    vocabulary: int | None = None,
) -> tuple[list[int], Counter[str]]:
    """Token counts of some samples spread evenly over the source, and why some are skipped."""
    count = source.count()
    step = max(count // wanted, 1) if wanted else 1
    spans = (
        [range(0, count)] if wanted >= count else [range(n, n + 1) for n in range(0, count, step)]
    )
    lengths: list[int] = []
    skipped: Counter[str] = Counter()
    for span in spans:
        for sample in tokenizing.tokenize(
            source.read(span),
            reader,
            max_length=draft["max_length"],
            too_long=draft["too_long"],
            vocabulary=vocabulary,
        ):
            lengths.append(len(sample.tokens))
            if not len(sample.tokens):
                skipped[sample.metadata["skipped"]] += 1
    return lengths, skipped


def with_cost(
    estimate: Estimate, *, chips: str | None, rate: float | None, price: float | None
) -> Estimate:
    """Hours, from tokens a second (`rate`) or from chips such as `v5e-16`; and the cost where a
    price is given: for an hour of one chip, or without `chips` of all that make the rate."""
    hours = hourly = None
    if chips is not None:
        kind, count = chip_count(chips)
        hours = estimate.operations / (PEAKS[kind] * count * UTILISATION) / 3600
        hourly = None if price is None else count * price
    if rate:
        hours = estimate.tokens / rate / 3600
        hourly = hourly if hourly is not None or price is None else price
    cost = None if hours is None or hourly is None else hours * hourly
    facts = {**asdict(estimate), "hours": hours, "cost": cost}
    return Estimate(**facts)


def chip_count(accelerator: str) -> tuple[str, int]:
    """The kind and number of chips of a TPU type: `v5e-16` has 16, `v4-16` has 8."""
    kind, _, number = accelerator.strip().lower().rpartition("-")
    if kind not in PEAKS or not number.isdecimal() or not int(number):
        known = ", ".join(PEAKS)
        raise BadInput(f"chips {accelerator!r}: write a TPU type such as v5e-16; kinds: {known}")
    return kind, max(int(number) // (2 if kind in BY_CORES else 1), 1)
