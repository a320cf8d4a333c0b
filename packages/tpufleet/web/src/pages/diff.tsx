import type { CodeDifference } from "../api";
import { Empty } from "../parts";

/** What differs in the code of a job, file by file. */
export function CodeDiff({ code }: { code: CodeDifference }) {
  if (code.same) return <Empty>The code is the same.</Empty>;
  return (
    <>
      {code.message ? <p class="warning">{code.message}</p> : null}
      {code.files.map((file, index) => (
        <details key={file.path} class="diff" open={index < 5}>
          <summary>
            {file.path} <span class="quiet">{file.change}</span>
          </summary>
          {file.diff ? <Lines text={file.diff} /> : <p class="quiet">Binary or large: not shown.</p>}
        </details>
      ))}
    </>
  );
}

function Lines({ text }: { text: string }) {
  return (
    <pre tabIndex={0}>
      {text.split("\n").map((line, index) => {
        const head = line.startsWith("+++") || line.startsWith("---") || line.startsWith("@@");
        const kind = head ? "quiet" : line.startsWith("+") ? "added" : line.startsWith("-") ? "deleted" : "";
        return (
          <span key={index} class={kind}>
            {line || " "}
          </span>
        );
      })}
    </pre>
  );
}

/** Fields that differ between jobs, one column for each. */
export function ConfigDiff({ config, names }: { config: Record<string, (string | null)[]>; names: string[] }) {
  const fields = Object.entries(config);
  if (!fields.length) return <Empty>The configuration is the same.</Empty>;
  return (
    <div class="wide">
      <table class="config">
        <thead>
          <tr>
            <th>Field</th>
            {names.map((name, index) => (
              <th key={index}>{name}</th>
            ))}
          </tr>
        </thead>
        <tbody>
          {fields.map(([field, values]) => (
            <tr key={field}>
              <td data-label="Field">{field}</td>
              {values.map((value, index) => (
                <td key={index} data-label={names[index]} class="text">
                  <code>{value ?? "–"}</code>
                </td>
              ))}
            </tr>
          ))}
        </tbody>
      </table>
    </div>
  );
}
