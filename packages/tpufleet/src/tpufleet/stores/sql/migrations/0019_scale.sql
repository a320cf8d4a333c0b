-- Listings leave archived jobs out: as a column, an index skips any number of them. `archived_jobs`
-- still says since when.
ALTER TABLE jobs ADD COLUMN archived $number NOT NULL DEFAULT 0;
UPDATE jobs SET archived = 1 WHERE id IN (SELECT job_id FROM archived_jobs);
CREATE INDEX jobs_listed ON jobs (submitted_at, id) WHERE archived = 0;
CREATE INDEX jobs_archived ON jobs (submitted_at, id) WHERE archived = 1;
CREATE INDEX jobs_live_by_owner ON jobs (owner, submitted_at, id) WHERE ended = 0;
DROP INDEX jobs_by_owner;
DROP INDEX jobs_by_state;
DROP INDEX jobs_by_name;
DROP INDEX jobs_by_pool;
CREATE INDEX jobs_by_owner ON jobs (owner, archived, submitted_at, id);
CREATE INDEX jobs_by_state ON jobs (state, archived, submitted_at, id);
CREATE INDEX jobs_by_name ON jobs (name, archived, submitted_at, id);
CREATE INDEX jobs_by_pool ON jobs (pool, archived, submitted_at, id) WHERE pool IS NOT NULL;

-- How many jobs have ended, by state; live ones are counted when asked.
CREATE TABLE job_counts (
    state $text PRIMARY KEY,
    count $number NOT NULL
);
INSERT INTO job_counts (state, count)
    SELECT state, COUNT(*) FROM jobs WHERE ended = 1 GROUP BY state;

-- Every heartbeat changes `seen_at`. Reading all hosts now and then is cheaper than an index.
DROP INDEX pulses_by_age;

-- Searches by one of these read as many rows as match, however long the history is.
CREATE INDEX job_search_by_state ON job_search (state, submitted_at, job_id);
CREATE INDEX job_search_by_name ON job_search (name, submitted_at, job_id);
CREATE INDEX job_search_by_pool ON job_search (pool, submitted_at, job_id);
CREATE INDEX job_search_by_parent ON job_search (parent, submitted_at, job_id);
CREATE INDEX job_search_by_type ON job_search (accelerator, submitted_at, job_id);
CREATE INDEX job_tags_in_lower_case ON job_tags (lower(tag), job_id);

-- The words of ended jobs by each three characters in a row, which finds any part of a word.
$word_index;
