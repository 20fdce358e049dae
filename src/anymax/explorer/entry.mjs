// Input of scores and names without dragging: examples, exact values, more or fewer classes, a pasted row.
import { $, change, complain, desk, fit, valid } from "./desk.mjs";
import { setScores } from "./board.mjs";
import { parseNames } from "./names.mjs";
import { TwoReadings, parseRow, parseScores, shortly } from "./scores.mjs";

// Example vectors; the long one is the same on every machine.
const EXAMPLES = {
  "Five classes": () => ({ x: [2, 1.2, 0.4, -0.3, -1.5] }),
  "Four animals": () => ({ x: [2, 1.4, 0.6, -0.9], names: ["cat", "dog", "fox", "owl"] }),
  "Three, on the plane": () => ({ x: [1.1, 0.5, -0.6] }),
  "A clear winner": () => ({ x: [3.5, 0.6, 0.2, -0.4, -1] }),
  "A tie": () => ({ x: [1.5, 1.5, 1.5, -0.5, -1] }),
  "Nearly alike": () => ({ x: [0.3, 0.2, 0.1, 0, -0.1, -0.2] }),
  "2,000 classes": () => ({ x: bells(2000) }),
};

function bells(n) {
  let seed = 20240229;
  const draw = () => {
    seed = (Math.imul(seed, 1664525) + 1013904223) >>> 0;
    return (seed + 0.5) / 4294967296;
  };
  return Array.from({ length: n }, () => Number((Math.sqrt(-2 * Math.log(draw())) * Math.cos(2 * Math.PI * draw())).toFixed(2)));
}

// A new row; names stay if the number of classes stays.
function take({ scores, names }) {
  change({ x: scores, names: names ?? (scores.length === desk.state.x.length ? desk.state.names : []) });
  desk.one = 0;
  fit();
}

export function buildEntry() {
  buildExamples();
  buildExact();
  buildPaste();
}

function buildExamples() {
  const menu = $("examples");
  menu.append(...Object.keys(EXAMPLES).map((name) => new Option(name, name)));
  menu.addEventListener("change", () => {
    const { x, names } = EXAMPLES[menu.value]();
    menu.value = "";
    take({ scores: x, names });
  });
}

// -- exact values --------------------------------------------------------------------------------------------------------------------------

function buildExact() {
  whole($("one-class"), "The class", (v) => {
    desk.one = v;
    change({});
  });
  whole($("target"), "The target", (target) => change({ target }));
  $("one-score").addEventListener("change", () => attempt($("one-score"), `The score stays at ${desk.state.x[desk.one]}.`, (text) => {
    const scores = parseScores(`${text} 0`, "decimal");
    if (scores.length > 2) throw new Error("That is more than one score; Paste takes a whole row.");
    setScores([[desk.one, scores[0]]]);
    if (Math.abs(scores[0]) > desk.range && scores[0] > -Infinity) fit();
  }));
  $("names").addEventListener("change", () => attempt($("names"), "The names are as they were.", (text) => change({ names: parseNames(text, desk.state.x.length) })));
  $("sorted").addEventListener("change", () => change({ sorted: $("sorted").checked }));
  $("add").addEventListener("click", () => change({ x: [...desk.state.x, 0] }));
  $("remove").addEventListener("click", () => {
    const x = desk.state.x.slice(0, -1);
    x.some((v) => v > -Infinity) ? change({ x }) : complain("The class that would go is the last one that is not masked.");
  });
}

function attempt(input, otherwise, use) {
  try {
    use(input.value);
    valid(input, "");
  } catch (error) {
    valid(input, `${error.message} ${otherwise}`);
  }
}

function whole(input, what, use) {
  input.addEventListener("change", () => attempt(input, "", (text) => {
    const v = Number(text), n = desk.state.x.length;
    if (text === "" || !Number.isInteger(v) || v < 0 || v >= n) throw new Error(`${what} is one of the classes 0 to ${n - 1}, not ${text || "empty"}.`);
    use(v);
  }));
}

// -- a pasted row --------------------------------------------------------------------------------------------------------------------------

function open(yes) {
  if (yes) $("more").open = true;
  $("paste").hidden = !yes;
  $("paste-open").setAttribute("aria-expanded", yes);
  $(yes ? "paste-text" : "paste-open").focus();
}

function use(text) {
  ask([]);
  try {
    take(parseRow(text));
    $("paste-error").textContent = "";
    $("paste-text").removeAttribute("aria-invalid");
    complain("");
  } catch (error) {
    if (!(error instanceof TwoReadings)) throw error;
    if ($("paste").hidden) $("paste-text").value = text;
    open(true);
    $("paste-error").textContent = "";
    ask(error.readings);
  }
}

const WAYS = { decimal: "It marks decimals", separator: "It stands between numbers" };

// Asks what the comma means, with both readings to choose from.
function ask(readings) {
  $("comma").hidden = !readings.length;
  $("comma-ways").replaceChildren(...readings.map(({ way, scores }) => {
    const button = document.createElement("button");
    button.type = "button";
    button.dataset.way = way;
    button.innerHTML = `<b>${WAYS[way]}</b> <span></span>`;
    button.lastElementChild.textContent = `${scores.length} scores: ${shortly(scores.join(" | "))}`;
    button.addEventListener("click", () => {
      take({ scores, names: null });
      ask([]);
      $("paste-text").focus();
    });
    return button;
  }));
  $("comma-ways").firstElementChild?.focus();
}

function buildPaste() {
  $("paste-open").addEventListener("click", () => open($("paste").hidden));
  $("paste-close").addEventListener("click", () => open(false));
  $("paste").addEventListener("keydown", (event) => event.key === "Escape" && open(false));
  $("paste").addEventListener("submit", (event) => {
    event.preventDefault();
    try {
      use($("paste-text").value);
    } catch (error) {
      $("paste-error").textContent = `${error.message} Your scores are as they were.`;
      $("paste-text").setAttribute("aria-invalid", "true");
      $("paste-text").focus();
    }
  });
  document.addEventListener("paste", (event) => { // anywhere except in a field
    if (event.target.closest?.("input, textarea")) return;
    try {
      use(event.clipboardData.getData("text"));
    } catch (error) {
      complain(`${error.message} Your scores are as they were.`);
    }
  });
}
