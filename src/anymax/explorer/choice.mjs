// The choice of maps on the screen, and a card for each of them.
import { $, change, complain, desk, put } from "./desk.mjs";
import { few } from "./board.mjs";
import { DRAWS } from "./draws.mjs";
import { SHOWN, card, drawCard } from "./figures.mjs";
import { badge, colour } from "./looks.mjs";
import { MAPS, label } from "./maps.mjs";

export function buildChoice() {
  $("chips").replaceChildren(...Object.keys(MAPS).map(makeChip));
  $("draws").append(...DRAWS.map((count) => new Option(count ? count.toLocaleString("en") : "none", count)));
  $("draws").addEventListener("change", () => change({ draws: Number($("draws").value) }));
  $("again").addEventListener("click", () => change({ seed: (desk.state.seed + 1) % 1e9 }, "draw again"));
  $("cards").addEventListener("click", (event) => {
    const key = event.target.closest(".card")?.dataset.map;
    if (key) change({ focus: key });
  });
}

function makeChip(key) {
  const chip = document.createElement("label");
  chip.dataset.map = key;
  chip.innerHTML = `<input type="checkbox">${badge(key)}${MAPS[key].title}`;
  chip.firstElementChild.addEventListener("change", (event) => {
    const on = event.target.checked, maps = Object.keys(MAPS).filter((name) => (name === key ? on : desk.state.maps.includes(name)));
    if (!maps.length) {
      event.target.checked = true;
      complain("One map has to stay; choose another one first.");
      return;
    }
    complain("");
    change({ maps, ...(on ? { focus: key } : {}) });
  });
  return chip;
}

export function showCards() {
  const { state, seen, drawn } = desk, cards = $("cards"), have = new Map([...cards.children].map((element) => [element.dataset.map, element]));
  const wanted = Object.keys(MAPS).filter((key) => state.maps.includes(key)), n = state.x.length;
  if ([...have.keys()].join() !== wanted.join()) {
    const active = document.activeElement;
    cards.replaceChildren(...wanted.map((key) => have.get(key) ?? card(key)));
    if (cards.contains(active)) active.focus();
  }
  for (const element of cards.children) drawCard(element, element.dataset.map, seen.results.get(element.dataset.map), state, seen);
  for (const chip of $("chips").children) {
    chip.firstElementChild.checked = state.maps.includes(chip.dataset.map);
    chip.style.setProperty("--map", colour(chip.dataset.map));
  }
  const draws = state.draws ? `, a diamond the share in ${state.draws === 1 ? "one draw" : `${state.draws.toLocaleString("en")} draws`}` : "";
  $("marks").textContent = `${few() ? "A ring marks a probability that is exactly 0" : "The strip below the bars is filled where a class is above 0"}${draws}.${
    state.sorted && n > SHOWN ? ` These are the ${SHOWN} largest scores.` : ""}`;
  put($("draws"), state.draws);
  $("again").disabled = !state.draws;
  const options = wanted.map((key) => `<option value="${key}">${label(key, state, n)}</option>`).join("");
  if (drawn.options !== options) $("focus").innerHTML = drawn.options = options;
  $("focus").value = state.focus;
}
