// The page at work: hands on the scores and settings, one state, one redraw a frame.
import { EVERYWHERE, MAPS, NOISES, SLIDERS, label } from "./maps.mjs";
import { kernels, unpack } from "./kernels.mjs";
import { EXTENT, HEATS, MOST, fresh, fromHash, parseScores, setting, tidy, toHash } from "./state.mjs";
import { toPython } from "./python.mjs";
import { brief, brush, colour, columns, ink, whenResized } from "./draw.mjs";
import { SHOWN, card, compute, drawCard, drawGradient, drawJacobian, drawPairs, drawPlane, finePlane, pairsOf, planeOf, spoken, toPlane, toScores } from "./figures.mjs";

const FINGERS = 32; // classes that have a bar of their own to drag
const $ = (id) => document.getElementById(id);

let K, state, seen, range = 4, one = 0, drawn = {}, plane, pairs, waiting = 0, speaking = 0, saving = 0, refining = 0;

export async function start() {
  try {
    K = await kernels(await unpack($("kernels").textContent.trim()));
  } catch (error) {
    complain(`The kernels can't run in this browser (${error.message}). It takes WebAssembly with 128-bit vectors: a Chrome, Edge, Firefox or Safari since 2023.`);
    return;
  }
  prefer(matchMedia("(prefers-color-scheme: dark)").matches);
  build();
  adopt();
  addEventListener("hashchange", () => location.hash !== toHash(state) && adopt());
  whenResized(redraw);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", ({ matches }) => {
    prefer(matches);
    redraw();
  });
  $("more").open = innerWidth > 900;
  document.documentElement.dataset.ready = "true";
}

// -- state in, picture out ------------------------------------------------------------------------------------------------------------

// Takes the state that the address holds.
function adopt() {
  const { state: next, complaints } = fromHash(location.hash);
  state = next;
  complain(complaints.join("\n"));
  fit();
  refresh();
}

// What a hand changes goes through here.
function change(next) {
  Object.assign(state, next);
  tidy(state);
  if (!waiting) waiting = requestAnimationFrame(refresh);
}

function redraw() {
  drawn = {};
  if (!waiting) waiting = requestAnimationFrame(refresh);
}

function refresh() {
  waiting = 0;
  const began = performance.now();
  one = Math.min(one, state.x.length - 1);
  try {
    seen = compute(K, state);
  } catch (error) {
    complain(`The kernels can't compute this (${error.message}); the picture is the one before.`);
    return;
  }
  seen.top = topOf(seen.results);
  showScores();
  showSettings();
  showCards();
  showClose();
  showPairs();
  const program = toPython(state);
  $("python").textContent = state.x.length <= 200 ? program : shortened(program);
  performance.measure("anymax-update", { start: began, end: performance.now() });
  clearTimeout(saving);
  saving = setTimeout(save, 150);
  clearTimeout(speaking);
  speaking = setTimeout(speak, 700);
}

// A long vector is not shown whole; the copy has it.
function shortened(program) {
  const lines = program.split("\n"), end = lines.indexOf("])");
  return [...lines.slice(0, 8), "    ...  # and so on: Copy as Python has them all", ...lines.slice(end)].join("\n");
}

function save() {
  const hash = toHash(state);
  if (location.hash !== hash) history.replaceState(null, "", hash);
}

function speak() {
  const n = state.x.length;
  $("live").textContent = state.maps.slice(0, 4).map((key) => `${label(key, state, n)}: ${seen.results.get(key).support} of ${n} above 0${n <= 6 ? `, ${spoken(seen.results.get(key).p)}` : ""}.`).join(" ");
}

function complain(text) {
  $("notice").hidden = !text;
  $("notice").querySelector("p").textContent = text;
}

// The probability at the top of all cards: the least of 1, 1/2, 1/4, 1/5, 1/10 ... that holds them.
function topOf(results) {
  let most = 0;
  for (const { p } of results.values()) for (const v of p) if (v > most) most = v;
  if (!(most > 0)) return 1;
  if (most > 0.5) return 1;
  const power = 10 ** Math.floor(Math.log10(most));
  return [1, 2, 2.5, 5, 10].map((step) => step * power).find((top) => top >= most * 0.999);
}

