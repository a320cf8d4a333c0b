import type { AuditEntry } from "../api";
import { clock } from "../format";
import { Cli, Empty, Failure, Table, useData } from "../parts";

/** Entries of the audit log, newest first: all of them, or those of a token. */
export function AuditLog({ path, line }: { path: string; line: string }) {
  const { data, error } = useData<{ entries: AuditEntry[] }>(`${path}?limit=200`, 0, 30);
  return (
    <>
      <div class="controls">
        <Cli line={line} />
      </div>
      <Failure message={error} />
      {data && !data.entries.length ? <Empty>No entries.</Empty> : null}
      <Table
        name="audit"
        rows={data?.entries ?? []}
        rowKey={(entry) => String(entry.seq)}
        columns={[
          { name: "Time", cell: (entry) => clock(entry.at) },
          { name: "User", cell: (entry) => entry.actor },
          { name: "Action", cell: (entry) => `${entry.action}${entry.outcome === "refused" ? ", refused" : ""}` },
          { name: "Target", kind: "text", cell: (entry) => entry.target },
          { name: "Detail", kind: "text", cell: (entry) => entry.detail || "–" },
          { name: "Address", cell: (entry) => entry.address },
        ]}
      />
    </>
  );
}
