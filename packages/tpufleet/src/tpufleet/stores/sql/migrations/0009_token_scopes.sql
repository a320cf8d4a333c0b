-- Tokens may be limited by scope and pool, which is in their data. Earlier versions would take a
-- limited token for an unlimited one, so they must not open this database. The index also gives the
-- order in which tokens are listed.

DROP INDEX tokens_by_owner;
CREATE INDEX tokens_by_owner ON tokens (owner, created_at, id);
