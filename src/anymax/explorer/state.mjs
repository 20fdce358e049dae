// The whole state of the page, as plain data: its way into the address and back, and scores read from what people paste.
import { MAPS, NOISES, SLIDERS } from "./maps.mjs";

export const MOST = 20000; // classes

export const HEATS = { top: "largest probability", first: "probability of class 0", entropy: "entropy" };

export function fresh() {
  return {
    x: [2, 1.2, 0.4, -0.3, -1.5],
    maps: ["softmax", "entmax", "sparsemax"],
    focus: "entmax",
    target: 0,
    ...Object.fromEntries(Object.entries(SLIDERS).map(([key, slider]) => [key, slider.start])),
    noise: "normal",
    heat: "top",
    probe: [0.6, 0.3],
    sorted: false,
  };
}

const SHORT = { x: "x", maps: "maps", focus: "focus", target: "y", T: "T", alpha: "alpha", norm: "norm", k: "k", p: "p", order: "order", noise: "noise",
  scale: "scale", margin: "margin", tilt: "prior", heat: "heat", probe: "at", sorted: "sorted" };

const score = (v) => (v === -Infinity ? "-inf" : String(v));

export function toHash(state) {
  return "#" + Object.entries(SHORT).map(([key, short]) => {
    const value = state[key];
    return `${short}=${key === "x" || key === "probe" ? value.map(score).join(",") : Array.isArray(value) ? value.join(",") : value}`;
  }).join("&");
}

// The state that an address says, and a sentence for each part of it that can't be used; such a part is as in `base`.
export function fromHash(hash, base = fresh()) {
  const state = { ...base }, complaints = [];
  const given = new Map(hash.replace(/^#/, "").split("&").filter(Boolean).map((word) => {
    const at = word.indexOf("=");
    return at < 0 ? [word, ""] : [word.slice(0, at), decoded(word.slice(at + 1))];
  }));
  const take = (key, read) => {
    const short = SHORT[key];
    if (!given.has(short)) return;
    try {
      state[key] = read(given.get(short));
    } catch (error) {
      complaints.push(`The address says ${short}=${brief(given.get(short))}: ${error.message}`);
    }
  };
  take("x", parseScores);
  take("maps", (text) => {
    const keys = [...new Set(text.split(","))], stray = keys.filter((key) => !Object.hasOwn(MAPS, key));
    if (stray.length) throw new Error(`there is no map ${brief(stray[0]) || "without a name"}; the maps are ${Object.keys(MAPS).join(", ")}.`);
    return keys;
  });
  take("focus", (text) => oneOf(text, Object.keys(MAPS)));
  take("noise", (text) => oneOf(text, NOISES));
  take("heat", (text) => oneOf(text, Object.keys(HEATS)));
  take("sorted", (text) => oneOf(text, ["true", "false"]) === "true");
  take("target", (text) => {
    if (!/^\d+$/.test(text) || Number(text) >= state.x.length) throw new Error(`the target is one of the classes 0 to ${state.x.length - 1}.`);
    return Number(text);
  });
  take("probe", (text) => {
    const place = text.split(",").map(Number);
    if (place.length !== 2 || !place.every((v) => Math.abs(v) <= EXTENT)) throw new Error(`a point is two numbers from ${-EXTENT} to ${EXTENT}.`);
    return place;
  });
  for (const key of Object.keys(SLIDERS)) take(key, (text) => setting(key, text.trim() === "" ? NaN : Number(text)));
  const known = new Set(Object.values(SHORT));
  for (const short of given.keys()) if (!known.has(short)) complaints.push(`The address says ${brief(short)}, which this page doesn't know.`);
  return { state: tidy(state), complaints };
}

export const EXTENT = 3; // of the plane of three classes, from its middle

// A slider's number, or an error that says what it may be.
export function setting(key, value) {
  const { low, high, step, label } = SLIDERS[key];
  if (!(value >= low && value <= high)) throw new Error(`${label} goes from ${low} to ${high}.`);
  if ((key === "k" || key === "order") && (value - low) % step !== 0) throw new Error(`${label} goes from ${low} to ${high} in steps of ${step}.`);
  return value;
}

// Parts that depend on others, made to agree.
export function tidy(state) {
  if (!state.maps.length) state.maps = ["softmax"];
  if (!state.maps.includes(state.focus)) state.focus = state.maps[0];
  if (state.target >= state.x.length) state.target = 0;
  return state;
}

const decoded = (text) => {
  try {
    return decodeURIComponent(text);
  } catch {
    return text;
  }
};
const brief = (text) => (text.length > 40 ? `${text.slice(0, 37)}…` : text);
function oneOf(text, allowed) {
  if (!allowed.includes(text)) throw new Error(`it has to be one of ${allowed.join(", ")}.`);
  return text;
}

const NUMBER = /^[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?$/i;

// One row of scores from what a person pastes: numbers between spaces, commas or line ends, or how NumPy, torch, JAX and JSON print them.
export function parseScores(text) {
  let body = text.replaceAll("\u2212", "-").trim();
  const open = body.indexOf("["), close = body.lastIndexOf("]");
  if (open >= 0 && close > open) {
    body = body.slice(open, close + 1).replace(/^\[+|\]+$/g, "");
    const rows = body.split(/\]\s*,?\s*\[/);
    if (rows.length > 1) throw new Error(`These are ${rows.length} rows; give one row of scores.`);
  }
  const words = body.split(/[\s,;|]+/).map((word) => word.replace(/^["']|["']$/g, "")).filter(Boolean);
  if (!words.length) throw new Error("There are no numbers; give at least two scores, such as 2 1 0.1 -1.");
  const scores = words.map((word, i) => {
    if (/^-inf(inity)?$/i.test(word)) return -Infinity;
    const value = NUMBER.test(word) ? Number(word) : NaN;
    if (Number.isFinite(value)) return value;
    if (/^\.\.\.$|^…$/.test(word)) throw new Error(`Entry ${i + 1} is "...": the row was shortened when it was printed; give all of its numbers.`);
    if (/^[+]?inf(inity)?$|^nan$/i.test(word) || NUMBER.test(word)) throw new Error(`Entry ${i + 1}, ${brief(word)}, is not a score; scores are finite numbers, or -inf for a masked class.`);
    throw new Error(`Entry ${i + 1}, "${brief(word)}", is not a number; give numbers between spaces or commas, such as 2 1 0.1 -1.`);
  });
  if (scores.length < 2) throw new Error("That is one score; give at least two.");
  if (scores.length > MOST) throw new Error(`These are ${scores.length} scores; the page shows at most ${MOST}.`);
  if (!scores.some((v) => v > -Infinity)) throw new Error("Every score is -inf; at least one class has to be left.");
  return scores;
}

