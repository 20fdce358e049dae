// The whole state of the page, as plain data, and its conversion to an address and back.
import { MAPS, NOISES, SLIDERS } from "./maps.mjs";
import { DRAWS } from "./draws.mjs";
import { clean, fitted } from "./names.mjs";
import { shortly, parseScores } from "./scores.mjs";
import { STEPS } from "./story.mjs";

export const HEATS = { top: "largest probability", first: "probability of class 0", entropy: "entropy" };

export function fresh() {
  return {
    x: [2, 1.2, 0.4, -0.3, -1.5],
    names: [],
    maps: ["softmax", "entmax", "sparsemax"],
    focus: "entmax",
    target: 0,
    ...Object.fromEntries(Object.entries(SLIDERS).map(([key, slider]) => [key, slider.start])),
    noise: "normal",
    heat: "top",
    probe: [0.6, 0.3],
    sorted: false,
    draws: 0, // for each map; 0 shows none
    seed: 1,
  };
}

const SHORT = { x: "x", names: "names", maps: "maps", focus: "focus", target: "y", T: "T", alpha: "alpha", norm: "norm", k: "k", sink: "s", p: "p", order: "order", noise: "noise",
  scale: "scale", margin: "margin", tilt: "prior", heat: "heat", probe: "at", sorted: "sorted", draws: "draws", seed: "seed" };

const score = (v) => (v === -Infinity ? "-inf" : String(v));

const WRITTEN = {
  x: (value) => value.map(score).join(","),
  probe: (value) => value.join(","),
  maps: (value) => value.join(","),
  names: (value) => value.map(encodeURIComponent).join(","),
};

// The address of a state, and of the step of the story that is open.
export function toHash(state, story = 0) {
  const unsaid = state.draws ? [] : ["draws", "seed"];
  const words = Object.entries(SHORT).filter(([key]) => !unsaid.includes(key)).map(([key, short]) => `${short}=${WRITTEN[key]?.(state[key]) ?? state[key]}`);
  return "#" + [...words.filter((word) => word !== "names="), ...(story ? [`story=${story}`] : [])].join("&");
}

// The state of an address, and a complaint for each part that can't be used; such a part is taken from `base`.
export function fromHash(hash, base = fresh()) {
  const state = { ...base }, complaints = [];
  const given = new Map(hash.replace(/^#/, "").split("&").filter(Boolean).map((word) => {
    const at = word.indexOf("=");
    return at < 0 ? [word, ""] : [word.slice(0, at), word.slice(at + 1)];
  }));
  const read = (short, use) => {
    if (!given.has(short)) return;
    try {
      use(given.get(short));
    } catch (error) {
      complaints.push(`The address says ${short}=${shortly(decoded(given.get(short)))}: ${error.message}`);
    }
  };
  const take = (key, value) => read(SHORT[key], (text) => (state[key] = value(decoded(text))));
  take("x", parseScores);
  read("names", (text) => (state.names = namesOf(text, state.x.length)));
  take("maps", (text) => {
    const keys = [...new Set(text.split(","))], stray = keys.filter((key) => !Object.hasOwn(MAPS, key));
    if (stray.length) throw new Error(`there is no map ${shortly(stray[0]) || "without a name"}; the maps are ${Object.keys(MAPS).join(", ")}.`);
    return keys;
  });
  take("focus", (text) => oneOf(text, Object.keys(MAPS)));
  take("noise", (text) => oneOf(text, NOISES));
  take("heat", (text) => oneOf(text, Object.keys(HEATS)));
  take("sorted", (text) => oneOf(text, ["true", "false"]) === "true");
  take("draws", (text) => Number(oneOf(text, DRAWS.map(String))));
  take("seed", (text) => {
    if (!/^\d{1,9}$/.test(text)) throw new Error("a seed is a whole number from 0 to 999999999.");
    return Number(text);
  });
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
  let story = 0;
  read("story", (text) => (story = Number(oneOf(text, STEPS.map((_, i) => String(i + 1))))));
  const known = new Set([...Object.values(SHORT), "story"]);
  for (const short of given.keys()) if (!known.has(short)) complaints.push(`The address says ${shortly(short)}, which this page doesn't know.`);
  return { state: tidy(state), story, complaints };
}

// Each name is encoded separately, so that a comma in a name does not separate names.
function namesOf(text, count) {
  const names = text.split(",").map((word) => clean(decoded(word)));
  if (names.length > count) throw new Error(`these are ${names.length} names for ${count} classes.`);
  return names;
}

export const EXTENT = 3; // the distance from the middle of the plane of three classes to its edge

// The number of a slider; throws an error with the allowed range.
export function setting(key, value) {
  const { low, high, step, label } = SLIDERS[key];
  if (!(value >= low && value <= high)) throw new Error(`${label} goes from ${low} to ${high}.`);
  if ((key === "k" || key === "order") && (value - low) % step !== 0) throw new Error(`${label} goes from ${low} to ${high} in steps of ${step}.`);
  return value;
}

// Makes parts agree that depend on others.
export function tidy(state) {
  if (!state.maps.length) state.maps = ["softmax"];
  if (!state.maps.includes(state.focus)) state.focus = state.maps[0];
  if (state.target >= state.x.length) state.target = 0;
  state.names = fitted(state.names, state.x.length);
  return state;
}

const decoded = (text) => {
  try {
    return decodeURIComponent(text);
  } catch {
    return text;
  }
};
function oneOf(text, allowed) {
  if (!allowed.includes(text)) throw new Error(`it has to be one of ${allowed.join(", ")}.`);
  return text;
}
