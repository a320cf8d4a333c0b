import type { ComponentChildren } from "preact";
import { type JobRow, type Pool, type SliceRow, type User, eventsOf, get, put, remove } from "../api";
import { type Question, useAsk } from "../dialogs";
import { duration, plural, span, typeName, word } from "../format";
import { Age, Cli, Empty, Facts, Failure, JobLink, PoolLink, ResourceEvents, SliceLink, State, Table, Tabs, Title, useData, useFleetChange } from "../parts";
import { go, isAdmin, route } from "../state";

export function Pools() {
  const change = useFleetChange();
  const { data, error, reload } = useData<{ pools: Pool[] }>("/pools", change, 15);
  const { data: slices } = useData<{ slices: SliceRow[] }>("/slices", change, 15);
  const { ask, dialog } = useAsk();
  const pools = data?.pools ?? [];
  const of = (pool: Pool) => slices?.slices.filter((each) => each.pool === pool.name) ?? [];
  return (
    <>
      <Title line="tpu pool list">Pools</Title>
      <Failure message={error} />
      {isAdmin() ? (
        <div class="controls">
          <button type="button" class="primary" onClick={() => ask(edit(null, reload))}>
            Create a pool
          </button>
        </div>
      ) : null}
      {data && !pools.length ? <Empty>No pools. An admin creates one with `tpu pool create`.</Empty> : null}
      {pools.length ? (
        <Table
          name="pools"
          rows={pools}
          rowKey={(pool) => pool.name}
          columns={[
            { name: "Pool", cell: (pool) => <PoolLink name={pool.name} /> },
            { name: "Type", cell: (pool) => typeName(pool.accelerator) },
            { name: "Provider", cell: (pool) => pool.provider },
            { name: "Slices", kind: "number", cell: (pool) => `${of(pool).length} of ${pool.largest}` },
            { name: "In use", kind: "number", cell: (pool) => of(pool).filter((each) => each.job_id).length },
            { name: "Zones", kind: "text", cell: (pool) => pool.zones.join(", ") || "any" },
            { name: "Capacity", cell: (pool) => pool.capacity.join(", ") },
            { name: "Members", kind: "text", cell: (pool) => pool.members.join(", ") || "all users" },
          ]}
        />
      ) : null}
      {dialog}
    </>
  );
}

const TABS = ["configuration", "slices", "events"] as const;

export function PoolPage({ name }: { name: string }) {
  const change = useFleetChange();
  const { data: pool, error, reload } = useData<Pool>(`/pools/${encodeURIComponent(name)}`, change, 30);
  const { data: slices } = useData<{ slices: SliceRow[] }>(`/slices?pool=${encodeURIComponent(name)}`, change, 15);
  const { ask, dialog } = useAsk();
  const tab = route.value[2] ?? "configuration";
  if (!pool) return error ? <Failure message={error} /> : <Empty>Loading…</Empty>;
  const rows = slices?.slices ?? [];
  return (
    <>
      <Title
        line={`tpu pool show ${word(name)}`}
        more={
          <p>
            {rows.length} of {plural(pool.largest, "slice")} · {typeName(pool.accelerator)} · <a href={`#/queue?pool=${encodeURIComponent(name)}`}>queue</a> ·{" "}
            <a href={`#/jobs?q=${encodeURIComponent(`pool:${name}`)}`}>jobs</a> · <a href="#/reservations">reservations</a>
          </p>
        }
      >
        {name}
      </Title>
      {isAdmin() ? (
        <div class="buttons">
          <button type="button" onClick={() => ask(edit(pool, reload))}>
            Edit
          </button>
          <button
            type="button"
            class="danger"
            onClick={() =>
              ask({
                title: `Delete pool ${name}?`,
                action: "Delete pool",
                danger: true,
                line: () => `tpu pool delete ${word(name)} --yes`,
                body: <p>Its slices are released and its reservations end. A pool that live jobs use cannot be deleted.</p>,
                run: async () => {
                  await remove(`/pools/${encodeURIComponent(name)}`);
                  go("/pools");
                  return `deleted pool ${name}`;
                },
              })
            }
          >
            Delete
          </button>
        </div>
      ) : null}
      <Tabs base={`pools/${encodeURIComponent(name)}`} names={TABS} current={tab} label="Parts of this pool" />
      <Failure message={error} />
      {tab === "events" ? (
        <ResourceEvents path={eventsOf("pool", name)} line={`tpu events pool:${word(name)}`} />
      ) : tab === "slices" ? (
        rows.length ? (
          <Table
            rows={rows}
            rowKey={(each) => each.id}
            columns={[
              { name: "Slice", cell: (each) => <SliceLink id={each.id} /> },
              { name: "Zone", cell: (each) => each.zone },
              { name: "State", cell: (each) => <State name={each.state} /> },
              { name: "Job", cell: (each) => (each.job_id ? <JobLink id={each.job_id} /> : "–") },
              { name: "Hosts", kind: "number", cell: (each) => `${each.hosts_seen}/${each.hosts}` },
              { name: "Since", cell: (each) => <Age at={each.ready_at ?? each.requested_at} /> },
            ]}
          />
        ) : (
          <Empty>No slices now. They are created when jobs need them.</Empty>
        )
      ) : (
        <>
          <Facts facts={facts(pool)} />
          <Cli line={createLine(pool)} />
        </>
      )}
      {dialog}
    </>
  );
}

