-- Small objects that all servers share: the newest part of logs, and encrypted secrets.

CREATE TABLE objects (
    name $text PRIMARY KEY,
    at $number NOT NULL,
    size $number NOT NULL,
    data BYTEA NOT NULL
);
