import { useEffect, useMemo, useRef, useState } from "preact/hooks";
import {
  type Attempt,
  type Explanation,
  type FleetEvent,
  type JobDetail,
  type JobRow,
  jobPath,
  listen,
  newJobId,
  patch,
  post,
} from "../api";
import { clock, duration, plural, tone } from "../format";
import { Age, Cli, Confirm, Empty, Failure, Progress, State, Tags, useData } from "../parts";
import { attempt, changed, go, mayChange, now, route } from "../state";
import { Curves } from "./curves";

const ENDED = ["succeeded", "failed", "cancelled"];
const TABS = ["overview", "logs", "metrics", "events", "config"] as const;

export function JobPage({ id }: { id: string }) {
  const live = changed.value.get(id);
  const { data, error } = useData<JobDetail>(jobPath(id), live?.state, live && ENDED.includes(live.state) ? 0 : 3);
  const [asking, setAsking] = useState<"cancel" | "resume" | "rerun" | null>(null);
  const tab = route.value[2] ?? "overview";
  if (!data) return error ? <Failure message={error} /> : <Empty>Loading…</Empty>;
  const row: JobRow = live ? { ...data.row, ...live, progress: data.row.progress } : data.row;
  const ended = ENDED.includes(row.state);
  const act = () =>
    attempt(async () => {
      if (asking === "cancel") {
        await post(`${jobPath(id)}/cancel`);
        return `cancelled ${row.name}`;
      }
      const made = await post<JobRow>(`${jobPath(id)}/${asking}`, { id: newJobId(), changes: {} });
      go(`/jobs/${made.id}`);
      return `submitted ${made.name} as ${made.id}`;
    });
  return (
    <>
      <header class="title">
        <h1>
          {row.name} <State name={row.state} />
        </h1>
        <p>
          <code>{row.id}</code> · {row.owner} · {row.slices > 1 ? `${row.slices} × ` : ""}
          {row.accelerator} {row.pool ? `· pool ${row.pool} ` : ""}· <Age at={row.submitted_at} />{" "}
          {row.parent ? (
            <>
              · from <a href={`#/jobs/${row.parent}`}>{row.parent}</a>
            </>
          ) : null}
        </p>
        <p>
          <Tags tags={row.tags} />
          {mayChange(row.owner) ? <EditTags row={row} /> : null}
        </p>
        {mayChange(row.owner) ? (
          <div class="buttons">
            {ended ? null : (
              <button type="button" class="danger" onClick={() => setAsking("cancel")}>
                Cancel
              </button>
            )}
            {ended ? (
              <button type="button" onClick={() => setAsking("resume")}>
                Resume
              </button>
            ) : null}
            <button type="button" onClick={() => setAsking("rerun")}>
              Rerun
            </button>
          </div>
        ) : null}
      </header>
      <nav class="tabs" aria-label="Parts of this job">
        {TABS.map((name) => (
          <a key={name} href={`#/jobs/${id}/${name}`} aria-current={name === tab ? "page" : undefined}>
            {name}
          </a>
        ))}
      </nav>
      <Failure message={error} />
      {tab === "logs" ? (
        <Logs id={id} processes={Math.max(1, data.hosts.length)} />
      ) : tab === "metrics" ? (
        <Curves ids={[id]} />
      ) : tab === "events" ? (
        <Events id={id} state={row.state} />
      ) : tab === "config" ? (
        <Config detail={data} />
      ) : (
        <Overview detail={data} row={row} />
      )}
      {asking ? (
        <Confirm
          title={{ cancel: `Cancel ${row.name}?`, resume: `Resume ${row.name}?`, rerun: `Run ${row.name} again?` }[asking]}
          action={{ cancel: "Cancel job", resume: "Resume", rerun: "Rerun" }[asking]}
          line={`tpu ${asking} ${id}`}
          onYes={act}
          onClose={() => setAsking(null)}
        >
          <p>
            {
              {
                cancel: "Its processes get SIGTERM, and its slices are released. Checkpoints stay.",
                resume: "A new job continues from the last checkpoint, with the same code.",
                rerun: "A new job starts from the beginning, with the same code.",
              }[asking]
            }
          </p>
        </Confirm>
      ) : null}
    </>
  );
}

function EditTags({ row }: { row: JobRow }) {
  const edit = () => {
    const text = prompt("Tags, separated by spaces", row.tags.join(" "));
    if (text !== null)
      void attempt(async () => {
        await patch(jobPath(row.id), { tags: text.split(/\s+/).filter(Boolean) });
        return "changed the tags";
      });
  };
  return (
    <button type="button" class="link" onClick={edit}>
      edit tags
    </button>
  );
}

