-- Cleaned jobs: their files are deleted, and lists omit them.

CREATE TABLE cleaned_jobs (
    job_id $text PRIMARY KEY,
    at $number NOT NULL
);
