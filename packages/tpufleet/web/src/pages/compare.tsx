import type { Comparison } from "../api";
import { number, word } from "../format";
import { Empty, Failure, JobLink, State, Table, Title, useData } from "../parts";
import { Curves } from "./curves";
import { CodeDiff, ConfigDiff } from "./diff";

export function Compare({ ids }: { ids: string[] }) {
  const { data, error } = useData<Comparison>(`/compare?jobs=${encodeURIComponent(ids.join(","))}`);
  if (!data) return error ? <Failure message={error} /> : <Empty>Loading…</Empty>;
  const { jobs } = data;
  const metrics = Object.entries(data.metrics);
  return (
    <>
      <Title line={`tpu compare ${ids.map(word).join(" ")}`}>Compare</Title>
      <Table
        name="compared"
        rows={jobs.map((job, index) => ({ job, index }))}
        rowKey={({ job }) => job.id}
        columns={[
          { name: "Job", cell: ({ job }) => <JobLink id={job.id} name={job.name} /> },
          { name: "Owner", cell: ({ job }) => job.owner },
          { name: "State", cell: ({ job }) => <State name={job.state} /> },
          ...metrics.map(([name, values]) => ({
            name,
            kind: "number" as const,
            cell: ({ index }: { index: number }) => {
              const value = values[index];
              return value === null || value === undefined ? "–" : number(value);
            },
          })),
        ]}
      />
      <section aria-labelledby="curves">
        <h2 id="curves">Metrics</h2>
        <Curves ids={jobs.map((job) => job.id)} />
      </section>
      <section aria-labelledby="config">
        <h2 id="config">Configuration</h2>
        <ConfigDiff config={data.config} names={jobs.map((job) => job.name)} />
      </section>
      {data.code.map((code, index) => (
        <section key={code.job_id} aria-labelledby={`code-${index}`}>
          <h2 id={`code-${index}`}>
            Code of {jobs[index + 1]?.name} against {jobs[0]?.name}
          </h2>
          <CodeDiff code={code} />
        </section>
      ))}
    </>
  );
}
