import { useEffect, useMemo, useRef, useState } from "preact/hooks";
import { type JobRow, type Pool, get, isTemporary, jobPath, newJobId, patch, post, retry } from "../api";
import { type Question, type Values, each, useAsk } from "../dialogs";
import { needs, plural, typeName, word } from "../format";
import { Age, Cli, Empty, Failure, JobLink, Progress, State, Tags, useData } from "../parts";
import { pack } from "../archive";
import { changed, go, isMe, isMember, mayChange, query } from "../state";

const PAGE = 100;
const VIEWS: [string, string][] = [
  ["All", ""],
  ["Mine", "owner:me"],
  ["Live", "state:live"],
  ["Failed, 7 days", "state:failed since:7d"],
];

export function Jobs() {
  const text = query.value.get("q") ?? "";
  const [rows, setRows] = useState<JobRow[] | null>(null);
  const [next, setNext] = useState<string | null>(null);
  const [error, setError] = useState("");
  const [failures, setFailures] = useState(0);
  const [chosen, setChosen] = useState<Set<string>>(new Set());
  const [cursor, setCursor] = useState(-1);
  const { ask, dialog } = useAsk();
  const { data: preferences, reload } = useData<{ views: Record<string, string> }>("/preferences");
  const { data: pools, error: noPools } = useData<{ pools: Pool[] }>(isMember() ? "/pools" : null);
  const box = useRef<HTMLInputElement>(null);
  const wanted = useRef(text);
  wanted.current = text;

  // An answer to a search that is no longer the one on the page is not shown.
  const load = async (before: string | null) => {
    const parameters = new URLSearchParams({ limit: String(PAGE) });
    if (text) parameters.set("q", text);
    if (before) parameters.set("before", before);
    try {
      const page = await get<{ jobs: JobRow[]; next?: string | null }>(`/jobs?${parameters}`);
      if (wanted.current !== text) return;
      setRows((old) => (before && old ? [...old, ...page.jobs] : page.jobs));
      setNext(page.next ?? null);
      setError("");
      setFailures(0);
    } catch (failure) {
      if (wanted.current !== text) return;
      setError(failure instanceof Error ? failure.message : String(failure));
      if (before === null && isTemporary(failure)) setFailures((count) => count + 1);
    }
  };
  useEffect(() => {
    setChosen(new Set());
    setCursor(-1);
    void load(null);
  }, [text]);
  useEffect(() => {
    if (failures) return retry(() => void load(null));
  }, [failures, text]);
  // Jobs that are not on the page yet: load it again, not more than once in two seconds.
  const unknown = useMemo(() => {
    const known = new Set(rows?.map((row) => row.id));
    return [...changed.value.keys()].filter((id) => !known.has(id)).length;
  }, [changed.value, rows]);
  useEffect(() => {
    if (!unknown || rows === null || rows.length > PAGE) return;
    const timer = setTimeout(() => void load(null), 2000);
    return () => clearTimeout(timer);
  }, [unknown, text]);

  const shown = (rows ?? []).map((row) => {
    const newer = changed.value.get(row.id);
    return newer ? { ...row, ...newer } : row;
  });
  const toggle = (id: string) =>
    setChosen((old) => {
      const copy = new Set(old);
      if (!copy.delete(id)) copy.add(id);
      return copy;
    });
  const keys = useRef<(event: KeyboardEvent) => void>(() => undefined);
  keys.current = (event) => {
    if (event.key === "Escape" && event.target === box.current) box.current?.blur();
    const typing = event.target instanceof HTMLElement && event.target.closest("input[type=search], textarea, select, dialog");
    if (typing || event.metaKey || event.ctrlKey || event.altKey) return;
    const row = shown[cursor];
    if (event.key === "/") box.current?.focus();
    else if (event.key === "j") setCursor(Math.min(shown.length - 1, cursor + 1));
    else if (event.key === "k") setCursor(Math.max(0, cursor - 1));
    else if (event.key === "x" && row) toggle(row.id);
    else if (event.key === "o" && row) go(`/jobs/${row.id}`);
    else if (event.key === "l" && row) go(`/jobs/${row.id}/logs`);
    else return;
    event.preventDefault();
  };
  useEffect(() => {
    const handle = (event: KeyboardEvent) => keys.current(event);
    addEventListener("keydown", handle);
    return () => removeEventListener("keydown", handle);
  }, []);
  useEffect(() => document.querySelector("tr.cursor")?.scrollIntoView({ block: "nearest" }), [cursor]);

  const mine = shown.filter((row) => chosen.has(row.id) && mayChange(row.owner));
  const views = [...VIEWS, ...Object.entries(preferences?.views ?? {})];
  const save = () =>
    ask({
      title: "Save this search",
      action: "Save",
      fields: [{ name: "name", label: "Name", required: true, hint: "Letters, digits, dots and dashes" }],
      line: ({ name }) => `tpu config view save ${word(name || "NAME")} ${word(text)}`,
      run: async ({ name }) => {
        await patch("/preferences", { views: { [name!]: text } });
        reload();
        return `saved the view ${name}`;
      },
    });

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
          {views.map(([name, view]) => (
            <a key={name} href={`#/jobs?q=${encodeURIComponent(view)}`} aria-current={view === text ? "page" : undefined}>
              {name}
            </a>
          ))}
          {text && !views.some(([, view]) => view === text) ? (
            <button type="button" class="link" onClick={save}>
              save
            </button>
          ) : null}
        </nav>
        {isMember() ? (
          <button
            type="button"
            disabled={!pools}
            onClick={() => pools && ask(submit(pools.pools, shown.filter((row) => isMe(row.owner)).slice(0, 20)))}
          >
            New job
          </button>
        ) : null}
      </form>
      <Failure message={error || noPools} />
      {chosen.size ? (
        <Bulk
          chosen={chosen}
          mine={mine}
          archived={/(^|\s)is:archived(\s|$)/.test(text)}
          ask={ask}
          onDone={() => {
            setChosen(new Set());
            void load(null);
          }}
        />
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
        <div class="wide">
          <table class="jobs">
            <thead>
              <tr>
                <th class="tick">
                  <input
                    type="checkbox"
                    aria-label="choose all jobs on this page"
                    checked={chosen.size > 0 && chosen.size === shown.length}
                    onChange={(event) => setChosen(new Set(event.currentTarget.checked ? shown.map((row) => row.id) : []))}
                  />
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
              {shown.map((row, index) => (
                <tr key={row.id} data-job={row.id} class={index === cursor ? "cursor" : ""}>
                  <td class="tick">
                    <input type="checkbox" aria-label={`choose ${row.name}`} checked={chosen.has(row.id)} onChange={() => toggle(row.id)} />
                  </td>
                  <td data-label="Job" class="name">
                    <span class="cell">
                      <JobLink id={row.id} name={row.name} /> <Tags tags={row.tags} />
                      {row.notes ? <span class="note" title={row.notes}>{row.notes}</span> : null}
                    </span>
                  </td>
                  <td data-label="State" class="text">
                    <span class="cell">
                      <State name={row.held_by ? "held" : row.state} />{" "}
                      <span class="reason" title={row.reason}>
                        {row.reason}
                      </span>
                    </span>
                  </td>
                  <td data-label="Progress">
                    <Progress row={row} />
                  </td>
                  <td data-label="Slices">
                    <span class="cell">
                      {needs(row)}
                      {row.pool ? <span class="quiet"> {row.pool}</span> : null}
                    </span>
                  </td>
                  <td data-label="Owner">{isMe(row.owner) ? "me" : row.owner}</td>
                  <td data-label="Submitted">
                    <Age at={row.submitted_at} />
                  </td>
                </tr>
              ))}
            </tbody>
          </table>
        </div>
      )}
      {next ? (
        <button type="button" class="more" onClick={() => void load(next)}>
          Older jobs
        </button>
      ) : null}
      {shown.length ? (
        <p class="keys">
          <kbd>/</kbd> search <kbd>j</kbd> <kbd>k</kbd> move <kbd>x</kbd> choose <kbd>o</kbd> open <kbd>l</kbd> logs
        </p>
      ) : null}
      {dialog}
    </>
  );
}