function Overview({ detail, row }: { detail: JobDetail; row: JobRow }) {
  const { data: why } = useData<Explanation>(`${jobPath(row.id)}/why`, row.state, ENDED.includes(row.state) ? 0 : 5);
  return (
    <>
      <section aria-labelledby="why">
        <h2 id="why">Why</h2>
        {why ? (
          <div class="why">
            <p>
              <strong>{why.message}</strong>
            </p>
            <ul>{why.details?.map((line) => <li key={line}>{line}</li>)}</ul>
            {why.advice ? <p class="quiet">next: {why.advice}</p> : null}
          </div>
        ) : null}
        <p>
          <Progress row={row} />
        </p>
      </section>
      <section aria-labelledby="attempts">
        <h2 id="attempts">{plural(detail.attempts.length, "attempt")}</h2>
        <Timeline detail={detail} row={row} />
      </section>
      {detail.hosts.length ? (
        <section aria-labelledby="hosts">
          <h2 id="hosts">Hosts</h2>
          <table>
            <thead>
              <tr>
                <th>Rank</th>
                <th>Slice</th>
                <th>Address</th>
                <th>Phase</th>
                <th>Step</th>
                <th>Heartbeat</th>
              </tr>
            </thead>
            <tbody>
              {detail.hosts.map((host) => (
                <tr key={host.id}>
                  <td data-label="Rank">{host.process}</td>
                  <td data-label="Slice">{host.slice_id}</td>
                  <td data-label="Address">{host.address}</td>
                  <td data-label="Phase">
                    <State name={host.phase} /> {host.notice ? <State name={host.notice} /> : null}
                  </td>
                  <td data-label="Step">{host.progress?.step ?? "–"}</td>
                  <td data-label="Heartbeat">
                    <Age at={host.seen_at} />
                  </td>
                </tr>
              ))}
            </tbody>
          </table>
        </section>
      ) : null}
      {detail.children.length ? (
        <section aria-labelledby="children">
          <h2 id="children">Resumed or rerun as</h2>
          <ul>
            {detail.children.map((child) => (
              <li key={child.id}>
                <a href={`#/jobs/${child.id}`}>{child.name}</a> <State name={child.state} />
              </li>
            ))}
          </ul>
        </section>
      ) : null}
    </>
  );
}

interface FullAttempt extends Attempt {
  running_at: string | null;
  start_step: number | null;
  last_step: number | null;
  message: string;
}

/** One bar for each attempt over the life of the job: waiting, starting, running. */
function Timeline({ detail, row }: { detail: JobDetail; row: JobRow }) {
  const begin = Date.parse(row.submitted_at);
  const end = row.ended_at ? Date.parse(row.ended_at) : now.value;
  const span = Math.max(end - begin, 1);
  const share = (at: number) => (100 * (at - begin)) / span;
  if (!detail.attempts.length) return <Empty>It has not started yet.</Empty>;
  return (
    <ol class="timeline">
      {(detail.attempts as FullAttempt[]).map((each) => {
        const from = Date.parse(each.created_at);
        const running = each.running_at ? Date.parse(each.running_at) : null;
        const to = each.ended_at ? Date.parse(each.ended_at) : now.value;
        const colour = tone(each.end_reason ?? each.state);
        return (
          <li key={each.number}>
            <span class="name">
              attempt {each.number} <State name={each.end_reason ?? each.state} /> {duration(to - (running ?? from))}
            </span>
            <svg viewBox="0 0 100 4" preserveAspectRatio="none" aria-hidden="true">
              <rect x="0" width="100" height="4" class="track" />
              <rect x={share(from)} width={Math.max(0.3, share(running ?? to) - share(from))} height="4" class="starting" />
              {running ? (
                <rect x={share(running)} width={Math.max(0.3, share(to) - share(running))} height="4" class={colour} />
              ) : null}
            </svg>
            <span class="quiet">{each.message}</span>
          </li>
        );
      })}
    </ol>
  );
}

