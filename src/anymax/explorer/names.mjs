// The names of the classes: those that the reader gave, and numbers for the others.

const LONGEST = 24; // characters of a name

// A name as stored: one line, without commas, which separate names, and without control characters or invisible ones such as those that turn
// the direction of what follows, in a program that is copied too. Only the two that join letters stay: scripts and emoji are written with them.
export function clean(name) {
  return Array.from(name.replace(/(?:(?![\u200c\u200d])\p{Cf}|[\p{Cc}\s,;])+/gu, " ").replace(/\p{Surrogate}/gu, "").trim()).slice(0, LONGEST).join("").trim();
}

// Names separated by commas, semicolons or line ends, in the order of the classes; an empty one leaves its class without a name.
export function parseNames(text, count) {
  const names = text.split(/[,;\n]/).map(clean);
  while (names.length && !names.at(-1)) names.pop();
  if (names.length > count) throw new Error(`These are ${names.length} names for ${count} classes.`);
  return names;
}

// Names for `count` classes.
export function fitted(names, count) {
  let last = Math.min(names.length, count);
  while (last && !names[last - 1]) last--;
  return last === names.length ? names : names.slice(0, last);
}

export const tagOf = (state, i) => state.names[i] || String(i); // a short form
export const nameOf = (state, i) => state.names[i] || `class ${i}`; // in a sentence
export const upper = (words) => words.charAt(0).toUpperCase() + words.slice(1);

export const escaped = (text) => text.replace(/[&<>"]/g, (sign) => ({ "&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;" })[sign]);
