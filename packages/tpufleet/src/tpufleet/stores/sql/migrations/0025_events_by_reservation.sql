-- Events of a reservation, and audit entries of a token, can be listed.

ALTER TABLE events ADD COLUMN reservation $text;
CREATE INDEX events_by_reservation ON events (reservation, seq) WHERE reservation IS NOT NULL;
ALTER TABLE audit ADD COLUMN token_id $text;
ALTER TABLE audit ADD COLUMN target $text;
CREATE INDEX audit_by_token ON audit (token_id, seq) WHERE token_id IS NOT NULL;
CREATE INDEX audit_by_target ON audit (target, seq) WHERE target IS NOT NULL;
