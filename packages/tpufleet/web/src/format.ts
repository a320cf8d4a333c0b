const MINUTE = 60_000;
const HOUR = 60 * MINUTE;
const DAY = 24 * HOUR;

/** Classes of badput, as `tpu cost` names them. */
export const BADPUT: Record<string, string> = {
  program_startup: "start",
  tpu_initialization: "connecting",
  unproductive_checkpoint_restore_time: "restoring",
  unproductive_checkpoint_save_time: "saving",
  wasted_progress_from_disruption: "steps again",
  infrastructure_recovery_from_disruption: "recovery",
  other: "idle",
  unknown: "unknown",
};

export function duration(milliseconds: number): string {
  const seconds = Math.max(0, Math.floor(milliseconds / 1000));
  if (seconds < 60) return `${seconds} s`;
  const minutes = Math.floor(seconds / 60);
  if (minutes < 60) return `${minutes} min`;
  const hours = Math.floor(minutes / 60);
  if (hours < 24) return minutes % 60 ? `${hours} h ${minutes % 60} min` : `${hours} h`;
  const days = Math.floor(hours / 24);
  return hours % 24 ? `${days} d ${hours % 24} h` : `${days} d`;
}

export function age(at: string | null, now: number): string {
  if (at === null) return "–";
  const since = now - Date.parse(at);
  if (Math.abs(since) < 1000) return "just now";
  return since > 0 ? `${duration(since)} ago` : `in ${duration(-since)}`;
}

const pad = (value: number) => String(value).padStart(2, "0");
const day = (date: Date) => `${date.getFullYear()}-${pad(date.getMonth() + 1)}-${pad(date.getDate())}`;

/** With the date where it is not today. */
export function clock(at: string | Date, seconds = true): string {
  const date = new Date(at);
  const time = `${pad(date.getHours())}:${pad(date.getMinutes())}${seconds ? `:${pad(date.getSeconds())}` : ""}`;
  return day(date) === day(new Date()) ? time : `${day(date)} ${time}`;
}

export const minutes = (at: string | Date) => clock(at, false);

/** What an input of type datetime-local holds, in local time. */
export function inputTime(date: Date): string {
  return `${day(date)}T${pad(date.getHours())}:${pad(date.getMinutes())}`;
}

export function number(value: number): string {
  if (Number.isInteger(value) || Math.abs(value) >= 1000) return value.toLocaleString("en", { maximumFractionDigits: 0 });
  return value.toPrecision(4);
}

/** As the command line writes amounts: at least two decimals, at least two digits that count. */
export function amount(value: number): string {
  const decimals = value ? Math.max(2, 1 - Math.floor(Math.log10(Math.abs(value)))) : 2;
  return value.toLocaleString("en", { minimumFractionDigits: decimals, maximumFractionDigits: decimals });
}

export const usd = (value: number) => `$${amount(value)}`;
export const percent = (share: number) => `${Math.round(100 * share)} %`;

/** The name that people use: v5e-16. */
export const typeName = (accelerator: string) => accelerator.replace(/^v5litepod-/, "v5e-");

export function needs(row: { slices: number; accelerator: string }): string {
  return `${row.slices > 1 ? `${row.slices} × ` : ""}${typeName(row.accelerator)}`;
}

/** A span of the API, such as PT600S or P1DT2H, in milliseconds. */
export function span(iso: string): number {
  const match = /^P(?:(\d+)D)?(?:T(?:(\d+)H)?(?:(\d+)M)?(?:([\d.]+)S)?)?$/.exec(iso);
  if (!match) return 0;
  const [, days, hours, mins, seconds] = match;
  return Number(days ?? 0) * DAY + Number(hours ?? 0) * HOUR + Number(mins ?? 0) * MINUTE + Number(seconds ?? 0) * 1000;
}

/** One word of a command line. */
export function word(text: string): string {
  return /^[\w@%+=:,./-]+$/.test(text) ? text : `'${text.replaceAll("'", "'\\''")}'`;
}

const TONES: Record<string, string[]> = {
  good: ["succeeded", "finished", "ready", "free", "active"],
  busy: ["running", "starting", "setup", "booting", "creating", "requested", "next"],
  kept: ["reserved"],
  amber: [
    "recovering", "stopping", "doomed", "draining", "preempted", "maintenance", "superseded", "host_lost", "lost",
    "held", "refused", "releasing",
  ],
  bad: [
    "failed", "hung", "user_error", "timeout", "out_of_hbm", "out_of_host_memory", "disk_full", "setup_failed",
    "reserved(error)",
  ],
};

/** Which colour a state has: states and end reasons share names. */
export function tone(state: string): string {
  return Object.keys(TONES).find((name) => TONES[name]!.includes(state)) ?? "quiet";
}

export function plural(count: number, noun: string): string {
  return `${count.toLocaleString("en")} ${noun}${count === 1 ? "" : "s"}`;
}
