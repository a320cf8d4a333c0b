// Client of the HTTP API. Types name only the fields that the page uses.

export interface Progress {
  step: number | null;
  total: number | null;
  checkpoint_step: number | null;
  at: string | null;
  output_at: string | null;
  message: string;
  metrics: Record<string, number> | null;
}

export interface JobRow {
  id: string;
  name: string;
  owner: string;
  state: string;
  reason: string;
  accelerator: string;
  slices: number;
  pool: string | null;
  priority: number;
  tags: string[];
  notes: string;
  held_by: string | null;
  submitted_at: string;
  ended_at: string | null;
  attempts: number;
  progress: Progress | null;
  parent: string | null;
}

export interface Recovery {
  attempt: number;
  seconds: number;
  parts: Record<string, number>;
  resumed_step: number | null;
  lost_steps: number | null;
}

export interface Attempt {
  number: number;
  state: string;
  created_at: string;
  running_at: string | null;
  ended_at: string | null;
  end_reason: string | null;
  start_step: number | null;
  last_step: number | null;
  checkpoint_step: number | null;
  message: string;
  slices: string[];
}

export interface SliceRow {
  id: string;
  provider: string;
  accelerator: string;
  zone: string;
  capacity: string;
  state: string;
  reason: string;
  pool: string | null;
  job_id: string | null;
  hosts: number;
  hosts_seen: number;
  chips: number;
  requested_at: string;
  ready_at: string | null;
  gone_at: string | null;
  /** Of an adopted node: the name that a person gave it. */
  node: string;
  reserved_for: string | null;
  reserved_until: string | null;
}

export interface HostRow {
  id: string;
  process: number;
  slice_id: string;
  address: string;
  phase: string;
  notice: string | null;
  seen_at: string | null;
  progress: Progress | null;
}

export interface JobDetail {
  job: { spec: Record<string, unknown>; [field: string]: unknown };
  row: JobRow;
  attempts: Attempt[];
  recoveries?: Recovery[];
  goodput?: (number | null)[];
  slices: SliceRow[];
  hosts: HostRow[];
  children: JobRow[];
  processes: number;
}

export interface FleetEvent {
  seq: number;
  at: string;
  kind: string;
  state: string;
  message: string;
  job_id: string | null;
  slice_id: string | null;
  pool: string | null;
  by: string | null;
}

export interface SourceRow {
  provider: string;
  zone: string;
  capacity: string;
  state: string;
  usd_per_hour: number | null;
  message: string;
  detail: string;
  at: string | null;
  retry_at: string | null;
}

export interface Explanation {
  message: string;
  details: string[];
  advice: string;
  until: string | null;
  ahead: number | null;
  sources: SourceRow[];
}

export interface QueueEntry {
  job: JobRow;
  queue: string;
  position: number | null;
  blocked_by: string;
  behind: string | null;
  behind_until: string | null;
  earliest_start: string | null;
  owner_chip_hours: number;
}

export interface Reservation {
  id: string;
  pool: string;
  slices: number;
  owner: string;
  starts_at: string;
  ends_at: string;
  note: string;
  ended_by: string;
  end_reason: string;
}

export interface Pool {
  name: string;
  provider: string;
  accelerator: string;
  largest: number;
  smallest: number;
  zones: string[];
  capacity: string[];
  members: string[];
  slices_per_user: number | null;
  supersede: boolean;
  hold_after_failure: string;
  idle_after: string;
  pod: Record<string, unknown>;
}

export interface InventoryRow {
  id: string;
  alias: string;
  accelerator: string;
  count: number;
  chips: number;
  provider: string;
  zone: string;
  capacity: string | null;
  pool: string | null;
  state: string;
  owner: string | null;
  job_id: string | null;
  job_name: string;
  note: string;
  belongs_to: string;
  since: string | null;
  last_check: string | null;
  reason: string;
  /** Of an adopted node: the name that a person gave it. */
  node: string;
}

export interface Inventory {
  rows: InventoryRow[];
  chips: { accelerator: string; zone: string; chips: number }[];
}

export interface CostRow {
  job_id: string | null;
  job_name: string;
  owner: string;
  pool: string | null;
  accelerator: string;
  capacity: string;
  slices: number;
  chip_hours: number;
  useful: number;
  badput: Record<string, number>;
  simulated: boolean;
  usd_per_chip_hour: number | null;
}

export interface Comparison {
  jobs: JobRow[];
  config: Record<string, (string | null)[]>;
  metrics: Record<string, (number | null)[]>;
  code: CodeDifference[];
}

export interface CodeDifference {
  job_id: string;
  same: boolean;
  files: { path: string; change: string; diff: string }[];
  message: string;
}

export interface Session {
  user: string;
  role: "viewer" | "member" | "admin";
  csrf: string;
  id: string;
}

export interface User {
  name: string;
  role: string;
  created_at: string;
  service: boolean;
}

export interface TokenRow {
  id: string;
  user: string;
  note: string;
  created_at: string;
  last_used_at: string | null;
  expires_at: string | null;
  scope: string;
  session_of: string | null;
}

export interface AuditEntry {
  seq: number;
  at: string;
  actor: string;
  outcome: string;
  action: string;
  target: string;
  detail: string;
  address: string;
}

