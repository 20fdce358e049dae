// The pictures of the page: each draws results of the kernels, with a text for readers who can't see it.
import { FAINT, brief, brush, curves, depths, heat, ink, picture, poles, probabilities, signed } from "./draw.mjs";
import { drawn } from "./draws.mjs";
import { typeset } from "./formula.mjs";
import { badge, colour, dark, signOf } from "./looks.mjs";
import { MAPS, detail, label, sharesOne } from "./maps.mjs";
import { escaped, nameOf, tagOf } from "./names.mjs";
import { CLOSE } from "./python.mjs";
import { EXTENT, HEATS } from "./state.mjs";

// -- everything on the screen, from the kernels --------------------------------------------------------------------------------

export function compute(K, state) {
  const s = K.scores(state.x, state), moved = K.scores(state.x, state, state.target), n = s.length;
  const results = new Map(state.maps.map((key) => [key, look(K, key, state, s, moved)]));
  const which = n <= CLOSE ? Array.from(s, (_, i) => i) : K.largest(s, CLOSE);
  const focus = results.get(state.focus);
  return { s, moved, results, which, jacobian: K.jacobian(state.focus, state, s, focus.p, which), order: state.sorted ? K.largest(s, n) : null };
}

function look(K, key, state, s, moved) {
  const p = K.apply(key, state, s), found = { p, support: p.reduce((count, v) => count + (v > 0), 0), sum: p.reduce((sum, v) => sum + v, 0) };
  if (Math.abs(found.sum - 1) < 1e-9) { // entropies and draws need probabilities
    Object.assign(found, K.entropies(p, state.alpha));
    if (state.draws) found.drawn = drawn(p, state);
  }
  if (MAPS[key].threshold) found.tau = K.threshold(key, state, s);
  try {
    found.loss = K.loss(key, state, moved, state.target);
    found.gradient = K.gradient(key, state, moved, state.target);
  } catch (error) {
    found.refused = error.message;
  }
  return found;
}

export const SHOWN = 120; // sorted classes shown on a card

// -- one card per map -------------------------------------------------------------------------------------------------------------

export function card(key) {
  const element = document.createElement("article");
  element.className = "card";
  element.dataset.map = key;
  element.innerHTML = `<h3>${badge(key)}<button type="button" aria-pressed="false"></button></h3><p class="formula">${typeset(MAPS[key].formula)}</p><canvas role="img"></canvas><dl></dl>`;
  return element;
}

export function drawCard(element, key, found, state, seen) {
  const { p } = found, n = p.length, words = detail(key, state, n);
  element.style.setProperty("--map", colour(key));
  element.classList.toggle("chosen", key === state.focus);
  const button = element.querySelector("button");
  button.setAttribute("aria-pressed", key === state.focus);
  const title = `${MAPS[key].title}${words ? ` <small>${words}</small>` : ""}`;
  if (button.dataset.title !== title) button.innerHTML = button.dataset.title = title;
  const canvas = element.querySelector("canvas");
  probabilities(canvas, p, { key, order: seen.order?.slice(0, SHOWN), target: state.target, top: seen.top, tag: (i) => tagOf(state, i), named: state.names.length > 0,
    shares: found.drawn?.map((count) => count / state.draws) });
  canvas.setAttribute("aria-label", `Probabilities of ${label(key, state, n)}. ${spoken(p, state)}${found.drawn ? `. ${said(found.drawn, state)}` : ""}`);
  const rows = [
    ["τ", found.tau === undefined ? "this map has no threshold" : "threshold", found.tau],
    ["above 0", "classes with a probability above 0", `${found.support} of ${n}`],
    ["loss", found.refused ? `no loss: ${found.refused}` : "loss of the target", found.loss],
    ...[["Shannon", "Shannon entropy", found.shannon], ["Rényi 2", "Rényi entropy of order 2", found.renyi2], [`Tsallis ${state.alpha}`, `Tsallis entropy of order ${state.alpha}`, found.tsallis]]
      .map(([short, long, value]) => [short, value === undefined ? `no entropy: these numbers sum to ${brief(found.sum)}, and an entropy is one of probabilities, which sum to 1` : long, value]),
    ...(state.draws ? [["drawn", found.drawn ? said(found.drawn, state) : `no draws: these numbers sum to ${brief(found.sum)}`,
      found.drawn && `${found.drawn.reduce((count, v) => count + (v > 0), 0)} of ${n}`]] : []),
  ];
  const html = rows.map(([short, long, value]) => `<div title="${escaped(long)}"><dt>${short}</dt><dd>${value === undefined ? "–" : typeof value === "number" ? brief(value) : value}${
    value === undefined ? `<span class="unseen">${escaped(long)}</span>` : ""}</dd></div>`).join("");
  const list = element.querySelector("dl");
  if (list.dataset.html !== html) list.innerHTML = list.dataset.html = html;
}

