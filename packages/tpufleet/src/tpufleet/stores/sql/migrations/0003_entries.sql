-- The agent bound to each host: the first one that requested the slice token.

CREATE TABLE entries (
    host_id $text PRIMARY KEY,
    digest $text NOT NULL
);
