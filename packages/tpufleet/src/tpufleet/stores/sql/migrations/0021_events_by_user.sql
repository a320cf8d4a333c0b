-- Events that a user caused can be listed. Those recorded before this migration have no user here.

ALTER TABLE events ADD COLUMN by_user $text;
CREATE INDEX events_by_user ON events (by_user, seq) WHERE by_user IS NOT NULL;
