-- Archived jobs: lists omit them. `cleaned_jobs` now only says whose files are deleted.

CREATE TABLE archived_jobs (
    job_id $text PRIMARY KEY,
    at $number NOT NULL
);
INSERT INTO archived_jobs (job_id, at) SELECT job_id, at FROM cleaned_jobs;
