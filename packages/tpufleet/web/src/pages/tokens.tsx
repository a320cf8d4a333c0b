import { useState } from "preact/hooks";
import { type TokenRow, type User, post, remove } from "../api";
import { type Question, useAsk } from "../dialogs";
import { word } from "../format";
import { Age, Cli, Empty, Facts, Failure, Table, Title, useData } from "../parts";
import { isAdmin, session } from "../state";
import { AuditLog } from "./audit";

interface NewToken {
  id: string;
  token: string;
  user: string;
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

export function Tokens() {
  const { data, error, reload } = useData<{ tokens: TokenRow[] }>("/tokens");
  const { data: users, error: noUsers } = useData<{ users: User[] }>(isAdmin() ? "/users" : null);
  const ready = users !== null || !isAdmin();
  const [shown, setShown] = useState<NewToken | null>(null);
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
    ],
    line: (values) =>
      [
        "tpu token create",
        values["user"] && values["user"] !== me ? `--user ${word(values["user"])}` : "",
        values["note"] ? `--note ${word(values["note"])}` : "",
        values["expires"] ? `--expires ${values["expires"]}` : "",
        values["scope"] === "full" ? "" : `--scope ${values["scope"]}`,
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
        }),
      );
      reload();
      return "created the token";
    },
  });
  return (
    <>
      <div class="controls">
        <button type="button" class="primary" disabled={!ready} onClick={() => ask(create())}>
          Create a token
        </button>
        <Cli line="tpu token list" />
      </div>
      <Failure message={error || noUsers} />
      <Secret made={shown} />
      <Table
        name="tokens"
        rows={(data?.tokens ?? []).filter((token) => !token.session_of)}
        rowKey={(token) => token.id}
        columns={[
          { name: "Token", cell: (token) => <code>{token.id}</code> },
          { name: "User", cell: (token) => token.user },
          { name: "Scope", cell: (token) => token.scope },
          { name: "Note", kind: "text", cell: (token) => token.note || "–" },
          { name: "Created", cell: (token) => <Age at={token.created_at} /> },
          { name: "Used", cell: (token) => (token.last_used_at ? <Age at={token.last_used_at} /> : "never") },
          { name: "Expires", cell: (token) => (token.expires_at ? <Age at={token.expires_at} /> : "never") },
          {
            name: "Actions",
            kind: "acts",
            cell: (token) => (
              <span class="actions">
                <a href={`#/people/tokens/${token.id}`}>Events</a>
                <TokenButtons token={token} ask={ask} onChange={reload} onReplaced={setShown} />
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
export function Sessions() {
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
                    line: () => `tpu token revoke ${word(each.id)}`,
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

function Secret({ made }: { made: NewToken | null }) {
  return made ? (
    <div class="card secret" role="status">
      <p>
        Token {made.id} of {made.user}. It is shown only now. Save it in a file of mode 600, and set TPUFLEET_TOKEN_FILE to its path:
      </p>
      <Cli raw line={made.token} />
    </div>
  ) : null;
}

function TokenButtons(props: { token: TokenRow; ask: (question: Question) => void; onChange: () => void; onReplaced: (made: NewToken) => void }) {
  const { token, ask, onChange, onReplaced } = props;
  return (
    <>
      <button
        type="button"
        onClick={() =>
          ask({
            title: `Rotate token ${token.id}?`,
            action: "Rotate",
            fields: [{ name: "overlap", label: "The old one stays valid for", type: "select", value: "1h", options: [["0s", "no time"], ["1h", "1 hour"], ["24h", "1 day"], ["168h", "7 days"]] }],
            line: ({ overlap }) => `tpu token rotate ${word(token.id)} --overlap ${word(overlap!)}`,
            body: <p>A new token with the same rights replaces it.</p>,
            run: async ({ overlap }) => {
              const hours = overlap!.endsWith("h") ? parseInt(overlap!, 10) : 0;
              onReplaced(await post(`/tokens/${token.id}/rotate`, { overlap: `PT${hours * 3600}S` }));
              onChange();
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
            line: () => `tpu token revoke ${word(token.id)}`,
            body: <p>Programs that use it, and browsers that logged in with it, lose access at once.</p>,
            run: async () => {
              await remove(`/tokens/${token.id}`);
              onChange();
              return `revoked token ${token.id}`;
            },
          })
        }
      >
        Revoke
      </button>
    </>
  );
}

/** One token: what it may do, and what was done with it and to it. */
export function TokenPage({ id }: { id: string }) {
  const { data, error, reload } = useData<{ tokens: TokenRow[] }>("/tokens");
  const [shown, setShown] = useState<NewToken | null>(null);
  const { ask, dialog } = useAsk();
  const token = data?.tokens.find((each) => each.id === id);
  return (
    <>
      <Title line="tpu token list" more={<a href="#/people/tokens">All tokens</a>}>
        Token <code>{id}</code>
      </Title>
      <Failure message={error} />
      <Secret made={shown} />
      {data && !token ? <Empty>It was revoked, or it belongs to another user.</Empty> : null}
      {token ? (
        <>
          {token.session_of ? null : (
            <div class="buttons">
              <TokenButtons token={token} ask={ask} onChange={reload} onReplaced={setShown} />
            </div>
          )}
          <Facts
            facts={[
              ["User", token.user],
              ["Scope", token.scope],
              ["Note", token.note || "–"],
              ["Created", <Age at={token.created_at} />],
              ["Used", token.last_used_at ? <Age at={token.last_used_at} /> : "never"],
              ["Expires", token.expires_at ? <Age at={token.expires_at} /> : "never"],
              ...(token.session_of ? ([["Browser session of token", token.session_of]] as [string, string][]) : []),
            ]}
          />
        </>
      ) : null}
      {token || (data && isAdmin()) ? (
        <section aria-labelledby="events-title">
          <h2 id="events-title">Events</h2>
          <p class="quiet">Requests of the audit log that were made with this token, or that changed it.</p>
          <AuditLog path={`/tokens/${encodeURIComponent(id)}/audit`} line={`tpu user audit --token ${word(id)}`} />
        </section>
      ) : null}
      {dialog}
    </>
  );
}