const time = (iso: string) => (span(iso) ? duration(span(iso)) : "none");

function facts(pool: Pool): [string, ComponentChildren][] {
  const pod = Object.entries(pool.pod).filter(([, value]) => value && Object.keys(Object(value)).length !== 0);
  return [
    ["Type", typeName(pool.accelerator)],
    ["Provider", pool.provider],
    ["Most slices", pool.largest],
    ["Kept ready", pool.smallest],
    ["Zones, best first", pool.zones.join(", ") || "those of the provider"],
    ["Capacity, best first", pool.capacity.join(", ")],
    ["Members", pool.members.join(", ") || "all users"],
    ["Slices per user", pool.slices_per_user ?? "no limit"],
    ["Higher priority takes slices", pool.supersede ? "yes" : "no"],
    ["Held after a failure", time(pool.hold_after_failure)],
    ["Idle slices released after", time(pool.idle_after)],
    ...pod.map(([name, value]): [string, string] => [`Pod ${name.replaceAll("_", " ")}`, typeof value === "string" ? value : JSON.stringify(value)]),
  ];
}

const short = (iso: string) => `${Math.round(span(iso) / 1000)}s`;

function createLine(pool: Pool): string {
  return [
    `tpu pool create ${word(pool.name)} ${typeName(pool.accelerator)} --provider ${pool.provider} --largest ${pool.largest}`,
    pool.smallest ? `--smallest ${pool.smallest}` : "",
    ...pool.zones.map((zone) => `--zone ${zone}`),
    ...pool.capacity.map((kind) => `--capacity ${kind}`),
    ...pool.members.map((member) => `--member ${word(member)}`),
    pool.slices_per_user ? `--per-user ${pool.slices_per_user}` : "",
    pool.supersede ? "--supersede" : "",
    span(pool.hold_after_failure) ? `--hold-after-failure ${short(pool.hold_after_failure)}` : "",
    span(pool.idle_after) === 600_000 ? "" : `--idle-after ${short(pool.idle_after)}`,
  ]
    .filter(Boolean)
    .join(" ");
}

const list = (text: string) => text.split(/[\s,]+/).filter(Boolean);

