-- The audit log. Rows are only ever added.

CREATE TABLE audit (
    seq $number PRIMARY KEY,
    at $number NOT NULL,
    actor $text NOT NULL,
    data TEXT NOT NULL
);

ALTER TABLE numbers ADD COLUMN audit $number NOT NULL DEFAULT 0;
