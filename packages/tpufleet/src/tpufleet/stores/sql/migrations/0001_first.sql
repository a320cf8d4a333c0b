-- `data` holds the whole object as JSON. A column stands beside it only where a query needs it.
-- $text sorts by code point and $number holds 64 bits on every database. Times are microseconds
-- since 1970 in UTC.

CREATE TABLE jobs (
    id $text PRIMARY KEY,
    submitted_at $number NOT NULL,
    owner $text NOT NULL,
    state $text NOT NULL,
    ended $number NOT NULL,
    pool $text,
    name $text NOT NULL,
    parent $text,
    data TEXT NOT NULL
);
CREATE INDEX jobs_by_age ON jobs (submitted_at, id);
CREATE INDEX jobs_by_owner ON jobs (owner, submitted_at, id);
CREATE INDEX jobs_by_state ON jobs (state, submitted_at, id);
CREATE INDEX jobs_by_name ON jobs (name, submitted_at, id);
CREATE INDEX jobs_by_pool ON jobs (pool, submitted_at, id) WHERE pool IS NOT NULL;
CREATE INDEX jobs_by_parent ON jobs (parent, submitted_at, id) WHERE parent IS NOT NULL;
CREATE INDEX jobs_live ON jobs (submitted_at, id) WHERE ended = 0;

CREATE TABLE job_tags (
    tag $text NOT NULL,
    job_id $text NOT NULL,
    PRIMARY KEY (tag, job_id)
);

CREATE TABLE attempts (
    id $text PRIMARY KEY,
    job_id $text NOT NULL,
    number $number NOT NULL,
    ended $number NOT NULL,
    data TEXT NOT NULL
);
CREATE INDEX attempts_by_job ON attempts (job_id, number);

CREATE TABLE slices (
    id $text PRIMARY KEY,
    requested_at $number NOT NULL,
    gone $number NOT NULL,
    pool $text,
    job_id $text,
    data TEXT NOT NULL
);
CREATE INDEX slices_there ON slices (requested_at, id) WHERE gone = 0;
CREATE INDEX slices_by_pool ON slices (pool, requested_at, id) WHERE pool IS NOT NULL;
CREATE INDEX slices_by_job ON slices (job_id, requested_at, id) WHERE job_id IS NOT NULL;

CREATE TABLE hosts (
    id $text PRIMARY KEY,
    slice_id $text NOT NULL,
    number $number NOT NULL,
    data TEXT NOT NULL
);
CREATE INDEX hosts_by_slice ON hosts (slice_id, number);

CREATE TABLE pools (
    name $text PRIMARY KEY,
    data TEXT NOT NULL
);

CREATE TABLE refusals (
    id $text PRIMARY KEY,
    data TEXT NOT NULL
);

-- One row. Every commit updates it first, so commits are serialized and numbers become
-- visible in order: a reader that asks for what came after the last number it saw misses nothing.
CREATE TABLE numbers (
    id $number PRIMARY KEY,
    events $number NOT NULL,
    inbox $number NOT NULL
);
INSERT INTO numbers (id, events, inbox) VALUES (1, 0, 0);

CREATE TABLE events (
    seq $number PRIMARY KEY,
    job_id $text,
    slice_id $text,
    data TEXT NOT NULL
);
CREATE INDEX events_by_job ON events (job_id, seq) WHERE job_id IS NOT NULL;
CREATE INDEX events_by_slice ON events (slice_id, seq) WHERE slice_id IS NOT NULL;

CREATE TABLE inbox (
    seq $number PRIMARY KEY,
    data TEXT NOT NULL
);

CREATE TABLE pulses (
    host_id $text PRIMARY KEY,
    seen_at $number NOT NULL,
    attempt_id $text,
    progress TEXT
);
CREATE INDEX pulses_by_age ON pulses (seen_at);

CREATE TABLE leases (
    name $text PRIMARY KEY,
    holder $text,
    token $number NOT NULL,
    expires_at $number NOT NULL
);

CREATE TABLE users (
    name $text PRIMARY KEY,
    data TEXT NOT NULL
);

CREATE TABLE tokens (
    id $text PRIMARY KEY,
    owner $text NOT NULL,
    hash $text NOT NULL,
    created_at $number NOT NULL,
    data TEXT NOT NULL
);
CREATE INDEX tokens_by_owner ON tokens (owner);
CREATE INDEX tokens_by_hash ON tokens (hash);

CREATE TABLE facts (
    name $text PRIMARY KEY,
    value TEXT NOT NULL
);
