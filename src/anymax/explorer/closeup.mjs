// One map up close, and all of them for two classes.
import { $, change, desk, fit } from "./desk.mjs";
import { brief } from "./draw.mjs";
import { drawGradient, drawJacobian, drawPairs, drawPlane, finePlane, heatOf, heatWords, pairsOf, planeNames, planeOf, spoken, toPlane, toScores } from "./figures.mjs";
import { MAPS, SLIDERS } from "./maps.mjs";
import { EXTENT, HEATS } from "./state.mjs";

let plane, refining = 0;

const place = ({ x, probe }) => (x.length === 3 && x.every(Number.isFinite) ? toPlane(x) : probe);

export function showClose() {
  const { K, state, seen, drawn } = desk;
  $("words").textContent = MAPS[state.focus].words;
  drawJacobian($("jacobian"), $("jacobian-words"), seen, state);
  drawGradient($("gradient"), $("gradient-words"), $("gradient-note"), seen, state);
  const { focus, T, tilt } = state, key = JSON.stringify([focus, heatOf(state), T, tilt, state.noise, (MAPS[focus].uses ?? []).map((name) => state[name])]);
  if (drawn.plane !== key) {
    drawn.plane = key;
    plane = planeOf(K, state);
    clearTimeout(refining);
    refining = setTimeout(refine, 120, key);
  }
  showPlane();
}

async function refine(key) {
  const fine = await finePlane(desk.K, desk.state, () => desk.drawn.plane !== key);
  if (!fine) return;
  plane = fine;
  showPlane();
}

function showPlane() {
  const { K, state } = desk, { focus } = state, at = place(state), p = K.apply(focus, state, K.scores(toScores(at), state)), heat = heatOf(state);
  drawPlane($("simplex"), plane, state, at, p);
  for (const option of $("heat").options) {
    option.textContent = heatWords(option.value, state);
    option.disabled = option.value !== heatOf(state, option.value);
  }
  $("heat").value = heat;
  $("ramp-low").textContent = brief(plane.low);
  $("ramp-high").textContent = `${brief(plane.high)} ${heatWords(heat, state)}`;
  $("simplex-words").textContent = `the plane of scores that sum to 0${plane.sizes.length > 1 ? "; white lines part the regions by how many classes are above 0" : ""}.`;
  $("probe").textContent = `At the ring: ${spoken(p, planeNames(state))}.${state.x.length === 3 ? " It is your score vector: drag it." : " Drag it to read off others."}`;
}

function movePlace([u, v], kind) {
  const { state } = desk, to = [u, v].map((w) => Number(Math.max(-EXTENT, Math.min(EXTENT, w)).toFixed(2)));
  if (state.x.length !== 3) {
    change({ probe: to }, kind);
    return;
  }
  const mean = state.x.every(Number.isFinite) ? state.x.reduce((sum, w) => sum + w, 0) / 3 : 0;
  change({ x: toScores(to).map((w) => Number((w + mean).toFixed(3))) }, kind);
  if (state.x.some((w) => Math.abs(w) > desk.range)) fit();
}

export function showPairs() {
  const { K, state, drawn } = desk, key = JSON.stringify([state.maps, Object.keys(SLIDERS).map((name) => state[name]), state.noise, document.documentElement.dataset.theme]);
  if (drawn.pairs === key) return;
  drawn.pairs = key;
  drawPairs($("curve"), $("losses"), [$("curve-legend"), $("losses-legend")], pairsOf(K, state));
}

export function buildClose() {
  $("focus").addEventListener("change", () => change({ focus: $("focus").value }));
  $("heat").append(...Object.entries(HEATS).map(([key, words]) => new Option(words, key)));
  $("heat").addEventListener("change", () => change({ heat: $("heat").value }));
  const simplex = $("simplex");
  let drags = 0;
  const point = (event) => {
    const box = simplex.getBoundingClientRect();
    movePlace([EXTENT * ((2 * (event.clientX - box.left)) / box.width - 1), EXTENT * (1 - (2 * (event.clientY - box.top)) / box.height)], `plane ${drags}`);
  };
  simplex.addEventListener("pointerdown", (event) => {
    event.preventDefault();
    simplex.focus({ preventScroll: true });
    simplex.setPointerCapture(event.pointerId);
    drags++;
    point(event);
  });
  simplex.addEventListener("pointermove", (event) => simplex.hasPointerCapture(event.pointerId) && point(event));
  simplex.addEventListener("keydown", (event) => {
    const step = event.shiftKey ? 0.5 : 0.1, [u, v] = place(desk.state), by = { ArrowLeft: [-step, 0], ArrowRight: [step, 0], ArrowUp: [0, step], ArrowDown: [0, -step] }[event.key];
    if (!by) return;
    event.preventDefault();
    if (!event.repeat) drags++;
    movePlace([u + by[0], v + by[1]], `plane ${drags}`);
  });
}
