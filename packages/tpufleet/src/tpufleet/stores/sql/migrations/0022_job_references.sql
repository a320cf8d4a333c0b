-- What of a job is still there, so that the rules of retention find the jobs that they apply to
-- without reading those whose files were deleted long ago.
ALTER TABLE jobs ADD COLUMN files_deleted $number NOT NULL DEFAULT 0;
ALTER TABLE jobs ADD COLUMN logs_deleted $number NOT NULL DEFAULT 0;
ALTER TABLE jobs ADD COLUMN checkpoints_deleted $number NOT NULL DEFAULT 0;
UPDATE jobs SET files_deleted = 1, logs_deleted = 1 WHERE id IN (SELECT job_id FROM cleaned_jobs);
CREATE INDEX jobs_with_files ON jobs (submitted_at, id) WHERE ended = 1 AND files_deleted = 0;
CREATE INDEX jobs_with_logs ON jobs (submitted_at, id) WHERE ended = 1 AND logs_deleted = 0;
CREATE INDEX jobs_with_checkpoints ON jobs (submitted_at, id)
    WHERE ended = 1 AND checkpoints_deleted = 0;

-- The code of a job, and the checkpoints of other jobs that it names. Filled for earlier jobs by
-- `job_references.py`.
CREATE TABLE job_references (
    reference $text NOT NULL,
    job_id $text NOT NULL,
    PRIMARY KEY (reference, job_id)
) $clustered;
