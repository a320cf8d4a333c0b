import { useState } from "preact/hooks";
import { type Pool, post, remove } from "../api";
import { type Question, useAsk } from "../dialogs";
import { clock, word } from "../format";
import { Age, Cli, Empty, Failure, ResourceEvents, Table, Tabs, Title, useData } from "../parts";
import { go, isAdmin, isMe, query, route, session } from "../state";

interface User {
  name: string;
  role: string;
  created_at: string;
  service: boolean;
}

interface TokenRow {
  id: string;
  user: string;
  note: string;
  created_at: string;
  last_used_at: string | null;
  expires_at: string | null;
  scope: string;
  pool: string | null;
  session_of: string | null;
}

interface AuditEntry {
  seq: number;
  at: string;
  actor: string;
  outcome: string;
  action: string;
  target: string;
  detail: string;
  address: string;
}

export function People() {
  const admin = isAdmin();
  const tabs = admin ? ["users", "tokens", "sessions", "events", "audit"] : ["tokens", "sessions", "events"];
  const tab = route.value[1] ?? tabs[0]!;
  return (
    <>
      <Title>{admin ? "Users and tokens" : "My tokens"}</Title>
      <Tabs base="people" names={tabs} current={tab} label="Parts of this page" />
      {tab === "users" && admin ? <Users /> : tab === "sessions" ? <Sessions /> : tab === "events" ? <UserEvents /> : tab === "audit" && admin ? <Audit /> : <Tokens />}
    </>
  );
}

const ROLES: [string, string][] = [
  ["viewer", "viewer: sees everything, changes nothing"],
  ["member", "member: runs jobs, changes their own"],
  ["admin", "admin: changes anything"],
];

function Users() {
  const { data, error, reload } = useData<{ users: User[] }>("/users");
  const { ask, dialog } = useAsk();
  const put = (user: User | null): Question => ({
    title: user ? `Change the role of ${user.name}` : "Create a user",
    action: user ? "Save" : "Create",
    fields: [
      ...(user ? [] : [{ name: "name", label: "Name", required: true }]),
      { name: "role", label: "Role", type: "select", value: user?.role ?? "member", options: ROLES },
      ...(user
        ? []
        : [{ name: "kind", label: "Kind", type: "select" as const, options: [["person", "person"], ["service", "service account: a program"]] as [string, string][] }]),
    ],
    line: (values) =>
      `tpu user add ${word(user?.name ?? (values["name"] || "NAME"))} --role ${values["role"]}${values["kind"] === "service" ? " --service" : ""}`,
    run: async (values) => {
      const name = user?.name ?? values["name"]!;
      await post("/users", { name, role: values["role"], ...(user ? {} : { service: values["kind"] === "service" }) });
      reload();
      return user ? `${name} has the ${values["role"]} role` : `created ${name}; next, create a token for ${name}`;
    },
  });
  return (
    <>
      <div class="controls">
        <button type="button" class="primary" onClick={() => ask(put(null))}>
          Create a user
        </button>
        <Cli line="tpu user list" />
      </div>
      <Failure message={error} />
      <Table
        name="people"
        rows={data?.users ?? []}
        rowKey={(user) => user.name}
        columns={[
          { name: "User", cell: (user) => <a href={`#/jobs?q=${encodeURIComponent(`owner:${user.name}`)}`}>{user.name}</a> },
          { name: "Role", cell: (user) => `${user.role}${user.service ? ", service account" : ""}` },
          { name: "Created", cell: (user) => <Age at={user.created_at} /> },
          {
            name: "Actions",
            kind: "acts",
            cell: (user) => (
              <span class="actions">
                <a href={`#/people/events?user=${encodeURIComponent(user.name)}`}>Events</a>
                <button type="button" onClick={() => ask(put(user))}>
                  Role
                </button>
                <button
                  type="button"
                  class="danger"
                  disabled={isMe(user.name)}
                  onClick={() =>
                    ask({
                      title: `Delete ${user.name}?`,
                      action: "Delete user",
                      danger: true,
                      line: () => `tpu user delete ${word(user.name)} --yes`,
                      body: <p>Their tokens and secrets are deleted, and their live jobs are cancelled.</p>,
                      run: async () => {
                        await remove(`/users/${encodeURIComponent(user.name)}`);
                        reload();
                        return `deleted ${user.name}`;
                      },
                    })
                  }
                >
                  Delete
                </button>
              </span>
            ),
          },
        ]}
      />
      {dialog}
    </>
  );
}

