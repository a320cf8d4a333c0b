-- Users change name, tags, notes, priority and the place in the queue of a job. `edits` holds all of
-- these changes, so that a controller with an older copy of the job does not undo them.

ALTER TABLE jobs ADD COLUMN edits TEXT;
CREATE INDEX job_tags_by_job ON job_tags (job_id);

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
CREATE INDEX job_search_by_owner ON job_search (owner, submitted_at, job_id);

-- The last value of each metric of a job.
CREATE TABLE job_metrics (
    name $text NOT NULL,
    job_id $text NOT NULL,
    value DOUBLE PRECISION NOT NULL,
    PRIMARY KEY (name, job_id)
);
CREATE INDEX job_metrics_by_value ON job_metrics (name, value, job_id);

CREATE TABLE job_points (
    job_id $text NOT NULL,
    at $number NOT NULL,
    data TEXT NOT NULL,
    PRIMARY KEY (job_id, at)
);
