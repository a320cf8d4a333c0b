"""Fingerprints of node pools: has what a pod asks for changed since its pool was made? Pure."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

HASH_PREFIX = (
    "v2-"  # hashes of old are bare; they cover labels, machine, reservation and spot alone
)
_SAFE = "bcdfghjklmnpqrstvwxz2456789"  # as Kubernetes spells random words: no vowels


def pool_hash(request: Mapping[str, Any], places: object) -> str:
    """Of everything that a pool is made with, but the place that was chosen for it."""
    fixed = {key: value for key, value in request.items() if key not in ("name", "locations")}
    # Spot is a choice among the allowed places too, and so is its taint.
    dropped = ("spot", "flexStart", "taints")
    config = {key: value for key, value in request["config"].items() if key not in dropped}
    text = json.dumps([fixed | {"config": config}, places], sort_keys=True, default=str)
    return HASH_PREFIX + hashlib.sha256(text.encode()).hexdigest()[:16]


def legacy_hash(request: Mapping[str, Any]) -> str:
    """As provisioners of old wrote it on pools that may still be around."""
    config = request["config"]
    kept = {
        key: config[key]
        for key in ("labels", "machineType", "reservationAffinity", "spot")
        if config.get(key)
    }
    if "labels" in kept:
        kept["labels"] = dict(sorted(kept["labels"].items()))
    text = json.dumps({"config": kept}, separators=(",", ":"))
    value = 2166136261
    for byte in text.encode():
        value = ((value ^ byte) * 16777619) & 0xFFFFFFFF
    return "".join(_SAFE[byte % len(_SAFE)] for byte in str(value).encode())


def hash_matches(written: str | None, current: str, old: str) -> bool:
    """A pool without a hash is taken as it is: it is older than hashes are."""
    if not written:
        return True
    return written == (current if written.startswith(HASH_PREFIX) else old)
