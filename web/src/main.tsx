import { render } from "preact";
import { useEffect, useState } from "preact/hooks";
import { currentSession, isTemporary, login, remove, retry } from "./api";
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
import { Failure } from "./parts";
import "./style.css";
import { connect, connected, disconnect, go, route, session, start, toast } from "./state";

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

function Login() {
  const [error, setError] = useState("");
  const enter = async (token: string) => {
    try {
      session.value = await login(token);
    } catch (failure) {
      setError(failure instanceof Error ? failure.message : String(failure));
    }
  };
  useEffect(() => {
    const [page, code] = route.value;
    if (page !== "login" || !code) return;
    // The code must not stay in the history of the browser.
    history.replaceState(null, "", "#/jobs");
    route.value = ["jobs"];
    void enter(code);
  }, []);
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
    default:
      return rest[0] ? <JobPage key={rest[0]} id={rest[0]} /> : <Jobs />;
  }
}

function App() {
  const [checked, setChecked] = useState(false);
  const [problem, setProblem] = useState("");
  useEffect(() => {
    const check = async () => {
      try {
        session.value = await currentSession();
      } catch (failure) {
        if (isTemporary(failure)) {
          setProblem((failure as Error).message);
          retry(() => void check());
          return;
        }
      }
      setChecked(true);
    };
    void check();
  }, []);
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
  if (!session.value) return <Login />;
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
      <main id="main" tabIndex={-1}>
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
