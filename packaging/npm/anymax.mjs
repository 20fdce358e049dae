// The functions of the package: rows of scores in a typed array, their classes side by side, in and the same kind of array out.
import { DTYPE, NOISE, OP } from "./codes.mjs";
import { instantiate, sentence } from "./engine.mjs";
import { kernelOf, names, refuseOthers } from "./maps.mjs";
import { logs } from "./perturbed.mjs";

// load(), which takes the engine from `read` once, and load(bytes), which takes it from there.
export function loader(read) {
  let loaded;
  return (bytes) => {
    if (bytes !== undefined) return functions(bytes);
    loaded ??= read().then(functions);
    loaded.catch(() => { loaded = undefined; }); // another call tries again
    return loaded;
  };
}

async function functions(bytes) {
  const library = await instantiate(bytes), { memory } = library;

  // f with a place in the memory of the engine for each part: an array, which is copied there, or a number of bytes.
  function held(parts, f) {
    const places = [];
    try {
      for (const part of parts) {
        const place = library.malloc(Math.max(8, part.byteLength ?? part));
        if (!place) throw new RangeError("anymax: out of memory; give fewer rows at a time");
        places.push(place);
      }
      parts.forEach((part, i) => part.byteLength && new part.constructor(memory.buffer, places[i], part.length).set(part));
      return f(...places);
    } finally {
      places.forEach((place) => library.free(place));
    }
  }

  // One operation of the kernels on places in the memory.
  function run(op, { code, noise, number }, { dtype, rows, classes }, { x = 0, p = 0, g = 0, index = 0, scale = 0, out }) {
    const wrong = library.rows_run(op, code, dtype, noise, number, rows, classes, x, p, g, index, scale, out);
    if (wrong) throw new Error(`anymax: ${sentence(library, library.rows_error(wrong))}`);
  }
  const taken = ({ Kind }, place, length) => new Kind(memory.buffer, place, length).slice();

  // The result of an operation that reads the scores alone.
  function of(op, kernel, x, shape, each = shape.classes) {
    if (!shape.rows) return new shape.Kind(0);
    return held([x, shape.rows * each * x.BYTES_PER_ELEMENT], (from, out) => {
      run(op, kernel, shape, { x: from, out });
      return taken(shape, out, shape.rows * each);
    });
  }

  function apply(map, x, options = {}) {
    const shape = shapeOf("apply", x, options);
    return of(OP.FORWARD, kernelOf(map, shape.classes), x, shape);
  }

  function logApply(map, x, options = {}) {
    const shape = shapeOf("logApply", x, options), kernel = kernelOf(map, shape.classes);
    if (kernel.log) return of(OP.LOG, kernel, x, shape);
    const [wide, doubles] = doubled(x, shape);
    if (kernel.noise === NOISE.gumbel && kernel.name === "perturb_max") { // softmax of x / scale, exactly
      return shape.Kind.from(of(OP.LOG, kernelOf("softmax", shape.classes), wide.map((v) => v / kernel.number), doubles));
    }
    const p = of(OP.FORWARD, kernel, wide, doubles), n = shape.classes;
    if (kernel.name !== "perturb_max") return shape.Kind.from(p, Math.log);
    const out = new shape.Kind(x.length), noise = Object.keys(NOISE).find((name) => NOISE[name] === kernel.noise);
    for (let i = 0; i < x.length; i += n) out.set(logs(wide.subarray(i, i + n), p.subarray(i, i + n), noise, kernel.number), i);
    return out;
  }

  // J^T g, of p or of log p.
  function pulledBack(kernel, x, g, shape, [forward, backward]) {
    if (!shape.rows) return new shape.Kind(0);
    return held([x, g, x.byteLength, x.byteLength], (from, upstream, p, out) => {
      run(forward, kernel, shape, { x: from, out: p });
      run(backward, kernel, shape, { x: from, p, g: upstream, out });
      return taken(shape, out, x.length);
    });
  }

  function vjp(map, x, g, options = {}) {
    const shape = shapeOf("vjp", x, options);
    return pulledBack(kernelOf(map, shape.classes), x, gradient("vjp", g, x), shape, [OP.FORWARD, OP.VJP]);
  }

  function logVjp(map, x, g, options = {}) {
    const shape = shapeOf("logVjp", x, options), kernel = kernelOf(map, shape.classes);
    gradient("logVjp", g, x);
    if (kernel.log) return pulledBack(kernel, x, g, shape, [OP.LOG, OP.LOG_VJP]);
    const [wide, doubles] = doubled(x, shape), p = of(OP.FORWARD, kernel, wide, doubles);
    return shape.Kind.from(pulledBack(kernel, wide, p.map((v, i) => g[i] / v), doubles, [OP.FORWARD, OP.VJP]));
  }

  // The kernel of a map with a loss, and its target classes as the kernels read them.
  function aimed(who, map, x, targets, shape) {
    const kernel = kernelOf(map, shape.classes);
    if (!kernel.loss) throw new TypeError(`${who}: ${kernel.name} has no Fenchel-Young loss of a class; take minus the target's log p of logApply`);
    if (targets?.length !== shape.rows) throw new TypeError(`${who}: there are ${targets?.length} targets and ${shape.rows} rows; give each row a class`);
    const wrong = Array.prototype.findIndex.call(targets, (t) => !(typeof t === "bigint" || Number.isInteger(t)) || t >= shape.classes);
    if (wrong >= 0) throw new RangeError(`${who}: a target is ${String(targets[wrong])}; it has to be an integer below ${shape.classes}, and one below 0 leaves its row out`);
    return [kernel, BigInt64Array.from(targets, (t) => t < 0 ? -1n : BigInt(t))]; // any below 0 is no class; one below -2^63 has no place there
  }

  function loss(map, x, targets, options = {}) {
    const shape = shapeOf("loss", x, options), [kernel, index] = aimed("loss", map, x, targets, shape);
    if (!shape.rows) return new shape.Kind(0);
    return held([x, index, 8 * shape.rows], (from, at, out) => {
      run(OP.LOSS, kernel, shape, { x: from, index: at, out });
      return taken(shape, out, shape.rows);
    });
  }

  function lossGradient(map, x, targets, options = {}) {
    const { scale = 1, ...rest } = options, shape = shapeOf("lossGradient", x, rest, ["scale"]);
    const [kernel, index] = aimed("lossGradient", map, x, targets, shape);
    if (typeof scale !== "number") throw new TypeError(`lossGradient: scale is ${scale}; it has to be a number, by which each gradient is multiplied`);
    if (!shape.rows) return new shape.Kind(0);
    return held([x, index, new shape.Kind(shape.rows).fill(scale), x.byteLength], (from, at, factor, out) => {
      run(OP.LOSS_GRAD, kernel, shape, { x: from, index: at, scale: factor, out });
      return taken(shape, out, x.length);
    });
  }

  function threshold(map, x, options = {}) {
    const shape = shapeOf("threshold", x, options), kernel = kernelOf(map, shape.classes);
    if (!kernel.threshold) throw new TypeError(`threshold: ${kernel.name} has none`);
    return of(OP.THRESHOLD, kernel, x, shape, 1);
  }

  function sample(map, x, options = {}) {
    const { draws = 1, random = Math.random, ...rest } = options, shape = shapeOf("sample", x, rest, ["draws", "random"]), { rows, classes } = shape;
    if (!Number.isInteger(draws) || draws < 0) throw new RangeError(`sample: draws is ${draws}; it has to be an integer from 0, the number of draws from each row`);
    if (typeof random !== "function") throw new TypeError(`sample: random is ${String(random)}; it has to be a function that gives numbers from 0 to 1`);
    const p = of(OP.FORWARD, kernelOf(map, classes), x, shape), drawn = new Int32Array(rows * draws), upto = new Float64Array(classes);
    for (let r = 0; r < rows; r++) {
      let total = 0;
      for (let i = 0; i < classes; i++) upto[i] = total += p[r * classes + i];
      for (let s = 0; s < draws; s++) {
        const given = random(), u = given * total;
        if (!(given >= 0 && given <= 1)) throw new RangeError(`sample: random gave ${String(given)}; it has to give numbers from 0 to 1`);
        drawn[r * draws + s] = total > 0 ? first(upto, u < total ? (v) => v > u : (v) => v === total) : -1;
      }
    }
    return drawn;
  }

  const named = (name, ...keys) => (x, options = {}) => {
    const own = Object.fromEntries(Object.entries(options).filter(([key]) => keys.includes(key)));
    const rest = Object.fromEntries(Object.entries(options).filter(([key]) => !keys.includes(key)));
    return apply({ name, ...own }, x, rest);
  };
  return Object.freeze({
    apply, logApply, vjp, logVjp, loss, lossGradient, threshold, sample, names,
    softmax: named("softmax"), sparsemax: named("sparsemax"), entmax: named("entmax", "alpha"), sparseSoftmax: named("sparse_softmax", "k", "p"),
    logSoftmax: (x, options) => logApply("softmax", x, options),
  });
}