const LIFETIMES: [string, string][] = [
  ["", "does not expire"],
  ["1d", "1 day"],
  ["7d", "7 days"],
  ["30d", "30 days"],
  ["90d", "90 days"],
  ["365d", "1 year"],
];
const days = (text: string) => `P${parseInt(text, 10)}D`;
const SCOPES: [string, string][] = [
  ["full", "full: all that its user may do"],
  ["read", "read: changes nothing"],
  ["submit", "submit: submits jobs, follows and cancels them"],
];

function Tokens() {
  const { data, error, reload } = useData<{ tokens: TokenRow[] }>("/tokens");
  const { data: users } = useData<{ users: User[] }>(isAdmin() ? "/users" : null);
  const { data: pools } = useData<{ pools: Pool[] }>("/pools");
  const [shown, setShown] = useState<{ id: string; token: string; user: string } | null>(null);
  const { ask, dialog } = useAsk();
  const me = session.value?.user ?? "";
  const create = (): Question => ({
    title: "Create a token",
    action: "Create",
    fields: [
      ...(users ? [{ name: "user", label: "User", type: "select" as const, value: me, options: users.users.map((user) => [user.name, user.name] as [string, string]) }] : []),
      { name: "note", label: "What it is for" },
      { name: "expires", label: "Expires", type: "select", value: "90d", options: LIFETIMES },
      { name: "scope", label: "Scope", type: "select", options: SCOPES },
      { name: "pool", label: "Pool", type: "select", options: [["", "all pools"], ...(pools?.pools ?? []).map((pool) => [pool.name, `only ${pool.name}`] as [string, string])] },
    ],
    line: (values) =>
      [
        "tpu token create",
        values["user"] && values["user"] !== me ? `--user ${word(values["user"])}` : "",
        values["note"] ? `--note ${word(values["note"])}` : "",
        values["expires"] ? `--expires ${values["expires"]}` : "",
        values["scope"] === "full" ? "" : `--scope ${values["scope"]}`,
        values["pool"] ? `--pool ${word(values["pool"])}` : "",
      ]
        .filter(Boolean)
        .join(" "),
    run: async (values) => {
      setShown(
        await post("/tokens", {
          user: values["user"] || null,
          note: values["note"],
          expires_in: values["expires"] ? days(values["expires"]) : null,
          scope: values["scope"],
          pool: values["pool"] || null,
        }),
      );
      reload();
      return "created the token";
    },
  });
  return (
    <>
      <div class="controls">
        <button type="button" class="primary" onClick={() => ask(create())}>
          Create a token
        </button>
        <Cli line="tpu token list" />
      </div>
      <Failure message={error} />
      {shown ? (
        <div class="card secret" role="status">
          <p>
            Token {shown.id} of {shown.user}. It is shown only now. Save it in a file of mode 600, and set TPUFLEET_TOKEN_FILE to its path:
          </p>
          <Cli raw line={shown.token} />
        </div>
      ) : null}
      <Table
        name="tokens"
        rows={(data?.tokens ?? []).filter((token) => !token.session_of)}
        rowKey={(token) => token.id}
        columns={[
          { name: "Token", cell: (token) => <code>{token.id}</code> },
          { name: "User", cell: (token) => token.user },
          { name: "Scope", cell: (token) => `${token.scope}${token.pool ? `, pool ${token.pool}` : ""}` },
          { name: "Note", kind: "text", cell: (token) => token.note || "–" },
          { name: "Created", cell: (token) => <Age at={token.created_at} /> },
          { name: "Used", cell: (token) => (token.last_used_at ? <Age at={token.last_used_at} /> : "never") },
          { name: "Expires", cell: (token) => (token.expires_at ? <Age at={token.expires_at} /> : "never") },
          {
            name: "Actions",
            kind: "acts",
            cell: (token) => (
              <span class="actions">
                <button
                  type="button"
                  onClick={() =>
                    ask({
                      title: `Rotate token ${token.id}?`,
                      action: "Rotate",
                      fields: [{ name: "overlap", label: "The old one stays valid for", type: "select", value: "1h", options: [["0s", "no time"], ["1h", "1 hour"], ["24h", "1 day"], ["168h", "7 days"]] }],
                      line: ({ overlap }) => `tpu token rotate ${token.id} --overlap ${overlap}`,
                      body: <p>A new token with the same rights replaces it.</p>,
                      run: async ({ overlap }) => {
                        const hours = overlap!.endsWith("h") ? parseInt(overlap!, 10) : 0;
                        setShown(await post(`/tokens/${token.id}/rotate`, { overlap: `PT${hours * 3600}S` }));
                        reload();
                        return "rotated the token";
                      },
                    })
                  }
                >
                  Rotate
                </button>
                <button
                  type="button"
                  class="danger"
                  onClick={() =>
                    ask({
                      title: `Revoke token ${token.id}?`,
                      action: "Revoke",
                      danger: true,
                      line: () => `tpu token revoke ${token.id}`,
                      body: <p>Programs that use it, and browsers that logged in with it, lose access at once.</p>,
                      run: async () => {
                        await remove(`/tokens/${token.id}`);
                        reload();
                        return `revoked token ${token.id}`;
                      },
                    })
                  }
                >
                  Revoke
                </button>
              </span>
            ),
          },
        ]}
      />
      {dialog}
    </>
  );
}