export class ApiError extends Error {
  constructor(
    message: string,
    readonly status: number,
  ) {
    super(message);
  }
}

const PREFIX = "/api/v1";
let csrf = "";

const RETRY_MS = 3000;

/** Whether the same request may succeed later: the server starts, is overloaded, or is not reached. */
export const isTemporary = (failure: unknown) =>
  failure instanceof ApiError && (failure.status === 0 || failure.status === 429 || failure.status >= 500);

/** Later, and not at the same moment in all browsers. Returns how to cancel it. */
export function retry(action: () => void): () => void {
  const timer = setTimeout(action, RETRY_MS * (0.5 + Math.random()));
  return () => clearTimeout(timer);
}

// Colours and other control sequences, and signs that reorder text, in what programs and users write.
const SEQUENCE =
  /\x1b\[[0-?]*[ -/]*[@-~]?|\x1b[\]PX^_][^\x07\x1b]*(?:\x07|\x1b\\)?|\x1b[ -/]*[0-~]?|[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]/g;
const IN_JSON = /\\u00[01]|[\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]/;

/** Without what would deceive readers. */
export function parse<T>(json: string): T {
  const clean = (_: string, value: unknown) => (typeof value === "string" ? value.replace(SEQUENCE, "") : value);
  return JSON.parse(json, IN_JSON.test(json) ? clean : undefined) as T;
}

async function request<T>(method: string, path: string, body?: unknown, token?: string): Promise<T> {
  const headers: Record<string, string> = {};
  if (token) headers["Authorization"] = `Bearer ${token}`;
  else if (method !== "GET") headers["X-Tpufleet-Csrf"] = csrf;
  let response: Response;
  try {
    response = await fetch(PREFIX + path, {
      method,
      headers,
      credentials: "same-origin",
      body: body === undefined || body instanceof Blob ? body : JSON.stringify(body),
    });
  } catch {
    throw new ApiError("the server does not respond; retrying", 0);
  }
  if (!response.ok) {
    const answer = await response.json().catch(() => null);
    throw new ApiError(answer?.error?.message ?? `the server answered ${response.status}`, response.status);
  }
  const kind = response.headers.get("content-type") ?? "";
  return (kind.includes("json") ? parse(await response.text()) : await response.text()) as T;
}

export const get = <T>(path: string) => request<T>("GET", path);
export const post = <T>(path: string, body?: unknown) => request<T>("POST", path, body);
export const put = <T>(path: string, body: unknown) => request<T>("PUT", path, body);
export const patch = <T>(path: string, body: unknown) => request<T>("PATCH", path, body);
export const remove = <T>(path: string) => request<T>("DELETE", path);

// Of this origin alone, unlike the cookie, which browsers send to every port of the server's machine.
const KEPT = "tpufleet-session";

export async function login(token: string): Promise<Session> {
  const session = await request<Session>("POST", "/session", undefined, token);
  csrf = session.csrf;
  localStorage.setItem(KEPT, JSON.stringify({ id: session.id, csrf }));
  return session;
}

export async function currentSession(): Promise<Session> {
  const session = await get<Session>("/session");
  const kept = JSON.parse(localStorage.getItem(KEPT) ?? "{}");
  if (kept.id !== session.id) throw new ApiError("log in again", 401);
  csrf = kept.csrf;
  return session;
}

/** Called when another tab of this browser logs in: the cookie is the same, so the session of this
 * tab has changed too. Returns how to stop. */
export function onOtherSession(action: () => void): () => void {
  const changed = (event: StorageEvent) => {
    if (event.key === KEPT) action();
  };
  addEventListener("storage", changed);
  return () => removeEventListener("storage", changed);
}

export const eventsOf = (kind: "slice" | "pool" | "reservation", name: string) =>
  `/events?limit=300&newest=1&${kind}=${encodeURIComponent(name)}`;

export function jobPath(id: string): string {
  return `/jobs/${encodeURIComponent(id)}`;
}

const LETTERS = "abcdefghijklmnopqrstuvwxyz234567";

/** The sender chooses the id of a new job, so that a resend is the same job. */
export function newJobId(): string {
  const bytes = crypto.getRandomValues(new Uint8Array(12));
  return Array.from(bytes, (byte) => LETTERS[byte % 32]).join("");
}

/** Server-sent events, after the last one that was received when the connection was lost. */
export function listen(path: string, handlers: Record<string, (data: string) => void>): () => void {
  let source: EventSource;
  let last = "";
  let cancel = () => {};
  const open = () => {
    source = new EventSource(PREFIX + path + (last && `${path.includes("?") ? "&" : "?"}after=${encodeURIComponent(last)}`));
    for (const [name, handle] of Object.entries(handlers)) {
      source.addEventListener(name, (message) => {
        last = (message as MessageEvent<string>).lastEventId || last;
        handle((message as MessageEvent<string>).data);
      });
    }
    source.onopen = () => handlers["open"]?.("");
    source.onerror = () => {
      handlers["closed"]?.("");
      // The browser connects again by itself, unless it was answered with an error.
      if (source.readyState === EventSource.CLOSED) cancel = retry(open);
    };
  };
  open();
  return () => {
    cancel();
    source.close();
  };
}