// The first place at which numbers in ascending order are as asked; the last one is.
function first(numbers, asked) {
  let low = 0, high = numbers.length - 1;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (asked(numbers[middle])) high = middle;
    else low = middle + 1;
  }
  return low;
}

// Where log p comes from p, both are computed in double precision: 1 / p of a small p has no place in a Float32Array.
const doubled = (x, shape) => [Float64Array.from(x), { ...shape, Kind: Float64Array, dtype: DTYPE.F64 }];

// An array made in another window or test environment has another constructor, so that its name is asked for.
const kindOf = (x) => Object.prototype.toString.call(x).slice(8, -1);

// How the scores lie: `classes` numbers a row, all of them if it is not said.
function shapeOf(who, x, options, more = []) {
  const kind = kindOf(x), Kind = { Float32Array, Float64Array }[kind];
  if (!Kind) throw new TypeError(`${who}: the scores are of the kind ${kind}; give a Float32Array or a Float64Array, as in Float32Array.of(2, 1, 0)`);
  refuseOthers(who, options, ["classes", ...more]);
  const { classes = Math.max(1, x.length) } = options;
  if (!Number.isInteger(classes) || classes < 1 || x.length % classes) {
    throw new RangeError(`${who}: classes is ${classes} and there are ${x.length} scores; give the number of scores in a row, which has to divide that`);
  }
  return { Kind, dtype: Kind === Float32Array ? DTYPE.F32 : DTYPE.F64, rows: x.length / classes, classes };
}

function gradient(who, g, x) {
  if (kindOf(g) !== kindOf(x) || g.length !== x.length) {
    throw new TypeError(`${who}: the gradient is ${kindOf(g)} of ${g?.length} and the scores ${kindOf(x)} of ${x.length}; give one of the same kind and length`);
  }
  return g;
}
