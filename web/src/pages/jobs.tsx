import { useEffect, useMemo, useRef, useState } from "preact/hooks";
import { type JobRow, get, jobPath, newJobId, patch, post } from "../api";
import { plural } from "../format";
import { Age, Cli, Confirm, Empty, Failure, Progress, State, Tags } from "../parts";
import { attempt, changed, go, mayChange, query, session } from "../state";

const PAGE = 100;
const VIEWS: [string, string][] = [
  ["Mine", "owner:me"],
  ["Live", "state:live"],
  ["Failed, 7 days", "state:failed since:7d"],
  ["All", ""],
];

export function Jobs() {
  const text = query.value.get("q") ?? "";
  const [rows, setRows] = useState<JobRow[] | null>(null);
  const [next, setNext] = useState<string | null>(null);
  const [error, setError] = useState("");
  const [chosen, setChosen] = useState<Set<string>>(new Set());
  const [asking, setAsking] = useState<"cancel" | "rerun" | null>(null);
  const box = useRef<HTMLInputElement>(null);

  const load = async (before: string | null) => {
    const parameters = new URLSearchParams({ limit: String(PAGE) });
    if (text) parameters.set("q", text);
    if (before) parameters.set("before", before);
    try {
      const page = await get<{ jobs: JobRow[]; next?: string | null }>(`/jobs?${parameters}`);
      setRows((old) => (before && old ? [...old, ...page.jobs] : page.jobs));
      setNext(page.next ?? null);
      setError("");
    } catch (failure) {
      setError(failure instanceof Error ? failure.message : String(failure));
    }
  };
  useEffect(() => {
    setChosen(new Set());
    void load(null);
  }, [text]);
  // Jobs that are not on the page yet: load it again, not more than once in two seconds.
  const unknown = useMemo(() => {
    const known = new Set(rows?.map((row) => row.id));
    return [...changed.value.keys()].filter((id) => !known.has(id)).length;
  }, [changed.value, rows]);
  useEffect(() => {
    if (!unknown || rows === null || rows.length > PAGE) return;
    const timer = setTimeout(() => void load(null), 2000);
    return () => clearTimeout(timer);
  }, [unknown]);
  useEffect(() => {
    const focus = (event: KeyboardEvent) => {
      if (event.key === "/" && !(event.target instanceof HTMLInputElement)) {
        event.preventDefault();
        box.current?.focus();
      }
    };
    addEventListener("keydown", focus);
    return () => removeEventListener("keydown", focus);
  }, []);

  const shown = (rows ?? []).map((row) => {
    const newer = changed.value.get(row.id);
    return newer ? { ...row, ...newer } : row;
  });
  const mine = shown.filter((row) => chosen.has(row.id) && mayChange(row.owner));
  const toggle = (id: string) =>
    setChosen((old) => {
      const copy = new Set(old);
      if (!copy.delete(id)) copy.add(id);
      return copy;
    });
  const cancel = () =>
    attempt(async () => {
      for (const row of mine) await post(`${jobPath(row.id)}/cancel`);
      setChosen(new Set());
      return `cancelled ${plural(mine.length, "job")}`;
    });
  const rerun = () =>
    attempt(async () => {
      for (const row of mine) await post(`${jobPath(row.id)}/rerun`, { id: newJobId(), changes: {} });
      setChosen(new Set());
      return `submitted ${plural(mine.length, "job")} again`;
    });
  const tag = () => {
    const name = prompt("Tag to add to the chosen jobs");
    if (name)
      void attempt(async () => {
        for (const row of mine) await patch(jobPath(row.id), { add_tags: [name] });
        await load(null);
        return `tagged ${plural(mine.length, "job")}`;
      });
  };
  const ids = mine.map((row) => row.id).join(" ");

  return (
    <>
      <h1 class="hidden">Jobs</h1>
      <form
        class="search"
        role="search"
        onSubmit={(event) => {
          event.preventDefault();
          go(`/jobs?q=${encodeURIComponent(box.current?.value ?? "")}`);
        }}
      >
        <input
          ref={box}
          key={text}
          type="search"
          defaultValue={text}
          aria-label="Search jobs"
          placeholder="owner:me tag:sweep-* loss<0.3 since:7d state:failed   ( / )"
        />
        <nav aria-label="Views">
          {VIEWS.map(([name, view]) => (
            <a key={name} href={`#/jobs?q=${encodeURIComponent(view)}`} aria-current={view === text ? "page" : undefined}>
              {name}
            </a>
          ))}
        </nav>
      </form>
      <Failure message={error} />
      {chosen.size ? (
        <div class="bulk" role="toolbar" aria-label="Chosen jobs">
          <span>{plural(chosen.size, "job")} chosen</span>
          {chosen.size > 1 ? <a href={`#/compare/${[...chosen].join("/")}`}>Compare</a> : null}
          <button type="button" disabled={!mine.length} onClick={() => setAsking("cancel")}>
            Cancel
          </button>
          <button type="button" disabled={!mine.length} onClick={() => setAsking("rerun")}>
            Rerun
          </button>
          <button type="button" disabled={!mine.length} onClick={tag}>
            Tag
          </button>
          {mine.length < chosen.size ? <span class="quiet">{chosen.size - mine.length} are not yours to change</span> : null}
        </div>
      ) : null}
      {rows === null ? (
        error ? null : <Empty>Loading…</Empty>
      ) : shown.length === 0 ? (
        text ? (
          <Empty>No job matches {text}.</Empty>
        ) : (
          <Empty>
            No jobs yet. Submit one: <Cli line="tpu run v5e-16 -- python train.py" />
          </Empty>
        )
      ) : (
        <table class="jobs">
          <thead>
            <tr>
              <th class="tick">
                <span class="hidden">Choose</span>
              </th>
              <th>Job</th>
              <th>State</th>
              <th>Progress</th>
              <th>Slices</th>
              <th>Owner</th>
              <th>Submitted</th>
            </tr>
          </thead>
          <tbody>
            {shown.map((row) => (
              <tr key={row.id} data-job={row.id}>
                <td class="tick">
                  <input type="checkbox" aria-label={`choose ${row.name}`} checked={chosen.has(row.id)} onChange={() => toggle(row.id)} />
                </td>
                <td data-label="Job">
                  <a href={`#/jobs/${row.id}`}>{row.name}</a> <Tags tags={row.tags} />
                </td>
                <td data-label="State">
                  <State name={row.state} /> <span class="reason" title={row.reason}>{row.reason}</span>
                </td>
                <td data-label="Progress">
                  <Progress row={row} />
                </td>
                <td data-label="Slices">
                  {row.slices > 1 ? `${row.slices} × ` : ""}
                  {row.accelerator}
                </td>
                <td data-label="Owner">{row.owner === session.value?.user ? "me" : row.owner}</td>
                <td data-label="Submitted">
                  <Age at={row.submitted_at} />
                </td>
              </tr>
            ))}
          </tbody>
        </table>
      )}
      {next ? (
        <button type="button" class="more" onClick={() => void load(next)}>
          Older jobs
        </button>
      ) : null}
      {asking ? (
        <Confirm
          title={asking === "cancel" ? `Cancel ${plural(mine.length, "job")}?` : `Run ${plural(mine.length, "job")} again?`}
          action={asking === "cancel" ? "Cancel jobs" : "Rerun"}
          line={`tpu ${asking} ${ids}`}
          onYes={asking === "cancel" ? cancel : rerun}
          onClose={() => setAsking(null)}
        >
          <ul class="names">
            {mine.slice(0, 20).map((row) => (
              <li key={row.id}>
                {row.name} <span class="quiet">{row.id}</span>
              </li>
            ))}
            {mine.length > 20 ? <li>and {mine.length - 20} more</li> : null}
          </ul>
        </Confirm>
      ) : null}
    </>
  );
}