/** Queued jobs that fail if the pool is changed: it gets another type, or no longer admits their owner. */
async function failing(before: Pool, wanted: Pool): Promise<JobRow[]> {
  const sameType = typeName(before.accelerator) === typeName(wanted.accelerator);
  if (sameType && before.members.join() === wanted.members.join()) return [];
  const queued = await get<{ jobs: JobRow[] }>(`/jobs?pool=${encodeURIComponent(before.name)}&state=queued,waiting,recovering&limit=10000`);
  if (!queued.jobs.length) return [];
  const { users } = await get<{ users: User[] }>("/users");
  const admitted = new Set([...wanted.members, ...users.filter((user) => user.role === "admin").map((user) => user.name)]);
  return queued.jobs.filter(
    (job) => typeName(job.accelerator) !== typeName(wanted.accelerator) || (wanted.members.length && !admitted.has(job.owner)),
  );
}

/** Create a pool, or change one. */
function edit(pool: Pool | null, done: () => void): Question {
  let confirmed = "";
  const wanted = (values: Record<string, string>): Pool => ({
    name: pool?.name ?? values["name"]!,
    provider: values["provider"]!,
    accelerator: values["accelerator"]!,
    largest: Number(values["largest"]),
    smallest: Number(values["smallest"]),
    zones: list(values["zones"]!),
    capacity: list(values["capacity"]!),
    members: list(values["members"]!),
    slices_per_user: values["per_user"] ? Number(values["per_user"]) : null,
    supersede: values["supersede"] === "yes",
    hold_after_failure: `PT${Number(values["hold"]) * 60}S`,
    idle_after: `PT${Number(values["idle"]) * 60}S`,
    pod: pool?.pod ?? {},
  });
  const inMinutes = (iso: string | undefined, usual: string) => (iso ? String(span(iso) / 60_000) : usual);
  return {
    title: pool ? `Edit pool ${pool.name}` : "Create a pool",
    action: pool ? "Save" : "Create",
    fields: [
      ...(pool ? [] : [{ name: "name", label: "Name", required: true }]),
      { name: "accelerator", label: "TPU type", value: pool ? typeName(pool.accelerator) : "v5e-16", required: true },
      {
        name: "provider", label: "Provider", type: "select", value: pool?.provider ?? "local",
        options: [["local", "local (simulated)"], ["tpu-vm", "tpu-vm"], ["gke", "gke"]],
      },
      { name: "largest", label: "Most slices", type: "number", min: 1, value: String(pool?.largest ?? 1), required: true },
      { name: "smallest", label: "Kept ready", type: "number", min: 0, value: String(pool?.smallest ?? 0), required: true },
      { name: "zones", label: "Zones, best first", value: pool?.zones.join(" ") ?? "", hint: "Empty: those of the provider" },
      { name: "capacity", label: "Capacity, best first", value: pool?.capacity.join(" ") ?? "spot", required: true },
      { name: "members", label: "Members", value: pool?.members.join(" ") ?? "", hint: "Empty: all users" },
      { name: "per_user", label: "Slices per user", type: "number", min: 1, value: pool?.slices_per_user ? String(pool.slices_per_user) : "", hint: "Empty: no limit" },
      { name: "supersede", label: "Higher priority takes slices", type: "select", value: pool?.supersede ? "yes" : "no", options: [["no", "no"], ["yes", "yes"]] },
      { name: "hold", label: "Held after a failure, minutes", type: "number", min: 0, value: inMinutes(pool?.hold_after_failure, "0"), required: true },
      { name: "idle", label: "Idle slices released after, minutes", type: "number", min: 1, value: inMinutes(pool?.idle_after, "10"), required: true },
    ],
    line: (values) => createLine(wanted(values)),
    run: async (values) => {
      const body = wanted(values);
      const jobs = pool && confirmed !== JSON.stringify(body) ? await failing(pool, body) : [];
      if (jobs.length) {
        confirmed = JSON.stringify(body);
        const owners = [...new Set(jobs.map((job) => job.owner))].sort().join(", ");
        throw new Error(`This fails ${jobs.length} queued job${jobs.length > 1 ? "s" : ""} in the pool (of ${owners}). Save again to do it.`);
      }
      await put(`/pools/${encodeURIComponent(body.name)}`, body);
      done();
      return `saved pool ${body.name}`;
    },
  };
}
