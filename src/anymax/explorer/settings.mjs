// The sliders of the maps on the screen.
import { $, change, desk, letGo, put, valid } from "./desk.mjs";
import { mixed } from "./formula.mjs";
import { EVERYWHERE, MAPS, NOISES, SLIDERS } from "./maps.mjs";
import { fresh, setting } from "./state.mjs";

const FINE = 1000; // positions of a slider that moves by factors
const ROOMY = 5; // at most this many sliders show their words below them

function toTravel(key, value) {
  const { low, high, log } = SLIDERS[key];
  return log ? Math.round((FINE * Math.log(value / low)) / Math.log(high / low)) : value;
}

function fromTravel(key, travel) {
  const { low, high, log } = SLIDERS[key];
  return log ? Number((low * (high / low) ** (travel / FINE)).toFixed(2)) : travel;
}

function makeSlider(key) {
  const { low, high, step, log, label: name, symbol, words } = SLIDERS[key], row = makeRow(key, name, symbol === name || name.includes(symbol) ? words : `${symbol}: ${words}`);
  const [from, to, by] = log ? [0, FINE, 1] : [low, high, step];
  row.insertAdjacentHTML("beforeend", `<input type="range" id="set-${key}" min="${from}" max="${to}" step="${by}">
    <input type="number" id="type-${key}" min="${low}" max="${high}" step="any" aria-label="${name}, exactly">`);
  const [, , travel, typed] = row.children;
  travel.addEventListener("input", () => change({ [key]: fromTravel(key, Number(travel.value)) }, `slide ${key}`));
  travel.addEventListener("change", letGo);
  typed.addEventListener("change", () => {
    try {
      change({ [key]: setting(key, typed.value === "" ? NaN : Number(typed.value)) });
      valid(typed, "");
    } catch (error) {
      valid(typed, `${error.message} It stays at ${desk.state[key]}.`);
    }
  });
  return row;
}

function makeNoise() {
  const row = makeRow("noise", "Noise", "of the perturbed argmax");
  row.insertAdjacentHTML("beforeend", `<select id="set-noise">${NOISES.map((name) => `<option>${name}</option>`).join("")}</select>`);
  row.lastElementChild.addEventListener("change", (event) => change({ noise: event.target.value }));
  return row;
}

function makeRow(key, name, words) {
  const row = document.createElement("div");
  row.className = "slider";
  row.dataset.setting = key;
  row.title = words.replaceAll("$", "");
  row.innerHTML = `<label for="set-${key}">${name}</label><p class="quiet">${mixed(words)}</p>`;
  return row;
}

export function buildSettings() {
  const own = Object.keys(SLIDERS).filter((key) => !EVERYWHERE.includes(key)), [first, ...rest] = EVERYWHERE;
  const rows = [first, ...own, ...rest].flatMap((key) => (key === "scale" ? [makeNoise(), makeSlider(key)] : [makeSlider(key)]));
  $("sliders").replaceChildren(...rows);
  $("reset").addEventListener("click", () => {
    const start = fresh();
    change(Object.fromEntries([...Object.keys(SLIDERS), "noise"].map((key) => [key, start[key]])));
  });
}

export function showSettings() {
  const { state } = desk, used = new Set([...EVERYWHERE, ...state.maps.flatMap((key) => MAPS[key].uses ?? [])]);
  for (const row of $("sliders").children) {
    const key = row.dataset.setting;
    row.hidden = !used.has(key);
    if (key === "noise") {
      row.lastElementChild.value = state.noise;
      continue;
    }
    const [, , travel, typed] = row.children, at = String(toTravel(key, state[key]));
    put(typed, state[key]);
    if (fromTravel(key, Number(travel.value)) !== state[key] && travel.value !== at) travel.value = at;
    travel.setAttribute("aria-valuetext", `${state[key]}`);
  }
  $("sliders").classList.toggle("dense", used.size > ROOMY);
}
