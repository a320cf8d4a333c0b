import type { CostRow, Inventory, Pool } from "../api";
import { BADPUT, amount, percent, plural, typeName, usd } from "../format";
import { Cli, Empty, Failure, JobLink, PoolLink, Share, Table, Title, useData, useFleetChange } from "../parts";
import { isMe } from "../state";

interface BudgetUse {
  scope: string;
  name: string;
  usd: number;
  period: string;
  spent: number;
  since: string | null;
}

const dollars = (row: CostRow) => row.chip_hours * (row.usd_per_chip_hour ?? 0);

/** What everybody uses now and has used, against the limits. */
export function Usage() {
  const change = useFleetChange();
  const { data: inventory } = useData<Inventory>("/inventory", change, 15);
  const { data: pools } = useData<{ pools: Pool[] }>("/pools");
  const { data: budgets } = useData<{ budgets: BudgetUse[] }>("/budgets", 0, 60);
  const { data, error } = useData<{ rows: CostRow[] }>("/costs", 0, 60);
  const rows = [...(data?.rows ?? [])].sort((a, b) => b.chip_hours - a.chip_hours);
  const used = inventory?.rows.filter((row) => row.owner) ?? [];
  const users = [...new Set(used.map((row) => row.owner!))].sort();
  const name = (user: string) => (isMe(user) ? `${user} (me)` : user);
  const chips = (user: string) => used.filter((row) => row.owner === user).reduce((sum, row) => sum + row.chips, 0);
  const all = (inventory?.rows ?? []).reduce((sum, row) => sum + row.chips, 0);
  const limited = (pools?.pools ?? []).filter((pool) => pool.slices_per_user !== null);
  return (
    <>
      <Title line="tpu cost --by user">Usage</Title>
      <Failure message={error} />
      <div class="columns">
        <section aria-labelledby="now" class="card">
          <h2 id="now">Chips in use now</h2>
          {inventory && !users.length ? <Empty>Nobody uses a slice.</Empty> : null}
          <ul class="bars">
            {users.map((user) => (
              <Share key={user} label={name(user)} value={chips(user)} most={all} text={`${chips(user)} of ${plural(all, "chip")}`} />
            ))}
          </ul>
        </section>
        <section aria-labelledby="budgets" class="card">
          <div class="line">
            <h2 id="budgets">Budgets</h2>
            <Cli line="tpu cost budget" />
          </div>
          {budgets && !budgets.budgets.length ? <Empty>No budgets are set on the server.</Empty> : null}
          <ul class="bars">
            {budgets?.budgets.map((each) => (
              <Share
                key={`${each.scope} ${each.name}`}
                label={`${each.scope} ${each.name}`}
                value={each.spent}
                most={each.usd}
                text={`${usd(each.spent)} of ${usd(each.usd)} ${each.since ? `this ${each.period}` : "in total"}`}
              />
            ))}
          </ul>
        </section>
      </div>
      {limited.length ? (
        <section aria-labelledby="quota">
          <h2 id="quota">Slices per user</h2>
          {limited.map((pool) => {
            const here = used.filter((row) => row.pool === pool.name);
            const owners = [...new Set(here.map((row) => row.owner!))].sort();
            return (
              <div key={pool.name} class="card">
                <h3>
                  <PoolLink name={pool.name} /> <span class="quiet">{plural(pool.slices_per_user!, "slice")} each</span>
                </h3>
                {owners.length ? null : <p class="quiet">Nobody uses it now.</p>}
                <ul class="bars">
                  {owners.map((user) => {
                    const count = here.filter((row) => row.owner === user).length;
                    return <Share key={user} label={name(user)} value={count} most={pool.slices_per_user!} text={`${count} of ${pool.slices_per_user}`} />;
                  })}
                </ul>
              </div>
            );
          })}
        </section>
      ) : null}
      <section aria-labelledby="hours">
        <h2 id="hours">Chip hours</h2>
        {data && !rows.length ? <Empty>No slice has been used yet.</Empty> : null}
        {rows.length ? (
          <>
            <Table
              name="users"
              label="Chip hours by user"
              rows={totals(rows, (row) => row.owner || "idle slices")}
              rowKey={(sum) => sum.name}
              columns={[{ name: "User", cell: (sum) => name(sum.name) }, ...figures()]}
            />
            <h3>By job</h3>
            <Table
              name="costs"
              rows={rows.slice(0, 200)}
              rowKey={(row) => `${row.job_id} ${row.owner} ${row.accelerator} ${row.capacity} ${row.pool}`}
              columns={[
                { name: "Job", cell: (row) => (row.job_id ? <JobLink id={row.job_id} name={row.job_name} /> : row.owner ? "(earlier jobs)" : "(idle)") },
                { name: "Owner", cell: (row) => row.owner || "–" },
                { name: "Type", cell: (row) => typeName(row.accelerator) },
                { name: "Capacity", cell: (row) => row.capacity },
                { name: "Chip hours", kind: "number", cell: (row) => amount(row.chip_hours) },
                { name: "Useful", kind: "number", cell: (row) => amount(row.useful) },
                { name: "Cost", kind: "number", cell: (row) => `${usd(dollars(row))}${row.simulated ? " simulated" : ""}` },
                { name: "Not useful", kind: "text", cell: (row) => losses(row.badput, row.chip_hours, row.usd_per_chip_hour ?? 0) },
              ]}
            />
          </>
        ) : null}
      </section>
    </>
  );
}

interface Sum {
  name: string;
  hours: number;
  useful: number;
  badput: Record<string, number>; // dollars
  billed: number;
  simulated: number;
}

function totals(rows: CostRow[], name: (row: CostRow) => string): Sum[] {
  const sums = new Map<string, Sum>();
  for (const row of rows) {
    const key = name(row);
    const sum = sums.get(key) ?? { name: key, hours: 0, useful: 0, badput: {}, billed: 0, simulated: 0 };
    sum.hours += row.chip_hours;
    sum.useful += row.useful;
    for (const [kind, hours] of Object.entries(row.badput)) {
      sum.badput[kind] = (sum.badput[kind] ?? 0) + hours * (row.usd_per_chip_hour ?? 0);
    }
    if (row.simulated) sum.simulated += dollars(row);
    else sum.billed += dollars(row);
    sums.set(key, sum);
  }
  return [...sums.values()].sort((a, b) => b.hours - a.hours);
}

/** What cost most comes first; less than a hundredth of all is left out. */
function losses(badput: Record<string, number>, all: number, price: number): string {
  return (
    Object.entries(badput)
      .filter(([, value]) => value > 0 && value >= all / 100)
      .sort((a, b) => b[1] - a[1])
      .map(([kind, value]) => `${BADPUT[kind] ?? kind} ${usd(value * price)}`)
      .join(", ") || "–"
  );
}

function figures() {
  const column = (name: string, cell: (sum: Sum) => string) => ({ name, kind: "number" as const, cell });
  return [
    column("Chip hours", (sum) => amount(sum.hours)),
    column("Goodput", (sum) => (sum.hours ? percent(sum.useful / sum.hours) : "–")),
    column("Cost", (sum) => [sum.billed || !sum.simulated ? usd(sum.billed) : "", sum.simulated ? `${usd(sum.simulated)} simulated` : ""].filter(Boolean).join(" + ")),
    { name: "Not useful", kind: "text" as const, cell: (sum: Sum) => losses(sum.badput, sum.billed + sum.simulated, 1) },
  ];
}
