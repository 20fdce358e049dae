// Plays the story; the reader's state comes back at the end.
import { $, complain, desk, fit, show, turnTo } from "./desk.mjs";
import { mixed } from "./formula.mjs";
import { newHistory } from "./history.mjs";
import { fresh } from "./state.mjs";
import { STEPS, eased } from "./story.mjs";

const STILLS = 4; // pictures of a motion after the first, for readers whose system is set to reduced motion
const PAUSE = 1.4; // seconds between them

const calm = matchMedia("(prefers-reduced-motion: reduce)");

// step: 0 if the story is closed; along: the progress of the motion, from 0 to 1; own: the reader's state, which comes back
export const tour = { step: 0, along: 0, playing: 0, own: null };

const current = () => STEPS[tour.step - 1];

export function enter(step) {
  pause();
  tour.own ??= { state: { ...desk.state }, history: desk.history };
  tour.step = step;
  tour.along = 0;
  const { title, words, state, parts, motion } = current();
  desk.drawn = {};
  turnTo({ ...fresh(), ...state, ...motion.at(0) });
  desk.history = newHistory(desk.state);
  $("desk").dataset.parts = parts.join(" ");
  $("story").hidden = false;
  $("story-title").textContent = title;
  $("story-count").textContent = `Step ${step} of ${STEPS.length}`;
  $("story-words").innerHTML = mixed(words);
  $("story-dial").textContent = motion.symbol;
  $("story-along").setAttribute("aria-label", `Along the motion: ${motion.symbol}`);
  $("story-back").disabled = step === 1;
  $("story-next").textContent = step === STEPS.length ? "End" : "Next";
  $("story-open").setAttribute("aria-pressed", true);
  complain("");
  desk.save();
  if (!calm.matches) play();
}

export function leave() {
  if (!tour.step) return;
  pause();
  const { state, history } = tour.own;
  Object.assign(tour, { step: 0, own: null });
  $("story").hidden = true;
  delete $("desk").dataset.parts;
  $("story-open").setAttribute("aria-pressed", false);
  desk.history = history;
  desk.drawn = {};
  turnTo(state);
}

// The play button, and the sentence about what the page shows now.
export function showStory() {
  if (!tour.step) return;
  $("story-play").textContent = tour.playing ? "Pause" : "Play";
  $("story-along").value = Math.round(1000 * tour.along);
  $("story-now").textContent = nowOf();
}

// No sentence if the reader has removed maps that it speaks of.
function nowOf() {
  const { now, state } = current();
  return state.maps.every((key) => desk.seen.results.has(key)) && desk.state.x.length === state.x.length ? now(desk.state, desk.seen) : "";
}

function move(along) {
  tour.along = along;
  const next = current().motion.at(eased(along));
  show(next);
  if (next.x) fit();
}

function play() {
  if (tour.along >= 1) move(0);
  const mine = (tour.playing = performance.now()), begun = tour.along, { seconds } = current().motion;
  const going = () => tour.playing === mine;
  if (calm.matches) {
    const next = () => going() && (move(Math.min(1, (Math.floor(tour.along * STILLS + 1e-9) + 1) / STILLS)), tour.along < 1 ? setTimeout(next, 1000 * PAUSE) : pause());
    setTimeout(next, 1000 * PAUSE);
    return;
  }
  const frame = (time) => {
    if (!going()) return;
    move(Math.min(1, begun + Math.max(0, time - mine) / 1000 / seconds));
    tour.along < 1 ? requestAnimationFrame(frame) : pause();
  };
  requestAnimationFrame(frame);
}

export function pause() {
  if (!tour.playing) return;
  tour.playing = 0;
  showStory();
}

// Closes the story and returns the focus to the button that opened it.
function close() {
  leave();
  $("story-open").focus();
}

function turn(by) {
  const step = tour.step + by;
  if (step > STEPS.length) close();
  else {
    enter(step);
    $("story-title").focus({ preventScroll: true });
    scrollTo({ top: 0 });
  }
}

export function buildTour() {
  $("story-open").addEventListener("click", () => (tour.step ? close() : turn(1)));
  $("story-leave").addEventListener("click", close);
  $("story-back").addEventListener("click", () => turn(-1));
  $("story-next").addEventListener("click", () => turn(1));
  $("story-play").addEventListener("click", () => {
    tour.playing ? pause() : play();
    showStory();
  });
  $("story-along").addEventListener("input", (event) => {
    pause();
    move(Number(event.target.value) / 1000);
  });
  $("story").addEventListener("keydown", (event) => event.key === "Escape" && close());
}
