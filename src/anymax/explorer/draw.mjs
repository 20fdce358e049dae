// Drawing on canvases: sizes, bars, lines and heat maps. No mathematics of maps in here.
import { colour, dark } from "./looks.mjs";

const inks = new Map(); // colours of the style sheet, read once
export function ink(name) {
  const key = `${dark()} ${name}`;
  if (!inks.has(key)) inks.set(key, getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim());
  return inks.get(key);
}

// Sizes are observed, not read: reading them during a change would lay out the page again for every picture.
const sizes = new WeakMap();
let resized = () => {}, observer;
export const whenResized = (f) => (resized = f);
function sizeOf(canvas) {
  if (!sizes.has(canvas)) {
    observer ??= new ResizeObserver((entries) => {
      const changed = entries.filter(({ target, contentRect: { width, height } }) => {
        if (!target.isConnected) return observer.unobserve(target); // a canvas that a redraw has replaced has size 0: ignore it
        const old = sizes.get(target);
        sizes.set(target, { width, height });
        return old.width !== width || old.height !== height;
      });
      if (changed.length) resized();
    });
    const { width, height } = canvas.getBoundingClientRect();
    sizes.set(canvas, { width, height });
    observer.observe(canvas);
  }
  return sizes.get(canvas);
}

export const sharp = { ratio: 1 }; // the least number of canvas pixels per page pixel: more for printing

export function brush(canvas) {
  const box = sizeOf(canvas), ratio = Math.max(sharp.ratio, window.devicePixelRatio || 1);
  const [width, height] = [Math.max(1, Math.round(box.width * ratio)), Math.max(1, Math.round(box.height * ratio))];
  if (canvas.width !== width || canvas.height !== height) [canvas.width, canvas.height] = [width, height];
  const pen = canvas.getContext("2d");
  pen.setTransform(ratio, 0, 0, ratio, 0, 0);
  pen.clearRect(0, 0, box.width, box.height);
  pen.font = `11.5px ${ink("sans")}`;
  pen.lineJoin = "round";
  return { pen, width: box.width, height: box.height };
}

// A number for the head of a bar, such as 0.734; "0" only for exactly 0.
export function brief(v) {
  if (v === 0) return "0";
  if (!Number.isFinite(v)) return v > 0 ? "∞" : v < 0 ? "−∞" : "–";
  const size = Math.abs(v);
  const text = size >= 1000 || size < 0.001 ? v.toExponential(1) : size >= 100 ? v.toFixed(0) : size >= 10 ? v.toFixed(1) : size >= 0.01 ? v.toFixed(2) : v.toFixed(3);
  return text.replaceAll("-", "\u2212").replace("e+", "e");
}

const tick = (v) => String(Number(v.toFixed(2))).replace("-", "\u2212");

// A row of numbers, in `order` if given, as `count` columns: the largest and the smallest number in each column.
export function columns(values, order, count) {
  const high = new Float64Array(count).fill(-Infinity), low = new Float64Array(count).fill(Infinity), n = order ? order.length : values.length;
  for (let i = 0; i < n; i++) {
    const at = Math.min(count - 1, Math.floor((i * count) / n)), v = values[order ? order[i] : i];
    if (v > high[at]) high[at] = v;
    if (v < low[at]) low[at] = v;
  }
  return { high, low };
}

const FEW = 32;

// As much of a text as fits.
export function clipped(pen, text, room) {
  if (pen.measureText(text).width <= room) return text;
  const letters = Array.from(text);
  while (letters.length > 1 && pen.measureText(`${letters.join("")}…`).width > room) letters.pop();
  return `${letters.join("").trim()}…`;
}

// The label below a bar: for all classes if there is room, else for every fourth.
function foot(pen, i, place, n, { step, target, tag, named }) {
  if (i === target && step <= 26) return "◎";
  if (named && step > 20) return clipped(pen, i === target ? `◎ ${tag(i)}` : tag(i), step - 4);
  if (n <= 16 || place % 4 === 0 || i === target) return i === target ? `◎ ${i}` : String(i);
  return "";
}

