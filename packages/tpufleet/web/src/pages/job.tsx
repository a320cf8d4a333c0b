import { type Comparison, type FleetEvent, type JobDetail, type JobRow, jobPath, newJobId, patch, post } from "../api";
import { type Question, type Values, useAsk } from "../dialogs";
import { needs, typeName, word } from "../format";
import { Age, Cli, Empty, EventTable, Failure, JobLink, PoolLink, State, Tabs, Tags, useData } from "../parts";
import { changed, go, mayChange, route } from "../state";
import { Curves } from "./curves";
import { CodeDiff, ConfigDiff } from "./diff";
import { Logs } from "./logs";
import { Overview } from "./overview";

const ENDED = ["succeeded", "failed", "cancelled"];

export function JobPage({ id }: { id: string }) {
  const live = changed.value.get(id);
  const { data, error, reload } = useData<JobDetail>(jobPath(id), live?.state, live && ENDED.includes(live.state) ? 0 : 3);
  const { ask, dialog } = useAsk();
  const tab = route.value[2] ?? "overview";
  if (!data) return error ? <Failure message={error} /> : <Empty>Loading…</Empty>;
  const row: JobRow = live ? { ...data.row, ...live, progress: data.row.progress } : data.row;
  const ended = ENDED.includes(row.state);
  const tabs = ["overview", "logs", "metrics", "events", "config", ...(row.parent ? ["diff"] : [])];
  return (
    <>
      <header class="title">
        <h1>
          {row.name} <State name={row.held_by ? "held" : row.state} />
        </h1>
        <p>
          <code>{row.id}</code> · <a href={`#/jobs?q=${encodeURIComponent(`owner:${row.owner}`)}`}>{row.owner}</a> · {size(data, row)}{" "}
          {row.pool ? (
            <>
              · pool <PoolLink name={row.pool} />{" "}
            </>
          ) : null}
          {row.priority ? `· priority ${row.priority} ` : ""}· <Age at={row.submitted_at} />{" "}
          {row.parent ? (
            <>
              · from <JobLink id={row.parent} />
            </>
          ) : null}
        </p>
        <p>
          <Tags tags={row.tags} />
        </p>
        {mayChange(row.owner) ? (
          <div class="buttons">
            {ended ? (
              <button type="button" onClick={() => ask(resubmit("resume", data))}>
                Resume
              </button>
            ) : (
              <button type="button" class="danger" onClick={() => ask(cancel(row))}>
                Cancel
              </button>
            )}
            <button type="button" onClick={() => ask(resubmit("rerun", data))}>
              Rerun
            </button>
            <button type="button" onClick={() => ask(edit(row, reload))}>
              Edit
            </button>
          </div>
        ) : null}
      </header>
      <Tabs base={`jobs/${id}`} names={tabs} current={tab} label="Parts of this job" />
      <Failure message={error} />
      {tab === "logs" ? (
        <Logs id={id} processes={data.processes} attempts={data.attempts.length} />
      ) : tab === "metrics" ? (
        <>
          <Cli line={`tpu compare ${word(id)}`} />
          <Curves ids={[id]} />
        </>
      ) : tab === "events" ? (
        <Events id={id} state={row.state} />
      ) : tab === "config" ? (
        <Config detail={data} />
      ) : tab === "diff" && row.parent ? (
        <Diff id={id} parent={row.parent} />
      ) : (
        <Overview detail={data} row={row} />
      )}
      {dialog}
    </>
  );
}

/** Of an elastic job: `3 of 2–4 × v5e-16`. */
function size({ job, attempts }: JobDetail, row: JobRow): string {
  const range = job.spec["slices"] as { min: number; max: number } | number | undefined;
  if (typeof range !== "object") return needs(row);
  const newest = attempts.at(-1);
  const used = newest && !newest.ended_at ? `${newest.slices.length} of ` : "";
  return `${used}${range.min}–${range.max} × ${typeName(row.accelerator)}`;
}

function cancel(row: JobRow): Question {
  return {
    title: `Cancel ${row.name}?`,
    action: "Cancel job",
    danger: true,
    line: () => `tpu cancel ${word(row.id)}`,
    body: <p>Its processes get SIGTERM, and its slices are released. Checkpoints stay.</p>,
    run: async () => {
      await post(`${jobPath(row.id)}/cancel`);
      return `cancelled ${row.name}`;
    },
  };
}

