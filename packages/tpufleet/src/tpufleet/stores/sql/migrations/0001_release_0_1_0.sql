-- The schema of release 0.1.0. It does not change any more: a change is a new file with the next
-- number (docs/decisions/0029-release-reset.md).
--
-- `data` holds the whole object as JSON. A column stands beside it only where a query needs it.
-- $text sorts by code point and $number holds 64 bits on every database. Times are microseconds
-- since 1970 in UTC.

-- `edits`: what users changed of name, tags, notes, priority and place in the queue, so that a
-- controller with an older copy of the job does not undo it. `…_deleted`: so that the rules of
-- retention find the jobs that they apply to without reading those without files.
CREATE TABLE jobs (
    id $text PRIMARY KEY,
    submitted_at $number NOT NULL,
    owner $text NOT NULL,
    state $text NOT NULL,
    ended $number NOT NULL,
    pool $text,
    name $text NOT NULL,
    parent $text,
    data TEXT NOT NULL,
    edits TEXT,
    archived $number NOT NULL DEFAULT 0,
    files_deleted $number NOT NULL DEFAULT 0,
    logs_deleted $number NOT NULL DEFAULT 0,
    checkpoints_deleted $number NOT NULL DEFAULT 0,
    files_deleted_at $number
);
CREATE INDEX jobs_by_age ON jobs (submitted_at, id);
CREATE INDEX jobs_by_owner ON jobs (owner, archived, submitted_at, id);
CREATE INDEX jobs_by_state ON jobs (state, archived, submitted_at, id);
CREATE INDEX jobs_by_name ON jobs (name, archived, submitted_at, id);
CREATE INDEX jobs_by_pool ON jobs (pool, archived, submitted_at, id) WHERE pool IS NOT NULL;
CREATE INDEX jobs_by_parent ON jobs (parent, submitted_at, id) WHERE parent IS NOT NULL;
CREATE INDEX jobs_live ON jobs (submitted_at, id) WHERE ended = 0;
CREATE INDEX jobs_live_by_owner ON jobs (owner, submitted_at, id) WHERE ended = 0;
CREATE INDEX jobs_listed ON jobs (submitted_at, id) WHERE archived = 0;
CREATE INDEX jobs_archived ON jobs (submitted_at, id) WHERE archived = 1;
CREATE INDEX jobs_with_files ON jobs (submitted_at, id) WHERE ended = 1 AND files_deleted = 0;
CREATE INDEX jobs_with_logs ON jobs (submitted_at, id) WHERE ended = 1 AND logs_deleted = 0;
CREATE INDEX jobs_with_checkpoints ON jobs (submitted_at, id)
    WHERE ended = 1 AND checkpoints_deleted = 0;

CREATE TABLE job_tags (
    tag $text NOT NULL,
    job_id $text NOT NULL,
    PRIMARY KEY (tag, job_id)
);
CREATE INDEX job_tags_by_job ON job_tags (job_id);
CREATE INDEX job_tags_in_lower_case ON job_tags (lower(tag), job_id);

-- How many jobs have ended, by state; live ones are counted when asked.
CREATE TABLE job_counts (
    state $text PRIMARY KEY,
    count $number NOT NULL
);

-- The code of a job, and the checkpoints of other jobs that it names.
CREATE TABLE job_references (
    reference $text NOT NULL,
    job_id $text NOT NULL,
    PRIMARY KEY (reference, job_id)
) $clustered;

-- What is searched of a job, apart from the wide rows of `jobs` and in the order of listings: all of
-- it is read within milliseconds. Texts are in lower case. `state` is empty until the job has ended.
CREATE TABLE job_search (
    submitted_at $number NOT NULL,
    job_id $text NOT NULL,
    owner $text NOT NULL,
    state $text NOT NULL,
    pool $text NOT NULL,
    parent $text NOT NULL,
    name $text NOT NULL,
    accelerator $text NOT NULL,
    tags TEXT NOT NULL,
    words TEXT NOT NULL,
    PRIMARY KEY (submitted_at, job_id)
) $clustered;
-- Searches by one of these read as many rows as match, however long the history is.
CREATE INDEX job_search_by_owner ON job_search (owner, submitted_at, job_id);
CREATE INDEX job_search_by_state ON job_search (state, submitted_at, job_id);
CREATE INDEX job_search_by_name ON job_search (name, submitted_at, job_id);
CREATE INDEX job_search_by_pool ON job_search (pool, submitted_at, job_id);
CREATE INDEX job_search_by_parent ON job_search (parent, submitted_at, job_id);
CREATE INDEX job_search_by_type ON job_search (accelerator, submitted_at, job_id);
CREATE INDEX job_search_by_owner_and_type ON job_search (owner, accelerator, submitted_at, job_id);
CREATE INDEX job_search_by_owner_and_state ON job_search (owner, state, submitted_at, job_id);
-- The words of ended jobs by each three characters in a row, which finds any part of a word.
$word_index;

-- The last value of each metric of a job.
CREATE TABLE job_metrics (
    name $text NOT NULL,
    job_id $text NOT NULL,
    value DOUBLE PRECISION NOT NULL,
    PRIMARY KEY (name, job_id)
);
CREATE INDEX job_metrics_by_value ON job_metrics (name, value, job_id);

