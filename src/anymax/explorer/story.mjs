// The guided story: five steps, each with a state of the page, a few sentences and a motion. $...$ in the sentences is typeset.

const ANIMALS = { x: [2, 1.4, 0.6, -0.9], names: ["cat", "dog", "fox", "owl"], target: 0 };

const between = (from, to, t) => Number((from + (to - from) * t).toFixed(3));
const alpha = { symbol: "α", seconds: 7, at: (t) => ({ alpha: Number(between(1, 2, t).toFixed(2)) }) };
const says = (v, digits = 2) => (v === 0 ? "exactly 0" : v < 0.5 * 10 ** -digits ? `below ${(10 ** -digits).toFixed(digits)}` : v.toFixed(digits));

export const STEPS = [
  {
    title: "From argmax to softmax",
    words: `A model has given four animals a score. Argmax lets the largest score take all: cat gets 1, the others get 0. It jumps when two scores change
      places, and it has no slope to learn from. Softmax shares instead: $p = exp(x − τ)$, with τ such that everything sums to 1. The temperature T leads
      from one to the other: near 0 softmax is almost argmax, at 1 it is itself.`,
    state: { ...ANIMALS, maps: ["softmax"], focus: "softmax" },
    parts: ["cards"],
    motion: { symbol: "T", seconds: 6, at: (t) => ({ T: Number((0.1 * 10 ** t).toFixed(2)) }) },
    now: ({ T }, { results }) => `T = ${T.toFixed(2)}: cat gets ${says(results.get("softmax").p[0], 3)}, owl ${says(results.get("softmax").p[3], 4)}`,
  },
  {
    title: "From softmax to sparsemax",
    words: `Softmax never says no: a class can fall far behind and still keep something. Sparsemax does: $p = [x − τ]₊$ takes one threshold τ off every
      score, and a class below τ gets exactly 0, which a ring marks. Watch fox fall: under sparsemax it drops out, under softmax it only fades.`,
    state: { ...ANIMALS, maps: ["softmax", "sparsemax"], focus: "sparsemax" },
    parts: ["cards"],
    motion: { symbol: "score of fox", seconds: 7, at: (t) => ({ x: [2, 1.4, between(1.9, -0.9, t), -0.9] }) },
    now: ({ x }, { results }) => `score of fox ${x[2].toFixed(2)}: ${says(results.get("softmax").p[2])} under softmax, ${says(results.get("sparsemax").p[2])} under sparsemax`,
  },
  {
    title: "Entmax, in between",
    words: `Entmax has a dial: $p = [(α − 1)(x − τ)]₊^(1/(α−1))$. At α = 1 it is softmax, at α = 2 sparsemax. As α grows, the classes that lag behind let go one
      after another, the last one first, and those that stay share what is freed. A model can even learn α.`,
    state: { ...ANIMALS, maps: ["softmax", "entmax", "sparsemax"], focus: "entmax" },
    parts: ["cards"],
    motion: alpha,
    now: ({ alpha }, { results }) => `α = ${alpha.toFixed(2)}: ${results.get("entmax").support} of 4 animals above 0`,
  },
  {
    title: "The loss",
    words: `Suppose cat is the truth. How wrong is the model? Each map has a loss of its own; softmax's is cross-entropy. Their gradients look alike: $p − y$.
      Softmax always asks for more. Sparsemax is content: once cat leads by 1, its loss is exactly 0, and nothing is left to learn.`,
    state: { ...ANIMALS, maps: ["softmax", "entmax", "sparsemax"], focus: "sparsemax" },
    parts: ["cards", "gradient", "losses"],
    motion: { symbol: "score of cat", seconds: 7, at: (t) => ({ x: [between(0.2, 3, t), 1.4, 0.6, -0.9] }) },
    now: ({ x }, { results }) => `score of cat ${x[0].toFixed(2)}; loss ${["softmax", "entmax", "sparsemax"].map((key) => `${says(results.get(key).loss)} (${key})`).join(", ")}`,
  },
  {
    title: "The Jacobian",
    words: `If one score rises a little, what do the probabilities do? The table says it: row i, column j is $∂pᵢ/∂xⱼ$. What one class gains the others lose, so that
      every row and every column sums to 0. Softmax ties all classes together. As α grows, the class that drops out takes its row and its column with it: no
      gradient flows there, and no time has to be spent on it.`,
    state: { ...ANIMALS, maps: ["entmax"], focus: "entmax" },
    parts: ["cards", "jacobian"],
    motion: alpha,
    now: ({ alpha }, { jacobian }) => `α = ${alpha.toFixed(2)}: ${jacobian.reduce((count, v) => count + (v === 0), 0)} of 16 entries exactly 0`,
  },
];

// Eases a motion: slow at both ends.
export const eased = (t) => t * t * (3 - 2 * t);
