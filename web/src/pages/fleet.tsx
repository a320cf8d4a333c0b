import type { SliceRow } from "../api";
import { plural, tone } from "../format";
import { Age, Empty, Failure, State, useData } from "../parts";
import { recent, session } from "../state";
import { EventTable } from "./job";

interface Status {
  version: string;
  controller: {
    holder: string;
    providers: { name: string; answered_at: string | null; problems: { call: string; message: string; zone: string | null }[] }[];
  } | null;
  controller_stale: boolean;
  jobs: Record<string, number>;
  waiting_for: { message?: string; zone?: string; provider?: string }[];
}

export function Fleet() {
  const { data, error } = useData<{ slices: SliceRow[] }>("/slices", recent.value[0]?.seq ?? 0, 10);
  const { data: status } = useData<Status>("/status", 0, 10);
  const slices = data?.slices ?? [];
  const zones = [...new Set(slices.map((slice) => slice.zone))].sort();
  const problems = status?.controller?.providers.flatMap((provider) => provider.problems.map((each) => ({ provider: provider.name, ...each }))) ?? [];
  return (
    <>
      <header class="title">
        <h1>Fleet</h1>
        <p>
          {plural(slices.length, "slice")}, {plural(slices.reduce((sum, slice) => sum + slice.chips, 0), "chip")}
          {status ? ` · tpufleet ${status.version} · leader ${status.controller?.holder ?? "none"}` : ""}
        </p>
      </header>
      <Failure message={error || (status?.controller_stale ? "No controller is running: jobs are not placed." : "")} />
      {problems.map((each) => (
        <p class="failure" key={each.provider + each.call + each.zone}>
          {each.provider} {each.zone ?? ""}: {each.call} fails: {each.message}
        </p>
      ))}
      {slices.length === 0 && data ? <Empty>No slices. They are created when jobs need them.</Empty> : null}
      <div class="map">
        {zones.map((zone) => {
          const here = slices.filter((slice) => slice.zone === zone);
          return (
            <section key={zone} aria-label={`zone ${zone}`}>
              <h2>
                {zone} <span class="quiet">{plural(here.reduce((sum, slice) => sum + slice.chips, 0), "chip")}</span>
              </h2>
              <ul>
                {here.map((slice) => (
                  <li key={slice.id} class={tone(slice.state)} title={`${slice.id}: ${slice.state}, ${slice.reason}`}>
                    {slice.job_id ? <a href={`#/jobs/${slice.job_id}`}>{slice.accelerator}</a> : <span>{slice.accelerator}</span>}
                    <small>
                      {slice.state} · {slice.capacity} · {slice.hosts_seen}/{slice.hosts}
                    </small>
                  </li>
                ))}
              </ul>
            </section>
          );
        })}
      </div>
      {slices.length ? (
        <table>
          <thead>
            <tr>
              <th>Slice</th>
              <th>Type</th>
              <th>Zone</th>
              <th>Capacity</th>
              <th>State</th>
              <th>Pool</th>
              <th>Job</th>
              <th>Hosts</th>
              <th>Since</th>
            </tr>
          </thead>
          <tbody>
            {slices.map((slice) => (
              <tr key={slice.id}>
                <td data-label="Slice">{slice.id}</td>
                <td data-label="Type">{slice.accelerator}</td>
                <td data-label="Zone">{slice.zone}</td>
                <td data-label="Capacity">{slice.capacity}</td>
                <td data-label="State">
                  <State name={slice.state} /> <span class="reason" title={slice.reason}>{slice.reason}</span>
                </td>
                <td data-label="Pool">{slice.pool ?? "–"}</td>
                <td data-label="Job">{slice.job_id ? <a href={`#/jobs/${slice.job_id}`}>{slice.job_id}</a> : "–"}</td>
                <td data-label="Hosts">
                  {slice.hosts_seen}/{slice.hosts}
                </td>
                <td data-label="Since">
                  <Age at={slice.ready_at ?? slice.requested_at} />
                </td>
              </tr>
            ))}
          </tbody>
        </table>
      ) : null}
    </>
  );
}

export function EventsPage() {
  const { data, error } = useData<{ events: Parameters<typeof EventTable>[0]["events"] }>("/events?limit=300&newest=1");
  const known = new Set(recent.value.map((event) => event.seq));
  const older = [...(data?.events ?? [])].reverse().filter((event) => !known.has(event.seq));
  return (
    <>
      <header class="title">
        <h1>Events</h1>
      </header>
      <Failure message={error} />
      <EventTable events={[...recent.value, ...older]} jobs />
    </>
  );
}

