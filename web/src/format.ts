export function duration(milliseconds: number): string {
  const seconds = Math.max(0, Math.floor(milliseconds / 1000));
  if (seconds < 60) return `${seconds} s`;
  const minutes = Math.floor(seconds / 60);
  if (minutes < 60) return `${minutes} min`;
  const hours = Math.floor(minutes / 60);
  if (hours < 24) return minutes % 60 ? `${hours} h ${minutes % 60} min` : `${hours} h`;
  const days = Math.floor(hours / 24);
  return hours % 24 ? `${days} d ${hours % 24} h` : `${days} d`;
}

export function age(at: string | null, now: number): string {
  if (at === null) return "–";
  const since = now - Date.parse(at);
  if (Math.abs(since) < 1000) return "just now";
  return since > 0 ? `${duration(since)} ago` : `in ${duration(-since)}`;
}

export function clock(at: string): string {
  const date = new Date(at);
  const today = date.toDateString() === new Date().toDateString();
  return today ? date.toLocaleTimeString() : `${date.toLocaleDateString()} ${date.toLocaleTimeString()}`;
}

export function number(value: number): string {
  return Number.isInteger(value) ? value.toLocaleString() : value.toPrecision(4);
}

/** Which colour a state has: states and end reasons share names. */
export function tone(state: string): string {
  if (["succeeded", "finished", "ready"].includes(state)) return "good";
  if (["running", "starting", "setup", "booting"].includes(state)) return "busy";
  if (
    ["recovering", "stopping", "doomed", "preempted", "maintenance", "superseded", "host_lost", "lost"].includes(state)
  )
    return "amber";
  if (
    ["failed", "hung", "user_error", "timeout", "out_of_hbm", "out_of_host_memory", "disk_full", "setup_failed"].includes(
      state,
    )
  )
    return "bad";
  return "quiet";
}

export function plural(count: number, noun: string): string {
  return `${count.toLocaleString()} ${noun}${count === 1 ? "" : "s"}`;
}
