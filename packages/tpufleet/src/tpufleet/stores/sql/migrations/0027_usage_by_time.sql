-- What was in use in a span of time is found without reading all that came before. Times of what
-- goes on are the largest number. Filled for earlier rows by `usage_times.py`.
ALTER TABLE slices ADD COLUMN gone_at $number NOT NULL DEFAULT 9223372036854775807;
ALTER TABLE attempts ADD COLUMN created_at $number NOT NULL DEFAULT 0;
ALTER TABLE attempts ADD COLUMN ended_at $number NOT NULL DEFAULT 9223372036854775807;
CREATE INDEX slices_by_time ON slices (gone_at, requested_at);
CREATE INDEX attempts_by_time ON attempts (ended_at, created_at);
