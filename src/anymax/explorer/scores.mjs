// Reads pasted scores, with or without names: numbers between spaces, commas or line ends, or as NumPy, torch, JAX and JSON print them.
import { clean } from "./names.mjs";

export const MOST = 20000; // classes

const NUMBER = /^[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?$/i;
const MASKED = /^-inf(inity)?$/i;
export const shortly = (text) => (text.length > 40 ? `${text.slice(0, 37)}…` : text);

// A text that can be read in two ways; `readings` holds both, in words and as scores.
export class TwoReadings extends Error {
  constructor(text, readings) {
    super(`${shortly(text)} can be read in two ways: the comma marks decimals, or stands between numbers.`);
    this.readings = readings;
  }
}

// One row of scores, and the names before them ("cat: 2.0, dog: 1.2"), if there are any.
export function parseRow(text, comma) {
  const body = text.trim().replace(/^\{|\}$/g, ""), parts = body.split(/[;\n]/.test(body.trim()) ? /,?\s*[;\n]+/ : ",").filter((part) => part.trim());
  const pairs = parts.map((part) => part.match(/^\s*(?:"([^"]+)"|'([^']+)'|(\p{L}[^:=[(]*?))\s*[:=]\s*([^\s[(]+)\s*$/u));
  if (!pairs.length || pairs.includes(null)) return { scores: parseScores(text, comma), names: null };
  const names = pairs.map((pair) => clean(pair[1] ?? pair[2] ?? pair[3]));
  return { scores: parseScores(pairs.map((pair) => pair[4]).join(" "), "decimal"), names };
}

// One row of scores. `comma` says what a comma is, "decimal" or "separator"; without it a text that allows for both is a `TwoReadings`.
export function parseScores(text, comma) {
  const body = rowOf(text.replaceAll("\u2212", "-").trim());
  if (comma === undefined && decimals(body) && !(text.includes("[") && /^\S+(,\s+\S+)*$/.test(body))) { // programs write [1,2, 3,4]
    throw new TwoReadings(text.trim(), ["decimal", "separator"].map((way) => ({ way, scores: parseScores(text, way) })));
  }
  const words = (comma === "decimal" ? withPoints(body) : body.split(/[\s,;|]+/)).map((word) => word.replace(/^["']|["']$/g, "")).filter(Boolean);
  if (!words.length) throw new Error("There are no numbers; give at least two scores, such as 2 1 0.1 -1.");
  const scores = words.map(scoreOf);
  if (scores.length < 2) throw new Error("That is one score; give at least two.");
  if (scores.length > MOST) throw new Error(`These are ${scores.length} scores; the page shows at most ${MOST}.`);
  if (!scores.some((v) => v > -Infinity)) throw new Error("Every score is -inf; at least one class has to be left.");
  return scores;
}

function rowOf(body) {
  const open = body.indexOf("["), end = body.lastIndexOf("]");
  if (open < 0 || end < open) return body;
  const inside = body.slice(open, end + 1).replace(/^\[+|\]+$/g, ""), rows = inside.split(/\]\s*,?\s*\[/);
  if (rows.length > 1) throw new Error(`These are ${rows.length} rows; give one row of scores.`);
  return inside;
}

const withPoints = (body) => body.split(/,\s+|[\s;|]+/).map((word) => word.replace(",", "."));

// Whether commas can be decimal commas: words are separated by something else, each has at most one comma, and one word has one.
function decimals(body) {
  const words = body.split(/,\s+|[\s;|]+/).filter(Boolean);
  return words.length > 1 && words.some((word) => /\d,\d/.test(word))
    && words.every((word) => (/^[+-]?\d+,\d+(e[+-]?\d+)?$/i.test(word) || /^[+-]?\d+$/.test(word) || MASKED.test(word)));
}

function scoreOf(word, i) {
  if (MASKED.test(word)) return -Infinity;
  const value = NUMBER.test(word) ? Number(word) : NaN;
  if (Number.isFinite(value)) return value;
  if (/^\.\.\.$|^…$/.test(word)) throw new Error(`Entry ${i + 1} is "...": the row was shortened when it was printed; give all of its numbers.`);
  if (/^[+]?inf(inity)?$|^nan$/i.test(word) || NUMBER.test(word)) throw new Error(`Entry ${i + 1}, ${shortly(word)}, is not a score; scores are finite numbers, or -inf for a masked class.`);
  throw new Error(`Entry ${i + 1}, "${shortly(word)}", is not a number; give numbers between spaces or commas, such as 2 1 0.1 -1.`);
}
