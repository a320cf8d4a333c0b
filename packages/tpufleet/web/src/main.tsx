import { render } from "preact";
import { useEffect, useState } from "preact/hooks";
import { currentSession, isTemporary, login, onOtherSession, remove, retry } from "./api";
import { Compare } from "./pages/compare";
import { EventsPage } from "./pages/events";
import { Fleet } from "./pages/fleet";
import { Inventory } from "./pages/inventory";
import { JobPage } from "./pages/job";
import { Jobs } from "./pages/jobs";
import { People } from "./pages/people";
import { PoolPage, Pools } from "./pages/pools";
import { Queue } from "./pages/queue";
import { ReservationPage } from "./pages/reservation";
import { Reservations } from "./pages/reservations";
import { SlicePage } from "./pages/slice";
import { Usage } from "./pages/usage";
import { Empty, Failure, Title } from "./parts";
import "./style.css";
import { connect, connected, disconnect, go, loginCode, route, say, session, start, toast } from "./state";

const LINKS: [string, string][] = [
  ["jobs", "Jobs"],
  ["queue", "Queue"],
  ["fleet", "Fleet"],
  ["inventory", "Inventory"],
  ["reservations", "Reservations"],
  ["pools", "Pools"],
  ["usage", "Usage"],
  ["events", "Events"],
  ["people", "Users"],
];

function Login({ failure }: { failure: string }) {
  const [error, setError] = useState(failure);
  const enter = async (token: string) => {
    try {
      session.value = await login(token);
    } catch (failure) {
      setError(failure instanceof Error ? failure.message : String(failure));
    }
  };
  useEffect(() => setError(failure), [failure]);
  return (
    <main class="login">
      <h1>tpufleet</h1>
      <form
        onSubmit={(event) => {
          event.preventDefault();
          void enter(String(new FormData(event.currentTarget).get("token")).trim());
        }}
      >
        <label>
          Token <input name="token" type="password" autoComplete="current-password" required autoFocus />
        </label>
        <button type="submit">Log in</button>
      </form>
      {error ? (
        <p class="failure" role="alert">
          {error}
        </p>
      ) : null}
      <p class="quiet">
        <code>tpu dash</code> opens this page logged in; <code>tpu token create</code> makes a token.
      </p>
    </main>
  );
}

function Page() {
  const [page, ...rest] = route.value;
  switch (page) {
    case "fleet":
      return <Fleet />;
    case "inventory":
      return <Inventory />;
    case "queue":
      return <Queue />;
    case "reservations":
      return rest[0] ? <ReservationPage key={rest[0]} id={rest[0]} /> : <Reservations />;
    case "slices":
      return rest[0] ? <SlicePage key={rest[0]} id={rest[0]} /> : <Fleet />;
    case "pools":
      return rest[0] ? <PoolPage key={rest[0]} name={rest[0]} /> : <Pools />;
    case "events":
      return <EventsPage />;
    case "usage":
      return <Usage />;
    case "people":
      return <People />;
    case "compare":
      return <Compare key={rest.join("/")} ids={rest} />;
    case "":
    case "jobs":
      return rest[0] ? <JobPage key={rest[0]} id={rest[0]} /> : <Jobs />;
    default:
      return (
        <>
          <Title>No such page</Title>
          <Empty>
            Nothing is at <code>#/{route.value.join("/")}</code>. Go to <a href="#/jobs">Jobs</a>.
          </Empty>
        </>
      );
  }
}

function App() {
  const [checked, setChecked] = useState(false);
  const [problem, setProblem] = useState("");
  const [refused, setRefused] = useState("");
  const code = loginCode.value;
  useEffect(() => {
    if (checked && !code) return;
    let cancelled = false;
    let cancelRetry = () => {};
    const check = async () => {
      let refusal = "";
      try {
        try {
          // Also with a session: the link may be of another user, who takes over.
          if (code) {
            session.value = await login(code);
            say(`Logged in as ${session.value.user}`);
          }
        } catch (failure) {
          if (isTemporary(failure)) throw failure;
          refusal = (failure as Error).message;
        }
        if (!code || refusal) session.value = await currentSession();
        if (refusal) say(`${refusal}; still logged in as ${session.value?.user}`, true);
      } catch (failure) {
        if (cancelled) return;
        if (isTemporary(failure)) {
          setProblem((failure as Error).message);
          cancelRetry = retry(() => void check());
          return;
        }
        session.value = null;
      }
      if (cancelled) return;
      setRefused(refusal);
      setChecked(true);
      loginCode.value = "";
    };
    void check();
    return () => {
      cancelled = true;
      cancelRetry();
    };
  }, [code]);
  useEffect(
    () =>
      onOtherSession(() => {
        currentSession().then(
          (current) => (session.value = current),
          () => {},
        );
      }),
    [],
  );
  const user = session.value?.user;
  useEffect(() => {
    if (user) connect();
    return disconnect;
  }, [user]);
  const path = route.value.join("/");
  useEffect(() => document.querySelector("header nav [aria-current]")?.scrollIntoView({ inline: "center", block: "nearest" }), [path, user]);
  if (!checked)
    return problem ? (
      <main class="login">
        <Failure message={problem} />
      </main>
    ) : null;
  if (!session.value) return <Login failure={refused} />;
  const page = route.value[0] || "jobs";
  const section = page === "slices" ? "fleet" : page === "compare" ? "jobs" : page;
  return (
    <>
      <a class="skip" href="#main" onClick={(event) => (event.preventDefault(), document.getElementById("main")?.focus())}>
        Skip to content
      </a>
      <header class="top">
        <a class="brand" href="#/jobs">
          tpufleet
        </a>
        <nav aria-label="Pages">
          {LINKS.map(([path, name]) => (
            <a key={path} href={`#/${path}`} aria-current={path === section ? "page" : undefined}>
              {name}
            </a>
          ))}
        </nav>
        <span class={connected.value ? "live" : "live off"} role="status">
          {connected.value ? "live" : "reconnecting"}
        </span>
        <span class="who">
          {session.value.user} ({session.value.role}){" "}
          <button
            type="button"
            class="link"
            onClick={() =>
              void remove("/session").finally(() => {
                session.value = null;
                go("/jobs");
              })
            }
          >
            log out
          </button>
        </span>
      </header>
      <main id="main" tabIndex={-1} key={user}>
        <Page />
      </main>
      {toast.value ? (
        <div class={toast.value.bad ? "toast bad" : "toast"} role={toast.value.bad ? "alert" : "status"}>
          {toast.value.text}
        </div>
      ) : null}
    </>
  );
}

start();
render(<App />, document.getElementById("app")!);
