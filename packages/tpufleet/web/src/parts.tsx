// Parts that several pages share.
import type { ComponentChildren } from "preact";
import { useEffect, useRef, useState } from "preact/hooks";
import { ApiError, type FleetEvent, type JobRow, get, isTemporary, retry } from "./api";
import { age, clock, duration, number, tone } from "./format";
import { now, recent, say, session } from "./state";

export function State({ name }: { name: string }) {
  return <span class={`state ${tone(name)}`}>{name.replaceAll("_", " ")}</span>;
}

export function Age({ at }: { at: string | null }) {
  return (
    <time dateTime={at ?? undefined} title={at ? new Date(at).toLocaleString() : ""}>
      {age(at, now.value)}
    </time>
  );
}

const SILENT_AFTER = 10 * 60_000; // longer than a step and most checkpoints

export function Progress({ row, metrics: most = 1 }: { row: JobRow; metrics?: number }) {
  const { progress } = row;
  const last = progress?.at ?? progress?.output_at;
  const silence = last && row.state === "running" ? now.value - Date.parse(last) : 0;
  const silent = silence > SILENT_AFTER;
  const silentFor = silent ? <span class="amber">{duration(silence)} ago</span> : null;
  if (silent && !progress?.at) return <span class="amber">no output for {duration(silence)}</span>;
  if (!progress || progress.step === null) {
    const saved = progress?.checkpoint_step ?? null;
    return (
      <span class="progress">
        <span class="quiet">{progress?.message || (saved === null ? "–" : `checkpoint ${number(saved)}`)}</span>
        {silentFor}
      </span>
    );
  }
  const metrics = Object.entries(progress.metrics ?? {}).sort(([a], [b]) => Number(b === "loss") - Number(a === "loss"));
  return (
    <span class="progress">
      {progress.total ? (
        <progress value={Math.min(progress.step, progress.total)} max={progress.total} aria-label={`progress of ${row.name}`} />
      ) : null}
      <span>
        {progress.total ? "" : "step "}
        {number(progress.step)}
        {progress.total ? `/${number(progress.total)}` : ""}
      </span>
      {metrics.slice(0, most).map(([name, value]) => (
        <span class="quiet" key={name}>
          {name} {number(value)}
        </span>
      ))}
      {silentFor}
    </span>
  );
}

export function Tags({ tags }: { tags: string[] }) {
  return (
    <>
      {tags.map((tag) => (
        <a class="tag" key={tag} href={`#/jobs?q=${encodeURIComponent(`tag:${tag}`)}`}>
          {tag}
        </a>
      ))}
    </>
  );
}

export const JobLink = ({ id, name }: { id: string; name?: string }) => <a href={`#/jobs/${id}`}>{name || id}</a>;

export const SliceLink = ({ id }: { id: string }) => <a href={`#/slices/${encodeURIComponent(id)}`}>{id}</a>;

/** Text that is cut off where there is little room. */
export const Clip = ({ title, children }: { title: string; children: ComponentChildren }) => (
  <span class="clip" title={title}>
    {children}
  </span>
);

export const PoolLink = ({ name }: { name: string | null }) =>
  name ? <a href={`#/pools/${encodeURIComponent(name)}`}>{name}</a> : <>–</>;

export function Empty({ children }: { children: ComponentChildren }) {
  return <p class="empty">{children}</p>;
}

/** The command that does the same. */
export function Cli({ line, raw = false }: { line: string; raw?: boolean }) {
  const copy = async () => {
    try {
      await navigator.clipboard.writeText(line);
      say("copied");
    } catch {
      say(`the browser does not allow copying here; select the text: ${line}`, true);
    }
  };
  return (
    <button type="button" class={raw ? "cli raw" : "cli"} title={raw ? "Copy" : "Copy this command"} onClick={() => void copy()}>
      <code>{line}</code>
    </button>
  );
}

export function Title({ children, line, more }: { children: ComponentChildren; line?: string; more?: ComponentChildren }) {
  return (
    <header class="title">
      <div class="line">
        <h1>{children}</h1>
        {line ? <Cli line={line} /> : null}
      </div>
      {more}
    </header>
  );
}

export function Tabs({ base, names, current, label }: { base: string; names: readonly string[]; current: string; label: string }) {
  return (
    <nav class="tabs" aria-label={label}>
      {names.map((name) => (
        <a key={name} href={`#/${base}/${name}`} aria-current={name === current ? "page" : undefined}>
          {name}
        </a>
      ))}
    </nav>
  );
}

export interface Column<T> {
  name: string;
  cell: (row: T) => ComponentChildren;
  kind?: "number" | "acts" | "text";
}

