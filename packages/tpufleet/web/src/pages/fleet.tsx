import { useState } from "preact/hooks";
import type { Inventory, InventoryRow } from "../api";
import { plural, tone, typeName } from "../format";
import { Age, Empty, Failure, State, Table, Title, useData, useFleetChange } from "../parts";
import { colourOf } from "./colours";

interface Refusal {
  provider: string;
  zone: string;
  accelerator: string;
  capacity: string;
  message: string;
  until: string;
}

interface Status {
  version: string;
  controller: {
    holder: string;
    providers: { name: string; problems: { call: string; message: string; zone: string | null }[] }[];
  } | null;
  controller_stale: boolean;
  waiting_for: Refusal[];
}

const CHIPS_PER_ROW = 16;
const MOST_CELLS = 256;

/** Chips by zone and type, coloured by state or by user. */
export function Fleet() {
  const change = useFleetChange();
  const { data, error } = useData<Inventory>("/inventory", change, 10);
  const { data: status } = useData<Status>("/status", 0, 10);
  const [colours, setColours] = useState<"state" | "user">("state");
  const slices = (data?.rows ?? []).filter((row) => row.state !== "not created");
  const chips = (rows: InventoryRow[]) => rows.reduce((sum, row) => sum + row.chips, 0);
  const zones = group(slices, (row) => row.zone);
  const problems =
    status?.controller?.providers.flatMap((provider) => provider.problems.map((each) => ({ provider: provider.name, ...each }))) ?? [];
  const colour = (row: InventoryRow) => (colours === "state" ? tone(row.state) : row.owner ? colourOf(row.owner) : "quiet");
  const legend = group(slices, (row) => (colours === "state" ? row.state : (row.owner ?? "nobody")));
  return (
    <>
      <Title
        line="tpu inventory slices"
        more={
          <p>
            {plural(slices.length, "slice")}, {plural(chips(slices), "chip")}
            {status ? ` · tpufleet ${status.version} · leader ${status.controller?.holder ?? "none"}` : ""}
          </p>
        }
      >
        Fleet
      </Title>
      <Failure message={error || (status?.controller_stale ? "No controller is running: jobs are not placed." : "")} />
      {problems.map((each) => (
        <p class="failure" key={each.provider + each.call + each.zone}>
          {each.provider} {each.zone ?? ""}: {each.call} fails: {each.message}
        </p>
      ))}
      {slices.length === 0 && data ? <Empty>No slices. They are created when jobs need them.</Empty> : null}
      {slices.length ? (
        <div class="controls">
          <span class="group" role="group" aria-label="Colours">
            {(["state", "user"] as const).map((each) => (
              <button key={each} type="button" aria-pressed={colours === each} onClick={() => setColours(each)}>
                By {each}
              </button>
            ))}
          </span>
          <ul class="legend" aria-label="Legend">
            {[...legend].map(([name, rows]) => (
              <li key={name}>
                <span class={`swatch ${colour(rows[0]!)}`} aria-hidden="true" /> {name} <span class="quiet">{plural(chips(rows), "chip")}</span>
              </li>
            ))}
          </ul>
        </div>
      ) : null}
      <div class="map">
        {[...zones].map(([zone, here]) => (
          <section key={zone} aria-label={`zone ${zone}`} class="card">
            <h2>
              {zone} <span class="quiet">{plural(chips(here), "chip")}</span>
            </h2>
            {[...group(here, (row) => row.accelerator)].map(([type, rows]) => (
              <div key={type} class="type">
                <h3>
                  {rows.length > 1 ? `${rows.length} × ` : ""}
                  {typeName(type)}
                </h3>
                <ul>
                  {rows.map((row) => (
                    <li key={row.id}>
                      <Tile row={row} colour={colour(row)} />
                    </li>
                  ))}
                </ul>
              </div>
            ))}
          </section>
        ))}
      </div>
      {status?.waiting_for.length ? (
        <section aria-labelledby="refusals">
          <h2 id="refusals">Capacity that was refused</h2>
          <Table
            name="refusals"
            rows={status.waiting_for}
            rowKey={(each) => `${each.provider} ${each.zone} ${each.accelerator} ${each.capacity}`}
            columns={[
              { name: "Zone", cell: (each) => each.zone },
              { name: "Type", cell: (each) => typeName(each.accelerator) },
              { name: "Capacity", cell: (each) => each.capacity },
              { name: "Answer", kind: "text", cell: (each) => each.message },
              { name: "Next try", cell: (each) => <Age at={each.until} /> },
            ]}
          />
        </section>
      ) : null}
    </>
  );
}

/** One square for each chip, up to a limit. */
function Tile({ row, colour }: { row: InventoryRow; colour: string }) {
  const cells = Math.min(row.chips, MOST_CELLS);
  const columns = Math.min(CHIPS_PER_ROW, cells, Math.max(4, 2 ** Math.ceil(Math.log2(Math.sqrt(cells)))));
  const lines = Math.ceil(cells / columns);
  return (
    <a class={`tile ${colour}`} href={`#/slices/${encodeURIComponent(row.id)}`} title={`${row.id}: ${row.state}, ${row.reason}`}>
      <svg width={columns * 8} height={lines * 8} aria-hidden="true">
        {Array.from({ length: cells }, (_, index) => (
          <rect key={index} x={(index % columns) * 8} y={Math.floor(index / columns) * 8} width="6.5" height="6.5" rx="1.5" />
        ))}
      </svg>
      <span class="about">
        <strong>{row.job_name || row.alias || row.state}</strong>
        <small>
          {row.owner ?? "nobody"} · {row.capacity}
          {row.pool ? ` · ${row.pool}` : ""}
        </small>
        {row.job_name ? <State name={row.state} /> : null}
      </span>
    </a>
  );
}

function group<T>(items: T[], name: (item: T) => string): Map<string, T[]> {
  const groups = new Map<string, T[]>();
  for (const item of items) groups.set(name(item), [...(groups.get(name(item)) ?? []), item]);
  return new Map([...groups].sort(([a], [b]) => a.localeCompare(b)));
}
