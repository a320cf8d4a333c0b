import { type Inventory, type SliceRow, eventsOf, post } from "../api";
import { useAsk } from "../dialogs";
import { typeName, word } from "../format";
import { Age, Empty, Facts, Failure, JobLink, PoolLink, ResourceEvents, State, Title, useData, useFleetChange } from "../parts";
import { isAdmin, isMe, isMember } from "../state";
import { annotate, giveBack } from "./inventory";

const FAULTS = ["preempt", "preempt-notice", "maintenance", "kill-host", "stall-host"];

export function SlicePage({ id }: { id: string }) {
  const change = useFleetChange();
  const { data, error, reload } = useData<{ slices: SliceRow[] }>(`/slices?id=${encodeURIComponent(id)}`, change, 15);
  const { data: inventory, reload: reloadNotes } = useData<Inventory>("/inventory", change, 15);
  const { ask, dialog } = useAsk();
  const row = data?.slices.find((each) => each.id === id);
  const entry = inventory?.rows.find((each) => each.id === id);
  if (!data) return error ? <Failure message={error} /> : <Empty>Loading…</Empty>;
  const mayUse = isAdmin() || (entry?.owner ? isMe(entry.owner) : false);
  return (
    <>
      <Title line={`tpu inventory slices`}>
        {entry?.alias ? `${entry.alias} ` : ""}
        {id} {row ? <State name={entry?.state ?? row.state} /> : null}
      </Title>
      <Failure message={row ? error : `No slice named ${id}.`} />
      {row ? (
        <>
          <div class="buttons">
            {isMember() && entry ? (
              <button type="button" onClick={() => ask(annotate(id, entry, reloadNotes))}>
                Edit
              </button>
            ) : null}
            {row.reserved_for && (isMe(row.reserved_for) || isAdmin()) ? (
              <button
                type="button"
                onClick={() =>
                  ask({
                    title: `Return ${id} to its pool?`,
                    action: "Release",
                    line: () => `tpu reserve end ${word(id)}`,
                    body: <p>It is held for {row.reserved_for} after a failure. Other jobs may use it afterwards.</p>,
                    run: async () => {
                      await post(`/slices/${encodeURIComponent(id)}/release`);
                      reload();
                      return `released ${id}`;
                    },
                  })
                }
              >
                Release
              </button>
            ) : null}
            {row.node && isAdmin() && !row.gone_at ? (
              <button type="button" onClick={() => ask(giveBack(row, reload))}>
                Give back
              </button>
            ) : null}
            {row.provider === "local" && mayUse && !row.gone_at ? (
              <button
                type="button"
                class="danger"
                onClick={() =>
                  ask({
                    title: `Inject a fault into ${id}`,
                    action: "Inject",
                    danger: true,
                    fields: [{ name: "fault", label: "Fault", type: "select", options: FAULTS.map((name) => [name, name]) }],
                    line: ({ fault }) => `tpu doctor fault ${word(id)} ${fault}`,
                    run: async ({ fault }) => {
                      await post(`/slices/${encodeURIComponent(id)}/fault`, { fault });
                      return `injected ${fault} into ${id}`;
                    },
                  })
                }
              >
                Inject a fault
              </button>
            ) : null}
          </div>
          <Facts
            facts={[
              ["Type", typeName(row.accelerator)],
              ["Chips", row.chips],
              ["Zone", row.zone],
              ["Capacity", row.capacity],
              ["Provider", row.provider],
              ...(row.node ? ([["Adopted TPU VM", row.node]] as [string, string][]) : []),
              ["Pool", <PoolLink name={row.pool} />],
              ["Job", row.job_id ? <JobLink id={row.job_id} name={entry?.job_name} /> : "–"],
              ["Owner", entry?.owner ?? "–"],
              ["Hosts", `${row.hosts_seen} of ${row.hosts} up`],
              ["Requested", <Age at={row.requested_at} />],
              ["Ready", <Age at={row.ready_at} />],
              ["Last check", <Age at={entry?.last_check ?? null} />],
              ["Belongs to", entry?.belongs_to || "–"],
              ["Note", entry?.note || "–"],
              ["Reason", row.reason || "–"],
              ...(row.reserved_for ? ([["Held for", `${row.reserved_for}`]] as [string, string][]) : []),
            ]}
          />
        </>
      ) : null}
      <ResourceEvents path={eventsOf("slice", id)} line={`tpu events slice:${word(id)}`} />
      {dialog}
    </>
  );
}