/** A table that becomes a list of cards on a phone. */
export function Table<T>({
  rows,
  columns,
  rowKey,
  name,
  label,
}: {
  rows: T[];
  columns: (Column<T> | null)[];
  rowKey: (row: T) => string;
  name?: string;
  label?: string;
}) {
  const shown = columns.filter((column): column is Column<T> => column !== null);
  return (
    <div class="wide">
      <table class={name} aria-label={label}>
        <thead>
          <tr>
            {shown.map((column) => (
              <th key={column.name} class={column.kind} scope="col">
                {column.kind === "acts" ? <span class="hidden">{column.name}</span> : column.name}
              </th>
            ))}
          </tr>
        </thead>
        <tbody>
          {rows.map((row) => (
            <tr key={rowKey(row)} data-row={rowKey(row)}>
              {shown.map((column) => (
                <td key={column.name} class={column.kind} data-label={column.kind === "acts" ? "" : column.name}>
                  <span class="cell">{column.cell(row)}</span>
                </td>
              ))}
            </tr>
          ))}
        </tbody>
      </table>
    </div>
  );
}

/** Loads data again whenever `key` changes, and every `seconds` while the page is visible. */
export function useData<T>(
  path: string | null,
  key: unknown = 0,
  seconds = 0,
): { data: T | null; error: string; reload: () => void } {
  const [data, setData] = useState<T | null>(null);
  const [error, setError] = useState("");
  const [again, setAgain] = useState(0);
  const shown = useRef(path);
  useEffect(() => {
    if (shown.current !== path) setData(null);
    shown.current = path;
    if (path === null) return;
    let current = true;
    let cancel = () => {};
    const load = async () => {
      if (document.hidden) return;
      try {
        const answer = await get<T>(path);
        if (current) (setData(() => answer), setError(""));
      } catch (failure) {
        if (failure instanceof ApiError && failure.status === 401) session.value = null;
        if (!current) return;
        setError(failure instanceof Error ? failure.message : String(failure));
        cancel();
        if (isTemporary(failure)) cancel = retry(() => void load());
      }
    };
    void load();
    const timer = seconds ? setInterval(load, seconds * 1000) : 0;
    document.addEventListener("visibilitychange", load);
    return () => {
      current = false;
      cancel();
      clearInterval(timer);
      document.removeEventListener("visibilitychange", load);
    };
  }, [path, key, seconds, again]);
  return { data, error, reload: () => setAgain((count) => count + 1) };
}

/** Changes when something happened in the fleet, after a few seconds: many browsers may be open. */
export function useFleetChange(): number {
  const newest = recent.value[0]?.seq ?? 0;
  const [seen, setSeen] = useState(newest);
  useEffect(() => {
    if (newest === seen) return;
    const newestNow = () => setSeen(recent.value[0]?.seq ?? 0);
    const timer = setTimeout(newestNow, 1500 + 2000 * Math.random());
    return () => clearTimeout(timer);
  }, [newest > seen]);
  return seen;
}

export function Failure({ message }: { message: string }) {
  return message ? (
    <p class="failure" role="alert">
      {message}
    </p>
  ) : null;
}

export function EventTable({ events, jobs = false }: { events: FleetEvent[]; jobs?: boolean }) {
  if (!events.length) return <Empty>No events.</Empty>;
  return (
    <Table
      name="events"
      rows={events}
      rowKey={(event) => String(event.seq)}
      columns={[
        { name: "Time", cell: (event) => <time dateTime={event.at}>{clock(event.at)}</time> },
        jobs
          ? {
              name: "About",
              cell: (event) =>
                event.job_id ? (
                  <JobLink id={event.job_id} />
                ) : event.slice_id ? (
                  <SliceLink id={event.slice_id} />
                ) : (
                  <PoolLink name={event.pool} />
                ),
            }
          : null,
        { name: "State", cell: (event) => <State name={event.state} /> },
        {
          name: "Message",
          kind: "text",
          cell: (event) => (
            <>
              {event.message}
              {event.by ? <span class="quiet"> (by {event.by})</span> : null}
            </>
          ),
        },
      ]}
    />
  );
}

/** The events of a slice, a pool or a user, newest first. */
export function ResourceEvents({ path, line, jobs = false }: { path: string; line: string; jobs?: boolean }) {
  const { data, error } = useData<{ events: FleetEvent[] }>(path, useFleetChange());
  return (
    <section aria-labelledby="events-title">
      <div class="line">
        <h2 id="events-title">Events</h2>
        <Cli line={line} />
      </div>
      <Failure message={error} />
      {data ? <EventTable events={[...data.events].reverse()} jobs={jobs} /> : null}
    </section>
  );
}

export function Facts({ facts }: { facts: [string, ComponentChildren][] }) {
  return (
    <dl class="facts">
      {facts.map(([name, value]) => (
        <div key={name}>
          <dt>{name}</dt>
          <dd>{value}</dd>
        </div>
      ))}
    </dl>
  );
}

/** A share of something, with the figures beside it. */
export function Share({ label, value, most, text }: { label: string; value: number; most: number; text: string }) {
  const share = most > 0 ? value / most : 0;
  return (
    <li>
      <span>{label}</span>
      <meter
        value={Math.min(value, most)}
        max={most || 1}
        low={most * 0.8}
        high={most * 0.999}
        optimum={0}
        aria-label={label}
        class={share >= 1 ? "full" : ""}
      />
      <span>{text}</span>
    </li>
  );
}
