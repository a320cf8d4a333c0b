-- Events of a pool can be listed. Those recorded before this migration have no pool here.

ALTER TABLE events ADD COLUMN pool $text;
CREATE INDEX events_by_pool ON events (pool, seq) WHERE pool IS NOT NULL;
