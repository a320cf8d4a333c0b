// Bundles the page: one script and one style sheet, named after their content.
import { cp, mkdir, readFile, rm, writeFile } from "node:fs/promises";
import { basename } from "node:path";
import { build } from "esbuild";

const out = "../src/tpufleet/service/web/static";
await rm(out, { recursive: true, force: true });
await mkdir(out, { recursive: true });
const { metafile } = await build({
  entryPoints: ["src/main.tsx"],
  outdir: `${out}/assets`,
  entryNames: "[name]-[hash]",
  bundle: true,
  minify: true,
  format: "esm",
  target: "es2022",
  jsx: "automatic",
  jsxImportSource: "preact",
  metafile: true,
});
const names = Object.keys(metafile.outputs).map((path) => basename(path));
const page = await readFile("index.html", "utf8");
await writeFile(
  `${out}/index.html`,
  page
    .replace("main.css", names.find((name) => name.endsWith(".css")))
    .replace("main.js", names.find((name) => name.endsWith(".js"))),
);
await cp("public", out, { recursive: true });
