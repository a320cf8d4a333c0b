-- Which agent took the word of a host: the first one, and no other.

CREATE TABLE entries (
    host_id $text PRIMARY KEY,
    digest $text NOT NULL
);
