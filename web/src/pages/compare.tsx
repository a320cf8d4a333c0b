import { useEffect, useState } from "preact/hooks";
import { type JobDetail, get, jobPath } from "../api";
import { number } from "../format";
import { Cli, Empty, Failure, State } from "../parts";
import { Curves } from "./curves";

export function Compare({ ids }: { ids: string[] }) {
  const [details, setDetails] = useState<JobDetail[] | null>(null);
  const [error, setError] = useState("");
  const key = ids.join("/");
  useEffect(() => {
    Promise.all(ids.map((id) => get<JobDetail>(jobPath(id))))
      .then(setDetails)
      .catch((failure: Error) => setError(failure.message));
  }, [key]);
  if (error) return <Failure message={error} />;
  if (!details) return <Empty>Loading…</Empty>;
  const fields = [...new Set(details.flatMap((each) => Object.keys(each.job.spec)))];
  const differing = fields.filter((name) => new Set(details.map((each) => JSON.stringify(each.job.spec[name]))).size > 1);
  const metrics = [...new Set(details.flatMap((each) => Object.keys(each.row.progress?.metrics ?? {})))].sort();
  return (
    <>
      <header class="title">
        <h1>Compare</h1>
        <Cli line={`tpu compare ${ids.join(" ")}`} />
      </header>
      <table>
        <thead>
          <tr>
            <th>Field</th>
            {details.map((each) => (
              <th key={each.row.id}>
                <a href={`#/jobs/${each.row.id}`}>{each.row.name}</a> <State name={each.row.state} />
              </th>
            ))}
          </tr>
        </thead>
        <tbody>
          <tr>
            <td data-label="Field">step</td>
            {details.map((each) => (
              <td key={each.row.id} data-label={each.row.name}>
                {each.row.progress?.step ?? "–"}
              </td>
            ))}
          </tr>
          {metrics.map((name) => (
            <tr key={name}>
              <td data-label="Field">{name}</td>
              {details.map((each) => {
                const value = each.row.progress?.metrics?.[name];
                return (
                  <td key={each.row.id} data-label={each.row.name}>
                    {value === undefined ? "–" : number(value)}
                  </td>
                );
              })}
            </tr>
          ))}
          {differing.map((name) => (
            <tr key={name} class="differs">
              <td data-label="Field">{name}</td>
              {details.map((each) => (
                <td key={each.row.id} data-label={each.row.name}>
                  <code>{JSON.stringify(each.job.spec[name]) ?? "–"}</code>
                </td>
              ))}
            </tr>
          ))}
        </tbody>
      </table>
      <Curves ids={ids} />
    </>
  );
}
