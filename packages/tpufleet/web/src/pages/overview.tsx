// The first tab of a job: why it waits or how it ended, attempts, cost, hosts.
import type { CostRow, Explanation, JobDetail, JobRow, Recovery, SourceRow } from "../api";
import { jobPath } from "../api";
import { BADPUT, amount, clock, duration, number, percent, plural, tone, usd, word } from "../format";
import { Age, Cli, Empty, Facts, JobLink, Progress, SliceLink, State, Table, useData } from "../parts";
import { now } from "../state";

const ENDED = ["succeeded", "failed", "cancelled"];

export function Overview({ detail, row }: { detail: JobDetail; row: JobRow }) {
  const ended = ENDED.includes(row.state);
  const { data: why } = useData<Explanation>(`${jobPath(row.id)}/why`, row.state, ended ? 0 : 5);
  return (
    <>
      <div class="columns">
        <section aria-labelledby="why" class="card">
          <div class="line">
            <h2 id="why">Why</h2>
            <Cli line={`tpu why ${word(row.id)}`} />
          </div>
          {why ? (
            <div class="why">
              <p>
                <strong>{why.message}</strong>
              </p>
              <ul>
                {why.details.map((line) => (
                  <li key={line}>{line}</li>
                ))}
              </ul>
              {why.advice ? <p class="quiet">next: {why.advice}</p> : null}
            </div>
          ) : null}
          {row.progress ? (
            <p>
              <Progress row={row} metrics={6} />
            </p>
          ) : null}
          {row.notes ? <p class="notes">{row.notes}</p> : null}
        </section>
        <Cost id={row.id} state={row.state} ended={ended} />
      </div>
      {why?.sources.length ? <Sources sources={why.sources} /> : null}
      <section aria-labelledby="attempts">
        <h2 id="attempts">{plural(detail.attempts.length, "attempt")}</h2>
        <Timeline detail={detail} row={row} />
      </section>
      {detail.hosts.length ? (
        <section aria-labelledby="hosts">
          <h2 id="hosts">Hosts</h2>
          <Table
            rows={detail.hosts}
            rowKey={(host) => host.id}
            columns={[
              { name: "Rank", kind: "number", cell: (host) => host.process },
              { name: "Slice", cell: (host) => <SliceLink id={host.slice_id} /> },
              { name: "Address", cell: (host) => host.address },
              {
                name: "Phase",
                cell: (host) => (
                  <>
                    <State name={host.phase} /> {host.notice ? <State name={host.notice} /> : null}
                  </>
                ),
              },
              { name: "Step", kind: "number", cell: (host) => (host.progress?.step == null ? "–" : number(host.progress.step)) },
              { name: "Heartbeat", cell: (host) => <Age at={host.seen_at} /> },
            ]}
          />
        </section>
      ) : null}
      {detail.children.length ? (
        <section aria-labelledby="children">
          <h2 id="children">Resumed or rerun as</h2>
          <ul>
            {detail.children.map((child) => (
              <li key={child.id}>
                <JobLink id={child.id} name={child.name} /> <State name={child.state} />
              </li>
            ))}
          </ul>
        </section>
      ) : null}
    </>
  );
}

function Sources({ sources }: { sources: SourceRow[] }) {
  return (
    <section aria-labelledby="sources">
      <h2 id="sources">Where it may run</h2>
      <Table
        name="sources"
        rows={sources}
        rowKey={(source) => `${source.provider} ${source.zone} ${source.capacity}`}
        columns={[
          { name: "Zone", cell: (source) => source.zone },
          { name: "Capacity", cell: (source) => source.capacity },
          {
            name: "Price",
            kind: "number",
            cell: (source) =>
              source.provider === "local" ? "simulated" : source.usd_per_hour === null ? "not known" : `${usd(source.usd_per_hour)}/h`,
          },
          { name: "State", cell: (source) => <State name={source.state} /> },
          {
            name: "Answer",
            kind: "text",
            cell: (source) => (
              <>
                {source.message || "–"}
                {source.at ? (
                  <span class="quiet">
                    {" "}
                    <Age at={source.at} />
                  </span>
                ) : null}
              </>
            ),
          },
          { name: "Next try", cell: (source) => (source.retry_at ? <Age at={source.retry_at} /> : "–") },
        ]}
      />
    </section>
  );
}