// Probabilities: few classes as bars with their numbers and a ring for an exact 0, many as columns over a strip that shows the support.
export function probabilities(canvas, p, { key, order, target, top, tag, named, shares }) {
  const { pen, width, height } = brush(canvas), tint = colour(key), n = order ? order.length : p.length, head = 16;
  const floor = height - (n <= FEW ? 30 : 16), tall = floor - head, up = (v) => floor - (tall * v) / top;
  pen.strokeStyle = ink("line");
  pen.fillStyle = ink("soft");
  pen.textAlign = "left";
  for (const at of [0.5, 1]) {
    const y = Math.round(up(at * top)) + 0.5;
    pen.beginPath();
    pen.setLineDash([2, 3]);
    pen.moveTo(0, y);
    pen.lineTo(width, y);
    pen.stroke();
  }
  pen.setLineDash([]);
  pen.fillText(brief(top), 0, up(top) - 4);
  if (n <= FEW) {
    const step = width / n, bar = Math.min(step * 0.62, 40);
    pen.textAlign = "center";
    for (let place = 0; place < n; place++) {
      const i = order ? order[place] : place, x = (place + 0.5) * step, v = p[i];
      pen.fillStyle = tint;
      if (v === 0) {
        pen.strokeStyle = tint;
        pen.lineWidth = 1.6;
        pen.beginPath();
        pen.arc(x, floor - 5, Math.min(3.6, bar / 2), 0, 7);
        pen.stroke();
      } else {
        const tallness = Math.max(1.5, floor - up(v));
        pen.beginPath();
        pen.roundRect(x - bar / 2, floor - tallness, bar, tallness, [Math.min(3, tallness), Math.min(3, tallness), 0, 0]);
        pen.fill();
      }
      if (shares?.[i] > 0) diamond(pen, x, up(Math.min(shares[i], top)), Math.min(4.5, Math.max(2, bar / 3)));
      pen.fillStyle = ink(i === target ? "hot" : "soft");
      pen.fillText(foot(pen, i, place, n, { step, target, tag, named }), x, floor + 13);
      if (n <= 9) {
        pen.fillStyle = ink(v === 0 ? "soft" : "ink");
        const text = brief(v), room = step - 3, short = v < 0.01 ? "<.01" : v.toFixed(2).replace(/^0/, "");
        pen.fillText(v === 0 || pen.measureText(text).width <= room ? text : short, x, floor + 26);
      }
    }
  } else {
    const count = Math.min(n, Math.floor(width)), step = width / count, { high } = columns(p, order, count);
    for (let c = 0; c < count; c++) {
      const x = c * step;
      pen.fillStyle = tint;
      if (high[c] > 0) {
        const tallness = Math.max(1, floor - up(high[c]));
        pen.fillRect(x, floor - tallness, Math.max(step * 0.9, 0.8), tallness);
        pen.fillRect(x, floor + 4, Math.max(step, 1), 6);
      }
    }
    if (shares) {
      const { high: most } = columns(shares, order, count);
      for (let c = 0; c < count; c++) if (most[c] > 0) diamond(pen, (c + 0.5) * step, up(Math.min(most[c], top)), 2.2);
    }
    pen.strokeStyle = tint;
    pen.globalAlpha = 0.6;
    pen.lineWidth = 1;
    pen.strokeRect(0.5, floor + 3.5, width - 1, 7);
    pen.globalAlpha = 1;
  }
  pen.strokeStyle = ink("soft");
  pen.lineWidth = 1;
  pen.beginPath();
  pen.moveTo(0, floor + 0.5);
  pen.lineTo(width, floor + 0.5);
  pen.stroke();
}

// A diamond with an edge, so that it is visible on a bar and beside one.
function diamond(pen, x, y, size) {
  pen.beginPath();
  pen.moveTo(x, y - size);
  pen.lineTo(x + size, y);
  pen.lineTo(x, y + size);
  pen.lineTo(x - size, y);
  pen.closePath();
  pen.fillStyle = ink("panel");
  pen.fill();
  pen.strokeStyle = ink("ink");
  pen.lineWidth = 1.4;
  pen.stroke();
}

