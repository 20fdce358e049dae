// The maps that the page can show, each with its code in the kernels, its number, its words on the screen and its Python.

// number(settings, n): the parameter that the kernel takes for n classes, which python() writes out again
// hidden(settings): the score of a class that the kernel sees after the others, and the page does not show
const chosen = (s, n) => Math.min(s.k, n);

export const MAPS = {
  softmax: {
    kind: 0, threshold: true, potential: true, title: "softmax", formula: "p = exp(x − τ)",
    words: "Every class keeps some probability, however small. The default.",
    python: () => "anymax.Softmax()",
  },
  entmax: {
    kind: 2, threshold: true, potential: true, title: "entmax", formula: "p = [(α − 1)(x − τ)]₊^(1/(α−1))",
    words: "Between softmax (α = 1) and sparsemax (α = 2). Above α = 1 a class that lags far enough behind gets exactly 0.",
    uses: ["alpha"], number: (s) => s.alpha, detail: (s) => `α = ${s.alpha}`, python: (s) => `anymax.Entmax(${float(s.alpha)})`,
  },
  sparsemax: {
    kind: 1, threshold: true, potential: true, title: "sparsemax", formula: "p = [x − τ]₊",
    words: "The point of the simplex nearest to the scores: the threshold τ cuts off what lies below it.",
    python: () => "anymax.Sparsemax()",
  },
  normmax: {
    kind: 4, threshold: true, potential: true, title: "normmax", formula: "p = argmax ⟨p, x⟩ − ‖p‖_α",
    words: "Sparse, and nearly uniform on what it keeps.",
    uses: ["norm"], number: (s) => s.norm, detail: (s) => `α = ${s.norm}`, python: (s) => `anymax.NormMax(${float(s.norm)})`,
  },
  topk: {
    kind: 5, threshold: true, potential: true, title: "top-k softmax", formula: "softmax over the k largest",
    words: "Exactly k classes stay, whatever the scores; ties go to the first.",
    uses: ["k"], number: chosen, detail: (s, n) => `k = ${chosen(s, n)}`, python: (s, n) => `anymax.SparseSoftmax(k=${chosen(s, n)})`,
  },
  topp: {
    kind: 6, threshold: true, potential: true, title: "top-p softmax", formula: "softmax over the nucleus of mass p",
    words: "The fewest classes whose softmax mass reaches p: few where the scores are clear, many where they are not.",
    uses: ["p"], number: (s) => s.p, detail: (s) => `p = ${s.p}`, python: (s) => `anymax.SparseSoftmax(p=${float(s.p)})`,
  },
  budget: {
    kind: 3, threshold: true, potential: true, title: "budget", formula: "p = clip(x − τ, 0, 1),  Σp = k",
    words: "Chooses k of n: every class is capped at 1, and all together sum to k.",
    uses: ["k"], number: chosen, detail: (s, n) => `k = ${chosen(s, n)}`, python: (s, n) => `anymax.Budget(${chosen(s, n)})`,
  },
  perturb: {
    kind: 9, potential: true, title: "perturbed argmax", formula: "pᵢ = P[argmax(x + ε) = i]",
    words: "How often each class wins once noise is added to the scores. Gumbel noise gives softmax.",
    uses: ["noise", "scale"], number: (s) => s.scale, detail: (s) => `${s.noise} × ${s.scale}`,
    python: (s) => `anymax.PerturbMax("${s.noise}", scale=${float(s.scale)})`,
  },
  taylor: {
    kind: 7, title: "Taylor softmax", formula: "p ∝ 1 + x + x²/2 + … + xᵐ/m!",
    words: "Long tails: polynomial where softmax is exponential. It rises again below x = −1, and it depends on where the zero of the scores is.",
    uses: ["order"], number: (s) => s.order, detail: (s) => `order ${s.order}`, python: (s) => `anymax.Taylor(${s.order})`,
  },
  sigsoftmax: {
    kind: 8, title: "sigsoftmax", formula: "p ∝ exp(x) σ(x)",
    words: "Its logarithms are not linear in the scores, which a narrow output layer needs.",
    python: () => "anymax.Sigsoftmax()",
  },
  square: {
    kind: 16, title: "square", formula: "p ∝ x²", words: "Signs don't matter: only how far from 0 a score is.",
    python: () => "anymax.Ratio.square()",
  },
  sigmoid: {
    kind: 17, title: "sigmoid", formula: "p ∝ σ(x)", words: "Large scores saturate and share alike.",
    python: () => "anymax.Ratio.sigmoid()",
  },
  sink: {
    kind: 2, threshold: true, potential: true, title: "sink", formula: "p = entmax(x, s)",
    words: "One class more, with the score s, is not shown: it takes what the others leave of 1. With α = 1 this is softmax-one.",
    uses: ["alpha", "sink"], number: (s) => s.alpha, hidden: (s) => s.sink, detail: (s) => `α = ${s.alpha}, s = ${s.sink}`,
    python: (s) => `anymax.Sink(anymax.Entmax(${float(s.alpha)}), score=${float(s.sink)})`,
  },
  relu: {
    kind: 18, title: "relu", formula: "p ∝ [x]₊", words: "Scores below 0 get nothing; a row without a positive score gives zeros.",
    python: () => "anymax.Ratio.relu()",
  },
};

export const NOISES = ["normal", "logistic", "uniform", "laplace", "gumbel"];

// Sliders: `log` ones move by factors.
export const SLIDERS = {
  T: { label: "Temperature", symbol: "T", low: 0.1, high: 10, step: 0.01, log: true, start: 1, words: "the scores are divided by it" },
  alpha: { label: "α of entmax", symbol: "α", low: 0.5, high: 4, step: 0.05, start: 1.5, words: "1 is softmax, 2 is sparsemax" },
  norm: { label: "α of normmax", symbol: "α", low: 1.05, high: 6, step: 0.05, start: 2, words: "larger: more classes, more alike" },
  k: { label: "k", symbol: "k", low: 1, high: 20, step: 1, start: 2, words: "classes kept, or the budget" },
  sink: { label: "Score of the sink", symbol: "s", low: -4, high: 4, step: 0.05, start: 0, words: "of the class that is not shown" },
  p: { label: "p of top-p", symbol: "p", low: 0.05, high: 1, step: 0.01, start: 0.9, words: "the mass to keep" },
  order: { label: "Taylor order", symbol: "m", low: 2, high: 12, step: 2, start: 2, words: "even; softmax as it grows" },
  scale: { label: "Size of the noise", symbol: "σ", low: 0.05, high: 5, step: 0.05, log: true, start: 1, words: "0 would be argmax" },
  margin: { label: "Margin", symbol: "m", low: 0, high: 3, step: 0.05, start: 0, words: "taken off the target before the loss" },
  tilt: { label: "Prior", symbol: "w", low: 0, high: 3, step: 0.05, start: 0, words: "class i is seen $(i + 1)^(−w)$ times as often" },
};

// Whether the probabilities of a map for n classes sum to 1.
export const sharesOne = (key, settings, n) => key !== "sink" && (key !== "budget" || chosen(settings, n) === 1);

export const EVERYWHERE = ["T", "tilt", "margin"]; // sliders that affect every map

export function detail(key, settings, n) {
  return MAPS[key].detail?.(settings, n) ?? "";
}

export function label(key, settings, n) {
  return [MAPS[key].title, detail(key, settings, n)].filter(Boolean).join(" ");
}

// A number as Python writes a float.
export function float(value) {
  if (value === -Infinity) return "-np.inf";
  const text = String(value);
  return /^-?\d+$/.test(text) ? `${text}.0` : text;
}