function Cost({ id, state, ended }: { id: string; state: string; ended: boolean }) {
  const { data } = useData<{ rows: CostRow[] }>(`${jobPath(id)}/cost`, state, ended ? 0 : 30);
  const rows = data?.rows ?? [];
  const sum = (pick: (row: CostRow) => number) => rows.reduce((total, row) => total + pick(row), 0);
  const hours = sum((row) => row.chip_hours);
  const useful = sum((row) => row.useful);
  const spent = (kind: string) => sum((row) => row.badput[kind] ?? 0);
  const unknown = spent("unknown");
  const price = (row: CostRow) => row.usd_per_chip_hour ?? 0;
  const kinds = Object.keys(BADPUT).filter((kind) => spent(kind) > hours / 1000);
  const dollars = sum((row) => row.chip_hours * (row.usd_per_chip_hour ?? 0));
  const simulated = rows.some((row) => row.simulated);
  const unpriced = rows.some((row) => row.usd_per_chip_hour === null);
  return (
    <section aria-labelledby="cost" class="card">
      <div class="line">
        <h2 id="cost">Cost</h2>
        <Cli line="tpu cost --by job" />
      </div>
      {data && !rows.length ? <Empty>No slice has been used yet.</Empty> : null}
      {rows.length ? (
        <>
          <Facts
            facts={[
              ["Cost", `${usd(dollars)}${unpriced ? " + unpriced" : ""}${simulated ? ", simulated" : ""}`],
              ["Chip hours", amount(hours)],
              ["Goodput", hours && unknown < hours / 2 ? percent(useful / hours) : "not known"],
              ["Useful", `${amount(useful)} h`],
              ...kinds.map((kind): [string, string] => [
                capital(BADPUT[kind]!),
                `${amount(spent(kind))} h, ${usd(sum((row) => (row.badput[kind] ?? 0) * price(row)))}`,
              ]),
            ]}
          />
          <Bar parts={[["good", useful, "useful"], ["amber", hours - useful - unknown - spent("other"), "lost"], ["quiet", unknown, "unknown"]]} total={hours} />
          {unknown > 0.005 ? <p class="quiet">{amount(unknown)} chip hours ran without reporting steps.</p> : null}
        </>
      ) : null}
    </section>
  );
}

const capital = (name: string) => name.charAt(0).toUpperCase() + name.slice(1);

function Bar({ parts, total }: { parts: [tone: string, value: number, name: string][]; total: number }) {
  let from = 0;
  return (
    <svg class="share" viewBox="0 0 100 4" preserveAspectRatio="none" role="img" aria-label={parts.map(([, value, name]) => `${name} ${percent(value / (total || 1))}`).join(", ")}>
      <rect width="100" height="4" class="track" />
      {parts.map(([colour, value, name]) => {
        const width = (100 * value) / (total || 1);
        from += width;
        return <rect key={name} x={from - width} width={width} height="4" class={colour} />;
      })}
    </svg>
  );
}

function recovered({ seconds, parts, lost_steps }: Recovery): string {
  const taken = Object.entries(parts).map(([name, value]) => `${name} ${value.toFixed(1)} s`);
  const again = lost_steps ? `, ${plural(lost_steps, "step")} again` : "";
  return `next step ${seconds.toFixed(1)} s after the fault: ${taken.join(", ")}${again}`;
}

/** One bar for each attempt over the life of the job: waiting, starting, running. */
function Timeline({ detail, row }: { detail: JobDetail; row: JobRow }) {
  const begin = Date.parse(row.submitted_at);
  const end = row.ended_at ? Date.parse(row.ended_at) : now.value;
  const share = (at: number) => (100 * (at - begin)) / Math.max(end - begin, 1);
  if (!detail.attempts.length) return <Empty>It has not started yet.</Empty>;
  return (
    <>
      <ol class="timeline">
        {detail.attempts.map((each) => {
          const from = Date.parse(each.created_at);
          const running = each.running_at ? Date.parse(each.running_at) : null;
          const to = each.ended_at ? Date.parse(each.ended_at) : now.value;
          const colour = tone(each.end_reason ?? each.state);
          const recovery = detail.recoveries?.find((one) => one.attempt === each.number);
          return (
            <li key={each.number}>
              <span class="name">
                attempt {each.number} <State name={each.end_reason ?? each.state} />{" "}
                <span class="quiet">
                  {running ? `ran ${duration(to - running)}` : `starting ${duration(to - from)}`}
                  {each.slices.length < row.slices ? ` on ${each.slices.length} of ${row.slices} slices` : ""}
                  {detail.goodput?.[each.number] != null ? `, ${percent(detail.goodput[each.number]!)} useful` : ""}
                  {each.last_step !== null ? `, steps ${number(each.start_step ?? 0)} to ${number(each.last_step)}` : ""}
                  {each.end_reason && each.end_reason !== "finished" && each.checkpoint_step !== null
                    ? `, checkpoint at ${number(each.checkpoint_step)}`
                    : ""}
                </span>
              </span>
              <svg viewBox="0 0 100 4" preserveAspectRatio="none" aria-hidden="true">
                <rect x="0" width="100" height="4" class="track" />
                <rect x={share(from)} width={Math.max(0.3, share(running ?? to) - share(from))} height="4" class="starting" />
                {running ? <rect x={share(running)} width={Math.max(0.3, share(to) - share(running))} height="4" class={colour} /> : null}
              </svg>
              {each.message ? <span class="quiet">{each.message}</span> : null}
              {recovery ? <div class="quiet">{recovered(recovery)}</div> : null}
            </li>
          );
        })}
      </ol>
      <p class="axis">
        <span>{clock(row.submitted_at)} submitted</span>
        <span>
          {row.ended_at ? `${clock(row.ended_at)} ended` : "now"}, {duration(end - begin)}
        </span>
      </p>
    </>
  );
}
