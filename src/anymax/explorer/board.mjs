// The board of scores: a bar for each class if there are few, one drawing surface if there are many; mouse, finger and keyboard.
import { $, change, complain, desk, letGo, put } from "./desk.mjs";
import { brief, brush, columns, ink } from "./draw.mjs";
import { nameOf, tagOf, upper } from "./names.mjs";
import { MOST } from "./scores.mjs";

const FINGERS = 32; // at most this many classes have a bar each to drag
const NAMED = 12; // at most this many classes show names and scores at their bars
export const few = () => desk.state.x.length <= FINGERS;

const rounded = (v) => Number(v.toFixed(desk.range <= 20 ? 2 : 0));

export function setScores(changes, kind) {
  const x = desk.state.x.slice();
  for (const [i, v] of changes) x[i] = v;
  if (x.every((v) => v === -Infinity)) {
    complain("Every score would be -inf; at least one class has to be left.");
    return;
  }
  change({ x }, kind);
}

export function showScores() {
  const { state, one, drawn } = desk, n = state.x.length, bars = few(), board = $("board"), kind = bars ? `bars ${n}` : "surface";
  if (drawn.board !== kind) {
    drawn.board = kind;
    bars ? makeColumns(board, n) : makeSurface(board);
  }
  bars ? moveColumns(board) : paintSurface(board);
  const masked = state.x.filter((v) => v === -Infinity).length;
  $("count").textContent = `${n.toLocaleString("en")} classes${masked ? `, ${masked} masked` : ""}`;
  $("hint").textContent = bars ? "Drag a bar, or use the arrow keys; Delete masks a class. A click on its name makes it the target."
    : "Draw across the scores. With the keyboard: left and right choose a class, up and down move it.";
  put($("one-class"), one, n - 1);
  put($("target"), state.target, n - 1);
  put($("one-score"), state.x[one] === -Infinity ? "-inf" : state.x[one]);
  put($("names"), state.names.join(", "));
  $("sorted").checked = state.sorted;
  $("add").disabled = n >= MOST;
  $("remove").disabled = n <= 2;
}

function makeColumns(board, n) {
  const held = board.contains(document.activeElement) ? document.activeElement.dataset.at : undefined;
  board.className = `board few${n > NAMED ? " narrow" : ""}`;
  board.replaceChildren(...Array.from({ length: n }, () => {
    const column = document.createElement("div");
    column.className = "column";
    column.innerHTML = `<div class="stick" role="slider" tabindex="0" aria-orientation="vertical"><span class="zero"></span><span class="bar"></span>
      <span class="knob"></span><span class="figure"></span></div><button type="button" class="aim" role="radio"></button>`;
    return column;
  }));
  board.setAttribute("role", "group");
  board.setAttribute("aria-label", "Scores and target class");
  if (held !== undefined) board.querySelectorAll(".stick")[Math.min(held, n - 1)].focus();
}

function moveColumns(board) {
  const { seen } = desk, before = board.contains(document.activeElement) ? document.activeElement.dataset.at : undefined;
  [...board.children].forEach((column, place) => moveColumn(column, seen.order ? seen.order[place] : place));
  if (before !== undefined && document.activeElement.dataset.at !== before) board.querySelector(`[data-at="${before}"]`).focus(); // sorting moved it
}

// The label below a bar: its name, its number if there are many classes, every fourth number if there are very many.
function below(state, i) {
  const n = state.x.length;
  if (n <= NAMED) return tagOf(state, i);
  return n <= 18 || i % 4 === 0 ? String(i) : "";
}