/** With a folder of this computer, with the code of an earlier job, or as a command alone. */
function submit(pools: Pool[], mine: JobRow[]): Question {
  const tags = (text: string) => text.split(/\s+/).filter(Boolean);
  const former = (values: Values) => (values["code"]!.startsWith("job:") ? values["code"]!.slice(4) : null);
  return {
    title: "New job",
    action: "Submit",
    fields: [
      { name: "type", label: "TPU type", value: pools[0] ? typeName(pools[0].accelerator) : "v5e-1", required: true },
      { name: "command", label: "Command", type: "textarea", required: true, hint: "Run by bash on every host, in the folder of the code." },
      {
        name: "code",
        label: "Code",
        type: "select",
        options: [
          ["", "none"],
          ["folder", "a folder of this computer"],
          ...mine.map((row) => [`job:${row.id}`, `that of ${row.name} (${row.id})`] as [string, string]),
        ],
      },
      { name: "folder", label: "Folder", type: "folder", when: ["code", "folder"], hint: "At most 100 MiB. What its .gitignore and .tpuignore exclude, .git and virtual environments are not sent. It is sent when you submit." },
      { name: "name", label: "Name", hint: "Empty: chosen from the command" },
      { name: "pool", label: "Pool", type: "select", options: [["", "no pool"], ...pools.map((pool) => [pool.name, `${pool.name} (${typeName(pool.accelerator)})`] as [string, string])] },
      { name: "tags", label: "Tags", hint: "Separated by spaces" },
    ],
    line: (values) =>
      [
        values["code"] === "folder" ? `cd ${word(values["folder"] || "FOLDER")} &&` : "",
        former(values) ? `tpu rerun ${former(values)} --type ${word(values["type"]!)}` : `tpu run ${word(values["type"]!)}`,
        values["name"] ? `--name ${word(values["name"])}` : "",
        values["pool"] ? `--pool ${word(values["pool"])}` : "",
        ...tags(values["tags"]!).map((tag) => `--tag ${word(tag)}`),
        `--detach -- ${values["command"] || "COMMAND"}`,
      ]
        .filter(Boolean)
        .join(" "),
    run: async (values, files) => {
      const id = newJobId();
      const name = values["name"] || `${values["command"]!.match(/[a-z][a-z0-9-]*/)?.[0] ?? "job"}-${id.slice(0, 4)}`;
      const spec: Record<string, unknown> = { name, command: values["command"], accelerator: values["type"], tags: tags(values["tags"]!) };
      if (values["pool"]) spec["pool"] = values["pool"];
      if (former(values)) {
        await post(`${jobPath(former(values)!)}/rerun`, { id, changes: spec });
      } else {
        if (values["code"] === "folder" && !files.length) throw new Error("choose a folder, or no code");
        const snapshot = values["code"] === "folder" ? (await post<{ digest: string }>("/snapshots", await pack(files))).digest : null;
        await post("/jobs", { jobs: [{ id, spec, snapshot }] });
      }
      go(`/jobs/${id}`);
      return `submitted ${name}`;
    },
  };
}

