// Classes drawn from the probabilities on the screen, with the same uniform numbers for every map, so that maps can be compared.

export const DRAWS = [0, 1, 10, 100, 1000, 10000];

let kept = { words: "", values: null };

// `count` uniform numbers in [0, 1), ascending; they depend on the count and the seed alone.
export function uniforms(count, seed) {
  const words = `${count} ${seed}`;
  if (kept.words !== words) {
    let state = Math.imul(seed, 0x9e3779b9) >>> 0;
    const next = () => { // mulberry32
      state = (state + 0x6d2b79f5) >>> 0;
      let t = Math.imul(state ^ (state >>> 15), state | 1);
      t ^= t + Math.imul(t ^ (t >>> 7), t | 61);
      return ((t ^ (t >>> 14)) >>> 0) / 4294967296;
    };
    kept = { words, values: Float64Array.from({ length: count }, next).sort() };
  }
  return kept.values;
}

// How often each class is drawn: a number draws the first class whose cumulative sum exceeds it, never one of probability 0.
export function drawn(p, { draws, seed }) {
  const counts = new Float64Array(p.length), at = uniforms(draws, seed), total = p.reduce((sum, v) => sum + v, 0);
  let sum = 0, j = 0, last = 0;
  for (let i = 0; i < p.length && j < at.length; i++) {
    if (!(p[i] > 0)) continue;
    sum += p[i];
    last = i;
    while (j < at.length && at[j] * total < sum) {
      counts[i]++;
      j++;
    }
  }
  counts[last] += at.length - j; // the draws that rounding has left over
  return counts;
}