function moveColumn(column, i) {
  const { state, range } = desk, v = state.x[i], masked = v === -Infinity, stick = column.firstElementChild, aim = column.lastElementChild;
  const share = masked ? 0 : 50 * Math.max(-1, Math.min(1, v / range)), [, bar, knob, figure] = stick.children, name = nameOf(state, i);
  column.classList.toggle("target", i === state.target);
  column.classList.toggle("masked", masked);
  if (stick.dataset.at !== String(i) || aim.title !== name || aim.textContent !== below(state, i)) {
    stick.dataset.at = aim.dataset.aim = i;
    stick.setAttribute("aria-label", `Score of ${name}`);
    aim.setAttribute("aria-label", `${upper(name)} is the target`);
    aim.title = name;
    aim.textContent = below(state, i);
  }
  bar.style.top = `${50 - Math.max(share, 0)}%`;
  bar.style.height = `${Math.abs(share)}%`;
  knob.style.top = `${50 - share}%`;
  figure.style.top = share >= 0 ? `calc(${50 - share}% - 1.55rem)` : `calc(${50 - share}% + .3rem)`;
  figure.textContent = state.x.length <= NAMED ? (masked ? "−∞" : brief(v)) : "";
  stick.setAttribute("aria-valuemin", -range);
  stick.setAttribute("aria-valuemax", range);
  stick.setAttribute("aria-valuenow", masked ? -range : v);
  stick.setAttribute("aria-valuetext", masked ? "masked, minus infinity" : String(v));
  aim.setAttribute("aria-checked", i === state.target);
  aim.tabIndex = i === state.target ? 0 : -1;
}

function makeSurface(board) {
  board.className = "board many";
  board.removeAttribute("role");
  board.innerHTML = `<canvas class="surface" role="slider" tabindex="0" aria-orientation="vertical"></canvas>`;
}

function paintSurface(board) {
  const canvas = board.firstElementChild, { pen, width, height } = brush(canvas), n = desk.state.x.length;
  const count = Math.min(n, Math.floor(width)), step = width / count, up = (v) => (height / 2) * (1 - Math.max(-1, Math.min(1, v / desk.range)));
  const { high, low } = columns(desk.state.x.map((v) => (v === -Infinity ? -desk.range : v)), desk.seen.order, count);
  pen.fillStyle = ink("soft");
  for (let c = 0; c < count; c++) {
    const [from, to] = [Math.min(up(high[c]), height / 2), Math.max(up(low[c]), height / 2)];
    pen.globalAlpha = 0.35;
    pen.fillRect(c * step, from, Math.max(0.8, step * 0.9), Math.max(1, to - from));
    pen.globalAlpha = 1;
    pen.fillRect(c * step, up(high[c]), Math.max(0.8, step * 0.9), 2);
  }
  pen.fillStyle = ink("line");
  pen.fillRect(0, height / 2, width, 1);
  const place = (i) => ((desk.seen.order ? desk.seen.order.indexOf(i) : i) + 0.5) * (width / n);
  for (const [i, tint, size] of [[desk.state.target, ink("hot"), 4], [desk.one, ink("focus"), 3]]) {
    pen.fillStyle = tint;
    pen.beginPath();
    pen.arc(place(i), up(Math.max(-desk.range, desk.state.x[i])), size, 0, 7);
    pen.fill();
  }
  const v = desk.state.x[desk.one];
  canvas.setAttribute("aria-label", `Score of ${nameOf(desk.state, desk.one)}; left and right choose another class`);
  canvas.setAttribute("aria-valuemin", -desk.range);
  canvas.setAttribute("aria-valuemax", desk.range);
  canvas.setAttribute("aria-valuenow", v === -Infinity ? -desk.range : v);
  canvas.setAttribute("aria-valuetext", `${nameOf(desk.state, desk.one)}: ${v === -Infinity ? "masked, minus infinity" : v}`);
}

// -- the hand ----------------------------------------------------------------------------------------------------------------------------

const held = { at: null, last: null, order: null };
let drags = 0;

function scoreAt(box, event) {
  return rounded(Math.max(-desk.range, Math.min(desk.range, desk.range * (1 - (2 * (event.clientY - box.top)) / box.height))));
}