// Signed bars around 0.
export function signed(canvas, values, { key, order, target, tag, named }) {
  const { pen, width, height } = brush(canvas), n = values.length, below = n <= FEW ? 32 : 2, head = 16;
  const middle = (height - below + head) / 2, reach = (height - below - head) / 2;
  const size = Math.max(...Array.from(values, Math.abs)) || 1, up = (v) => middle - (reach * v) / size;
  const tint = colour(key);
  if (n <= FEW) {
    const step = width / n, bar = Math.min(step * 0.62, 46);
    pen.textAlign = "center";
    for (let place = 0; place < n; place++) {
      const i = order ? order[place] : place, v = values[i], x = (place + 0.5) * step;
      pen.fillStyle = pen.strokeStyle = i === target ? ink("hot") : tint;
      if (v === 0) {
        pen.lineWidth = 1.6;
        pen.beginPath();
        pen.arc(x, middle, Math.min(3.6, bar / 2), 0, 7);
        pen.fillStyle = ink("paper");
        pen.fill();
        pen.stroke();
      } else {
        const y = up(v);
        pen.fillRect(x - bar / 2, Math.min(y, middle), bar, Math.max(1.5, Math.abs(y - middle)));
      }
      pen.fillStyle = ink("soft");
      if (n <= 12) pen.fillText(brief(v), x, v < 0 ? up(v) + 13 : up(v) - (v === 0 ? 9 : 5));
      pen.fillStyle = ink(i === target ? "hot" : "soft");
      pen.fillText(foot(pen, i, place, n, { step, target, tag, named }), x, height - 3);
    }
  } else {
    const count = Math.min(n, Math.floor(width)), step = width / count, { high, low } = columns(values, order, count);
    pen.fillStyle = tint;
    for (let c = 0; c < count; c++) {
      const [from, to] = [up(Math.max(high[c], 0)), up(Math.max(-size, Math.min(low[c], 0)))];
      if (to > from) pen.fillRect(c * step, from, Math.max(step * 0.9, 0.8), Math.max(1, to - from));
    }
  }
  pen.strokeStyle = ink("soft");
  pen.lineWidth = 1;
  pen.beginPath();
  pen.moveTo(0, Math.round(middle) + 0.5);
  pen.lineTo(width, Math.round(middle) + 0.5);
  pen.stroke();
}

export const FAINT = () => (dark() ? 0.6 : 0.45);

// Curves over [from, to] in a frame; each line: {values, tint, dash or sign, wide}.
export function curves(canvas, lines, { from, to, low, high, xs, ys, xName }) {
  const { pen, width, height } = brush(canvas), foot = 32, head = 8, right = 12;
  const left = Math.ceil(Math.max(...ys.map((v) => pen.measureText(tick(v)).width))) + 10;
  const px = (t) => left + ((width - left - right) * (t - from)) / (to - from), py = (v) => height - foot - ((height - foot - head) * (v - low)) / (high - low);
  pen.fillStyle = ink("soft");
  pen.lineWidth = 1;
  pen.strokeStyle = ink("line");
  pen.textAlign = "right";
  for (const v of ys) {
    pen.beginPath();
    pen.moveTo(left, Math.round(py(v)) + 0.5);
    pen.lineTo(width - right, Math.round(py(v)) + 0.5);
    pen.stroke();
    pen.fillText(tick(v), left - 6, py(v) + 4);
  }
  pen.textAlign = "center";
  for (const t of xs) {
    pen.beginPath();
    pen.moveTo(Math.round(px(t)) + 0.5, head);
    pen.lineTo(Math.round(px(t)) + 0.5, height - foot);
    pen.stroke();
    pen.fillText(tick(t), px(t), height - foot + 14);
  }
  pen.fillText(xName, (left + width - right) / 2, height - 4);
  pen.save();
  pen.beginPath();
  pen.rect(left, head - 2, width - left - right, height - foot - head + 4);
  pen.clip();
  const withSign = lines.filter((line) => line.sign);
  for (const line of lines) {
    pen.strokeStyle = line.tint;
    pen.lineWidth = line.wide ?? 2.2;
    pen.globalAlpha = line.faint ? FAINT() : 1;
    pen.setLineDash(line.dash ?? []);
    pen.beginPath();
    line.values.forEach((v, i) => {
      const y = Math.max(-1e4, Math.min(1e4, py(v)));
      if (Number.isFinite(y)) pen.lineTo(px(from + ((to - from) * i) / (line.values.length - 1)), y);
    });
    pen.stroke();
  }
  pen.setLineDash([]);
  pen.globalAlpha = 1;
  withSign.forEach((line, i) => marks(pen, line, (at) => [px(from + (to - from) * at), py(line.values[Math.round(at * (line.values.length - 1))])], (i + 0.5) / withSign.length));
  pen.restore();
}