/** Browsers that are logged in. Their sessions are kept with the tokens. */
function Sessions() {
  const { data, error, reload } = useData<{ tokens: TokenRow[] }>("/tokens");
  const { ask, dialog } = useAsk();
  const current = session.value?.id;
  return (
    <>
      <div class="controls">
        <Cli line="tpu token list" />
      </div>
      <Failure message={error} />
      <Table
        name="sessions"
        rows={(data?.tokens ?? []).filter((each) => each.session_of)}
        rowKey={(each) => each.id}
        columns={[
          { name: "Session", cell: (each) => (each.id === current ? "this browser" : <code>{each.id}</code>) },
          { name: "User", cell: (each) => each.user },
          { name: "Logged in with token", cell: (each) => <code>{each.session_of}</code> },
          { name: "Logged in", cell: (each) => <Age at={each.created_at} /> },
          { name: "Used", cell: (each) => <Age at={each.last_used_at} /> },
          { name: "Expires", cell: (each) => <Age at={each.expires_at} /> },
          {
            name: "Actions",
            kind: "acts",
            cell: (each) => (
              <button
                type="button"
                class="danger"
                disabled={each.id === current}
                aria-label={`end session ${each.id}`}
                onClick={() =>
                  ask({
                    title: `Log out ${each.user}?`,
                    action: "Log out",
                    danger: true,
                    line: () => `tpu token revoke ${each.id}`,
                    body: <p>The browser has to log in again. Other sessions of {each.user} stay open.</p>,
                    run: async () => {
                      await remove(`/tokens/${each.id}`);
                      reload();
                      return `ended the session of ${each.user}`;
                    },
                  })
                }
              >
                End
              </button>
            ),
          },
        ]}
      />
      {dialog}
    </>
  );
}

/** What one user did: admins choose whose, others see their own. */
function UserEvents() {
  const me = session.value?.user ?? "";
  const { data: users } = useData<{ users: User[] }>(isAdmin() ? "/users" : null);
  const name = (isAdmin() && query.value.get("user")) || me;
  return (
    <>
      {users ? (
        <div class="controls">
          <label>
            User{" "}
            <select value={name} onChange={(event) => go(`/people/events?user=${encodeURIComponent(event.currentTarget.value)}`)}>
              {users.users.map((user) => (
                <option key={user.name} value={user.name}>
                  {user.name}
                </option>
              ))}
            </select>
          </label>
        </div>
      ) : null}
      <ResourceEvents key={name} jobs path={`/events?user=${encodeURIComponent(name)}&limit=200&newest=1`} line={`tpu events --user ${word(name)}`} />
    </>
  );
}

function Audit() {
  const { data, error } = useData<{ entries: AuditEntry[] }>("/audit?limit=200", 0, 30);
  return (
    <>
      <div class="controls">
        <Cli line="tpu audit" />
      </div>
      <Failure message={error} />
      {data && !data.entries.length ? <Empty>No entries.</Empty> : null}
      <Table
        name="audit"
        rows={data?.entries ?? []}
        rowKey={(entry) => String(entry.seq)}
        columns={[
          { name: "Time", cell: (entry) => clock(entry.at) },
          { name: "User", cell: (entry) => entry.actor },
          { name: "Action", cell: (entry) => `${entry.action}${entry.outcome === "refused" ? ", refused" : ""}` },
          { name: "Target", kind: "text", cell: (entry) => entry.target },
          { name: "Detail", kind: "text", cell: (entry) => entry.detail || "–" },
          { name: "Address", cell: (entry) => entry.address },
        ]}
      />
    </>
  );
}
