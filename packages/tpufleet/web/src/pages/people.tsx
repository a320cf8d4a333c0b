import { type User, post, remove } from "../api";
import { type Question, useAsk } from "../dialogs";
import { word } from "../format";
import { Age, Cli, Failure, ResourceEvents, Table, Tabs, Title, useData } from "../parts";
import { go, isAdmin, isMe, query, route, session } from "../state";
import { AuditLog } from "./audit";
import { Sessions, TokenPage, Tokens } from "./tokens";

export function People() {
  const admin = isAdmin();
  const tabs = admin ? ["users", "tokens", "sessions", "events", "audit"] : ["tokens", "sessions", "events"];
  const tab = route.value[1] ?? tabs[0]!;
  const token = tab === "tokens" && route.value[2];
  if (token) return <TokenPage key={token} id={token} />;
  return (
    <>
      <Title>{admin ? "Users and tokens" : "My tokens"}</Title>
      <Tabs base="people" names={tabs} current={tab} label="Parts of this page" />
      {tab === "users" && admin ? <Users /> : tab === "sessions" ? <Sessions /> : tab === "events" ? <UserEvents /> : tab === "audit" && admin ? <AuditLog path="/audit" line="tpu user audit" /> : <Tokens />}
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
      ...(user
        ? []
        : [
            {
              name: "former", label: "Jobs of a deleted user who was called so", type: "select" as const,
              options: [["refuse", "refuse: it may have been another person"], ["take-over", "belong to this user: the same person"]] as [string, string][],
            },
          ]),
    ],
    line: (values) =>
      `tpu user add ${word(user?.name ?? (values["name"] || "NAME"))} --role ${values["role"]}${values["kind"] === "service" ? " --service" : ""}${values["former"] === "take-over" ? " --take-over" : ""}`,
    run: async (values) => {
      const name = user?.name ?? values["name"]!;
      await post("/users", { name, role: values["role"], ...(user ? {} : { service: values["kind"] === "service", take_over: values["former"] === "take-over" }) });
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
      <ResourceEvents key={name} jobs path={`/events?user=${encodeURIComponent(name)}&limit=200&newest=1`} line={`tpu events user:${word(name)}`} />
    </>
  );
}
