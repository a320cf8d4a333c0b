import { useEffect, useMemo, useRef, useState } from "preact/hooks";
import { jobPath, listen, parse } from "../api";
import { plural, word } from "../format";
import { Cli, Empty } from "../parts";

const KEPT_LINES = 20_000;
const SHOWN_LINES = 2_000; // more would make the page slow; a search looks at all of them

/** The log of one host or of all, live or finished. */
export function Logs({ id, processes, attempts }: { id: string; processes: number; attempts: number }) {
  const [host, setHost] = useState("0");
  const [attempt, setAttempt] = useState("all");
  const [lines, setLines] = useState<string[]>([]);
  const [filter, setFilter] = useState("");
  const [follow, setFollow] = useState(true);
  const [ended, setEnded] = useState(false);
  const box = useRef<HTMLDivElement>(null);
  const search = new URLSearchParams();
  if (host !== "all") search.set("host", host);
  if (attempt !== "all") search.set("attempt", attempt);
  const selection = search.toString();
  useEffect(() => {
    setLines([]);
    setEnded(false);
    let pending: string[] = [];
    let waiting = 0;
    const flush = () => {
      waiting = 0;
      const more = pending;
      pending = [];
      setLines((old) => [...old, ...more].slice(-KEPT_LINES));
    };
    const close = listen(`${jobPath(id)}/logs/stream?tail=5000&${selection}`, {
      line: (data) => {
        const line = parse<{ host: number; line: string }>(data);
        pending.push(host === "all" ? `[${line.host}] ${line.line}` : line.line);
        if (!waiting) waiting = window.setTimeout(flush, 100);
      },
      end: () => {
        close();
        setEnded(true);
      },
    });
    return () => {
      close();
      clearTimeout(waiting);
    };
  }, [id, selection]);
  const wanted = filter.toLowerCase();
  const matching = useMemo(
    () => (wanted ? lines.filter((line) => line.toLowerCase().includes(wanted)) : lines),
    [lines, wanted],
  );
  const shown = matching.slice(-SHOWN_LINES);
  useEffect(() => {
    if (follow && box.current) box.current.scrollTop = box.current.scrollHeight;
  }, [shown.length, matching, follow]);
  const options = `${host === "all" ? "" : ` --host ${host}`}${attempt === "all" ? "" : ` --attempt ${attempt}`}`;
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
        <label>
          Attempt{" "}
          <select value={attempt} onChange={(event) => setAttempt(event.currentTarget.value)}>
            <option value="all">all</option>
            {Array.from({ length: attempts }, (_, number) => (
              <option key={number} value={number}>
                {number}
              </option>
            ))}
          </select>
        </label>
        <input type="search" aria-label="Search in the log" placeholder="Search" onInput={(event) => setFilter(event.currentTarget.value)} />
        <label>
          <input type="checkbox" checked={follow} onChange={(event) => setFollow(event.currentTarget.checked)} /> Follow
        </label>
        <span class="quiet" role="status">
          {wanted ? `${plural(matching.length, "line")} of ${lines.length.toLocaleString("en")}` : plural(lines.length, "line")}
          {ended ? ", complete" : ""}
        </span>
        <a href={`/api/v1${jobPath(id)}/logs?${selection}`} download={`${id}.log`}>
          Download
        </a>
        <Cli line={`tpu logs -f ${word(id)}${options}`} />
      </div>
      {matching.length > shown.length ? <p class="quiet">The last {plural(shown.length, "line")} are shown; search to see others.</p> : null}
      <div class="log" ref={box} tabIndex={0} role="log" aria-label="Log lines">
        {shown.length ? (
          shown.map((line, index) => (
            <div key={index}>
              <Line text={line} wanted={wanted} />
            </div>
          ))
        ) : (
          <Empty>No lines{filter ? " match" : ended ? "" : " yet"}.</Empty>
        )}
      </div>
    </section>
  );
}

function Line({ text, wanted }: { text: string; wanted: string }) {
  if (!wanted) return <>{text || " "}</>;
  const at = text.toLowerCase().indexOf(wanted);
  return (
    <>
      {text.slice(0, at)}
      <mark>{text.slice(at, at + wanted.length)}</mark>
      {text.slice(at + wanted.length)}
    </>
  );
}
