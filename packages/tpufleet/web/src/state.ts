import { signal } from "@preact/signals";
import { type FleetEvent, type JobRow, type Session, listen, parse } from "./api";

export const session = signal<Session | null>(null);
export const route = signal<string[]>([]);
/** Of a login link that was opened and is not redeemed yet. */
export const loginCode = signal("");
export const query = signal(new URLSearchParams());
export const now = signal(Date.now());
export const connected = signal(true);
/** Rows of jobs that changed since the page was opened, newest row of each. */
export const changed = signal<Map<string, JobRow>>(new Map());
/** The newest events, newest first. */
export const recent = signal<FleetEvent[]>([]);
export const toast = signal<{ text: string; bad: boolean } | null>(null);

const RECENT = 500;

function decoded(part: string): string {
  try {
    return decodeURIComponent(part);
  } catch {
    return part;
  }
}

function readLocation() {
  const [path = "", search = ""] = location.hash.replace(/^#\/?/, "").split("?", 2);
  const parts = path.split("/").map(decoded);
  if (parts[0] === "login") {
    // Whoever is logged in: a code must not stay in the address or the history of the browser.
    history.replaceState(null, "", "#/jobs");
    loginCode.value = parts[1] ?? "";
    route.value = ["jobs"];
    query.value = new URLSearchParams();
    return;
  }
  route.value = parts;
  query.value = new URLSearchParams(search);
}

export function go(path: string) {
  location.hash = path;
}

export function start() {
  readLocation();
  addEventListener("hashchange", readLocation);
  setInterval(() => (now.value = Date.now()), 1000);
}

let stop: (() => void) | null = null;

/** One stream for the whole page. Changes are applied together, ten times a second at most. */
export function connect() {
  stop?.();
  let rows: JobRow[] = [];
  let events: FleetEvent[] = [];
  let waiting = false;
  const flush = () => {
    waiting = false;
    if (rows.length) {
      const next = new Map(changed.value);
      for (const row of rows) next.set(row.id, row);
      changed.value = next;
    }
    if (events.length) recent.value = [...events.reverse(), ...recent.value].slice(0, RECENT);
    rows = [];
    events = [];
  };
  const soon = () => {
    if (!waiting) setTimeout(flush, 100);
    waiting = true;
  };
  stop = listen("/stream", {
    open: () => (connected.value = true),
    closed: () => (connected.value = false),
    job: (data) => (rows.push(parse(data)), soon()),
    event: (data) => (events.push(parse(data)), soon()),
  });
}

export function disconnect() {
  stop?.();
  stop = null;
  changed.value = new Map();
  recent.value = [];
}

export function say(text: string, bad = false) {
  const shown = { text, bad };
  toast.value = shown;
  setTimeout(() => toast.value === shown && (toast.value = null), bad ? 8000 : 4000);
}

export const isAdmin = () => session.value?.role === "admin";
export const isMember = () => session.value?.role === "member" || isAdmin();
export const isMe = (user: string | null) => user === session.value?.user;

export const mayChange = (owner: string) => isAdmin() || (isMember() && isMe(owner));
