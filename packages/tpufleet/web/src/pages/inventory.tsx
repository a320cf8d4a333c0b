import { useState } from "preact/hooks";
import { type Inventory as InventoryData, type InventoryRow, patch, remove } from "../api";
import { type Question, useAsk } from "../dialogs";
import { plural, typeName, word } from "../format";
import { Age, Clip, Empty, Failure, JobLink, PoolLink, SliceLink, State, Table, Title, useData, useFleetChange } from "../parts";
import { isAdmin, isMember } from "../state";

/** Slices and room in pools, with what people wrote about them. */
export function Inventory() {
  const { data, error, reload } = useData<InventoryData>("/inventory", useFleetChange(), 15);
  const [filter, setFilter] = useState("");
  const { ask, dialog } = useAsk();
  const words = filter.toLowerCase().split(/\s+/).filter(Boolean);
  const rows = (data?.rows ?? []).filter((row) => {
    const text = [row.id, row.alias, row.node, typeName(row.accelerator), row.zone, row.capacity, row.pool, row.state, row.owner, row.job_name, row.note, row.belongs_to]
      .join(" ")
      .toLowerCase();
    return words.every((each) => text.includes(each));
  });
  return (
    <>
      <Title line="tpu inventory">Inventory</Title>
      <Failure message={error} />
      {data?.chips.length ? <Chips chips={data.chips} /> : null}
      <div class="controls">
        <input type="search" aria-label="Filter the inventory" placeholder="Filter: v5e free us-west4-a ada" onInput={(event) => setFilter(event.currentTarget.value)} />
        <span class="quiet" role="status">
          {plural(rows.reduce((sum, row) => sum + row.count, 0), "slice")}
        </span>
      </div>
      {data && !rows.length ? <Empty>{words.length ? "Nothing matches." : "No slices and no pools."}</Empty> : null}
      {rows.length ? (
        <Table
          name="inventory"
          rows={rows}
          rowKey={(row) => `${row.id} ${row.state}`}
          columns={[
            {
              name: "Slice",
              cell: (row) => (
                <>
                  {row.state === "not created" ? <span class="quiet">{row.count} more</span> : <SliceLink id={row.id} />}
                  {row.alias ? <strong> {row.alias}</strong> : null}
                  {row.node && row.node !== row.alias ? <span class="node">TPU VM {row.node}</span> : null}
                </>
              ),
            },
            {
              name: "Type",
              cell: (row) => (
                <>
                  {typeName(row.accelerator)} <span class="sub">{plural(row.chips, "chip")}</span>
                </>
              ),
            },
            {
              name: "Zone",
              cell: (row) => (
                <>
                  {row.zone || "any"} <span class="sub">{row.capacity}</span>
                </>
              ),
            },
            { name: "Pool", cell: (row) => <PoolLink name={row.pool} /> },
            {
              name: "State",
              cell: (row) => (
                <>
                  <State name={row.state} /> {row.since ? <span class="sub"><Age at={row.since} /></span> : null}
                </>
              ),
            },
            {
              name: "Owner, job",
              cell: (row) => (
                <>
                  {row.owner ?? "–"}
                  {row.job_id ? (
                    <Clip title={row.job_name}>
                      <JobLink id={row.job_id} name={row.job_name} />
                    </Clip>
                  ) : null}
                </>
              ),
            },
            {
              name: "Belongs to, note",
              cell: (row) => <Clip title={row.note}>{[row.belongs_to, row.note].filter(Boolean).join(": ") || "–"}</Clip>,
            },
            { name: "Last check", cell: (row) => <Age at={row.last_check} /> },
            {
              name: "Actions",
              kind: "acts",
              cell: (row) => (
                <>
                  {isMember() ? (
                    <button type="button" aria-label={`edit ${row.id}`} onClick={() => ask(annotate(row.id, row, reload))}>
                      Edit
                    </button>
                  ) : null}
                  {row.node && isAdmin() && row.state !== "releasing" ? (
                    <button type="button" aria-label={`give ${row.node} back`} onClick={() => ask(giveBack(row, reload))}>
                      Give back
                    </button>
                  ) : null}
                </>
              ),
            },
          ]}
        />
      ) : null}
      {dialog}
    </>
  );
}

export function annotate(name: string, row: Pick<InventoryRow, "alias" | "note" | "belongs_to">, done: () => void): Question {
  return {
    title: `Edit ${name}`,
    action: "Save",
    fields: [
      { name: "alias", label: "Alias", value: row.alias },
      { name: "note", label: "Note", value: row.note },
      { name: "belongs_to", label: "Belongs to", value: row.belongs_to },
    ],
    line: (values) =>
      `tpu inventory set ${word(name)} --alias ${word(values["alias"]!)} --note ${word(values["note"]!)} --belongs-to ${word(values["belongs_to"]!)}`,
    run: async (values) => {
      await patch(`/inventory/${encodeURIComponent(name)}`, values);
      done();
      return `changed ${name}`;
    },
  };
}

/** Of an adopted TPU VM. The server refuses while a job runs on it. */
export function giveBack(row: Pick<InventoryRow, "id" | "node">, done: () => void): Question {
  return {
    title: `Give ${row.node} back?`,
    action: "Give back",
    line: () => `tpu adopt undo ${word(row.node)}`,
    body: <p>Its agent stops, and jobs no longer run on it. The TPU VM itself keeps running.</p>,
    run: async () => {
      await remove(`/slices/${encodeURIComponent(row.id)}`);
      done();
      return `gave ${row.node} back`;
    },
  };
}

function Chips({ chips }: { chips: InventoryData["chips"] }) {
  const types = [...new Set(chips.map((each) => each.accelerator))];
  const zones = [...new Set(chips.map((each) => each.zone))];
  const count = (type: string, zone?: string) =>
    chips.filter((each) => each.accelerator === type && (!zone || each.zone === zone)).reduce((sum, each) => sum + each.chips, 0);
  return (
    <Table
      name="chips"
      label="Chips by type and zone"
      rows={types}
      rowKey={(type) => type}
      columns={[
        { name: "Chips", cell: (type) => typeName(type) },
        ...zones.map((zone) => ({ name: zone, kind: "number" as const, cell: (type: string) => count(type, zone) || "" })),
        { name: "All zones", kind: "number", cell: (type) => <strong>{count(type)}</strong> },
      ]}
    />
  );
}
