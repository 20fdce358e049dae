// What the explorer's modules and kernels say, for tests/project/explorer_at_work.py: node tests/project/explorer.mjs FOLDER anymax.wasm < requests > answers
import { readFileSync } from "node:fs";
import { pathToFileURL } from "node:url";

const [folder, wasm] = process.argv.slice(2);
const load = (name) => import(pathToFileURL(`${folder}/${name}.mjs`).href);
const { MAPS, SLIDERS, label } = await load("maps");
const { mixed, typeset } = await load("formula");
const { parseNames } = await load("names");
const { parseRow, parseScores } = await load("scores");
const { STEPS, eased } = await load("story");
const { back, close, forth, newHistory, record } = await load("history");
const { LOOKS, signOf } = await load("looks");
const { kernels } = await load("kernels");
const { fresh, fromHash, tidy, toHash } = await load("state");
const { toPython } = await load("python");
const { compute } = await load("figures");
const K = await kernels(readFileSync(wasm));

const answers = {
  maps: () => Object.fromEntries(Object.entries(MAPS).map(([key, map]) => [key, {
    python: map.python(fresh(), 5), threshold: Boolean(map.threshold), potential: Boolean(map.potential), uses: map.uses ?? [],
  }])),
  screen({ given }) {
    const state = tidy({ ...fresh(), ...given }), seen = compute(K, state), n = state.x.length;
    const results = [...seen.results].map(([key, found]) => [label(key, state, n), { ...found, p: Array.from(found.p), gradient: found.gradient && Array.from(found.gradient),
      drawn: found.drawn && Array.from(found.drawn) }]);
    return { program: toPython(state), results: Object.fromEntries(results), jacobian: Array.from(seen.jacobian), which: seen.which, order: seen.order };
  },
  two: ({ key, given }) => {
    const { p, losses } = K.two(key, { ...fresh(), ...given }, -4, 4, 81);
    return { p: Array.from(p), losses: losses && Array.from(losses) };
  },
  classic: ({ name }) => Array.from(K.classic(name, -3, 3, 61)),
  simplex: ({ key, given, heat }) => {
    const { values, support } = K.simplex(key, { ...fresh(), ...given }, 3, 13, heat), part = K.simplex(key, { ...fresh(), ...given }, 3, 13, heat, 4, 6);
    return { values: Array.from(values), support: Array.from(support), part: Array.from(part.values) };
  },
  formulas: () => Object.fromEntries(Object.entries(MAPS).map(([key, { formula }]) => [key, typeset(formula)])),
  words: () => Object.values(SLIDERS).map(({ words }) => mixed(words)),
  parse: ({ text, comma }) => parseScores(text, comma ?? undefined),
  row: ({ text }) => parseRow(text),
  names: ({ text, count }) => parseNames(text, count),
  looks: () => Object.fromEntries(Object.entries(LOOKS).map(([key, { inks }]) => [key, { inks, sign: signOf(key) }])),
  story: ({ along }) => STEPS.map(({ title, words, state: given, parts, motion, now }) => {
    const state = tidy({ ...fresh(), ...given, ...motion.at(eased(along)) }), seen = compute(K, state);
    return { title, words: mixed(words), parts, state, now: now(state, seen) };
  }),
  steps({ steps }) { // a state goes through changes {x, kind} and the words back, forth, close; what is seen after each
    const history = newHistory({ x: [0] });
    return steps.map((step) => {
      if (step === "close") close(history);
      else if (step === "back") back(history);
      else if (step === "forth") forth(history);
      else record(history, { x: [step.x] }, step.kind ?? null);
      return history.now.x[0];
    });
  },
  hash: ({ text }) => fromHash(text),
  turn: ({ given }) => fromHash(toHash({ ...fresh(), ...given })),
};

const words = (key, v) => (typeof v === "number" && !Number.isFinite(v) ? { number: String(v) } : v);
const numbers = (key, v) => (v && typeof v === "object" && "number" in v ? Number(v.number) : v);
const requests = JSON.parse(readFileSync(0, "utf8"), numbers);
console.log(JSON.stringify(requests.map(({ ask, ...rest }) => {
  try {
    return { answer: answers[ask](rest) };
  } catch (error) {
    return { error: error.message, readings: error.readings };
  }
}), words));
