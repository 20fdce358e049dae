// log p of Perturb Max where p is too small for its engine: the log of INT G h_i du at equal steps, G = prod_j F(u - z_j) and h_i = f / F (u - z_i).

const LOG_2 = Math.LN2, HALF_LOG_2PI = 0.5 * Math.log(2 * Math.PI);
const DEEPEST = -300, WIDTH = 12; // of z, the scores below the highest: beyond, log p is a lower bound; and of what is integrated around them

// (1 + 2w) erfcx(w) in powers of (w - 3.75) / (w + 3.75), the coefficients of anymax/_random/noises.py.
const ERFCX = [
  1.2375126308378275, -0.14024059858554697, 0.0035854154854790257, 0.0822767384901452, -0.10880393014244462, 0.09230432116037748,
  -0.05869339857664935, 0.028362277418956364, -0.009746579683265203, 0.001755625852895578, 0.0002937143780446766, -0.0002901540805420362,
  5.1646529742613335e-05, 2.2384239158309724e-05, -1.143804803494536e-05, -9.735599024300036e-07, 1.7419821605685549e-06, -5.721822408015812e-08,
  -2.4857126394415325e-07, 2.3263504032644517e-08, 3.197926733604639e-08, -3.744208176587683e-09, -2.623107459747668e-09, 3.11143001991097e-10,
];
function logPhi(v) {
  const w = Math.abs(v) * Math.SQRT1_2, r = (w - 3.75) / (w + 3.75), half = 0.5 * ERFCX.reduceRight((sum, c) => sum * r + c, 0) / (1 + 2 * w);
  return v < 0 ? Math.log(half) - w * w : Math.log1p(-half * Math.exp(-w * w));
}

// log F, log f, and a step that is short enough for them
const LAWS = {
  normal: { cdf: logPhi, pdf: (v) => -0.5 * v * v - HALF_LOG_2PI, step: 1 / 8 },
  logistic: {
    cdf: (v) => Math.min(v, 0) - Math.log1p(Math.exp(-Math.abs(v))), pdf: (v) => -Math.abs(v) - 2 * Math.log1p(Math.exp(-Math.abs(v))), step: 1 / 4,
  },
  laplace: { cdf: (v) => v < 0 ? v - LOG_2 : Math.log1p(-0.5 * Math.exp(-v)), pdf: (v) => -Math.abs(v) - LOG_2, step: 1 / 32 },
};

const SMALL = 1e-6; // below it the error of p, about 1e-13 of 1, has no part in log p's first digits

// log p of a row, given its scores and p in double precision; exact zeros of a bounded noise, and masked classes, are -Infinity.
export function logs(x, p, noise, scale) {
  const law = LAWS[noise], out = Array.from(p, Math.log), small = [];
  p.forEach((v, i) => v < SMALL && x[i] > -Infinity && small.push(i));
  if (!law || !small.length) return out;
  const high = x.reduce((most, v) => Math.max(most, v)), z = Array.from(x, (v) => (v - high) / scale), kept = z.filter((v) => v > -Infinity);
  const low = Math.max(DEEPEST, Math.min(...small.map((i) => z[i]))) - WIDTH, end = WIDTH + 2 * Math.log(kept.length) + (noise === "normal" ? 0 : 30);
  const sums = small.map(() => ({ high: -Infinity, sum: 0 }));
  for (let u = low; u <= end; u += law.step) {
    let logG = 0;
    for (const v of kept) logG += law.cdf(u - v);
    small.forEach((i, s) => {
      const term = logG + law.pdf(u - z[i]) - law.cdf(u - z[i]), part = sums[s];
      if (term > part.high) part.sum = part.sum * Math.exp(part.high - term) + 1, part.high = term;
      else if (term > -Infinity) part.sum += Math.exp(term - part.high);
    });
  }
  small.forEach((i, s) => { out[i] = sums[s].high + Math.log(sums[s].sum * law.step); });
  return out;
}
