"""About what it costs to move data between a bucket and hosts: list prices per GB, for an estimate.

Not compared with the page on a known date. Within one region, data moves for nothing; from a
multi-region or dual-region at the price of its continent.
https://cloud.google.com/storage/pricing#network-buckets
"""

from __future__ import annotations

_SAME_CONTINENT = {"us": 0.02, "eu": 0.02}
_ACROSS_ATLANTIC = 0.05
_FARTHER = 0.08


def usd_per_gb(location: str, region: str) -> float:
    """`location`: of a bucket, as Cloud Storage writes it: US-CENTRAL1, EU, NAM4."""
    if location.lower() == region:
        return 0.0
    continents = {_continent(location), _continent(region)}
    if len(continents) == 1:
        return _SAME_CONTINENT.get(continents.pop(), _FARTHER)
    return _ACROSS_ATLANTIC if continents == {"us", "eu"} else _FARTHER


def _continent(location: str) -> str:
    word = location.lower().partition("-")[0]
    return {"northamerica": "us", "nam4": "us", "europe": "eu", "eur4": "eu", "eur5": "eu",
            "eur7": "eu", "eur8": "eu", "asia1": "asia"}.get(word, word)  # fmt: skip
