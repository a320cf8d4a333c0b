import { useState } from "preact/hooks";
import { type Pool, type Reservation, type SliceRow, newJobId, post } from "../api";
import { type Question, useAsk } from "../dialogs";
import { inputTime, minutes, plural, typeName, word } from "../format";
import { Age, Empty, Failure, PoolLink, SliceLink, State, Table, Title, useData, useFleetChange } from "../parts";
import { isMe, isMember, now } from "../state";
import { colourOf } from "./colours";
import { Actions, DAY, HOUR, LENGTHS, iso, milliseconds, sentence } from "./reservation";

const SPANS: [string, number][] = [
  ["Day", DAY],
  ["Week", 7 * DAY],
  ["Month", 28 * DAY],
];
export function Reservations() {
  const change = useFleetChange();
  const { data, error, reload } = useData<{ reservations: Reservation[] }>("/reservations?all=1", change, 30);
  const { data: pools } = useData<{ pools: Pool[] }>("/pools");
  const { data: slices } = useData<{ slices: SliceRow[] }>("/slices", change, 30);
  const { ask, dialog } = useAsk();
  const [length, setLength] = useState(7 * DAY);
  const [from, setFrom] = useState(() => new Date().setHours(0, 0, 0, 0));
  const known = data?.reservations ?? [];
  const names = pools?.pools ?? [];
  const current = known.filter((each) => Date.parse(each.ends_at) > now.value);
  const held = slices?.slices.filter((each) => each.reserved_for) ?? [];
  const create = (pool?: string, at?: number) => ask(reserve(names, known, reload, pool, at));
  return (
    <>
      <Title line="tpu reserve list" more={<p>Until its end, only jobs of its owner are placed on reserved slices.</p>}>
        Reservations
      </Title>
      <Failure message={error} />
      <div class="controls">
        {isMember() && names.length ? (
          <button type="button" class="primary" onClick={() => create()}>
            Reserve
          </button>
        ) : null}
        <span class="group" role="group" aria-label="Time">
          <button type="button" aria-label="earlier" onClick={() => setFrom(from - length)}>
            ←
          </button>
          <button type="button" onClick={() => setFrom(new Date().setHours(0, 0, 0, 0))}>
            Today
          </button>
          <button type="button" aria-label="later" onClick={() => setFrom(from + length)}>
            →
          </button>
        </span>
        <span class="group" role="group" aria-label="Length">
          {SPANS.map(([name, span]) => (
            <button key={name} type="button" aria-pressed={span === length} onClick={() => setLength(span)}>
              {name}
            </button>
          ))}
        </span>
      </div>
      {pools && !names.length ? <Empty>No pools: an admin creates one with `tpu pool create`.</Empty> : null}
      {names.length ? (
        <Calendar pools={names} reservations={known} from={from} length={length} onFree={isMember() ? create : undefined} />
      ) : null}
      <h2>Active and coming</h2>
      {data && !current.length ? <Empty>No reservations.</Empty> : null}
      {current.length ? (
        <Table
          name="reservations"
          rows={current}
          rowKey={(each) => each.id}
          columns={[
            { name: "Pool", cell: (each) => <PoolLink name={each.pool} /> },
            { name: "Slices", kind: "number", cell: (each) => each.slices },
            { name: "Owner", cell: (each) => (isMe(each.owner) ? "me" : each.owner) },
            { name: "State", cell: (each) => <State name={Date.parse(each.starts_at) > now.value ? "coming" : "active"} /> },
            { name: "From", cell: (each) => minutes(each.starts_at) },
            { name: "Until", cell: (each) => minutes(each.ends_at) },
            { name: "Note", kind: "text", cell: (each) => each.note || "–" },
            {
              name: "Actions",
              kind: "acts",
              cell: (each) => (
                <span class="actions">
                  <a href={`#/reservations/${each.id}`}>Events</a>
                  <Actions each={each} ask={ask} onDone={reload} />
                </span>
              ),
            },
          ]}
        />
      ) : null}
      {held.length ? (
        <>
          <h2>Held after a failure</h2>
          <Table
            rows={held}
            rowKey={(each) => each.id}
            columns={[
              { name: "Slice", cell: (each) => <SliceLink id={each.id} /> },
              { name: "Pool", cell: (each) => <PoolLink name={each.pool} /> },
              { name: "For", cell: (each) => each.reserved_for },
              { name: "Until", cell: (each) => <Age at={each.reserved_until} /> },
            ]}
          />
        </>
      ) : null}
      {dialog}
    </>
  );
}

