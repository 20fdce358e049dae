// Typesets the formulas of maps.mjs: plain text in, MathML out. The text uses only brackets, raised and lowered letters, `^` and `_`
// before a letter or a bracket, and `/` between two runs without a space: a fraction, or a plain `/` in a superscript, as in
// p = [(α − 1)(x − τ)]₊^(1/(α−1)).

const RAISED = { "²": "2", "³": "3", "ᵐ": "m", "ʷ": "w" };
const LOWERED = { "₊": "+", "ᵢ": "i", "ⱼ": "j" };
const CLOSING = { "(": ")", "[": "]", "⟨": "⟩", "‖": "‖" };
const OPERATOR = /^[=∝+−,…]$/u;

const escaped = (text) => text.replace(/[&<>]/g, (sign) => ({ "&": "&amp;", "<": "&lt;", ">": "&gt;" })[sign]);

export function typeset(text) {
  return `<math aria-label="${escaped(text)}">${/^[a-z]{2,} /.test(text) ? phrase(text) : formula(text)}</math>`;
}

// A sentence with formulas between dollar signs.
export const mixed = (text) => text.split("$").map((part, i) => (i % 2 ? typeset(part) : escaped(part))).join("");

// Words that contain a variable, such as: softmax over the k largest.
function phrase(text) {
  return text.split(/\b(\p{L})\b/u).map((part, i) => (i % 2 ? leaf(part) : part && `<mtext>${escaped(part).replace(/^ | $/g, "\u00a0")}</mtext>`)).join("");
}

function leaf(word) {
  if (/^\d/.test(word)) return `<mn>${word}</mn>`;
  if (word === "Σ") return `<mi mathvariant="normal">Σ</mi>`;
  if (/^\p{L}/u.test(word)) return `<mi>${word}</mi>`;
  return word === "!" ? `<mo form="postfix">!</mo>` : `<mo>${escaped(word)}</mo>`;
}

function formula(text) {
  const words = text.match(/\s+|[A-Za-z]+|\d+(?:\.\d+)?|[^]/gu);
  let at = 0, raised = 0;

  // Up to the closing bracket `end`, or to the end of the text.
  function row(end) {
    let out = "";
    while (at < words.length && words[at] !== end) out += /^\s/.test(words[at]) ? space() : fraction(end);
    return out;
  }

  // Operators have their own space; other spaces in the text become small ones.
  function space() {
    const wide = words[at].length > 1, beside = [words[at - 1], words[at + 1]].some((word) => !word || OPERATOR.test(word));
    at++;
    return wide ? `<mspace width="1em"/>` : beside ? "" : `<mspace width=".2em"/>`;
  }

  function fraction(end) {
    const above = run(end);
    if (words[at] !== "/") return above.map(whole).join("");
    at++;
    if (raised) return `${above.map(whole).join("")}<mo lspace="0" rspace="0">/</mo>${run(end).map(whole).join("")}`;
    return `<mfrac>${bare(above)}${bare(run(end))}</mfrac>`;
  }

  // A run of parts without a space or an operator between them.
  function run(end) {
    const parts = [scripted()];
    if (OPERATOR.test(words[at - 1])) return parts;
    while (at < words.length && words[at] !== end && words[at] !== "/" && !/^\s/.test(words[at]) && !OPERATOR.test(words[at])) parts.push(scripted());
    return parts;
  }

  function scripted() {
    const base = atom();
    let below = "", above = "";
    for (;;) {
      const word = words[at];
      if (Object.hasOwn(LOWERED, word)) below += leaf(LOWERED[words[at++]]);
      else if (Object.hasOwn(RAISED, word)) above += leaf(RAISED[words[at++]]);
      else if (word === "_") below += script();
      else if (word === "^") above += script();
      else break;
    }
    if (!below && !above) return base;
    const kind = below && above ? "msubsup" : below ? "msub" : "msup";
    return { markup: `<${kind}>${whole(base)}${below && mrow(below)}${above && mrow(above)}</${kind}>` };
  }

  function script() {
    at++;
    raised++;
    const part = bare([atom()]);
    raised--;
    return part;
  }

  function atom() {
    const open = words[at++], close = CLOSING[open];
    if (!close) return { markup: leaf(open) };
    const inside = row(close);
    if (words[at++] !== close) throw new Error(`The formula ${text} opens a ${open} that it doesn't close.`);
    return { inside, markup: `<mrow><mo stretchy="false">${open}</mo>${inside}<mo stretchy="false">${close}</mo></mrow>`, round: open === "(" };
  }

  return row();
}

const mrow = (markup) => `<mrow>${markup}</mrow>`;
const whole = (part) => part.markup;
// Drops round brackets that a fraction or a superscript makes unnecessary.
const bare = (parts) => mrow(parts.length === 1 && parts[0].round ? parts[0].inside : parts.map(whole).join(""));