// The range of the board: whole numbers that hold all scores with some room.
function fit() {
  const most = state.x.reduce((size, v) => (v > -Infinity ? Math.max(size, Math.abs(v)) : size), 0);
  range = most <= 3.6 ? 4 : most * 1.12 < 10 ? Math.ceil(most * 1.12) : Number((most * 1.12).toPrecision(2));
}

// -- scores --------------------------------------------------------------------------------------------------------------------------------------

const rounded = (v) => Number(v.toFixed(range <= 20 ? 2 : 0));

function setScores(changes) {
  const x = state.x.slice();
  for (const [i, v] of changes) x[i] = v;
  if (x.every((v) => v === -Infinity)) {
    complain("Every score would be -inf; at least one class has to be left.");
    return;
  }
  change({ x });
}

function showScores() {
  const n = state.x.length, few = n <= FINGERS, board = $("board");
  if (drawn.board !== `${few}:${few ? n : 0}`) {
    drawn.board = `${few}:${few ? n : 0}`;
    few ? makeColumns(board, n) : makeSurface(board);
  }
  few ? moveColumns(board) : paintSurface(board);
  const masked = state.x.filter((v) => v === -Infinity).length;
  $("count").textContent = `${n.toLocaleString("en")} classes${masked ? `, ${masked} masked` : ""}`;
  $("hint").textContent = few ? "Drag a bar, or use the arrow keys; Delete masks a class. Click a number below to make it the target."
    : "Draw across the scores. With the keyboard: left and right choose a class, up and down move it.";
  put($("one-class"), one, n - 1);
  put($("target"), state.target, n - 1);
  put($("one-score"), state.x[one] === -Infinity ? "-inf" : state.x[one]);
  $("sorted").checked = state.sorted;
  $("add").disabled = n >= MOST;
  $("remove").disabled = n <= 2;
}

function put(input, value, most) {
  if (most !== undefined) input.max = most;
  if (document.activeElement === input && input.getAttribute("aria-invalid") === "true") return;
  if (input.value !== String(value)) input.value = value;
}

function makeColumns(board, n) {
  const held = board.contains(document.activeElement) ? document.activeElement.dataset.at : undefined;
  board.className = "board few";
  board.replaceChildren(...Array.from({ length: n }, (_, i) => {
    const column = document.createElement("div");
    column.className = "column";
    column.innerHTML = `<div class="stick" role="slider" tabindex="0" aria-orientation="vertical" aria-label="Score of class ${i}" data-at="${i}">
      <span class="zero"></span><span class="bar"></span><span class="knob"></span><span class="figure"></span></div>
      <button type="button" class="aim" role="radio" aria-label="Class ${i} is the target" data-aim="${i}">${i}</button>`;
    return column;
  }));
  board.setAttribute("role", "group");
  board.setAttribute("aria-label", "Scores and target class");
  if (held !== undefined) board.querySelector(`[data-at="${Math.min(held, n - 1)}"]`).focus();
}

