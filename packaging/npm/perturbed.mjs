// log p of Perturb Max where p is too small for its engine: the log of INT G h_i du at equal steps, G = prod_j F(u - z_j) and h_i = f / F (u - z_i).

const LOG_2 = Math.LN2, HALF_LOG_2PI = 0.5 * Math.log(2 * Math.PI);
const DEEPEST = -300; // the lowest z, the scores less the highest, of which all of the integral is computed: for lower ones log p is a lower bound

// (1 + 2w) erfcx(w) in powers of (w - 3.75) / (w + 3.75), the coefficients of anymax/_random/noises.py.
const ERFCX = [
  1.2375126308378275, -0.14024059858554697, 0.0035854154854790257, 0.0822767384901452, -0.10880393014244462, 0.09230432116037748,
  -0.05869339857664935, 0.028362277418956364, -0.009746579683265203, 0.001755625852895578, 0.0002937143780446766, -0.0002901540805420362,
  5.1646529742613335e-05, 2.2384239158309724e-05, -1.143804803494536e-05, -9.735599024300036e-07, 1.7419821605685549e-06, -5.721822408015812e-08,
  -2.4857126394415325e-07, 2.3263504032644517e-08, 3.197926733604639e-08, -3.744208176587683e-09, -2.623107459747668e-09, 3.11143001991097e-10,
];
function logPhi(v) {
  if (v > 9) return 0; // to 1e-19
  const w = Math.abs(v) * Math.SQRT1_2, r = (w - 3.75) / (w + 3.75);
  let sum = 0;
  for (let i = ERFCX.length - 1; i >= 0; i--) sum = sum * r + ERFCX[i];
  const half = 0.5 * sum / (1 + 2 * w);
  return v < 0 ? Math.log(half) - w * w : Math.log1p(-half * Math.exp(-w * w));
}

// log F, log f; the step, and where the integrand of a class begins, for the lowest z, and ends, above the highest score's.
const LAWS = {
  normal: { cdf: logPhi, pdf: (v) => -0.5 * v * v - HALF_LOG_2PI, step: 1 / 4, begin: (z) => z / 2 - 8, above: 6 },
  logistic: {
    cdf: (v) => (v < 0 ? v : 0) - Math.log1p(Math.exp(-Math.abs(v))), pdf: (v) => -Math.abs(v) - 2 * Math.log1p(Math.exp(-Math.abs(v))),
    step: 1 / 2, begin: (z) => z - 18, above: 18,
  },
  laplace: {
    cdf: (v) => v < 0 ? v - LOG_2 : Math.log1p(-0.5 * Math.exp(-v)), pdf: (v) => -Math.abs(v) - LOG_2, step: 1 / 8, begin: (z) => z - 18, above: 18,
  },
};

const SMALL = 1e-6; // below it the error of p, about 1e-13 of 1, has no part in log p's first digits
const NOTHING = 40; // e^-40 of a sum

// log p of a row, given its scores and p in double precision; exact zeros of a bounded noise, and masked classes, are -Infinity.
export function logs(x, p, noise, scale) {
  const law = LAWS[noise], out = p.map(Math.log), small = [];
  for (let i = 0; i < p.length; i++) if (p[i] < SMALL && x[i] > -Infinity) small.push(i);
  if (!law || !small.length) return out;
  const { cdf, pdf, step } = law, high = x.reduce((most, v) => Math.max(most, v)), z = x.map((v) => (v - high) / scale), below = new Float64Array(z.length);
  const lowest = small.reduce((least, i) => Math.min(least, z[i]), 0), end = Math.log(z.length) + law.above;
  const most = new Float64Array(z.length).fill(-Infinity), sums = new Float64Array(z.length);
  for (let u = law.begin(Math.max(DEEPEST, lowest)); u <= end; u += step) {
    let logG = 0;
    for (let i = 0; i < z.length; i++) logG += below[i] = z[i] > -Infinity ? cdf(u - z[i]) : 0;
    for (const i of small) {
      const term = logG - below[i] + pdf(u - z[i]), less = term - most[i];
      if (less > 0) sums[i] = sums[i] * Math.exp(-less) + 1, most[i] = term;
      else if (less > -NOTHING) sums[i] += Math.exp(less);
    }
  }
  for (const i of small) out[i] = most[i] + Math.log(sums[i] * step);
  return out;
}