// Probabilities in words: all if there are few, else the largest.
export function spoken(p, state) {
  const say = (i) => `${nameOf(state, i)}: ${p[i] === 0 ? "exactly 0" : brief(p[i])}`;
  if (p.length <= 12) return Array.from(p, (_, i) => say(i)).join(", ");
  const best = [];
  let zeros = 0;
  p.forEach((v, i) => {
    zeros += v === 0;
    if (best.length === 5 && !(v > p[best[4]])) return;
    const at = best.findIndex((j) => v > p[j]);
    best.splice(at < 0 ? best.length : at, 0, i);
    best.length = Math.min(best.length, 5);
  });
  return `${p.length} classes, ${zeros} of them exactly 0. The largest: ${best.map(say).join(", ")}`;
}

// What was drawn, the most frequent classes first.
function said(counts, state) {
  const most = Array.from(counts, (count, i) => [count, i]).filter(([count]) => count > 0).sort(([a, i], [b, j]) => b - a || i - j);
  const more = most.length > 8 ? `, and ${most.length - 8} other classes` : "";
  return `Drawn in ${state.draws.toLocaleString("en")}: ${most.slice(0, 8).map(([count, i]) => `${nameOf(state, i)} ${count.toLocaleString("en")}`).join(", ")}${more}`;
}

// -- up close ----------------------------------------------------------------------------------------------------------------------------

const TABLE = 8; // classes whose Jacobian is a table with numbers

