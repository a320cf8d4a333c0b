"""Rate limits: how many requests a caller may send, as a token bucket; and how many may run at a
time."""

from __future__ import annotations

from datetime import datetime, timedelta

import msgspec


class RateLimit(msgspec.Struct, frozen=True, kw_only=True):
    per_second: float
    burst: int


class TokenBucket(msgspec.Struct, frozen=True, kw_only=True):
    """What a caller has left, and since when it has been refilled."""

    tokens: float
    at: datetime


class ConcurrencyLimit(msgspec.Struct, frozen=True, kw_only=True):
    """Of the requests of one caller."""

    running: int  # at a time, until the client has received the response
    waiting: int  # for one of the others to end
    wait: timedelta
    downloads: int  # of files, which take as long as the client does


# Far above what people and scripts do, and below what one server answers. Of all tokens of a user
# together; and of the processes of their jobs, and of links, which must not lock the user out.
PER_USER = RateLimit(per_second=500, burst=10_000)
# Browsers open six connections. A user, their jobs and their links are three callers, which
# together must leave worker threads to other users.
CONCURRENT_PER_USER = ConcurrencyLimit(
    running=8, waiting=256, wait=timedelta(seconds=10), downloads=200
)
# What a user does that is entered into the audit log, or is refused. A script that sets up a team
# does a few hundred in a row.
AUDITED_PER_USER = RateLimit(per_second=1, burst=1_000)
# Agents of all hosts of a slice share a token: heartbeats, logs and command results.
PER_SLICE_TOKEN = RateLimit(per_second=500, burst=10_000)
# Requests of one address without a valid token.
PER_STRANGER = RateLimit(per_second=20, burst=300)


def take(
    bucket: TokenBucket | None, limit: RateLimit, now: datetime
) -> tuple[TokenBucket, timedelta | None]:
    """The bucket after one request; and, when it is rejected, how long to wait."""
    if bucket is None:
        bucket = TokenBucket(tokens=limit.burst, at=now)
    elapsed = max(0.0, (now - bucket.at).total_seconds())
    tokens = min(float(limit.burst), bucket.tokens + elapsed * limit.per_second)
    if tokens < 1:
        wait = timedelta(seconds=(1 - tokens) / limit.per_second)
        return TokenBucket(tokens=tokens, at=now), wait
    return TokenBucket(tokens=tokens - 1, at=now), None
