import { useEffect, useRef, useState } from "preact/hooks";
import uPlot from "uplot";
import "uplot/dist/uPlot.min.css";
import { get, jobPath } from "../api";
import { number } from "../format";
import { Empty, Failure } from "../parts";

interface Series {
  job_id: string;
  name: string;
  points: { step: number | null; at: string; values: Record<string, number> }[];
}

const COLOURS = 8; // --user-0 to --user-7 in the style sheet

const DARK = matchMedia("(prefers-color-scheme: dark)");

/** The metrics of one or more jobs, one chart for each name. */
export function Curves({ ids }: { ids: string[] }) {
  const [series, setSeries] = useState<Series[] | null>(null);
  const [error, setError] = useState("");
  const key = ids.join("/");
  useEffect(() => {
    let current = true;
    const load = () =>
      Promise.all(ids.map((id) => get<Series>(`${jobPath(id)}/metrics`)))
        .then((answer) => current && (setSeries(answer), setError("")))
        .catch((failure: Error) => current && setError(failure.message));
    void load();
    const timer = setInterval(load, 10_000);
    return () => {
      current = false;
      clearInterval(timer);
    };
  }, [key]);
  if (error) return <Failure message={error} />;
  if (!series) return <Empty>Loading…</Empty>;
  const names = [...new Set(series.flatMap((each) => each.points.flatMap((point) => Object.keys(point.values))))].sort();
  if (!names.length)
    return <Empty>No metrics. A program reports them with tpufleet.runtime.progress(step, loss=…).</Empty>;
  return (
    <div class="charts">
      {names.map((name) => (
        <Chart key={name} name={name} series={series} />
      ))}
    </div>
  );
}

function Chart({ name, series }: { name: string; series: Series[] }) {
  const place = useRef<HTMLDivElement>(null);
  const [dark, setDark] = useState(DARK.matches);
  useEffect(() => {
    const change = () => setDark(DARK.matches);
    DARK.addEventListener("change", change);
    return () => DARK.removeEventListener("change", change);
  }, []);
  useEffect(() => {
    const node = place.current;
    if (!node) return;
    const steps = [...new Set(series.flatMap((each) => each.points.map((point, index) => point.step ?? index)))].sort(
      (a, b) => a - b,
    );
    const at = new Map(steps.map((step, index) => [step, index]));
    const lines = series.map((each) => {
      const values: (number | null)[] = new Array(steps.length).fill(null);
      each.points.forEach((point, index) => {
        const value = point.values[name];
        if (value !== undefined) values[at.get(point.step ?? index)!] = value;
      });
      return values;
    });
    const style = getComputedStyle(document.documentElement);
    const grid = { stroke: style.getPropertyValue("--line"), width: 1 };
    const axis = { stroke: style.getPropertyValue("--quiet"), grid, ticks: grid };
    const chart = new uPlot(
      {
        width: Math.max(280, node.clientWidth),
        height: 240,
        scales: { x: { time: false } },
        axes: [axis, { ...axis, size: 70, values: (_, ticks) => ticks.map(number) }],
        series: [
          { label: "step" },
          ...series.map((each, index) => ({
            label: each.name,
            stroke: style.getPropertyValue(`--user-${index % COLOURS}`),
            width: 2,
            spanGaps: true,
          })),
        ],
      },
      [steps, ...lines],
      node,
    );
    const resize = new ResizeObserver(() => chart.setSize({ width: Math.max(280, node.clientWidth), height: 240 }));
    resize.observe(node);
    return () => {
      resize.disconnect();
      chart.destroy();
    };
  }, [name, series, dark]);
  return (
    <figure>
      <figcaption>{name}</figcaption>
      <div ref={place} />
    </figure>
  );
}