export function drawJacobian(holder, words, seen, state) {
  const { jacobian, which } = seen, m = which.length, n = state.x.length, zeros = jacobian.reduce((count, v) => count + (v === 0), 0);
  words.innerHTML = `${typeset("∂pᵢ/∂xⱼ")} is what class i gains when score j rises${m < n ? `, for the ${m} largest scores` : ""}. ${zeros ? `${zeros} of ${m * m} are exactly 0.` : ""}`;
  if (m <= TABLE) {
    const bound = jacobian.reduce((most, v) => Math.max(most, Math.abs(v)), 0) || 1, [below, above] = poles();
    const heading = (scope, i) => `<th scope="${scope}"${state.names[i] ? ` title="${escaped(state.names[i])}"><span>${escaped(state.names[i])}</span>` : `>${scope === "row" ? "p" : "x"}<sub>${i}</sub>`}</th>`;
    const head = `<tr><th scope="col"><span class="unseen">class</span></th>${which.map((j) => heading("col", j)).join("")}</tr>`;
    const body = which.map((i, row) => `<tr>${heading("row", i)}${which.map((_, column) => {
      const v = jacobian[row * m + column], share = v === 0 ? 0 : Math.round(10 + (80 * Math.abs(v)) / bound);
      const paint = v === 0 ? "" : ` style="background:color-mix(in srgb, ${v < 0 ? below : above} ${share}%, ${ink("well")});color:${share > 55 ? (dark() ? "#101014" : "#fff") : ink("ink")}"`;
      return `<td${paint}>${brief(v)}</td>`;
    }).join("")}</tr>`).join("");
    holder.innerHTML = `<table><caption class="unseen">Jacobian of ${label(state.focus, state, n)}</caption>${head}${body}</table>`;
    return;
  }
  let canvas = holder.querySelector("canvas");
  if (!canvas) {
    holder.innerHTML = `<canvas role="img"></canvas>`;
    canvas = holder.querySelector("canvas");
  }
  heat(canvas, jacobian, m);
  const largest = jacobian.reduce((best, v, at) => (Math.abs(v) > Math.abs(jacobian[best]) ? at : best), 0);
  canvas.setAttribute("aria-label", `Jacobian of ${label(state.focus, state, n)} for ${m} classes as a heat map. The entry of largest size is ${brief(jacobian[largest])}: `
    + `probability of ${nameOf(state, which[Math.floor(largest / m)])} against the score of ${nameOf(state, which[largest % m])}. ${zeros} entries are exactly 0.`);
}

export function drawGradient(canvas, words, note, seen, state) {
  const found = seen.results.get(state.focus), n = state.x.length, potential = MAPS[state.focus].potential;
  words.textContent = found.refused ? "of the target class and its gradient in the scores."
    : `of ${nameOf(state, state.target)}${state.margin ? ` with a margin of ${state.margin}` : ""} is ${brief(found.loss)}; its gradient in the scores${potential ? ", p\u00a0−\u00a0y:" : ":"}`;
  canvas.hidden = Boolean(found.refused) || !found.gradient.every(Number.isFinite);
  if (found.refused) {
    note.textContent = `${MAPS[state.focus].title} has no loss here: ${found.refused}.`;
    return;
  }
  if (canvas.hidden) {
    note.textContent = "The target has probability 0, so minus its logarithm is infinite and has no gradient. Maps with a loss of their own don't have this trouble.";
    return;
  }
  signed(canvas, found.gradient, { key: state.focus, order: seen.order, target: state.target, tag: (i) => tagOf(state, i), named: state.names.length > 0 });
  const pushed = found.gradient.reduce((count, v) => count + (v !== 0), 0);
  note.textContent = `${potential ? "The map's own Fenchel-Young loss." : "This map's Jacobian is not symmetric, so it has no Fenchel-Young loss: this is −log p of the target."} `
    + (pushed ? `A step against the gradient moves ${pushed} of ${n} scores.` : "It is 0: nothing is left to learn here.");
  canvas.setAttribute("aria-label", `Gradient of the loss in each score. ${n <= 12 ? Array.from(found.gradient, (v, i) => `score of ${nameOf(state, i)}: ${brief(v)}`).join(", ")
    : `At the target ${brief(found.gradient[state.target])}; ${pushed} of ${n} are not 0.`}`);
}

// -- the plane of three classes ------------------------------------------------------------------------------------------------------

const COARSE = 49, FINE = 221; // points along a side: during a change, and after it
export const toScores = ([u, v]) => [u / Math.sqrt(2) - v / Math.sqrt(6), -u / Math.sqrt(2) - v / Math.sqrt(6), (2 * v) / Math.sqrt(6)];
export const toPlane = ([a, b, c]) => [(a - b) / Math.sqrt(2), (2 * c - a - b) / Math.sqrt(6)];
const CORNERS = [[1 / Math.sqrt(2), -1 / Math.sqrt(6)], [-1 / Math.sqrt(2), -1 / Math.sqrt(6)], [0, 2 / Math.sqrt(6)]]; // of the simplex itself

// What the plane can show for a map: no entropy if the numbers don't sum to 1.
export const heatOf = (state, wanted = state.heat) => (wanted === "entropy" && !sharesOne(state.focus, state, 3) ? "top" : wanted);
const heatCode = (state) => Object.keys(HEATS).indexOf(heatOf(state));

// The plane uses the names of the page if the page has three classes.
export const planeNames = (state) => ({ names: state.x.length === 3 ? state.names : [] });
export const heatWords = (heat, state) => (heat === "first" ? `probability of ${nameOf(planeNames(state), 0)}` : HEATS[heat]);

export function planeOf(K, state) {
  return planeFrom(K.simplex(state.focus, state, EXTENT, COARSE, heatCode(state)), COARSE, heatOf(state));
}

// `planeOf` with more points, a few rows at a time so that the page stays responsive; null once `stale()` is true.
export async function finePlane(K, state, stale) {
  const values = new Float32Array(FINE * FINE), support = new Uint8Array(FINE * FINE), settings = { ...state };
  for (let row = 0; row < FINE; row++) {
    const began = performance.now();
    do {
      const part = K.simplex(settings.focus, settings, EXTENT, FINE, heatCode(settings), row, row + 1);
      values.set(part.values, row * FINE);
      support.set(part.support, row * FINE);
    } while (++row < FINE && performance.now() - began < 8);
    row--;
    await new Promise((done) => setTimeout(done));
    if (stale()) return null;
  }
  return planeFrom({ values, support }, FINE, heatOf(settings));
}

function planeFrom({ values, support }, points, kind) {
  let [low, high] = [Infinity, -Infinity];
  if (kind === "entropy") values = values.map((v, i) => (support[i] ? v : NaN)); // a row of zeros has no entropy
  for (const v of values) if (!Number.isNaN(v)) [low, high] = [Math.min(low, v), Math.max(high, v)];
  const sizes = [...new Set(support)];
  return { points, image: picture(values, points, low, high > low ? high : low + 1), support, low, high, sizes, labels: sizes.length > 1 ? depths(support, points) : [] };
}

// Where the number of classes above 0 changes: short lines between neighbouring points.
function borders(pen, { support, points }, scale) {
  pen.beginPath();
  const at = (r, c) => support[r * points + c];
  for (let r = 0; r + 1 < points; r++) {
    for (let c = 0; c + 1 < points; c++) {
      const corners = [at(r, c), at(r, c + 1), at(r + 1, c + 1), at(r + 1, c)], ends = [];
      if (corners[0] === corners[1] && corners[1] === corners[2] && corners[2] === corners[3]) continue;
      [[0.5, 0], [1, 0.5], [0.5, 1], [0, 0.5]].forEach(([x, y], k) => corners[k] !== corners[(k + 1) % 4] && ends.push([c + x, r + y]));
      for (let k = 0; k + 1 < ends.length; k += 2) {
        pen.moveTo(ends[k][0] * scale, ends[k][1] * scale);
        pen.lineTo(ends[k + 1][0] * scale, ends[k + 1][1] * scale);
      }
    }
  }
  pen.stroke();
}

export function drawPlane(canvas, plane, state, place, p) {
  const { pen, width } = brush(canvas), scale = width / (plane.points - 1), px = ([u, v]) => [((u / EXTENT + 1) * width) / 2, ((1 - v / EXTENT) * width) / 2];
  pen.imageSmoothingQuality = "high";
  pen.drawImage(plane.image, 0.5, 0.5, plane.points - 1, plane.points - 1, 0, 0, width, width);
  pen.strokeStyle = "#fff";
  pen.lineWidth = 1.6;
  borders(pen, plane, scale);
  pen.setLineDash([4, 4]);
  pen.lineWidth = 1;
  pen.beginPath();
  CORNERS.forEach((corner) => pen.lineTo(...px(corner)));
  pen.closePath();
  pen.stroke();
  pen.setLineDash([]);
  pen.textAlign = "center";
  pen.font = `600 12px ${ink("sans")}`;
  const tag = (text, x, y) => {
    const half = pen.measureText(text).width / 2 + 6, at = Math.max(half + 3, Math.min(width - half - 3, x)), line = Math.max(13, Math.min(width - 13, y));
    pen.fillStyle = "#ffffffd9";
    pen.beginPath();
    pen.roundRect(at - half, line - 10, 2 * half, 20, 6);
    pen.fill();
    pen.fillStyle = "#1d1b18";
    pen.fillText(text, at, line + 4);
  };
  const names = planeNames(state);
  [[0.86, -0.86], [-0.86, -0.86], [0, 0.9]].forEach(([u, v], i) => tag(nameOf(names, i), ...px([u * EXTENT, v * EXTENT])));
  pen.font = `11.5px ${ink("sans")}`;
  for (const [size, column, row] of plane.labels) if (size > 1) tag(`${size} of 3`, column * scale, row * scale);
  const [x, y] = px(place);
  for (const [line, tint] of [[4.5, "#1d1b18"], [2, "#fff"]]) {
    pen.lineWidth = line;
    pen.strokeStyle = tint;
    pen.beginPath();
    pen.arc(x, y, 7, 0, 7);
    pen.stroke();
  }
  canvas.setAttribute("aria-label", `Three classes under ${label(state.focus, state, 3)}, coloured by the ${heatWords(heatOf(state), state)}. Arrow keys move the point.`);
  canvas.setAttribute("aria-valuenow", place[0].toFixed(2));
  canvas.setAttribute("aria-valuetext", `at ${brief(place[0])} and ${brief(place[1])}. ${spoken(p, names)}`);
}

// -- two classes ------------------------------------------------------------------------------------------------------------------------------

const STEPS = 241, HALF = (STEPS - 1) / 2;
const CLASSIC = { hinge: [2, 3], logistic: [8, 3], "modified Huber": [] };

export function pairsOf(K, state) {
  const p = [], losses = [];
  for (const key of state.maps) {
    const wide = K.two(key, state, -4, 4, STEPS);
    p.push({ name: label(key, state, 2), values: wide.p, tint: colour(key), sign: signOf(key) });
    const near = K.two(key, state, -3, 3, STEPS).losses;
    if (near) losses.push({ name: `${label(key, state, 2)}${MAPS[key].potential ? "" : ", −log p"}`, values: scaled(near), tint: colour(key), sign: signOf(key), wide: 4, faint: true });
  }
  p.push({ name: "hard sigmoid", values: K.classic("hard sigmoid", -4, 4, STEPS), tint: ink("ink"), dash: [2, 4], wide: 1.6 });
  for (const [name, dash] of Object.entries(CLASSIC)) losses.push({ name, values: scaled(K.classic(name, -3, 3, STEPS)), tint: ink("ink"), dash, wide: 1.3 });
  return { p, losses };
}

// Divides by the value at 0, if possible, so that all curves meet there.
function scaled(values) {
  const middle = values[HALF];
  return middle > 0 && Number.isFinite(middle) ? values.map((v) => v / middle) : values;
}

export function drawPairs(curve, losses, legends, pairs) {
  const top = Math.max(1, ...pairs.p.map((line) => line.values.reduce((most, v) => Math.max(most, v), 0)));
  curves(curve, pairs.p, { from: -4, to: 4, low: -0.02 * top, high: 1.03 * top, xs: [-4, -2, 0, 2, 4], ys: [0, 0.25 * top, 0.5 * top, 0.75 * top, top], xName: "t" });
  curves(losses, pairs.losses, { from: -3, to: 3, low: -0.1, high: 4.2, xs: [-3, -2, -1, 0, 1, 2, 3], ys: [0, 1, 2, 3, 4], xName: "t = score of the target − score of the other" });
  curve.setAttribute("aria-label", `Probability of the first of two classes. At t = 0 and 1: ${pairs.p.map(({ name, values }) => `${name} ${brief(values[HALF])} and ${brief(values[HALF * 1.25])}`).join("; ")}`);
  losses.setAttribute("aria-label", `Loss against the margin, divided by its value at 0. At t = −1 and 1: ${pairs.losses.map(({ name, values }) => `${name} ${brief(values[HALF * 2 / 3])} and ${brief(values[HALF * 4 / 3])}`).join("; ")}`);
  [[legends[0], pairs.p], [legends[1], pairs.losses]].forEach(([list, lines]) => (list.innerHTML = lines.map(entry).join("")));
}

const entry = ({ name, tint, dash = [], sign, wide = 2.2, faint }) => `<li><svg aria-hidden="true" viewBox="-15 -5 30 10"><line x1="-15" x2="15" stroke="${tint}" stroke-width="${wide}"
  stroke-dasharray="${dash.join(" ")}" opacity="${faint ? FAINT() : 1}"/>${sign ? `<path d="${sign}" transform="scale(4)" fill="${tint}"/>` : ""}</svg>${name}</li>`;
