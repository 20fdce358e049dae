// Runs the page: one state, one redraw per frame, the address, undo, themes and printing.
import { buildBoard, showScores } from "./board.mjs";
import { buildChoice, showCards } from "./choice.mjs";
import { buildClose, showClose, showPairs } from "./closeup.mjs";
import { $, complain, desk, redraw, turnTo } from "./desk.mjs";
import { sharp, whenResized } from "./draw.mjs";
import { buildEntry } from "./entry.mjs";
import { compute, spoken } from "./figures.mjs";
import { back, forth, newHistory, record } from "./history.mjs";
import { kernels, unpack } from "./kernels.mjs";
import { label } from "./maps.mjs";
import { toPython } from "./python.mjs";
import { buildSettings, showSettings } from "./settings.mjs";
import { fromHash, toHash } from "./state.mjs";
import { buildTour, enter, leave, pause, showStory, tour } from "./tour.mjs";

let speaking = 0, saving = 0;

export async function start() {
  try {
    desk.K = await kernels(await unpack($("kernels").textContent.trim()));
  } catch (error) {
    complain(`The kernels can't run in this browser (${error.message}). It takes WebAssembly with 128-bit vectors: a Chrome, Edge, Firefox or Safari since 2023.`);
    return;
  }
  const darkness = matchMedia("(prefers-color-scheme: dark)");
  prefer(darkness.matches);
  desk.paint = refresh;
  desk.save = save;
  desk.touched = pause;
  for (const part of [buildBoard, buildEntry, buildSettings, buildChoice, buildClose, buildTour, buildTools]) part();
  desk.history = newHistory(fromHash(location.hash).state);
  adopt();
  addEventListener("hashchange", () => location.hash !== address() && adopt());
  whenResized(redraw);
  darkness.addEventListener("change", ({ matches }) => {
    prefer(matches);
    redraw();
  });
  document.documentElement.dataset.ready = "true";
}

// -- state in, picture out ------------------------------------------------------------------------------------------------------------

// Reads the state from the address.
function adopt() {
  leave();
  const { state, story, complaints } = fromHash(location.hash);
  turnTo(state);
  record(desk.history, desk.state);
  if (story) enter(story);
  complain(complaints.join("\n"));
  refresh();
}

function refresh() {
  cancelAnimationFrame(desk.waiting);
  desk.waiting = 0;
  const began = performance.now(), { state } = desk;
  desk.one = Math.min(desk.one, state.x.length - 1);
  try {
    desk.seen = compute(desk.K, state);
  } catch (error) {
    complain(`The kernels can't compute this (${error.message}); the picture is the one before.`);
    return;
  }
  desk.seen.top = topOf(desk.seen.results);
  for (const part of [showScores, showSettings, showCards, showClose, showPairs, showStory, showTools]) part();
  const program = toPython(state);
  $("python").textContent = state.x.length <= 200 ? program : shortened(program);
  performance.measure("anymax-update", { start: began, end: performance.now() });
  clearTimeout(saving);
  saving = setTimeout(save, 150);
  clearTimeout(speaking);
  speaking = setTimeout(speak, 700);
}

// A long vector is shown in part, and copied whole.
function shortened(program) {
  const lines = program.split("\n"), end = lines.indexOf("])");
  return [...lines.slice(0, 8), "    ...  # and so on: Copy as Python has them all", ...lines.slice(end)].join("\n");
}

// The probability at the top of all cards: the smallest of 1, 1/2, 1/4, 1/5, 1/10 ... that is large enough.
function topOf(results) {
  let most = 0;
  for (const { p } of results.values()) for (const v of p) if (v > most) most = v;
  if (!(most > 0)) return 1;
  if (most > 0.5) return 1;
  const power = 10 ** Math.floor(Math.log10(most));
  return [1, 2, 2.5, 5, 10].map((step) => step * power).find((top) => top >= most * 0.999);
}

// The reader's state, and the step of the story if it is open.
const address = () => toHash(tour.own?.state ?? desk.state, tour.step);

function save() {
  const hash = address();
  if (location.hash !== hash) history.replaceState(null, "", hash);
}

function speak() {
  const { state, seen } = desk, n = state.x.length;
  $("live").textContent = state.maps.slice(0, 4).map((key) => `${label(key, state, n)}: ${seen.results.get(key).support} of ${n} above 0${n <= 6 ? `, ${spoken(seen.results.get(key).p, state)}` : ""}.`).join(" ");
}

// -- undo and redo ------------------------------------------------------------------------------------------------------------------------

function stepTo(state) {
  if (!state) return;
  pause();
  turnTo(state);
}
const undo = () => stepTo(back(desk.history));
const redo = () => stepTo(forth(desk.history));

// Text fields have their own undo.
const typing = (element) => element.matches?.('textarea, input[type="text"], input[type="number"]');

function onKey(event) {
  if (!(event.ctrlKey || event.metaKey) || event.altKey || typing(event.target)) return;
  const key = event.key.toLowerCase(), step = key === "z" ? (event.shiftKey ? redo : undo) : key === "y" ? redo : null;
  if (!step) return;
  event.preventDefault();
  step();
}

function showTools() {
  $("undo").setAttribute("aria-disabled", !desk.history.past.length);
  $("redo").setAttribute("aria-disabled", !desk.history.future.length);
}

// -- the tools of the page ----------------------------------------------------------------------------------------------------------------

function prefer(darkness) {
  document.documentElement.dataset.theme = darkness ? "dark" : "light";
  $("theme").setAttribute("aria-pressed", darkness);
}

async function copy(text, what) {
  try {
    await navigator.clipboard.writeText(text);
  } catch { // an old way, if the browser does not give access to its clipboard
    const area = document.createElement("textarea");
    area.value = text;
    document.body.append(area);
    area.select();
    const done = document.execCommand("copy");
    area.remove();
    if (!done) {
      complain(`The browser does not let this page copy; ${what} is ${what === "The link" ? "in the address bar" : "at the end of the page"}.`);
      return;
    }
  }
  $("live").textContent = `${what} is copied.`;
  const button = $(what === "The link" ? "share" : "copy-python"), before = button.dataset.words ??= button.textContent;
  button.textContent = "Copied";
  setTimeout(() => (button.textContent = before), 1400);
}

// Paper is white and finer than a screen: the pictures are drawn again for printing.
function printing() {
  const before = { theme: document.documentElement.dataset.theme, ratio: sharp.ratio };
  const paint = (theme, ratio) => {
    prefer(theme === "dark");
    sharp.ratio = ratio;
    desk.drawn.pairs = "";
    refresh();
  };
  addEventListener("beforeprint", () => {
    before.theme = document.documentElement.dataset.theme;
    paint("light", 3);
  });
  addEventListener("afterprint", () => paint(before.theme, before.ratio));
}

function buildTools() {
  $("skip").addEventListener("click", () => (tour.step ? $("story-play") : $("chips").querySelector("input")).focus());
  $("undo").addEventListener("click", undo);
  $("redo").addEventListener("click", redo);
  document.addEventListener("keydown", onKey);
  $("share").addEventListener("click", () => {
    save();
    copy(location.href, "The link");
  });
  $("copy-python").addEventListener("click", () => copy(toPython(desk.state), "The program"));
  $("theme").addEventListener("click", () => {
    prefer(document.documentElement.dataset.theme !== "dark");
    redraw();
  });
  $("notice").querySelector("button").addEventListener("click", () => complain(""));
  printing();
}