function Logs({ id, processes }: { id: string; processes: number }) {
  const [host, setHost] = useState("0");
  const [lines, setLines] = useState<string[]>([]);
  const [filter, setFilter] = useState("");
  const [follow, setFollow] = useState(true);
  const box = useRef<HTMLDivElement>(null);
  useEffect(() => {
    setLines([]);
    let pending: string[] = [];
    let waiting = 0;
    const flush = () => {
      waiting = 0;
      const more = pending;
      pending = [];
      setLines((old) => [...old, ...more].slice(-20_000));
    };
    const search = new URLSearchParams({ tail: "5000" });
    if (host !== "all") search.set("host", host);
    const close = listen(`${jobPath(id)}/logs/stream?${search}`, {
      line: (data) => {
        const line = JSON.parse(data) as { host: number; line: string };
        pending.push(host === "all" ? `[${line.host}] ${line.line}` : line.line);
        if (!waiting) waiting = window.setTimeout(flush, 100);
      },
      end: () => close(),
    });
    return () => {
      close();
      clearTimeout(waiting);
    };
  }, [id, host]);
  const shown = useMemo(() => {
    const wanted = filter.toLowerCase();
    return wanted ? lines.filter((line) => line.toLowerCase().includes(wanted)) : lines;
  }, [lines, filter]);
  useEffect(() => {
    if (follow && box.current) box.current.scrollTop = box.current.scrollHeight;
  }, [shown, follow]);
  return (
    <section aria-label="Logs">
      <div class="controls">
        <label>
          Host{" "}
          <select value={host} onChange={(event) => setHost(event.currentTarget.value)}>
            {Array.from({ length: processes }, (_, rank) => (
              <option key={rank} value={rank}>
                {rank}
              </option>
            ))}
            <option value="all">all</option>
          </select>
        </label>
        <input type="search" aria-label="Search in the log" placeholder="Search" onInput={(event) => setFilter(event.currentTarget.value)} />
        <label>
          <input type="checkbox" checked={follow} onChange={(event) => setFollow(event.currentTarget.checked)} /> Follow
        </label>
        <Cli line={`tpu logs -f ${id}${host === "0" ? "" : ` --host ${host}`}`} />
      </div>
      <div class="log" ref={box} tabIndex={0} role="log" aria-label="Log lines">
        {shown.length ? shown.map((line, index) => <div key={index}>{line || " "}</div>) : <Empty>No lines{filter ? " match" : " yet"}.</Empty>}
      </div>
    </section>
  );
}

function Events({ id, state }: { id: string; state: string }) {
  const { data, error } = useData<{ events: FleetEvent[] }>(`${jobPath(id)}/events?limit=1000`, state, 5);
  return (
    <>
      <Failure message={error} />
      <EventTable events={data?.events ?? []} />
    </>
  );
}

export function EventTable({ events, jobs = false }: { events: FleetEvent[]; jobs?: boolean }) {
  if (!events.length) return <Empty>Nothing has happened yet.</Empty>;
  return (
    <table class="events">
      <thead>
        <tr>
          <th>Time</th>
          {jobs ? <th>Job</th> : null}
          <th>State</th>
          <th>Message</th>
        </tr>
      </thead>
      <tbody>
        {events.map((event) => (
          <tr key={event.seq}>
            <td data-label="Time">{clock(event.at)}</td>
            {jobs ? <td data-label="Job">{event.job_id ? <a href={`#/jobs/${event.job_id}`}>{event.job_id}</a> : "–"}</td> : null}
            <td data-label="State">
              <State name={event.state} />
            </td>
            <td data-label="Message">
              {event.message}
              {event.by ? <span class="quiet"> (by {event.by})</span> : null}
            </td>
          </tr>
        ))}
      </tbody>
    </table>
  );
}

function Config({ detail }: { detail: JobDetail }) {
  const parent = detail.row.parent;
  const { data: origin } = useData<JobDetail>(parent ? jobPath(parent) : null);
  const mine = detail.job.spec;
  const theirs = origin?.job.spec;
  const names = [...new Set([...Object.keys(mine), ...Object.keys(theirs ?? {})])];
  return (
    <section aria-label="Configuration">
      <table>
        <thead>
          <tr>
            <th>Field</th>
            <th>Value</th>
            {theirs ? <th>Parent</th> : null}
          </tr>
        </thead>
        <tbody>
          {names.map((name) => {
            const value = JSON.stringify(mine[name]);
            const other = theirs ? JSON.stringify(theirs[name]) : value;
            return (
              <tr key={name} class={value === other ? "" : "differs"}>
                <td data-label="Field">{name}</td>
                <td data-label="Value">
                  <code>{value ?? "–"}</code>
                </td>
                {theirs ? (
                  <td data-label="Parent">
                    <code>{value === other ? "same" : (other ?? "–")}</code>
                  </td>
                ) : null}
              </tr>
            );
          })}
        </tbody>
      </table>
    </section>
  );
}