function moveColumns(board) {
  const n = state.x.length, before = board.contains(document.activeElement) ? document.activeElement.dataset.at : undefined;
  [...board.children].forEach((column, place) => {
    const i = seen.order ? seen.order[place] : place, v = state.x[i], masked = v === -Infinity, stick = column.firstElementChild, aim = column.lastElementChild;
    const share = masked ? 0 : (50 * Math.max(-1, Math.min(1, v / range))), [zero, bar, knob, figure] = stick.children;
    column.classList.toggle("target", i === state.target);
    column.classList.toggle("masked", masked);
    if (stick.dataset.at !== String(i)) {
      stick.dataset.at = aim.dataset.aim = i;
      stick.setAttribute("aria-label", `Score of class ${i}`);
      aim.setAttribute("aria-label", `Class ${i} is the target`);
      aim.textContent = i;
    }
    zero.style.top = "50%";
    bar.style.top = `${50 - Math.max(share, 0)}%`;
    bar.style.height = `${Math.abs(share)}%`;
    knob.style.top = `${50 - share}%`;
    figure.style.top = share >= 0 ? `calc(${50 - share}% - 1.55rem)` : `calc(${50 - share}% + .3rem)`;
    figure.textContent = n <= 12 ? (masked ? "−∞" : brief(v)) : "";
    stick.setAttribute("aria-valuemin", -range);
    stick.setAttribute("aria-valuemax", range);
    stick.setAttribute("aria-valuenow", masked ? -range : v);
    stick.setAttribute("aria-valuetext", masked ? "masked, minus infinity" : String(v));
    aim.setAttribute("aria-checked", i === state.target);
    aim.tabIndex = i === state.target ? 0 : -1;
  });
  if (before !== undefined && document.activeElement.dataset.at !== before) board.querySelector(`[data-at="${before}"]`).focus(); // sorted elsewhere
}

function makeSurface(board) {
  board.className = "board many";
  board.removeAttribute("role");
  board.innerHTML = `<canvas class="surface" role="slider" tabindex="0" aria-orientation="vertical"></canvas>`;
}

function paintSurface(board) {
  const canvas = board.firstElementChild, { pen, width, height } = brush(canvas), n = state.x.length;
  const count = Math.min(n, Math.floor(width)), step = width / count, up = (v) => (height / 2) * (1 - Math.max(-1, Math.min(1, v / range)));
  const { high, low } = columns(state.x.map((v) => (v === -Infinity ? -range : v)), seen.order, count);
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
  const place = (i) => ((seen.order ? seen.order.indexOf(i) : i) + 0.5) * (width / n);
  for (const [i, tint, size] of [[state.target, ink("hot"), 4], [one, ink("focus"), 3]]) {
    pen.fillStyle = tint;
    pen.beginPath();
    pen.arc(place(i), up(Math.max(-range, state.x[i])), size, 0, 7);
    pen.fill();
  }
  const v = state.x[one];
  canvas.setAttribute("aria-label", `Score of class ${one}; left and right choose another class`);
  canvas.setAttribute("aria-valuemin", -range);
  canvas.setAttribute("aria-valuemax", range);
  canvas.setAttribute("aria-valuenow", v === -Infinity ? -range : v);
  canvas.setAttribute("aria-valuetext", `class ${one}: ${v === -Infinity ? "masked, minus infinity" : v}`);
}

const held = { at: null };
function scoreAt(box, event) {
  return rounded(Math.max(-range, Math.min(range, range * (1 - (2 * (event.clientY - box.top)) / box.height))));
}

function grab(event) {
  const stick = event.target.closest(".stick, .surface");
  if (!stick || (event.button ?? 0) !== 0) return;
  event.preventDefault();
  stick.focus({ preventScroll: true });
  stick.setPointerCapture(event.pointerId);
  held.at = stick.classList.contains("stick") ? Number(stick.dataset.at) : "surface";
  held.last = null;
  held.sorted = state.sorted;
  held.order = state.sorted ? seen.order : null;
  drag(event);
}

function drag(event) {
  if (held.at === null) return;
  const element = event.target.closest(".stick, .surface"), box = element.getBoundingClientRect(), v = scoreAt(box, event);
  if (held.at !== "surface") {
    one = held.at;
    setScores([[held.at, v]]);
    return;
  }
  const n = state.x.length, to = Math.max(0, Math.min(n - 1, Math.floor(((event.clientX - box.left) / box.width) * n)));
  const from = held.last ?? [to, v], changes = [], steps = Math.abs(to - from[0]);
  for (let k = 0; k <= steps; k++) {
    const place = from[0] + Math.sign(to - from[0]) * k, i = held.order ? held.order[place] : place;
    changes.push([i, rounded(steps ? from[1] + ((v - from[1]) * k) / steps : v)]);
  }
  held.last = [to, v];
  one = changes.at(-1)[0];
  setScores(changes);
}

