-- Host commands and their results. Deleted soon after they were delivered.

CREATE TABLE errands (
    id $text PRIMARY KEY,
    sent_at $number NOT NULL,
    data TEXT NOT NULL
);

CREATE TABLE errand_results (
    errand_id $text NOT NULL,
    host_id $text NOT NULL,
    data TEXT NOT NULL,
    PRIMARY KEY (errand_id, host_id)
);