CREATE TABLE metric_points (
    job_id $text NOT NULL,
    at $number NOT NULL,
    data TEXT NOT NULL,
    PRIMARY KEY (job_id, at)
);

-- `ended_at`, and `gone_at` of slices: the largest number while they go on. So what was in use in a
-- span of time is found without reading all that came before.
CREATE TABLE attempts (
    id $text PRIMARY KEY,
    job_id $text NOT NULL,
    number $number NOT NULL,
    ended $number NOT NULL,
    created_at $number NOT NULL,
    ended_at $number NOT NULL,
    data TEXT NOT NULL
);
CREATE INDEX attempts_by_job ON attempts (job_id, number);
CREATE INDEX attempts_by_time ON attempts (ended_at, created_at);

CREATE TABLE slices (
    id $text PRIMARY KEY,
    requested_at $number NOT NULL,
    gone $number NOT NULL,
    gone_at $number NOT NULL,
    pool $text,
    job_id $text,
    data TEXT NOT NULL
);
CREATE INDEX slices_live ON slices (requested_at, id) WHERE gone = 0;
CREATE INDEX slices_by_pool ON slices (pool, requested_at, id) WHERE pool IS NOT NULL;
CREATE INDEX slices_by_job ON slices (job_id, requested_at, id) WHERE job_id IS NOT NULL;
CREATE INDEX slices_by_time ON slices (gone_at, requested_at);

CREATE TABLE hosts (
    id $text PRIMARY KEY,
    slice_id $text NOT NULL,
    host_index $number NOT NULL,
    data TEXT NOT NULL
);
CREATE INDEX hosts_by_slice ON hosts (slice_id, host_index);

-- The last heartbeat of each host. Every heartbeat changes `seen_at`: reading all hosts now and then
-- is cheaper than an index on it.
CREATE TABLE heartbeats (
    host_id $text PRIMARY KEY,
    seen_at $number NOT NULL,
    attempt_id $text,
    progress TEXT
);

-- The agent of each host: the first one that registered.
CREATE TABLE registrations (
    host_id $text PRIMARY KEY,
    digest $text NOT NULL
);

-- Deleted soon after they were delivered.
CREATE TABLE host_commands (
    id $text PRIMARY KEY,
    sent_at $number NOT NULL,
    data TEXT NOT NULL
);

CREATE TABLE host_command_results (
    command_id $text NOT NULL,
    host_id $text NOT NULL,
    data TEXT NOT NULL,
    PRIMARY KEY (command_id, host_id)
);

CREATE TABLE pools (
    name $text PRIMARY KEY,
    data TEXT NOT NULL
);

CREATE TABLE capacity_refusals (
    id $text PRIMARY KEY,
    data TEXT NOT NULL
);

-- One row with the last number of each table. Every commit updates it first, so commits are
-- serialized and numbers become visible in order: a reader that asks for what came after the last
-- number it saw misses nothing.
CREATE TABLE sequences (
    id $number PRIMARY KEY,
    events $number NOT NULL,
    inbox $number NOT NULL,
    audit $number NOT NULL
);
INSERT INTO sequences (id, events, inbox, audit) VALUES (1, 0, 0, 0);

CREATE TABLE events (
    seq $number PRIMARY KEY,
    job_id $text,
    slice_id $text,
    pool $text,
    by_user $text,
    reservation $text,
    data TEXT NOT NULL
);
CREATE INDEX events_by_job ON events (job_id, seq) WHERE job_id IS NOT NULL;
CREATE INDEX events_by_slice ON events (slice_id, seq) WHERE slice_id IS NOT NULL;
CREATE INDEX events_by_pool ON events (pool, seq) WHERE pool IS NOT NULL;
CREATE INDEX events_by_user ON events (by_user, seq) WHERE by_user IS NOT NULL;
CREATE INDEX events_by_reservation ON events (reservation, seq) WHERE reservation IS NOT NULL;

CREATE TABLE inbox (
    seq $number PRIMARY KEY,
    data TEXT NOT NULL
);

-- Rows are only ever added.
CREATE TABLE audit (
    seq $number PRIMARY KEY,
    at $number NOT NULL,
    actor $text NOT NULL,
    token_id $text,
    target $text,
    data TEXT NOT NULL
);
CREATE INDEX audit_by_token ON audit (token_id, seq) WHERE token_id IS NOT NULL;
CREATE INDEX audit_by_target ON audit (target, seq) WHERE target IS NOT NULL;

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
CREATE INDEX tokens_by_owner ON tokens (owner, created_at, id);
CREATE INDEX tokens_by_hash ON tokens (hash);

-- Small objects that users change as a whole: preferences, reservations, entries of the inventory.
CREATE TABLE documents (
    kind $text NOT NULL,
    id $text NOT NULL,
    data TEXT NOT NULL,
    PRIMARY KEY (kind, id)
);

-- Small objects that all servers share: the newest part of logs, and encrypted secrets.
CREATE TABLE objects (
    name $text PRIMARY KEY,
    at $number NOT NULL,
    size $number NOT NULL,
    data BYTEA NOT NULL
);

-- Of this installation: fleet id, fingerprint of the server secret.
CREATE TABLE metadata (
    name $text PRIMARY KEY,
    value TEXT NOT NULL
);