function release() {
  if (held.at === null) return;
  held.at = null;
}

function nudge(event) {
  const stick = event.target.closest(".stick, .surface"), aim = event.target.closest(".aim");
  const n = state.x.length;
  if (aim) {
    const turn = { ArrowLeft: -1, ArrowUp: -1, ArrowRight: 1, ArrowDown: 1 }[event.key];
    if (!turn) return;
    event.preventDefault();
    change({ target: (state.target + turn + n) % n });
    requestAnimationFrame(() => document.querySelector('.aim[aria-checked="true"]')?.focus());
    return;
  }
  if (!stick) return;
  const surface = stick.classList.contains("surface"), i = surface ? one : Number(stick.dataset.at);
  const fine = event.shiftKey ? 0.01 : 0.1, v = state.x[i] === -Infinity ? -range : state.x[i];
  const to = { ArrowUp: v + fine, ArrowDown: v - fine, PageUp: v + 1, PageDown: v - 1, Home: -range, End: range, Delete: -Infinity, Backspace: -Infinity }[event.key];
  const turn = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
  if (to !== undefined) {
    event.preventDefault();
    one = i;
    const score = to === -Infinity ? to : Number(to.toFixed(2));
    if (Math.abs(score) > range && score !== -Infinity) range = Math.ceil(Math.abs(score));
    setScores([[i, score]]);
  } else if (turn) {
    event.preventDefault();
    if (surface) {
      one = (one + turn * (event.shiftKey ? 10 : 1) + n) % n;
      change({});
    } else {
      const sticks = [...document.querySelectorAll(".stick")];
      sticks[(sticks.indexOf(stick) + turn + n) % n].focus();
    }
  }
}

// Ready vectors; the long one is the same everywhere.
const EXAMPLES = {
  "Five classes": () => [2, 1.2, 0.4, -0.3, -1.5],
  "Three, on the plane": () => [1.1, 0.5, -0.6],
  "A clear winner": () => [3.5, 0.6, 0.2, -0.4, -1],
  "A tie": () => [1.5, 1.5, 1.5, -0.5, -1],
  "Nearly alike": () => [0.3, 0.2, 0.1, 0, -0.1, -0.2],
  "2,000 classes": () => bells(2000),
};

function bells(n) {
  let seed = 20240229;
  const draw = () => {
    seed = (Math.imul(seed, 1664525) + 1013904223) >>> 0;
    return (seed + 0.5) / 4294967296;
  };
  return Array.from({ length: n }, () => Number((Math.sqrt(-2 * Math.log(draw())) * Math.cos(2 * Math.PI * draw())).toFixed(2)));
}

// -- settings ----------------------------------------------------------------------------------------------------------------------------------------

const FINE = 1000;
function toTravel(key, value) {
  const { low, high, log } = SLIDERS[key];
  return log ? Math.round((FINE * Math.log(value / low)) / Math.log(high / low)) : value;
}
function fromTravel(key, travel) {
  const { low, high, log } = SLIDERS[key];
  return log ? Number((low * (high / low) ** (travel / FINE)).toFixed(2)) : travel;
}

function makeSlider(key) {
  const { low, high, step, log, label: name, symbol, words } = SLIDERS[key], row = document.createElement("div");
  row.className = "slider";
  row.dataset.setting = key;
  const [from, to, by] = log ? [0, FINE, 1] : [low, high, step];
  row.innerHTML = `<label for="set-${key}">${name} <span>${symbol === name ? words : `${name.includes(symbol) ? "" : `${symbol}: `}${words}`}</span></label>
    <input type="number" id="type-${key}" min="${low}" max="${high}" step="any" aria-label="${name}, exactly">
    <input type="range" id="set-${key}" min="${from}" max="${to}" step="${by}">`;
  const [, typed, travel] = row.children;
  travel.addEventListener("input", () => change({ [key]: fromTravel(key, Number(travel.value)) }));
  typed.addEventListener("change", () => {
    try {
      change({ [key]: setting(key, typed.value === "" ? NaN : Number(typed.value)) });
      valid(typed, "");
    } catch (error) {
      valid(typed, `${error.message} It stays at ${state[key]}.`);
    }
  });
  return row;
}

