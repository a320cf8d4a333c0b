-- Short-lived: whoever sent an errand waits for it, and soon after it is forgotten.

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
