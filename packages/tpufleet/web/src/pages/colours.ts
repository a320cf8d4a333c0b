const COUNT = 8;

/** The same colour for the same user on every page. */
export function colourOf(user: string): string {
  let hash = 0;
  for (const letter of user) hash = (hash * 31 + letter.charCodeAt(0)) >>> 0;
  return `user-${hash % COUNT}`;
}
