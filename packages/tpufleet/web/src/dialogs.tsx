// Questions before actions. Every one shows the command that does the same.
import type { ComponentChildren } from "preact";
import { useEffect, useRef, useState } from "preact/hooks";
import { ApiError } from "./api";
import { Cli, Failure } from "./parts";
import { say, session } from "./state";

export interface Field {
  name: string;
  label: string;
  type?: "text" | "number" | "datetime-local" | "select" | "textarea" | "folder";
  value?: string;
  options?: [value: string, text: string][];
  required?: boolean;
  min?: number;
  hint?: string;
  /** Only asked when another field has this value. */
  when?: [name: string, value: string];
}

export type Values = Record<string, string>;

export interface Question {
  title: string;
  action: string;
  danger?: boolean;
  fields?: Field[];
  line: (values: Values) => string;
  /** A warning about what was entered; it does not keep anybody from trying. */
  check?: (values: Values) => string;
  /** What happened, to be shown. An error is shown in the dialog, which stays open. */
  run: (values: Values, files: File[]) => Promise<string>;
  body?: ComponentChildren;
}

/** Escape and the left button say no. */
export function Ask({ question, onClose }: { question: Question; onClose: () => void }) {
  const { title, action, danger, fields = [], line, check, run, body } = question;
  const dialog = useRef<HTMLDialogElement>(null);
  const [values, setValues] = useState<Values>(() =>
    Object.fromEntries(fields.map((field) => [field.name, field.value ?? field.options?.[0]?.[0] ?? ""])),
  );
  const [error, setError] = useState("");
  const [busy, setBusy] = useState(false);
  const [files, setFiles] = useState<File[]>([]);
  useEffect(() => dialog.current?.showModal(), []);
  const change = (name: string, value: string) => setValues((old) => ({ ...old, [name]: value }));
  const submit = async () => {
    setBusy(true);
    try {
      say(await run(values, files));
      dialog.current?.close();
    } catch (failure) {
      if (failure instanceof ApiError && failure.status === 401) session.value = null;
      setError(failure instanceof Error ? failure.message : String(failure));
    } finally {
      setBusy(false);
    }
  };
  const warning = check?.(values);
  return (
    <dialog ref={dialog} onClose={onClose} aria-labelledby="ask-title">
      <form
        onSubmit={(event) => {
          event.preventDefault();
          void submit();
        }}
      >
        <h2 id="ask-title">{title}</h2>
        {body}
        {fields
          .filter(({ when }) => !when || values[when[0]] === when[1])
          .map((field) => (
            <Input
              key={field.name}
              field={field}
              value={values[field.name] ?? ""}
              onChange={(value) => change(field.name, value)}
              onFiles={setFiles}
            />
          ))}
        {warning ? (
          <p class="warning" role="status">
            {warning}
          </p>
        ) : null}
        <Failure message={error} />
        <Cli line={line(values)} />
        <div class="buttons">
          <button type="button" onClick={() => dialog.current?.close()}>
            {danger ? "Keep" : "Close"}
          </button>
          <button type="submit" class={danger ? "danger" : "primary"} disabled={busy}>
            {action}
          </button>
        </div>
      </form>
    </dialog>
  );
}

interface InputProps {
  field: Field;
  value: string;
  onChange: (value: string) => void;
  onFiles: (files: File[]) => void;
}

function Input({ field, value, onChange, onFiles }: InputProps) {
  const id = `field-${field.name}`;
  const hint = field.hint ? `${id}-hint` : undefined;
  const common = { id, name: field.name, value, required: field.required, "aria-describedby": hint };
  return (
    <div class="field">
      <label for={id}>{field.label}</label>
      {field.type === "select" ? (
        <select {...common} onChange={(event) => onChange(event.currentTarget.value)}>
          {field.options?.map(([option, text]) => (
            <option key={option} value={option}>
              {text}
            </option>
          ))}
        </select>
      ) : field.type === "folder" ? (
        <input
          id={id}
          type="file"
          aria-describedby={hint}
          ref={(input) => input?.setAttribute("webkitdirectory", "")}
          onChange={(event) => {
            const chosen = [...(event.currentTarget.files ?? [])];
            onFiles(chosen);
            onChange(chosen[0]?.webkitRelativePath.split("/")[0] ?? "");
          }}
        />
      ) : field.type === "textarea" ? (
        <textarea {...common} rows={3} onInput={(event) => onChange(event.currentTarget.value)} />
      ) : (
        <input {...common} type={field.type ?? "text"} min={field.min} onInput={(event) => onChange(event.currentTarget.value)} />
      )}
      {field.hint ? <small id={hint}>{field.hint}</small> : null}
    </div>
  );
}

/** `ask(question)` opens it; render `dialog` somewhere. */
export function useAsk(): { ask: (question: Question) => void; dialog: ComponentChildren } {
  const [question, setQuestion] = useState<Question | null>(null);
  return {
    ask: setQuestion,
    dialog: question ? <Ask key={question.title} question={question} onClose={() => setQuestion(null)} /> : null,
  };
}

/** Runs one request for each item, and counts what failed. */
export async function each<T>(items: T[], action: (item: T) => Promise<unknown>, done: (count: number) => string): Promise<string> {
  const errors: string[] = [];
  for (const item of items) {
    try {
      await action(item);
    } catch (failure) {
      errors.push(failure instanceof Error ? failure.message : String(failure));
    }
  }
  if (errors.length) throw new Error(`${done(items.length - errors.length)}; ${errors.length} failed: ${errors[0]}`);
  return done(items.length);
}
