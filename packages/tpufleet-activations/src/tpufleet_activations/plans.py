"""The plan of an extraction: everything that determines its bytes. Written once, never changed."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from tpufleet.errors import Conflict, NotFound, unreadable
from tpufleet.runtime.object_store import ObjectStore
from tpufleet.runtime.units import Commit

PLAN_FILE = "plan.json"
CHECKED_COMMITS = 16

# Not part of a plan's identity: the model and tokenizer may move, their digests may not change.
# The date is that of the first plan: making it again on another day gives the same plan.
NON_IDENTITY_FIELDS = ("model", "tokenizer", "estimate", "chat_date")


@dataclass(frozen=True, kw_only=True, slots=True)
class ExtractionPlan:
    """One dataset of activations, divided into units of consecutive samples.

    Field names are the keys of plan.json.
    """

    model: str
    model_digest: str
    tokenizer: str
    tokenizer_digest: str
    data: Mapping[str, Any]  # kind, path and options: see `inputs.sources`
    data_digest: str
    samples: int
    unit_samples: int
    sites: tuple[str, ...]
    widths: Mapping[str, int]
    dtype: str = "bf16"
    compute: str = "bf16"  # dtype of the forward pass
    compression: str = "none"
    max_length: int = 2048
    # Or "cut" (keep the first max_length tokens), "split" (into contexts), "refuse" (fail).
    too_long: str = "skip"
    stride: int = 0  # tokens between the beginnings of contexts; 0: max_length
    keep: str = "all"  # tokens that are stored: see `contexts.KEEP`
    batching: str = "bucket"  # or "pack", "auto": see `batches.resolve_batching`
    batch_tokens: int = 16384
    buckets: tuple[int, ...] = ()
    # The TopK encoder whose latents are stored instead of the site: see `model.encoders`.
    encode: Mapping[str, Any] = field(default_factory=dict)
    chat_date: str = ""  # for chat templates that state the day, such as 2026-11-15
    estimate: Mapping[str, Any] = field(default_factory=dict)

    @property
    def units(self) -> int:
        return -(-self.samples // self.unit_samples)

    def sample_range(self, unit: int) -> range:
        """Indexes of the samples in a unit."""
        start = unit * self.unit_samples
        return range(start, min(start + self.unit_samples, self.samples))

    def unit_of(self, sample: int) -> int:
        if not 0 <= sample < self.samples:
            raise NotFound(f"no sample {sample}: the dataset has {self.samples:,} samples")
        return sample // self.unit_samples

    @property
    def identity(self) -> str:
        text = json.dumps(_comparable(self), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()

    @property
    def model_sites(self) -> tuple[str, ...]:
        """The sites that the model computes."""
        return (self.encode["site"],) if self.encode else self.sites

    def weight_bytes(self) -> float:
        """Of the model's layers, about, before it is opened: each weight is two operations for a
        token. 0 if unknown."""
        tokens, operations = (self.estimate.get(name, 0) for name in ("tokens", "operations"))
        size = 4 if self.compute == "f32" else 2
        return operations / 2 / tokens * size if tokens else 0.0

    def to_json(self) -> bytes:
        return json.dumps(asdict(self), indent=2, sort_keys=True).encode()


def from_json(text: bytes) -> ExtractionPlan:
    try:
        body = json.loads(text)
        tuples = {name: tuple(body[name]) for name in ("sites", "buckets") if name in body}
        return ExtractionPlan(**{**body, **tuples})
    except (ValueError, KeyError, TypeError) as error:  # not JSON, or of another version
        raise unreadable(PLAN_FILE, error) from error


def load(objects: ObjectStore) -> ExtractionPlan:
    try:
        return from_json(objects.read(PLAN_FILE))
    except NotFound:
        objects.names(PLAN_FILE)  # raises if there is no such bucket
        location = getattr(objects, "url", "this folder")
        raise NotFound(f"{location} has no plan.json; create one with `tpu extract plan`") from None


def check_free(objects: ObjectStore) -> None:
    """Raise Conflict if a folder without a plan holds files of a dataset, whose plan was
    deleted."""
    if PLAN_FILE in objects.names(PLAN_FILE):
        return
    for name in ("shards/", "units/"):
        if objects.names(name):
            location = getattr(objects, "url", "the output folder")
            raise other_dataset(location, f"{name}, but no {PLAN_FILE}")


def write(objects: ObjectStore, plan: ExtractionPlan) -> ExtractionPlan:
    """Write the plan, or return the stored one if it has the same identity; else raise Conflict.
    Files of another dataset are never taken for those of a new plan."""
    check_free(objects)
    if objects.create(PLAN_FILE, plan.to_json()):
        return plan
    stored = load(objects)
    if stored.identity != plan.identity:
        raise other_dataset("the output folder", "; ".join(differences(stored, plan)))
    return stored


def check_commits(plan: ExtractionPlan, commits: Mapping[int, Commit]) -> None:
    """Raise Conflict if units were stored for another plan. Some are checked: their outcomes may
    have to be read."""
    stored = list(commits.values())
    for commit in stored[:: max(len(stored) // CHECKED_COMMITS, 1)]:
        if commit.outcome["plan"] != plan.identity:
            evidence = f"unit {commit.unit} was stored for another plan; restore {PLAN_FILE}"
            raise other_dataset("the folder", evidence)


def other_dataset(location: object, evidence: str) -> Conflict:
    return Conflict(f"{location} holds another dataset ({evidence}); choose another folder")


def differences(old: ExtractionPlan, new: ExtractionPlan) -> list[str]:
    before, after = _comparable(old), _comparable(new)
    return [
        f"{name} is {_short(before.get(name))}, requested {_short(after.get(name))}"
        for name in {**before, **after}
        if before.get(name) != after.get(name)
    ]


def _comparable(plan: ExtractionPlan) -> dict[str, Any]:
    body = json.loads(plan.to_json())
    for name in NON_IDENTITY_FIELDS:
        body.pop(name)
    for name in ("data", "encode"):
        body[name] = {key: value for key, value in body[name].items() if key != "path"}
    if not body["encode"]:
        del body["encode"]  # plans that were made before there were encoders keep their identity
    return body


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "…"
