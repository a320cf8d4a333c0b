import { useState } from "preact/hooks";
import type { FleetEvent } from "../api";
import { EventTable, Failure, Title, useData } from "../parts";
import { recent } from "../state";

/** What happens in the fleet, live. */
export function EventsPage() {
  const { data, error } = useData<{ events: FleetEvent[] }>("/events?limit=300&newest=1");
  const [filter, setFilter] = useState("");
  const known = new Set(recent.value.map((event) => event.seq));
  const older = [...(data?.events ?? [])].reverse().filter((event) => !known.has(event.seq));
  const wanted = filter.toLowerCase();
  const shown = [...recent.value, ...older].filter((event) =>
    [event.state, event.message, event.job_id, event.slice_id, event.pool, event.by, event.kind].join(" ").toLowerCase().includes(wanted),
  );
  return (
    <>
      <Title line="tpu events -f">Events</Title>
      <Failure message={error} />
      <div class="controls">
        <input type="search" aria-label="Filter events" placeholder="Filter: preempted, ada, tpf-…" onInput={(event) => setFilter(event.currentTarget.value)} />
      </div>
      {data ? <EventTable events={shown.slice(0, 500)} jobs /> : null}
    </>
  );
}
