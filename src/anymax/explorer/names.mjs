// What the classes are called: the names that a person gave, numbers for the others.

const LONGEST = 24; // characters of a name

// A name as it is kept: one line, without commas, which part names, and without signs that can't be written.
export function clean(name) {
  return Array.from(name.replace(/[\p{Cc}\s,;]+/gu, " ").replace(/\p{Surrogate}/gu, "").trim()).slice(0, LONGEST).join("").trim();
}

// Names between commas, semicolons or line ends, in the order of the classes; an empty place leaves its class without one.
export function parseNames(text, count) {
  const names = text.split(/[,;\n]/).map(clean);
  while (names.length && !names.at(-1)) names.pop();
  if (names.length > count) throw new Error(`These are ${names.length} names for ${count} classes.`);
  return names;
}

// Names that belong to `count` classes.
export function fitted(names, count) {
  let last = Math.min(names.length, count);
  while (last && !names[last - 1]) last--;
  return last === names.length ? names : names.slice(0, last);
}

export const tagOf = (state, i) => state.names[i] || String(i); // where it is short
export const nameOf = (state, i) => state.names[i] || `class ${i}`; // in a sentence
export const upper = (words) => words.charAt(0).toUpperCase() + words.slice(1);

export const escaped = (text) => text.replace(/[&<>"]/g, (sign) => ({ "&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;" })[sign]);