/** The most slices that are reserved at any moment between. */
function reservedThen(known: Reservation[], pool: string, start: number, end: number): { count: number; first: Reservation | null } {
  const here = known.filter((each) => each.pool === pool && Date.parse(each.starts_at) < end && start < Date.parse(each.ends_at));
  const moments = [start, ...here.map((each) => Date.parse(each.starts_at)).filter((at) => at > start)];
  const counts = moments.map((at) =>
    here.filter((each) => Date.parse(each.starts_at) <= at && at < Date.parse(each.ends_at)).reduce((sum, each) => sum + each.slices, 0),
  );
  return { count: Math.max(0, ...counts), first: here[0] ?? null };
}

function reserve(pools: Pool[], known: Reservation[], done: () => void, pool?: string, at?: number): Question {
  const begin = at ?? now.value;
  const values = (fields: Record<string, string>) => {
    const start = Math.max(Date.parse(fields["from"]!), now.value);
    return { start, end: start + milliseconds(fields["for"]!), later: start > now.value + 60_000 };
  };
  return {
    title: "Reserve slices",
    action: "Reserve",
    fields: [
      {
        name: "pool", label: "Pool", type: "select", value: pool ?? pools[0]?.name,
        options: pools.map((each) => [each.name, `${each.name}: ${each.largest} × ${typeName(each.accelerator)}`]),
      },
      { name: "from", label: "From", type: "datetime-local", value: inputTime(new Date(begin)), required: true },
      { name: "for", label: "For", type: "select", value: "2h", options: LENGTHS },
      { name: "slices", label: "Slices", type: "number", min: 1, value: "", hint: "Empty: all that you may have" },
      { name: "note", label: "What for", hint: "Others see it" },
    ],
    line: (fields) => {
      const { later } = values(fields);
      return [
        `tpu reserve ${word(fields["pool"]!)}`,
        later ? `--from '${fields["from"]!.replace("T", " ")}'` : "",
        `--for ${fields["for"]}`,
        fields["slices"] ? `--slices ${fields["slices"]}` : "",
        fields["note"] ? `--note ${word(fields["note"])}` : "",
      ].filter(Boolean).join(" ");
    },
    check: (fields) => {
      const of = pools.find((each) => each.name === fields["pool"]);
      const { start, end } = values(fields);
      if (!of || Number.isNaN(start)) return "";
      const { count, first } = reservedThen(known, of.name, start, end);
      const wanted = Number(fields["slices"]) || of.largest;
      if (count + wanted <= of.largest || !first) return "";
      const note = first.note ? ` (${first.note})` : "";
      return (
        `Conflict: ${Math.max(0, of.largest - count)} of ${of.largest} slices are left then. ` +
        `${first.owner} has ${first.slices} from ${minutes(first.starts_at)} to ${minutes(first.ends_at)}${note}.`
      );
    },
    run: async (fields) => {
      const { start, later } = values(fields);
      const made = await post<Reservation>("/reservations", {
        id: newJobId(),
        pool: fields["pool"],
        slices: fields["slices"] ? Number(fields["slices"]) : null,
        starts_at: later ? new Date(start).toISOString() : null,
        duration: iso(fields["for"]!),
        note: fields["note"],
      });
      done();
      return `reserved ${plural(made.slices, "slice")} of ${made.pool} until ${minutes(made.ends_at)}`;
    },
  };
}

