// Every map by its name: the code and the number by which the kernels know it, and what it has.
import { MAP, NOISE } from "./codes.mjs";

const positive = { say: "a finite number above 0", is: (v) => v > 0 && v < 1e300 };
const count = { say: "an integer from 1", is: (v) => Number.isInteger(v) && v >= 1 };

// takes: the options, each with what it may be and, unless it has to be given, its usual value
// number(options, classes): the number of the kernel
// log: the kernels have its log p; threshold, loss: it has one
const KINDS = {
  softmax: { code: MAP.SOFTMAX, log: true, threshold: true, loss: true },
  sparsemax: { code: MAP.SPARSEMAX, threshold: true, loss: true },
  entmax: { code: MAP.ENTMAX, takes: { alpha: { ...positive, usual: 1.5 } }, number: ({ alpha }) => alpha, threshold: true, loss: true },
  budget: {
    code: MAP.BUDGET, takes: { k: positive }, threshold: true, loss: ({ k }) => k === 1,
    number({ k }, classes) {
      if (k > classes) throw new RangeError(`budget: k is ${k}, and there are ${classes} classes; give a k of at most that`);
      return k;
    },
  },
  normmax: {
    code: MAP.NORMMAX, takes: { alpha: { say: "a finite number above 1", is: (v) => v > 1 && v < 9e299, usual: 2 } }, number: ({ alpha }) => alpha,
    threshold: true, loss: true,
  },
  sparse_softmax: {
    code: ({ k }) => k === undefined ? MAP.TOPP : MAP.TOPK, log: true, threshold: true, loss: true, either: ["k", "p"],
    takes: { k: count, p: { say: "a number above 0 and at most 1", is: (v) => v > 0 && v <= 1 } },
    number: ({ k, p }, classes) => k === undefined ? p : Math.min(k, classes),
  },
  taylor: {
    code: MAP.TAYLOR, takes: { order: { say: "an even integer from 2 to 64", is: (v) => v >= 2 && v <= 64 && v % 2 === 0, usual: 2 } },
    number: ({ order }) => order,
  },
  sigsoftmax: { code: MAP.SIGSOFTMAX, log: true },
  perturb_max: {
    code: MAP.PERTURB, loss: true, number: ({ scale }) => scale,
    takes: {
      noise: { say: Object.keys(NOISE).map((name) => `"${name}"`).join(", "), is: (v) => Object.hasOwn(NOISE, v), usual: "normal" },
      scale: { ...positive, usual: 1 },
    },
  },
};

export const names = Object.freeze(Object.keys(KINDS));

// What the kernels have to know of a map ("entmax", or { name: "entmax", alpha: 1.3 }) on so many classes.
export function kernelOf(map, classes) {
  const { name, ...given } = typeof map === "string" ? { name: map } : map ?? {};
  if (!Object.hasOwn(KINDS, name)) throw new TypeError(`there is no map ${JSON.stringify(name)}; the maps are ${names.join(", ")}`);
  const kind = KINDS[name], takes = kind.takes ?? {}, options = {};
  refuseOthers(name, given, Object.keys(takes));
  for (const [key, { say, is, usual }] of Object.entries(takes)) {
    options[key] = given[key] ?? usual;
    if (options[key] === undefined ? !kind.either : !is(options[key])) {
      throw new RangeError(`${name}: ${key} is ${options[key]}; it has to be ${say}, as in { name: "${name}", ${key}: ... }`);
    }
  }
  if (kind.either && kind.either.filter((key) => options[key] !== undefined).length !== 1) {
    throw new TypeError(`${name}: give exactly one of ${kind.either.join(" and ")}, as in { name: "${name}", ${kind.either[0]}: ... }`);
  }
  const softmax = name === "entmax" && options.alpha === 1 ? KINDS.softmax : kind;
  return {
    name, code: typeof softmax.code === "function" ? softmax.code(options) : softmax.code, noise: NOISE[options.noise] ?? 0,
    number: softmax.number?.(options, classes) ?? 0, log: Boolean(softmax.log), threshold: Boolean(softmax.threshold),
    loss: typeof softmax.loss === "function" ? softmax.loss(options) : Boolean(softmax.loss),
  };
}

export function refuseOthers(who, given, allowed) {
  const other = Object.keys(given).find((key) => !allowed.includes(key));
  if (other !== undefined) throw new TypeError(`${who}: there is no option ${other}; ${allowed.length ? `the options are ${allowed.join(", ")}` : "it takes none"}`);
}