function valid(input, words) {
  words ? input.setAttribute("aria-invalid", "true") : input.removeAttribute("aria-invalid");
  complain(words);
}

function showSettings() {
  const used = new Set([...EVERYWHERE, ...state.maps.flatMap((key) => MAPS[key].uses ?? [])]);
  for (const row of $("sliders").children) {
    const key = row.dataset.setting;
    row.hidden = !used.has(key);
    if (key === "noise") {
      row.lastElementChild.value = state.noise;
      continue;
    }
    const [, typed, travel] = row.children;
    put(typed, state[key]);
    const at = String(toTravel(key, state[key]));
    if (fromTravel(key, Number(travel.value)) !== state[key] && travel.value !== at) travel.value = at;
    travel.setAttribute("aria-valuetext", `${state[key]}`);
  }
}

// -- maps ----------------------------------------------------------------------------------------------------------------------------------------------

function showCards() {
  const cards = $("cards"), have = new Map([...cards.children].map((element) => [element.dataset.map, element]));
  const wanted = Object.keys(MAPS).filter((key) => state.maps.includes(key));
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
  const n = state.x.length;
  $("marks").textContent = `${n <= FINGERS ? "A ring marks a probability that is exactly 0." : "The strip below the bars is filled where a class is above 0."}${
    state.sorted && n > SHOWN ? ` These are the ${SHOWN} largest scores.` : ""}`;
  const options = wanted.map((key) => `<option value="${key}">${label(key, state, state.x.length)}</option>`).join("");
  if (drawn.options !== options) $("focus").innerHTML = drawn.options = options;
  $("focus").value = state.focus;
}

const PLACE = () => (state.x.length === 3 && state.x.every(Number.isFinite) ? toPlane(state.x) : state.probe);

function showClose() {
  $("words").textContent = MAPS[state.focus].words;
  drawJacobian($("jacobian"), $("jacobian-words"), seen, state);
  drawGradient($("gradient"), $("gradient-words"), $("gradient-note"), seen, state);
  const { focus, heat, T, tilt } = state, key = JSON.stringify([focus, heat, T, tilt, state.noise, (MAPS[focus].uses ?? []).map((name) => state[name])]);
  if (drawn.plane !== key) {
    drawn.plane = key;
    plane = planeOf(K, state);
    clearTimeout(refining);
    refining = setTimeout(refine, 120, key);
  }
  showPlane();
}

async function refine(key) {
  const fine = await finePlane(K, state, () => drawn.plane !== key);
  if (!fine) return;
  plane = fine;
  showPlane();
}

function showPlane() {
  const { focus, heat } = state, place = PLACE(), scores = toScores(place), p = K.apply(focus, state, K.scores(scores, state));
  drawPlane($("simplex"), plane, state, place, p);
  $("heat").value = heat;
  $("ramp-low").textContent = brief(plane.low);
  $("ramp-high").textContent = `${brief(plane.high)} ${HEATS[heat]}`;
  $("simplex-words").textContent = `the plane of scores that sum to 0${plane.sizes.length > 1 ? "; white lines part the regions by how many classes are above 0" : ""}.`;
  $("probe").textContent = `At the ring: ${spoken(p)}.${state.x.length === 3 ? " It is your score vector: drag it." : " Drag it to read off others."}`;
}

function movePlace([u, v]) {
  const place = [u, v].map((w) => Number(Math.max(-EXTENT, Math.min(EXTENT, w)).toFixed(2)));
  if (state.x.length === 3) {
    const mean = state.x.every(Number.isFinite) ? state.x.reduce((sum, w) => sum + w, 0) / 3 : 0;
    change({ x: toScores(place).map((w) => Number((w + mean).toFixed(3))) });
    if (state.x.some((w) => Math.abs(w) > range)) fit();
  } else change({ probe: place });
}