/** Rows are pools, bars are reservations; bars that overlap lie below one another. */
function Calendar(props: {
  pools: Pool[];
  reservations: Reservation[];
  from: number;
  length: number;
  onFree?: (pool: string, at: number) => void;
}) {
  const { pools, reservations, from, length, onFree } = props;
  const until = from + length;
  const share = (at: number) => (100 * (Math.min(Math.max(at, from), until) - from)) / length;
  const step = length <= DAY ? 3 * HOUR : length <= 7 * DAY ? DAY : 7 * DAY;
  const ticks = Array.from({ length: Math.ceil(length / step) }, (_, index) => from + index * step);
  const label = (at: number) =>
    length <= DAY
      ? minutes(new Date(at)).slice(-5)
      : new Date(at).toLocaleDateString("en", { weekday: length <= 7 * DAY ? "short" : undefined, day: "numeric", month: "short" });
  return (
    <div class="wide" role="region" aria-label="Calendar" tabIndex={0}>
      <div class="calendar">
        <div class="row head" aria-hidden="true">
          <span />
          <div class="lanes">
            {ticks.map((at) => (
              <span key={at} class="tick-label" style={{ left: `${share(at)}%` }}>
                {label(at)}
              </span>
            ))}
          </div>
        </div>
        {pools.map((pool) => {
          const here = reservations.filter((each) => each.pool === pool.name && Date.parse(each.starts_at) < until && Date.parse(each.ends_at) > from);
          const lanes = arrange(here);
          const active = reservedThen(reservations, pool.name, now.value, now.value + 1).count;
          return (
            <div class="row" key={pool.name}>
              <span class="pool">
                <PoolLink name={pool.name} />
                <small>
                  {active}/{pool.largest} reserved
                </small>
              </span>
              <div
                class="lanes"
                style={{ height: `${Math.max(1, lanes.length) * 30 + 6}px` }}
                title={onFree ? "Click to reserve" : undefined}
                onClick={(event) => {
                  if (event.target !== event.currentTarget || !onFree) return;
                  const box = event.currentTarget.getBoundingClientRect();
                  const at = from + (length * (event.clientX - box.left)) / box.width;
                  onFree(pool.name, Math.round(at / (30 * 60_000)) * 30 * 60_000);
                }}
              >
                {ticks.map((at) => (
                  <span key={at} class="grid-line" style={{ left: `${share(at)}%` }} />
                ))}
                {now.value > from && now.value < until ? <span class="now" style={{ left: `${share(now.value)}%` }} /> : null}
                {lanes.flatMap((lane, index) =>
                  lane.map((each) => (
                    <a
                      key={each.id}
                      href={`#/reservations/${each.id}`}
                      class={`bar ${colourOf(each.owner)}${Date.parse(each.ends_at) <= now.value ? " past" : ""}`}
                      style={{ left: `${share(Date.parse(each.starts_at))}%`, width: `${share(Date.parse(each.ends_at)) - share(Date.parse(each.starts_at))}%`, top: `${index * 30 + 3}px` }}
                      title={`${sentence(each)}${each.note ? `: ${each.note}` : ""}`}
                      aria-label={sentence(each)}
                    >
                      {each.owner} · {each.slices}
                      {each.note ? ` · ${each.note}` : ""}
                    </a>
                  )),
                )}
              </div>
            </div>
          );
        })}
      </div>
    </div>
  );
}

function arrange(reservations: Reservation[]): Reservation[][] {
  const lanes: Reservation[][] = [];
  for (const each of reservations) {
    const lane = lanes.find((items) => Date.parse(items[items.length - 1]!.ends_at) <= Date.parse(each.starts_at));
    if (lane) lane.push(each);
    else lanes.push([each]);
  }
  return lanes;
}
