import { type QueueEntry, jobPath, post } from "../api";
import { type Question, useAsk } from "../dialogs";
import { amount, minutes, needs, word } from "../format";
import { Empty, Failure, JobLink, PoolLink, State, Table, Title, useData, useFleetChange } from "../parts";
import { go, isAdmin, isMe, mayChange, now, query, session } from "../state";

/** Jobs that wait, in the order in which they are placed. */
export function Queue() {
  const mine = query.value.get("mine") !== null;
  const pool = query.value.get("pool") ?? "";
  const filter = new URLSearchParams();
  if (mine) filter.set("owner", session.value?.user ?? "");
  if (pool) filter.set("pool", pool);
  const { data, error, reload } = useData<{ entries: QueueEntry[] }>(`/queue?${filter}`, useFleetChange(), 15);
  const { ask, dialog } = useAsk();
  const entries = data?.entries ?? [];
  const queues = [...new Set(entries.map((entry) => entry.queue))];
  const line = `tpu queue${pool ? ` --pool ${word(pool)}` : ""}${mine ? " --user me" : ""}`;
  return (
    <>
      <Title
        line={line}
        more={<p>Higher priority goes first; then users who used fewer chips lately; then first in, first out.</p>}
      >
        Queue
      </Title>
      <div class="controls">
        <label>
          <input type="checkbox" checked={mine} onChange={() => go(`/queue?${pool ? `pool=${pool}` : ""}${mine ? "" : "&mine="}`)} /> My jobs
        </label>
        {pool ? (
          <a href="#/queue">
            pool {pool} <span aria-hidden="true">×</span>
            <span class="hidden">show all pools</span>
          </a>
        ) : null}
      </div>
      <Failure message={error} />
      {data && !entries.length ? <Empty>No jobs wait.</Empty> : null}
      {queues.map((name) => {
        const here = entries.filter((entry) => entry.queue === name);
        return (
          <section key={name} aria-label={`queue ${name}`}>
            <h2>{here[0]?.job.pool ? <PoolLink name={name} /> : name}</h2>
            <Table
              name="queue"
              rows={here}
              rowKey={(entry) => entry.job.id}
              columns={[
                { name: "Pos", kind: "number", cell: (entry) => entry.position ?? <State name="held" /> },
                { name: "Job", cell: (entry) => <JobLink id={entry.job.id} name={entry.job.name} /> },
                { name: "Owner", cell: (entry) => (isMe(entry.job.owner) ? "me" : entry.job.owner) },
                { name: "Needs", cell: (entry) => needs(entry.job) },
                { name: "Priority", kind: "number", cell: (entry) => entry.job.priority },
                { name: "Used, chip h", kind: "number", cell: (entry) => amount(entry.owner_chip_hours) },
                { name: "Starts", cell: (entry) => starts(entry) },
                { name: "Because", kind: "text", cell: (entry) => because(entry) },
                {
                  name: "Actions",
                  kind: "acts",
                  cell: (entry) =>
                    mayChange(entry.job.owner) ? <Actions entry={entry} queue={here} ask={ask} onDone={reload} /> : null,
                },
              ]}
            />
          </section>
        );
      })}
      {dialog}
    </>
  );
}

function starts(entry: QueueEntry): string {
  if (!entry.earliest_start) return "–";
  return Date.parse(entry.earliest_start) <= now.value ? "now" : `by ${minutes(entry.earliest_start)}`;
}

function because(entry: QueueEntry): string {
  if (!entry.behind) return entry.blocked_by;
  const until = entry.behind_until ? ` until ${minutes(entry.behind_until)}` : "";
  return `behind ${entry.behind}${until}; ${entry.blocked_by}`;
}

function Actions({ entry, queue, ask, onDone }: { entry: QueueEntry; queue: QueueEntry[]; ask: (question: Question) => void; onDone: () => void }) {
  const { job } = entry;
  const path = `/queue/${encodeURIComponent(job.id)}`;
  const index = queue.indexOf(entry);
  const above = queue[index - 1];
  const act = (title: string, action: string, line: string, run: () => Promise<unknown>, done: string, danger = false) =>
    ask({
      title,
      action,
      danger,
      line: () => line,
      run: async () => {
        await run();
        onDone();
        return done;
      },
    });
  const mayPass = (other: QueueEntry | undefined) => other && (isAdmin() || queue.slice(queue.indexOf(other), index).every((each) => isMe(each.job.owner)));
  return (
    <span class="actions">
      <button
        type="button"
        disabled={!mayPass(above)}
        aria-label={`move ${job.name} up`}
        title="Move up"
        onClick={() =>
          act(`Move ${job.name} ahead of ${above!.job.name}?`, "Move up", `tpu queue move ${job.id} --before ${above!.job.id}`,
            () => post(`${path}/move`, { before: above!.job.id }), `moved ${job.name}`)
        }
      >
        ↑
      </button>
      <button
        type="button"
        disabled={index === queue.length - 1}
        aria-label={`move ${job.name} to the end`}
        title="Move to the end"
        onClick={() =>
          act(`Move ${job.name} to the end?`, "Move to the end", `tpu queue move ${job.id} --last`,
            () => post(`${path}/move`, { last: true }), `moved ${job.name} to the end`)
        }
      >
        ↓
      </button>
      <button
        type="button"
        disabled={index > 0 ? !mayPass(queue[0]) : !job.held_by}
        onClick={() =>
          act(`Run ${job.name} next?`, "Run now", `tpu queue run-now ${job.id}`,
            async () => {
              await post(`${path}/move`, { first: true });
              if (job.held_by) await post(`${path}/release`);
            }, `${job.name} is next in its queue`)
        }
      >
        Run now
      </button>
      {job.held_by ? (
        <button
          type="button"
          onClick={() =>
            act(`Release ${job.name}?`, "Release", `tpu queue release ${job.id}`, () => post(`${path}/release`), `released ${job.name}`)
          }
        >
          Release
        </button>
      ) : (
        <button
          type="button"
          onClick={() =>
            act(`Hold ${job.name}?`, "Hold", `tpu queue hold ${job.id}`, () => post(`${path}/hold`), `held ${job.name}`)
          }
        >
          Hold
        </button>
      )}
      <button
        type="button"
        class="danger"
        onClick={() =>
          act(`Cancel ${job.name}?`, "Cancel job", `tpu cancel --waiting ${job.id}`, () => post(`${jobPath(job.id)}/cancel`),
            `cancelled ${job.name}`, true)
        }
      >
        Cancel
      </button>
    </span>
  );
}
