-- Small objects that users change as a whole: preferences, reservations, entries of the inventory.

CREATE TABLE documents (
    kind $text NOT NULL,
    id $text NOT NULL,
    data TEXT NOT NULL,
    PRIMARY KEY (kind, id)
);
