// Packs a folder that the user chose into a tar.gz, with the same files as `tpu run` in that folder:
// what .gitignore and .tpuignore exclude stays on this computer.
import ignore, { type Ignore } from "ignore";

/** As the default of the command line. */
const MOST_BYTES = 100 * 2 ** 20;
const MOST_FILES = 20_000;
const ALWAYS_EXCLUDED = new Set([".git", "__pycache__"]);
const VIRTUAL_ENVIRONMENT = "pyvenv.cfg"; // a file in its folder
const IGNORE_FILES = [".tpuignore", ".gitignore"]; // the first one that matches wins
const BLOCK = 512;
const ascii = new TextEncoder();

type Folder = Map<string, File | Folder>;
/** Patterns, and the path of their folder. */
type Rules = [folder: string, patterns: Ignore][];

/** Paths are relative to the folder; links and empty folders are not there in a browser. */
export async function included(files: File[]): Promise<[path: string, file: File][]> {
  const root: Folder = new Map();
  for (const file of files) {
    const parts = file.webkitRelativePath.split("/").slice(1);
    const name = parts.pop();
    let folder = root;
    for (const part of parts) {
      const known = folder.get(part);
      const below: Folder = known instanceof Map ? known : new Map();
      folder.set(part, below);
      folder = below;
    }
    if (name) folder.set(name, file);
  }
  const found: [string, File][] = [];
  await walk(root, "", [], found);
  return found.sort(([a], [b]) => (a < b ? -1 : 1));
}

async function walk(folder: Folder, path: string, above: Rules, found: [string, File][]): Promise<void> {
  const rules = [...(await rulesOf(folder, path)), ...above];
  for (const [name, item] of folder) {
    if (ALWAYS_EXCLUDED.has(name)) continue;
    if (item instanceof File) {
      if (!ignored(path + name, rules)) found.push([path + name, item]);
    } else if (!ignored(`${path}${name}/`, rules) && !item.has(VIRTUAL_ENVIRONMENT)) {
      await walk(item, `${path}${name}/`, rules, found);
    }
  }
}

async function rulesOf(folder: Folder, path: string): Promise<Rules> {
  const rules: Rules = [];
  for (const name of IGNORE_FILES) {
    const file = folder.get(name);
    if (file instanceof File) rules.push([path, ignore({ ignorecase: false }).add(await file.text())]);
  }
  return rules;
}

/** Rules of the deepest folder come first; the first that has a pattern for it, or for a folder that
 * it is in, decides. */
function ignored(path: string, rules: Rules): boolean {
  for (const [folder, patterns] of rules) {
    for (let part = path.slice(folder.length); part; part = part.replace(/[^/]+\/?$/, "")) {
      const verdict = patterns.test(part);
      if (verdict.ignored || verdict.unignored) return verdict.ignored;
    }
  }
  return false;
}

export async function pack(files: File[]): Promise<Blob> {
  const chosen = await included(files);
  const size = chosen.reduce((total, [, file]) => total + file.size, 0);
  if (!chosen.length) throw new Error("the folder has no files, or its .gitignore and .tpuignore exclude them all");
  if (size > MOST_BYTES || chosen.length > MOST_FILES) {
    throw new Error(
      `the folder has ${chosen.length} files of ${(size / 2 ** 20).toFixed(0)} MiB, more than ${MOST_FILES} files or ${MOST_BYTES / 2 ** 20} MiB; exclude data and outputs in a file .tpuignore (same syntax as .gitignore)`,
    );
  }
  const parts: BlobPart[] = [];
  for (const [path, file] of chosen) {
    // A browser does not know which files are executable.
    const start = new Uint8Array(await file.slice(0, 2).arrayBuffer());
    const script = start[0] === 0x23 && start[1] === 0x21;
    parts.push(header(path, file.size, script ? 0o755 : 0o644), file, new Uint8Array((BLOCK - (file.size % BLOCK)) % BLOCK));
  }
  parts.push(new Uint8Array(2 * BLOCK));
  return new Response(new Blob(parts).stream().pipeThrough(new CompressionStream("gzip"))).blob();
}

/** Of a regular file, in the format ustar. */
function header(path: string, size: number, mode: number): Uint8Array<ArrayBuffer> {
  const block = new Uint8Array(BLOCK);
  const write = (text: string, at: number) => block.set(ascii.encode(text), at);
  const [prefix, name] = split(path);
  write(name, 0);
  write(`${octal(mode, 7)}\0${octal(0, 7)}\0${octal(0, 7)}\0${octal(size, 11)} ${octal(0, 11)} `, 100);
  write(" ".repeat(8), 148); // counted as spaces in the checksum
  write("0", 156);
  write("ustar\0" + "00", 257);
  write(prefix, 345);
  const sum = block.reduce((total, byte) => total + byte, 0);
  write(`${octal(sum, 6)}\0 `, 148);
  return block;
}

const octal = (value: number, digits: number) => value.toString(8).padStart(digits, "0");

/** A name has 100 bytes, and the folders before it 155. */
function split(path: string): [prefix: string, name: string] {
  const length = (text: string) => ascii.encode(text).length;
  if (length(path) <= 100) return ["", path];
  for (let at = path.indexOf("/"); at >= 0; at = path.indexOf("/", at + 1)) {
    const [prefix, name] = [path.slice(0, at), path.slice(at + 1)];
    if (length(prefix) <= 155 && length(name) <= 100) return [prefix, name];
  }
  throw new Error(`the path ${path} is too long; use \`tpu run\` in the folder`);
}
