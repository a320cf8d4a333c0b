import { type Reservation, eventsOf, patch, remove } from "../api";
import { type Question, useAsk } from "../dialogs";
import { duration, minutes, plural, word } from "../format";
import { Empty, Facts, Failure, PoolLink, ResourceEvents, State, Title, useData, useFleetChange } from "../parts";
import { isAdmin, isMe, now } from "../state";

export const HOUR = 3_600_000;
export const DAY = 24 * HOUR;
export const LENGTHS: [string, string][] = [
  ["30m", "30 minutes"],
  ["1h", "1 hour"],
  ["2h", "2 hours"],
  ["4h", "4 hours"],
  ["8h", "8 hours"],
  ["1d", "1 day"],
  ["3d", "3 days"],
  ["7d", "7 days"],
];

export function milliseconds(text: string): number {
  const count = parseInt(text, 10);
  return count * (text.endsWith("d") ? DAY : text.endsWith("h") ? HOUR : 60_000);
}

export const iso = (text: string) => `PT${milliseconds(text) / 1000}S`;

export const sentence = (each: Reservation) =>
  `${each.owner}: ${plural(each.slices, "slice")} of ${each.pool}, ${minutes(each.starts_at)} to ${minutes(each.ends_at)}`;

function Body({ each }: { each: Reservation }) {
  return (
    <p>
      {sentence(each)} ({duration(Date.parse(each.ends_at) - Date.parse(each.starts_at))})
      {each.note ? `: ${each.note}` : ""}
      {each.ended_by ? ` – ended by ${each.ended_by}${each.end_reason ? `: ${each.end_reason}` : ""}` : ""}
    </p>
  );
}

const mayEnd = (each: Reservation) => Date.parse(each.ends_at) > now.value && (isMe(each.owner) || isAdmin());

function end(each: Reservation, done: () => void): Question {
  const mine = isMe(each.owner);
  return {
    title: mine ? "Release this reservation?" : `Break the reservation of ${each.owner}?`,
    action: mine ? "Release" : "Break",
    danger: true,
    fields: mine ? [] : [{ name: "reason", label: "Reason", required: true, hint: `${each.owner} sees it` }],
    line: ({ reason }) => (mine ? `tpu reserve end ${word(each.id)}` : `tpu reserve end ${word(each.id)} --reason ${word(reason || "REASON")}`),
    body: <Body each={each} />,
    run: async ({ reason }) => {
      await remove(`/reservations/${each.id}${mine ? "" : `?reason=${encodeURIComponent(reason!)}`}`);
      done();
      return mine ? "released the reservation" : `broke the reservation of ${each.owner}`;
    },
  };
}

export function Actions({ each, ask, onDone }: { each: Reservation; ask: (question: Question) => void; onDone: () => void }) {
  if (!mayEnd(each)) return null;
  return (
    <>
      <button
        type="button"
        onClick={() =>
          ask({
            title: "Extend this reservation",
            action: "Extend",
            fields: [{ name: "for", label: "By", type: "select", value: "30m", options: LENGTHS }],
            line: (values) => `tpu reserve extend ${word(each.id)} --for ${word(values["for"]!)}`,
            body: <Body each={each} />,
            run: async (values) => {
              const made = await patch<Reservation>(`/reservations/${each.id}`, { extend_by: iso(values["for"]!) });
              onDone();
              return `it now ends ${minutes(made.ends_at)}`;
            },
          })
        }
      >
        Extend
      </button>
      <button type="button" class="danger" onClick={() => ask(end(each, onDone))}>
        {isMe(each.owner) ? "Release" : "Break"}
      </button>
    </>
  );
}

const stateOf = (each: Reservation) =>
  Date.parse(each.ends_at) <= now.value ? "ended" : Date.parse(each.starts_at) > now.value ? "coming" : "active";

/** One reservation, also one that has ended. */
export function ReservationPage({ id }: { id: string }) {
  const { data, error, reload } = useData<{ reservations: Reservation[] }>("/reservations?all=1", useFleetChange(), 30);
  const { ask, dialog } = useAsk();
  const each = data?.reservations.find((known) => known.id === id);
  if (!data) return error ? <Failure message={error} /> : <Empty>Loading…</Empty>;
  return (
    <>
      <Title line="tpu reserve list --all" more={<a href="#/reservations">All reservations</a>}>
        Reservation {each?.note || id} {each ? <State name={stateOf(each)} /> : null}
      </Title>
      <Failure message={each ? error : `No reservation ${id}; ended ones are kept for 30 days.`} />
      {each ? (
        <>
          <div class="buttons">
            <Actions each={each} ask={ask} onDone={reload} />
          </div>
          <Facts
            facts={[
              ["Pool", <PoolLink name={each.pool} />],
              ["Slices", each.slices],
              ["Owner", each.owner],
              ["From", minutes(each.starts_at)],
              ["Until", minutes(each.ends_at)],
              ["Lasts", duration(Date.parse(each.ends_at) - Date.parse(each.starts_at))],
              ["Note", each.note || "–"],
              ...(each.ended_by ? ([["Ended by", `${each.ended_by}${each.end_reason ? `: ${each.end_reason}` : ""}`]] as [string, string][]) : []),
            ]}
          />
        </>
      ) : null}
      <ResourceEvents path={eventsOf("reservation", id)} line={`tpu events reservation:${word(id)}`} />
      {dialog}
    </>
  );
}
