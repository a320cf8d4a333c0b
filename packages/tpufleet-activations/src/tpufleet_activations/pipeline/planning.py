"""Making a plan, with an estimate of its samples, tokens, bytes, hours and cost."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from tpufleet.errors import BadInput, FleetError, Permanent
from tpufleet_activations import formatting, plans
from tpufleet_activations.input_errors import check_choice
from tpufleet_activations.inputs import contexts, sources, tokenization
from tpufleet_activations.inputs.samples import SampleSource, TokenizedSample
from tpufleet_activations.io import dtypes
from tpufleet_activations.model import architectures, encoders, sites, weights
from tpufleet_activations.pipeline import batches, locations

SHARD_BYTES = 1 << 30
# Small datasets are divided into this many units, so that several workers share them and little
# work is lost with one; each unit has at least this many batches, because its last ones are padded.
PARALLEL_UNITS = 16
MIN_UNIT_BATCHES = 4
DEFAULTS = {
    "dtype": "bf16", "compute": "bf16", "max_length": 2048, "too_long": "skip", "keep": "all",
}  # fmt: skip
PROBES = 512  # samples tokenized to estimate the rest
# A conservative fraction of peak for hardware that was not measured.
UTILIZATION = 0.4
# Dense bf16 peak of one chip, in operations per second.
PEAKS = {
    "v2": 45e12,
    "v3": 123e12,
    "v4": 275e12,
    "v5e": 197e12,
    "v5p": 459e12,
    "v6e": 918e12,
    "tpu7x": 2307e12,
}


class OverBudget(FleetError, Permanent):
    """The estimate exceeds a limit."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Estimate:
    """Exact if every sample was tokenized, else extrapolated from evenly spaced samples.

    Field names are keys of `estimate` in plan.json.
    """

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
    why_skipped: str = ""  # the most frequent kind of reason
    skipped_most: int = 0  # samples skipped for it
    default_batch: bool = False  # the size of batches was not given: devices may choose another
    longest: int | None = None  # tokens of the longest context that was tokenized
    model_limit: int | None = None  # tokens that the model was made for; None: unknown
    stored_tokens: int | None = None  # fewer than computed with --keep or overlapping contexts


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanLimits:
    """Limits on a plan; None: unlimited."""

    bytes: float | None = None
    hours: float | None = None
    cost: float | None = None

    def check(self, estimate: Estimate) -> None:
        formats: dict[str, Callable[[float], str]] = {
            "bytes": formatting.format_bytes,
            "hours": lambda hours: f"{hours:,.2f} hours",
            "cost": lambda dollars: f"{dollars:,.2f} dollars",
        }
        for name, format_value in formats.items():
            limit, value = getattr(self, name), getattr(estimate, name)
            if limit is not None and value is None:
                raise BadInput(
                    f"cannot estimate the {name}; pass --chips with a TPU that has a price"
                )
            if limit is not None and value > limit:
                raise OverBudget(
                    f"over budget: {format_value(value)}, more than the allowed "
                    f"{format_value(limit)}; no plan was written"
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
    chips: tuple[str, int] | None = None,
    price: float | None = None,
    encoder: str | None = None,
    **settings: Any,
) -> plans.ExtractionPlan:
    """A plan with its estimate. `settings` are fields of the plan: dtype, max_length, …
    `encoder`: a file with the TopK encoder whose latents are stored instead of the chosen site.
    """
    sources.check_split(data)
    resolved = locations.resolve(model=model, tokenizer=tokenizer, data=data)
    arch = resolved.architecture
    reader = tokenization.Tokenizer(resolved.tokenizer)
    options = {**DEFAULTS, **settings}
    dtypes.stored_dtype(options["dtype"])
    dtypes.check_compute_dtype(options["compute"])
    check_choice("compression", options.get("compression", "none"), ("none", "zstd"))
    _check_length(options, settings, arch)
    options["stride"] = _stride(options)
    names = sites.resolve(choices, arch)
    sites.check_patterns(names, options["max_length"])
    widths = {name: sites.width(name, arch, options["max_length"]) for name in names}
    depth = sites.layers_needed(names, arch)
    encode = None if encoder is None else _encoder(encoder, widths)
    checkpoint = weights.ModelCheckpoint(resolved.model)
    weights.check_weights(
        checkpoint,
        arch,
        depth=depth,
        final_norm=sites.final_norm_needed(names),
        head=sites.head_needed(names),
    )
    if encode is not None:
        names = encode.stored_sites
        widths = dict.fromkeys(names, encode.k)
    source = sources.open_files(resolved.data)
    count = source.count()
    wanted = count if exact else PROBES
    measured = measure_lengths(source, reader, options, wanted, arch.vocabulary)
    lengths, skipped = measured.lengths, measured.skipped
    check_usable(measured, count, str(data["path"]))
    why_skipped, most = next(iter(skipped.most_common(1)), ("", 0))
    row = dtypes.bytes_per_token(widths, options["dtype"])
    mean, stored = sum(lengths) / measured.samples, measured.stored / measured.samples
    scale = count / measured.samples
    buckets = batches.choose_buckets(lengths, options["max_length"])
    default_batch = options.get("batch_tokens") is None
    if default_batch:
        options["batch_tokens"] = batches.choose_batch_tokens(sum(lengths) * scale, len(buckets))
    if unit_samples is None:
        unit_samples = samples_per_unit(
            count,
            mean,
            row * stored / max(mean, 1.0),
            shard_bytes=shard_bytes,
            batch_tokens=options["batch_tokens"],
        )
    unit_samples = max(1, min(unit_samples, count or 1))
    estimate = Estimate(
        samples=count,
        tokens=round(sum(lengths) * scale),
        exact=measured.samples == count,
        skipped=round(skipped.total() * scale),
        why_skipped=why_skipped,
        skipped_most=round(most * scale),
        bytes=round(measured.stored * scale * row),
        bytes_if_padded=round(len(lengths) * scale) * options["max_length"] * row,
        stored_tokens=round(measured.stored * scale),
        default_batch=default_batch,
        longest=max(lengths, default=0),
        model_limit=arch.max_positions,
        units=-(-count // unit_samples),
        operations=scale * sum(arch.flops(length, depth) for length in lengths),
    )
    estimate = with_cost(estimate, chips=chips, price=price)
    return plans.ExtractionPlan(
        model=str(model),
        model_digest=checkpoint.digest(),
        tokenizer=str(tokenizer or model),
        tokenizer_digest=reader.digest(),
        data=dict(data),
        data_digest=source.digest(),
        samples=count,
        unit_samples=unit_samples,
        sites=names,
        widths=widths,
        buckets=buckets,
        chat_date=reader.chat_date(),
        encode={} if encode is None else asdict(encode),
        estimate=asdict(estimate),
        **options,
    )


def _encoder(path: str, widths: Mapping[str, int]) -> encoders.Encoder:
    if len(widths) != 1:
        raise BadInput(
            f"--encode needs one site, such as --site resid_post.8; chosen are {len(widths)}"
        )
    [(site, width)] = widths.items()
    return encoders.describe(Path(path).absolute(), site, width)


def _check_length(
    options: dict[str, Any], settings: Mapping[str, Any], arch: architectures.Architecture
) -> None:
    """Some models compute nothing meaningful beyond their positions."""
    limit = arch.max_positions
    if not arch.positions_end or limit is None or options["max_length"] <= limit:
        return
    if settings.get("max_length"):
        raise BadInput(
            f"--max-length {options['max_length']} is more than {limit}, beyond which "
            f"{arch.family} has no positions"
        )
    options["max_length"] = limit


def _stride(options: Mapping[str, Any]) -> int:
    """Tokens between the beginnings of contexts; 0 if samples are not split."""
    stride, longest = options.get("stride"), options["max_length"]
    split = options["too_long"] == "split"
    if stride and not (split and 0 < stride <= longest):
        raise BadInput(
            f"--stride {stride} needs --too-long split, and to be between 1 and --max-length "
            f"{longest}"
        )
    return stride or max(longest // 2, 1) if split else 0


def samples_per_unit(
    count: int, mean_tokens: float, row_bytes: float, *, shard_bytes: int, batch_tokens: int
) -> int:
    """As many samples as fit a shard; fewer if that would leave workers of a fleet without units,
    but never less than fill several batches."""
    largest = shard_bytes / max(mean_tokens * row_bytes, 1.0)
    smallest = MIN_UNIT_BATCHES * batch_tokens / max(mean_tokens, 1.0)
    return int(min(largest, max(math.ceil(count / PARALLEL_UNITS), smallest)))


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasuredSamples:
    """Some samples, tokenized."""

    samples: int
    lengths: list[int]  # of the contexts that the model sees; 0 for a skipped sample
    stored: int  # tokens whose activations are stored
    skipped: Counter[str]  # by the first reason of each kind


def measure_lengths(
    source: SampleSource,
    reader: tokenization.Tokenizer,
    options: Mapping[str, Any],
    wanted: int,
    vocabulary: int | None = None,
) -> MeasuredSamples:
    """About `wanted` evenly spaced samples."""
    count = source.count()
    step = max(count // wanted, 1) if wanted else 1
    spans = (
        [range(0, count)] if wanted >= count else [range(n, n + 1) for n in range(0, count, step)]
    )
    skipped: Counter[str] = Counter()
    kinds: dict[str, str] = {}  # the first reason of each
    tokenized: list[TokenizedSample] = []
    for span in spans:
        for sample in tokenization.tokenize(
            source.read(span),
            reader,
            max_length=options["max_length"],
            too_long=options["too_long"],
            vocabulary=vocabulary,
            keep=options["keep"],
        ):
            tokenized.append(sample)
            if not len(sample.tokens):
                reason = _skip_reason(sample, options)
                # Token counts and positions in JSON differ from sample to sample.
                skipped[kinds.setdefault(re.sub(r"\d+", "N", reason), reason)] += 1
    divided = contexts.divide(
        tokenized,
        max_length=options["max_length"],
        too_long=options["too_long"],
        stride=options.get("stride") or 0,
    )
    return MeasuredSamples(
        samples=len(tokenized),
        lengths=[len(context.tokens) for context in divided],
        stored=sum(stop - start for context in divided for start, stop in context.runs),
        skipped=skipped,
    )


def _skip_reason(sample: TokenizedSample, options: Mapping[str, Any]) -> str:
    if options["too_long"] == "skip" and "full_length" in sample.metadata:
        return (
            f"longer than --max-length {options['max_length']}; pass --too-long cut or split, or a "
            "larger --max-length"
        )
    return sample.metadata["skipped"]


def check_usable(measured: MeasuredSamples, count: int, path: str) -> None:
    """Raise if no sample has tokens: every machine of the run would be paid for nothing."""
    if not count:
        raise BadInput(f"{path} has no samples")
    if measured.skipped.total() == measured.samples:
        number = f"{count:,}" if measured.samples == count else f"{measured.samples:,} checked"
        reason, most = measured.skipped.most_common(1)[0]
        raise BadInput(
            f"all {number} samples of {path} would be skipped, mostly ({most:,}): {reason}"
        )


def with_cost(
    estimate: Estimate, *, chips: tuple[str, int] | None, price: float | None
) -> Estimate:
    """Add hours, from the generation and number of TPU chips, and with a price per chip-hour the
    cost."""
    if chips is None:
        return estimate
    generation, count = chips
    hours = estimate.operations / (PEAKS[generation] * count * UTILIZATION) / 3600
    cost = None if price is None else hours * count * price
    return replace(estimate, hours=hours, cost=cost)
