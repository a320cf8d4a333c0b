"""The plan of an extraction: all that decides its bytes. Written once, then only compared."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, field, fields
from typing import Any

from tpufleet.errors import BadInput, Conflict, NotFound
from tpufleet.runtime.object_store import ObjectStore

PLAN_FILE = "plan.json"

# Where things lie may change between runs; what they are may not.
LOCATION_FIELDS = ("model", "tokenizer", "estimate")


@dataclass(frozen=True, kw_only=True, slots=True)
class ExtractionPlan:
    """One dataset of activations, cut into units of consecutive samples."""

    model: str
    model_digest: str
    tokenizer: str
    tokenizer_digest: str
    data: Mapping[str, Any]  # how to read the samples: see `inputs.Source`
    data_digest: str
    samples: int
    unit_samples: int
    sites: tuple[str, ...]
    widths: Mapping[str, int]
    dtype: str = "bf16"
    compression: str = "none"
    max_length: int = 2048
    too_long: str = "skip"  # or "cut" (keep the first max_length tokens, and say so), "refuse"
    batching: str = "bucket"  # or "pack"
    batch_tokens: int = 16384
    buckets: tuple[int, ...] = ()
    seed: int = 42
    estimate: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.samples < 0 or self.unit_samples < 1:
            raise BadInput("a plan needs at least one sample a unit")
        if not self.sites:
            raise BadInput("a plan needs at least one site, such as resid_post.12")

    @property
    def units(self) -> int:
        return -(-self.samples // self.unit_samples)

    def sample_range(self, unit: int) -> range:
        """The samples of a unit."""
        start = unit * self.unit_samples
        return range(start, min(start + self.unit_samples, self.samples))

    def unit_of(self, sample: int) -> int:
        if not 0 <= sample < self.samples:
            raise NotFound(f"sample {sample} does not exist; there are {self.samples}")
        return sample // self.unit_samples

    @property
    def identity(self) -> str:
        text = json.dumps(_comparable(self), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()

    def to_json(self) -> bytes:
        return json.dumps(asdict(self), indent=2, sort_keys=True).encode()


def from_json(text: bytes) -> ExtractionPlan:
    try:
        body = json.loads(text)
    except ValueError as error:
        raise BadInput(f"plan.json cannot be read: {error}") from error
    unknown = set(body) - {item.name for item in fields(ExtractionPlan)}
    if unknown:
        raise BadInput(f"the plan has fields this version does not know: {sorted(unknown)}")
    for name in ("sites", "buckets"):
        body[name] = tuple(body.get(name, ()))
    missing = {item.name for item in fields(ExtractionPlan) if item.default is MISSING} - set(body)
    if missing - {"estimate"}:
        raise BadInput(f"plan.json lacks {', '.join(sorted(missing))}")
    return ExtractionPlan(**body)


def load(objects: ObjectStore) -> ExtractionPlan:
    try:
        return from_json(objects.read(PLAN_FILE))
    except NotFound:
        place = getattr(objects, "url", "this folder")
        raise NotFound(f"{place} has no plan.json; make one with `tpu extract plan`") from None


def write(objects: ObjectStore, plan: ExtractionPlan) -> ExtractionPlan:
    """Write the plan, or find the same one already there. A different one is refused."""
    if objects.create(PLAN_FILE, plan.to_json()):
        return plan
    there = load(objects)
    if there.identity != plan.identity:
        raise Conflict(
            "this folder holds another extraction; it differs in "
            + "; ".join(differences(there, plan))
            + ". Choose another folder"
        )
    return there


def differences(old: ExtractionPlan, new: ExtractionPlan) -> list[str]:
    before, after = _comparable(old), _comparable(new)
    return [
        f"{name}: {_short(before[name])} there, {_short(after[name])} asked"
        for name in before
        if before[name] != after[name]
    ]


def _comparable(plan: ExtractionPlan) -> dict[str, Any]:
    body = json.loads(plan.to_json())
    for name in LOCATION_FIELDS:
        body.pop(name)
    body["data"] = {key: value for key, value in body["data"].items() if key != "path"}
    return body


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "…"