function grab(event) {
  const stick = event.target.closest(".stick, .surface");
  if (!stick || (event.button ?? 0) !== 0) return;
  event.preventDefault();
  stick.focus({ preventScroll: true });
  stick.setPointerCapture(event.pointerId);
  drags++;
  held.at = stick.classList.contains("stick") ? Number(stick.dataset.at) : "surface";
  held.last = null;
  held.order = desk.state.sorted ? desk.seen.order : null;
  drag(event);
}

function drag(event) {
  if (held.at === null) return;
  const element = event.target.closest(".stick, .surface"), box = element.getBoundingClientRect(), v = scoreAt(box, event), kind = `drag ${drags}`;
  if (held.at !== "surface") {
    desk.one = held.at;
    setScores([[held.at, v]], kind);
    return;
  }
  const n = desk.state.x.length, to = Math.max(0, Math.min(n - 1, Math.floor(((event.clientX - box.left) / box.width) * n)));
  const from = held.last ?? [to, v], changes = [], steps = Math.abs(to - from[0]);
  for (let k = 0; k <= steps; k++) {
    const place = from[0] + Math.sign(to - from[0]) * k, i = held.order ? held.order[place] : place;
    changes.push([i, rounded(steps ? from[1] + ((v - from[1]) * k) / steps : v)]);
  }
  held.last = [to, v];
  desk.one = changes.at(-1)[0];
  setScores(changes, kind);
}

function release() {
  held.at = null;
  letGo();
}

function nudge(event) {
  const stick = event.target.closest(".stick, .surface"), aim = event.target.closest(".aim");
  if (aim) turnTarget(event);
  else if (stick) nudgeScore(event, stick);
}

function turnTarget(event) {
  const turn = { ArrowLeft: -1, ArrowUp: -1, ArrowRight: 1, ArrowDown: 1 }[event.key], n = desk.state.x.length;
  if (!turn) return;
  event.preventDefault();
  change({ target: (desk.state.target + turn + n) % n });
  requestAnimationFrame(() => document.querySelector('.aim[aria-checked="true"]')?.focus());
}

function nudgeScore(event, stick) {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  const surface = stick.classList.contains("surface"), i = surface ? desk.one : Number(stick.dataset.at), { range, state } = desk, n = state.x.length;
  const fine = event.shiftKey ? 0.01 : 0.1, v = state.x[i] === -Infinity ? -range : state.x[i];
  const to = { ArrowUp: v + fine, ArrowDown: v - fine, PageUp: v + 1, PageDown: v - 1, Home: -range, End: range, Delete: -Infinity, Backspace: -Infinity }[event.key];
  const turn = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
  if (to !== undefined) {
    event.preventDefault();
    desk.one = i;
    const score = to === -Infinity ? to : Number(to.toFixed(2));
    if (Math.abs(score) > range && score !== -Infinity) desk.range = Math.ceil(Math.abs(score));
    if (!event.repeat) letGo(); // holding a key down is one undo step
    setScores([[i, score]], `key ${event.key} ${i}`);
  } else if (turn && surface) {
    event.preventDefault();
    desk.one = (desk.one + turn * (event.shiftKey ? 10 : 1) + n) % n;
    change({});
  } else if (turn) {
    event.preventDefault();
    const sticks = [...document.querySelectorAll(".stick")];
    sticks[(sticks.indexOf(stick) + turn + n) % n].focus();
  }
}

export function buildBoard() {
  const board = $("board");
  board.addEventListener("pointerdown", grab);
  board.addEventListener("pointermove", drag);
  for (const end of ["pointerup", "pointercancel", "lostpointercapture"]) board.addEventListener(end, release);
  board.addEventListener("keydown", nudge);
  board.addEventListener("focusin", (event) => event.target.dataset.at && (desk.one = Number(event.target.dataset.at)));
  board.addEventListener("click", (event) => event.target.dataset.aim && change({ target: Number(event.target.dataset.aim) }));
}