/** A new job, from the checkpoint or from the beginning, with changes. */
function resubmit(verb: "resume" | "rerun", { job, row }: JobDetail): Question {
  const type = typeName(row.accelerator);
  const command = ((job.spec["command"] as string[] | undefined) ?? []).map(word).join(" ");
  return {
    title: verb === "resume" ? `Resume ${row.name}?` : `Run ${row.name} again?`,
    action: verb === "resume" ? "Resume" : "Rerun",
    fields: [
      { name: "type", label: "TPU type", value: type, required: true },
      { name: "command", label: "Command", type: "textarea", value: command, required: true },
      { name: "tags", label: "Tags", value: row.tags.join(" ") },
    ],
    line: (values) => {
      const parts = [`tpu ${verb} --detach`];
      if (values["type"] !== type) parts.push(`--type ${word(values["type"]!)}`);
      for (const tag of split(values["tags"]!)) if (!row.tags.includes(tag)) parts.push(`--tag ${word(tag)}`);
      parts.push(row.id);
      if (values["command"] !== command) parts.push(`-- ${values["command"]}`);
      return parts.join(" ");
    },
    body: (
      <p>
        {verb === "resume"
          ? "A new job continues from the last checkpoint, with the same code."
          : "A new job starts from the beginning, with the same code."}
      </p>
    ),
    run: async (values) => {
      const changes: Record<string, unknown> = {};
      if (values["type"] !== type) changes["accelerator"] = values["type"];
      if (values["command"] !== command) changes["command"] = values["command"];
      if (values["tags"] !== row.tags.join(" ")) changes["tags"] = split(values["tags"]!);
      const made = await post<JobRow>(`${jobPath(row.id)}/${verb}`, { id: newJobId(), changes });
      go(`/jobs/${made.id}`);
      return `submitted ${made.name} as ${made.id}`;
    },
  };
}

const split = (text: string) => text.split(/\s+/).filter(Boolean);

function edit(row: JobRow, done: () => void): Question {
  const before: Values = { name: row.name, tags: row.tags.join(" "), notes: row.notes, priority: String(row.priority) };
  const differs = (values: Values, name: string) => values[name] !== before[name];
  return {
    title: `Edit ${row.name}`,
    action: "Save",
    fields: [
      { name: "name", label: "Name", value: before["name"], required: true },
      { name: "tags", label: "Tags", value: before["tags"], hint: "Separated by spaces" },
      { name: "notes", label: "Notes", type: "textarea", value: before["notes"] },
      { name: "priority", label: "Priority", type: "number", value: before["priority"], hint: "Larger goes first" },
    ],
    line: (values) => {
      const options = [];
      if (differs(values, "tags")) options.push(...split(values["tags"]!).map((tag) => `--tag ${word(tag)}`));
      if (differs(values, "notes")) options.push(`--note ${word(values["notes"]!)}`);
      if (differs(values, "priority")) options.push(`--priority ${values["priority"]}`);
      if (differs(values, "name")) options.push(`--name ${word(values["name"]!)}`);
      return options.length ? `tpu edit ${row.id} ${options.join(" ")}` : `tpu show ${row.id}`;
    },
    run: async (values) => {
      const changes: Record<string, unknown> = {};
      if (differs(values, "name")) changes["name"] = values["name"];
      if (differs(values, "tags")) changes["tags"] = split(values["tags"]!);
      if (differs(values, "notes")) changes["notes"] = values["notes"];
      if (differs(values, "priority")) changes["priority"] = Number(values["priority"]);
      await patch(jobPath(row.id), changes);
      done();
      return `changed ${row.name}`;
    },
  };
}

function Events({ id, state }: { id: string; state: string }) {
  const { data, error } = useData<{ events: FleetEvent[] }>(`${jobPath(id)}/events?limit=1000`, state, 5);
  return (
    <>
      <Cli line={`tpu events ${word(id)}`} />
      <Failure message={error} />
      <EventTable events={data?.events ?? []} />
    </>
  );
}

function Config({ detail }: { detail: JobDetail }) {
  const fields = Object.entries(detail.job.spec).filter(([, value]) => !isEmpty(value));
  return (
    <section aria-label="Configuration">
      <Cli line={`tpu show ${word(detail.row.id)}`} />
      <div class="wide">
        <table class="config">
          <thead>
            <tr>
              <th>Field</th>
              <th>Value</th>
            </tr>
          </thead>
          <tbody>
            {fields.map(([name, value]) => (
              <tr key={name}>
                <td data-label="Field">{name}</td>
                <td data-label="Value" class="text">
                  <code>{typeof value === "string" ? value : JSON.stringify(value)}</code>
                </td>
              </tr>
            ))}
          </tbody>
        </table>
      </div>
    </section>
  );
}

function isEmpty(value: unknown): boolean {
  if (value === null || value === undefined || value === "") return true;
  return typeof value === "object" && Object.keys(value).length === 0;
}

function Diff({ id, parent }: { id: string; parent: string }) {
  const { data, error } = useData<Comparison>(`/compare?jobs=${parent},${id}`);
  if (!data) return error ? <Failure message={error} /> : <Empty>Loading…</Empty>;
  return (
    <>
      <Cli line={`tpu compare ${word(parent)} ${word(id)}`} />
      <h2>Configuration</h2>
      <ConfigDiff config={data.config} names={["parent", "this job"]} />
      <h2>Code</h2>
      {data.code.map((code) => (
        <CodeDiff key={code.job_id} code={code} />
      ))}
    </>
  );
}
