-- Searches of one user's jobs by type or state read as many rows as match both.

CREATE INDEX job_search_by_owner_and_type ON job_search (owner, accelerator, submitted_at, job_id);
CREATE INDEX job_search_by_owner_and_state ON job_search (owner, state, submitted_at, job_id);
