// Parts that several pages share.
import type { ComponentChildren } from "preact";
import { useEffect, useRef, useState } from "preact/hooks";
import { ApiError, type JobRow, get } from "./api";
import { age, number, tone } from "./format";
import { now, session } from "./state";

export function State({ name }: { name: string }) {
  return <span class={`state ${tone(name)}`}>{name}</span>;
}

export function Age({ at }: { at: string | null }) {
  return (
    <time dateTime={at ?? undefined} title={at ? new Date(at).toLocaleString() : ""}>
      {age(at, now.value)}
    </time>
  );
}

export function Progress({ row }: { row: JobRow }) {
  const { progress } = row;
  if (!progress || progress.step === null) return <span class="quiet">{progress?.message || "–"}</span>;
  const metrics = Object.entries(progress.metrics ?? {}).slice(0, 2);
  return (
    <span class="progress">
      {progress.total ? (
        <progress value={Math.min(progress.step, progress.total)} max={progress.total} aria-label={`progress of ${row.name}`} />
      ) : null}
      <span>
        {number(progress.step)}
        {progress.total ? `/${number(progress.total)}` : ""}
      </span>
      {metrics.map(([name, value]) => (
        <span class="quiet" key={name}>
          {name} {number(value)}
        </span>
      ))}
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

export function Empty({ children }: { children: ComponentChildren }) {
  return <p class="empty">{children}</p>;
}

/** The command that does the same. */
export function Cli({ line }: { line: string }) {
  return (
    <button
      type="button"
      class="cli"
      title="Copy this command"
      onClick={() => void navigator.clipboard?.writeText(line)}
    >
      <code>{line}</code>
    </button>
  );
}

/** Loads data again whenever `key` changes, and every `seconds` while the page is visible. */
export function useData<T>(path: string | null, key: unknown = 0, seconds = 0): { data: T | null; error: string } {
  const [data, setData] = useState<T | null>(null);
  const [error, setError] = useState("");
  const shown = useRef(path);
  useEffect(() => {
    if (shown.current !== path) setData(null);
    shown.current = path;
    if (path === null) return;
    let current = true;
    const load = async () => {
      if (document.hidden) return;
      try {
        const answer = await get<T>(path);
        if (current) (setData(() => answer), setError(""));
      } catch (failure) {
        if (failure instanceof ApiError && failure.status === 401) session.value = null;
        if (current) setError(failure instanceof Error ? failure.message : String(failure));
      }
    };
    void load();
    const timer = seconds ? setInterval(load, seconds * 1000) : 0;
    return () => {
      current = false;
      clearInterval(timer);
    };
  }, [path, key, seconds]);
  return { data, error };
}

export function Failure({ message }: { message: string }) {
  return message ? (
    <p class="failure" role="alert">
      {message}
    </p>
  ) : null;
}

/** Asks before an action; Escape and the backdrop say no. */
export function Confirm(props: {
  title: string;
  children: ComponentChildren;
  action: string;
  line: string;
  onYes: () => void;
  onClose: () => void;
}) {
  const dialog = useRef<HTMLDialogElement>(null);
  useEffect(() => dialog.current?.showModal(), []);
  return (
    <dialog ref={dialog} onClose={props.onClose} aria-labelledby="confirm-title">
      <h2 id="confirm-title">{props.title}</h2>
      {props.children}
      <Cli line={props.line} />
      <div class="buttons">
        <button type="button" onClick={() => dialog.current?.close()}>
          Keep
        </button>
        <button
          type="button"
          class="danger"
          onClick={() => {
            props.onYes();
            dialog.current?.close();
          }}
        >
          {props.action}
        </button>
      </div>
    </dialog>
  );
}