/** `archived`: the list is one of archived jobs. */
function Bulk(props: { chosen: Set<string>; mine: JobRow[]; archived: boolean; ask: (question: Question) => void; onDone: () => void }) {
  const { chosen, mine, archived, ask, onDone } = props;
  const ids = mine.map((row) => row.id);
  const ended = mine.filter((row) => row.ended_at !== null);
  const names = (rows: JobRow[]) => (
    <ul class="names">
      {rows.slice(0, 20).map((row) => (
        <li key={row.id}>
          {row.name} <span class="quiet">{row.id}</span>
        </li>
      ))}
      {rows.length > 20 ? <li>and {rows.length - 20} more</li> : null}
    </ul>
  );
  const act = (question: Omit<Question, "run" | "body">, action: (row: JobRow, values: Record<string, string>) => Promise<unknown>, done: (count: number) => string) =>
    ask({
      ...question,
      body: names(mine),
      run: async (values) => {
        try {
          return await each(mine, (row) => action(row, values), done);
        } finally {
          onDone();
        }
      },
    });
  const none = !mine.length;
  return (
    <div class="bulk" role="toolbar" aria-label="Chosen jobs">
      <span>{plural(chosen.size, "job")} chosen</span>
      {chosen.size > 1 && chosen.size <= 20 ? <a href={`#/compare/${[...chosen].join("/")}`}>Compare</a> : null}
      <button
        type="button"
        disabled={none}
        onClick={() =>
          act(
            { title: `Cancel ${plural(mine.length, "job")}?`, action: "Cancel jobs", danger: true, line: () => `tpu cancel ${ids.map(word).join(" ")}` },
            (row) => post(`${jobPath(row.id)}/cancel`),
            (count) => `cancelled ${plural(count, "job")}`,
          )
        }
      >
        Cancel
      </button>
      <button
        type="button"
        disabled={none}
        onClick={() =>
          act(
            {
              title: `Run ${plural(mine.length, "job")} again?`,
              action: "Rerun",
              line: () => ids.map((id) => `tpu rerun --detach ${word(id)}`).join("; "),
            },
            (row) => post(`${jobPath(row.id)}/rerun`, { id: newJobId(), changes: {} }),
            (count) => `submitted ${plural(count, "job")} again`,
          )
        }
      >
        Rerun
      </button>
      <button
        type="button"
        disabled={none}
        onClick={() =>
          act(
            {
              title: `Tag ${plural(mine.length, "job")}`,
              action: "Add tags",
              fields: [{ name: "tags", label: "Tags, separated by spaces", required: true }],
              line: ({ tags }) => ids.map((id) => `tpu edit ${word(id)} ${(tags || "TAG").split(/\s+/).filter(Boolean).map((tag) => `--tag ${word(tag)}`).join(" ")}`).join("; "),
            },
            (row, { tags }) => patch(jobPath(row.id), { add_tags: tags!.split(/\s+/).filter(Boolean) }),
            (count) => `tagged ${plural(count, "job")}`,
          )
        }
      >
        Tag
      </button>
      <button type="button" disabled={!ended.length} onClick={() => ask(archive(ended, archived, names(ended), onDone))}>
        {archived ? "Unarchive" : "Archive"}
      </button>
      {mine.length < chosen.size ? <span class="quiet">{plural(chosen.size - mine.length, "job")} of others</span> : null}
    </div>
  );
}

/** Lists leave archived jobs out; nothing is deleted. Or the reverse. */
function archive(rows: JobRow[], archived: boolean, body: Question["body"], onDone: () => void): Question {
  const ids = rows.map((row) => row.id);
  const verb = archived ? "unarchive" : "archive";
  return {
    title: archived ? `List ${plural(rows.length, "job")} again?` : `Archive ${plural(rows.length, "ended job")}?`,
    action: archived ? "Unarchive jobs" : "Archive jobs",
    line: () => `tpu archive ${archived ? "undo " : ""}${ids.map(word).join(" ")}`,
    body,
    run: async () => {
      const { jobs } = await post<{ jobs: JobRow[] }>(`/${verb}`, { jobs: ids });
      onDone();
      return archived ? `listed ${plural(jobs.length, "job")} again` : `archived ${plural(jobs.length, "job")}; search for is:archived to see them`;
    },
  };
}