const MARKS = 6; // signs on a line, at other places than on the other lines

function marks(pen, { tint, sign }, spot, shift) {
  for (let k = 0; k < MARKS; k++) {
    const [x, y] = spot((k + shift) / MARKS);
    if (!Number.isFinite(y)) continue;
    const path = new Path2D();
    path.addPath(new Path2D(sign), new DOMMatrix([4.6, 0, 0, 4.6, x, y]));
    pen.strokeStyle = ink("paper");
    pen.lineWidth = 2.5;
    pen.stroke(path);
    pen.fillStyle = tint;
    pen.fill(path);
  }
}

export const poles = () => (dark() ? ["#f2994a", "#7fa8ff"] : ["#b5520c", "#2b4fb3"]); // below and above 0

// A square matrix of signed numbers; exact zeros stay blank.
export function heat(canvas, values, m) {
  const { pen, width } = brush(canvas), cell = width / m, bound = values.reduce((most, v) => Math.max(most, Math.abs(v)), 0) || 1, [below, above] = poles();
  pen.fillStyle = ink("well");
  pen.fillRect(0, 0, width, width);
  for (let i = 0; i < m; i++) {
    for (let j = 0; j < m; j++) {
      const v = values[i * m + j];
      if (v === 0) continue;
      pen.globalAlpha = 0.12 + (0.88 * Math.abs(v)) / bound;
      pen.fillStyle = v < 0 ? below : above;
      pen.fillRect(j * cell + 0.5, i * cell + 0.5, cell - 1, cell - 1);
    }
  }
  pen.globalAlpha = 1;
}

const STOPS = ["00224e", "123570", "3b496c", "575d6d", "707173", "8a8678", "a59c74", "c3b369", "e1cc55", "fee838"].map((hex) =>
  [0, 2, 4].map((at) => parseInt(hex.slice(at, at + 2), 16)));
const RAMP = Array.from({ length: 256 }, (_, i) => {
  const at = (i / 255) * (STOPS.length - 1), k = Math.min(STOPS.length - 2, Math.floor(at));
  return STOPS[k].map((v, channel) => Math.round(v + (STOPS[k + 1][channel] - v) * (at - k)));
});

// An image of size x size values between low and high, which can be drawn at any scale.
export function picture(values, size, low, high) {
  const image = new ImageData(size, size);
  for (let i = 0; i < size * size; i++) {
    if (Number.isNaN(values[i])) continue; // blank
    const [r, g, b] = RAMP[Math.max(0, Math.min(255, Math.round((255 * (values[i] - low)) / (high - low))))];
    image.data.set([r, g, b, 255], 4 * i);
  }
  const canvas = document.createElement("canvas");
  canvas.width = canvas.height = size;
  canvas.getContext("2d").putImageData(image, 0, 0);
  return canvas;
}

// The place deepest inside the region of each value of `regions`: [value, column, row].
export function depths(regions, size) {
  const far = new Float32Array(size * size), at = (r, c) => (r < 0 || c < 0 || r >= size || c >= size ? -1 : r * size + c);
  const visit = (r, c, dr, dc) => {
    const here = r * size + c;
    let near = far[here];
    for (const [a, b, d] of [[dr, 0, 1], [0, dc, 1], [dr, dc, 1.4], [dr, -dc, 1.4]]) {
      const k = at(r + a, c + b);
      near = Math.min(near, k < 0 || regions[k] !== regions[here] ? d : far[k] + d);
    }
    far[here] = near;
  };
  far.fill(1e9);
  for (let r = 0; r < size; r++) for (let c = 0; c < size; c++) visit(r, c, -1, -1);
  for (let r = size - 1; r >= 0; r--) for (let c = size - 1; c >= 0; c--) visit(r, c, 1, 1);
  const best = new Map();
  far.forEach((d, k) => {
    if (d > (best.get(regions[k])?.[0] ?? -1)) best.set(regions[k], [d, k % size, Math.floor(k / size)]);
  });
  return [...best].map(([value, [, column, row]]) => [value, column, row]);
}