function showPairs() {
  const key = JSON.stringify([state.maps, Object.keys(SLIDERS).map((name) => state[name]), state.noise, document.documentElement.dataset.theme]);
  if (drawn.pairs === key) return;
  drawn.pairs = key;
  pairs = pairsOf(K, state);
  drawPairs($("curve"), $("losses"), [$("curve-legend"), $("losses-legend")], pairs);
}

// -- the hands ----------------------------------------------------------------------------------------------------------------------------------------

function prefer(darkness) {
  document.documentElement.dataset.theme = darkness ? "dark" : "light";
  $("theme").setAttribute("aria-pressed", darkness);
}

async function copy(text, what) {
  try {
    await navigator.clipboard.writeText(text);
  } catch { // an old way, where the browser does not lend its clipboard
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

function take(text) {
  change({ x: parseScores(text) });
  drawn.board = "";
  one = 0;
  fit();
}

function build() {
  $("presets").replaceChildren(...Object.entries(EXAMPLES).map(([name, scores]) => {
    const button = document.createElement("button");
    button.type = "button";
    button.textContent = name;
    button.addEventListener("click", () => {
      change({ x: scores() });
      one = 0;
      fit();
    });
    return button;
  }));
  $("skip").addEventListener("click", () => $("sight").querySelector("input").focus());
  const board = $("board");
  board.addEventListener("pointerdown", grab);
  board.addEventListener("pointermove", drag);
  for (const end of ["pointerup", "pointercancel", "lostpointercapture"]) board.addEventListener(end, release);
  board.addEventListener("keydown", nudge);
  board.addEventListener("focusin", (event) => event.target.dataset.at && (one = Number(event.target.dataset.at)));
  board.addEventListener("click", (event) => event.target.dataset.aim && change({ target: Number(event.target.dataset.aim) }));

  const whole = (input, what, use) => input.addEventListener("change", () => {
    const v = Number(input.value);
    if (input.value === "" || !Number.isInteger(v) || v < 0 || v >= state.x.length) {
      valid(input, `${what} is one of the classes 0 to ${state.x.length - 1}, not ${input.value || "empty"}.`);
      return;
    }
    valid(input, "");
    use(v);
  });
  whole($("one-class"), "The class", (v) => {
    one = v;
    change({});
  });
  whole($("target"), "The target", (target) => change({ target }));
  $("one-score").addEventListener("change", () => {
    const input = $("one-score");
    try {
      const [v] = parseScores(`${input.value} 0`), extra = parseScores(`${input.value} 0`).length > 2;
      if (extra) throw new Error("That is more than one score; Paste scores takes a whole row.");
      valid(input, "");
      setScores([[one, v]]);
      if (Math.abs(v) > range && v > -Infinity) fit();
    } catch (error) {
      valid(input, `${error.message} Class ${one} stays at ${state.x[one]}.`);
    }
  });
  $("sorted").addEventListener("change", () => change({ sorted: $("sorted").checked }));
  $("add").addEventListener("click", () => change({ x: [...state.x, 0] }));
  $("remove").addEventListener("click", () => {
    const x = state.x.slice(0, -1);
    x.some((v) => v > -Infinity) ? change({ x }) : complain("The class that would go is the last one that is not masked.");
  });

  const open = (yes) => {
    $("paste").hidden = !yes;
    $("paste-open").setAttribute("aria-expanded", yes);
    $(yes ? "paste-text" : "paste-open").focus();
  };
  $("paste-open").addEventListener("click", () => open($("paste").hidden));
  $("paste-close").addEventListener("click", () => open(false));
  $("paste").addEventListener("keydown", (event) => event.key === "Escape" && open(false));
  $("paste").addEventListener("submit", (event) => {
    event.preventDefault();
    try {
      take($("paste-text").value);
      $("paste-error").textContent = "";
      $("paste-text").removeAttribute("aria-invalid");
      complain("");
    } catch (error) {
      $("paste-error").textContent = `${error.message} Your scores are as they were.`;
      $("paste-text").setAttribute("aria-invalid", "true");
      $("paste-text").focus();
    }
  });
  document.addEventListener("paste", (event) => { // anywhere but in a field
    if (event.target.closest?.("input, textarea")) return;
    try {
      take(event.clipboardData.getData("text"));
      complain("");
    } catch (error) {
      complain(`${error.message} Your scores are as they were.`);
    }
  });

  const rows = Object.keys(SLIDERS).map(makeSlider), noise = document.createElement("div");
  noise.className = "slider";
  noise.dataset.setting = "noise";
  noise.innerHTML = `<label for="set-noise">Noise <span>of the perturbed argmax</span></label><select id="set-noise">${NOISES.map((name) => `<option>${name}</option>`).join("")}</select>`;
  noise.lastElementChild.addEventListener("change", (event) => change({ noise: event.target.value }));
  rows.splice(Object.keys(SLIDERS).indexOf("scale"), 0, noise);
  const order = [...EVERYWHERE];
  $("sliders").replaceChildren(...rows.filter((row) => order.includes(row.dataset.setting)).sort((a, b) => order.indexOf(a.dataset.setting) - order.indexOf(b.dataset.setting)),
    ...rows.filter((row) => !order.includes(row.dataset.setting)));
  $("reset").addEventListener("click", () => {
    const start = fresh();
    change(Object.fromEntries([...Object.keys(SLIDERS), "noise"].map((key) => [key, start[key]])));
  });

  $("chips").replaceChildren(...Object.keys(MAPS).map((key) => {
    const chip = document.createElement("label");
    chip.dataset.map = key;
    chip.innerHTML = `<input type="checkbox">${MAPS[key].title}`;
    chip.firstElementChild.addEventListener("change", (event) => {
      const on = event.target.checked, maps = Object.keys(MAPS).filter((name) => (name === key ? on : state.maps.includes(name)));
      if (!maps.length) {
        event.target.checked = true;
        complain("One map has to stay; choose another one first.");
        return;
      }
      complain("");
      change({ maps, ...(on ? { focus: key } : {}) });
    });
    return chip;
  }));
  $("cards").addEventListener("click", (event) => {
    const key = event.target.closest(".card")?.dataset.map;
    if (key) change({ focus: key });
  });
  $("focus").addEventListener("change", () => change({ focus: $("focus").value }));
  $("heat").innerHTML = Object.entries(HEATS).map(([key, words]) => `<option value="${key}">${words}</option>`).join("");
  $("heat").addEventListener("change", () => change({ heat: $("heat").value }));

  const simplex = $("simplex");
  const point = (event) => {
    const box = simplex.getBoundingClientRect();
    movePlace([EXTENT * ((2 * (event.clientX - box.left)) / box.width - 1), EXTENT * (1 - (2 * (event.clientY - box.top)) / box.height)]);
  };
  simplex.addEventListener("pointerdown", (event) => {
    event.preventDefault();
    simplex.focus({ preventScroll: true });
    simplex.setPointerCapture(event.pointerId);
    point(event);
  });
  simplex.addEventListener("pointermove", (event) => simplex.hasPointerCapture(event.pointerId) && point(event));
  simplex.addEventListener("keydown", (event) => {
    const step = event.shiftKey ? 0.5 : 0.1, [u, v] = PLACE(), by = { ArrowLeft: [-step, 0], ArrowRight: [step, 0], ArrowUp: [0, step], ArrowDown: [0, -step] }[event.key];
    if (!by) return;
    event.preventDefault();
    movePlace([u + by[0], v + by[1]]);
  });

  $("share").addEventListener("click", () => {
    save();
    copy(location.href, "The link");
  });
  $("copy-python").addEventListener("click", () => copy(toPython(state), "The program"));
  $("theme").addEventListener("click", () => {
    prefer(document.documentElement.dataset.theme !== "dark");
    redraw();
  });
  $("notice").querySelector("button").addEventListener("click", () => complain(""));
}