export function Pools() {
  const { data, error } = useData<{ pools: Record<string, unknown>[] }>("/pools", 0, 15);
  const pools = data?.pools ?? [];
  return (
    <>
      <header class="title">
        <h1>Pools</h1>
      </header>
      <Failure message={error} />
      {data && !pools.length ? <Empty>No pools. An admin creates one with `tpu pool set`.</Empty> : null}
      {pools.map((pool) => (
        <section key={String(pool["name"])} class="card">
          <h2>{String(pool["name"])}</h2>
          <dl>
            {Object.entries(pool).map(([name, value]) => (
              <div key={name}>
                <dt>{name.replaceAll("_", " ")}</dt>
                <dd>{Array.isArray(value) ? value.join(", ") || "any" : String(value ?? "–")}</dd>
              </div>
            ))}
          </dl>
        </section>
      ))}
    </>
  );
}

interface CostRow {
  job_id: string | null;
  job_name: string;
  owner: string;
  accelerator: string;
  capacity: string;
  chip_hours: number;
  running: number;
  lost: number;
  unknown: number;
}

export function Costs() {
  const { data, error } = useData<{ rows: CostRow[] }>("/costs", 0, 30);
  const rows = [...(data?.rows ?? [])].sort((a, b) => b.chip_hours - a.chip_hours);
  const users = new Map<string, { hours: number; lost: number }>();
  for (const row of rows) {
    const sum = users.get(row.owner) ?? { hours: 0, lost: 0 };
    users.set(row.owner, { hours: sum.hours + row.chip_hours, lost: sum.lost + row.lost });
  }
  const most = Math.max(...[...users.values()].map((sum) => sum.hours), 1e-9);
  return (
    <>
      <header class="title">
        <h1>Chip hours</h1>
        <p>Prices: `tpu cost`.</p>
      </header>
      <Failure message={error} />
      {data && !rows.length ? <Empty>No slice has been used yet.</Empty> : null}
      <ul class="bars" aria-label="Chip hours by user">
        {[...users].sort((a, b) => b[1].hours - a[1].hours).map(([user, sum]) => (
          <li key={user}>
            <span>{user || "idle slices"}</span>
            <meter value={sum.hours} max={most} aria-label={`chip hours of ${user || "idle slices"}`} />
            <span>
              {sum.hours.toFixed(2)} h{sum.lost > 0.005 ? `, ${sum.lost.toFixed(2)} h repeated` : ""}
            </span>
          </li>
        ))}
      </ul>
      {rows.length ? (
        <table>
          <thead>
            <tr>
              <th>Job</th>
              <th>Owner</th>
              <th>Type</th>
              <th>Capacity</th>
              <th>Chip hours</th>
              <th>Running</th>
              <th>Lost</th>
            </tr>
          </thead>
          <tbody>
            {rows.slice(0, 200).map((row, index) => (
              <tr key={index}>
                <td data-label="Job">{row.job_id ? <a href={`#/jobs/${row.job_id}`}>{row.job_name}</a> : "(idle)"}</td>
                <td data-label="Owner">{row.owner || "–"}</td>
                <td data-label="Type">{row.accelerator}</td>
                <td data-label="Capacity">{row.capacity}</td>
                <td data-label="Chip hours">{row.chip_hours.toFixed(2)}</td>
                <td data-label="Running">{row.running.toFixed(2)}</td>
                <td data-label="Lost">{row.lost.toFixed(2)}</td>
              </tr>
            ))}
          </tbody>
        </table>
      ) : null}
    </>
  );
}

interface TokenRow {
  id: string;
  user: string;
  note: string;
  created_at: string;
  last_used_at: string | null;
  expires_at: string | null;
}

export function People() {
  const admin = session.value?.role === "admin";
  const { data: users, error } = useData<{ users: { name: string; role: string }[] }>(admin ? "/users" : null);
  const { data: tokens } = useData<{ tokens: TokenRow[] }>("/tokens");
  return (
    <>
      <header class="title">
        <h1>{admin ? "Users and tokens" : "My tokens"}</h1>
      </header>
      <Failure message={error} />
      {users ? (
        <table>
          <thead>
            <tr>
              <th>User</th>
              <th>Role</th>
            </tr>
          </thead>
          <tbody>
            {users.users.map((user) => (
              <tr key={user.name}>
                <td data-label="User">{user.name}</td>
                <td data-label="Role">{user.role}</td>
              </tr>
            ))}
          </tbody>
        </table>
      ) : null}
      <table>
        <thead>
          <tr>
            <th>Token</th>
            <th>User</th>
            <th>Note</th>
            <th>Created</th>
            <th>Used</th>
            <th>Expires</th>
          </tr>
        </thead>
        <tbody>
          {tokens?.tokens.map((token) => (
            <tr key={token.id}>
              <td data-label="Token">{token.id}</td>
              <td data-label="User">{token.user}</td>
              <td data-label="Note">{token.note}</td>
              <td data-label="Created">
                <Age at={token.created_at} />
              </td>
              <td data-label="Used">
                <Age at={token.last_used_at} />
              </td>
              <td data-label="Expires">{token.expires_at ? <Age at={token.expires_at} /> : "never"}</td>
            </tr>
          ))}
        </tbody>
      </table>
    </>
  );
}

