-- Jobs that were cleaned away: what they left is gone, and lists leave them out.

CREATE TABLE cleaned_jobs (
    job_id $text PRIMARY KEY,
    at $number NOT NULL
);
