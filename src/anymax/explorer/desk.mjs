// What all parts of the page share: the state, the results of the kernels, and the functions that change the state.
import { close, newHistory, record } from "./history.mjs";
import { fresh, tidy } from "./state.mjs";

export const $ = (id) => document.getElementById(id);

export const desk = {
  K: null, // the kernels
  state: fresh(),
  history: newHistory(fresh()),
  seen: null, // everything computed from the state
  range: 4, // the largest score that the board shows, up and down
  one: 0, // the class that is being moved
  drawn: {}, // the inputs of the slower pictures as drawn last
  waiting: 0,
  paint: () => {}, // draws the page
  save: () => {}, // writes the address
  touched: () => {}, // called before the reader changes something
};

// Every change by the reader; changes of one `kind` are one undo step until `letGo`.
export function change(next, kind) {
  desk.touched();
  show(next);
  record(desk.history, desk.state, kind);
}

// A change without an undo step.
export function show(next) {
  tidy(Object.assign(desk.state, next));
  soon();
}

export const letGo = () => close(desk.history);

// Replaces the whole state, as undo does.
export function turnTo(state) {
  desk.state = tidy(state);
  fit();
  soon();
}

export function soon() {
  if (!desk.waiting) desk.waiting = requestAnimationFrame(() => desk.paint());
}

export function redraw() {
  desk.drawn = {};
  soon();
}

// Whole numbers that hold all scores with some room.
export function fit() {
  const most = desk.state.x.reduce((size, v) => (v > -Infinity ? Math.max(size, Math.abs(v)) : size), 0);
  desk.range = most <= 3.6 ? 4 : most * 1.12 < 10 ? Math.ceil(most * 1.12) : Number((most * 1.12).toPrecision(2));
}

export function complain(text) {
  $("notice").hidden = !text;
  $("notice").querySelector("p").textContent = text;
}

// Marks a field as wrong and says why; without words, as right.
export function valid(input, words) {
  words ? input.setAttribute("aria-invalid", "true") : input.removeAttribute("aria-invalid");
  complain(words);
}

// Writes a value into a field, unless the reader is correcting it.
export function put(input, value, most) {
  if (most !== undefined) input.max = most;
  if (document.activeElement === input && input.getAttribute("aria-invalid") === "true") return;
  if (input.value !== String(value)) input.value = value;
}
