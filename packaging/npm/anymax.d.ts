/** Scores: rows of classes side by side. Results have the same kind, a new array. */
export type Scores = Float32Array | Float64Array;
/** `Float32Array` of a `Float32Array`, whatever buffer it lies in. */
export type Like<X extends Scores> = X extends Float64Array ? Float64Array : Float32Array;

export type Name = "softmax" | "sparsemax" | "entmax" | "budget" | "normmax" | "sparse_softmax" | "taylor" | "sigsoftmax" | "perturb_max";

/** A map by its name, or with its options. Entmax is softmax at alpha 1, sparsemax at 2; sparse_softmax keeps the k largest scores, or the nucleus of mass p. */
export type Map =
  | Exclude<Name, "budget" | "sparse_softmax">
  | { name: "softmax" | "sparsemax" | "sigsoftmax" }
  | { name: "entmax"; alpha?: number }
  | { name: "normmax"; alpha?: number }
  | { name: "budget"; k: number }
  | { name: "sparse_softmax"; k: number }
  | { name: "sparse_softmax"; p: number }
  | { name: "taylor"; order?: number }
  | { name: "perturb_max"; noise?: "normal" | "logistic" | "uniform" | "laplace" | "gumbel"; scale?: number };

export interface Rows {
  /** How many scores a row has; without it all of them are one row. */
  classes?: number;
}

export interface Anymax {
  /** Probabilities. A score of -Infinity is a masked class: it gets 0. A row that is all masked becomes zeros, one with NaN or Infinity NaN. */
  apply<X extends Scores>(map: Map, x: X, options?: Rows): Like<X>;
  /** Their logarithms, -Infinity for 0; those of perturb_max also where p itself is too small for a number. */
  logApply<X extends Scores>(map: Map, x: X, options?: Rows): Like<X>;
  /** The gradient of the scores, given that of the probabilities: J^T g. */
  vjp<X extends Scores>(map: Map, x: X, g: X, options?: Rows): Like<X>;
  /** The same, given the gradient of the log probabilities. */
  logVjp<X extends Scores>(map: Map, x: X, g: X, options?: Rows): Like<X>;
  /** The Fenchel-Young loss of each row for its target class; cross-entropy for softmax. A target below 0 leaves its row out, which gives 0. */
  loss<X extends Scores>(map: Map, x: X, targets: ArrayLike<number> | ArrayLike<bigint>, options?: Rows): Like<X>;
  /** The gradient of that loss, p - y, times `scale` (1 / rows for a mean). */
  lossGradient<X extends Scores>(map: Map, x: X, targets: ArrayLike<number> | ArrayLike<bigint>, options?: Rows & { scale?: number }): Like<X>;
  /** The threshold tau of each row, such as p = max(x - tau, 0) for sparsemax; logsumexp for softmax. */
  threshold<X extends Scores>(map: Map, x: X, options?: Rows): Like<X>;
  /** `draws` classes from each row, side by side; -1 where a row has no class. `random` gives numbers from 0 to 1, `Math.random` by default. */
  sample(map: Map, x: Scores, options?: Rows & { draws?: number; random?: () => number }): Int32Array;

  softmax<X extends Scores>(x: X, options?: Rows): Like<X>;
  logSoftmax<X extends Scores>(x: X, options?: Rows): Like<X>;
  sparsemax<X extends Scores>(x: X, options?: Rows): Like<X>;
  /** alpha is any number above 0, 1.5 by default. */
  entmax<X extends Scores>(x: X, options?: Rows & { alpha?: number }): Like<X>;
  /** Softmax over the k largest scores, or over the fewest that hold mass p. */
  sparseSoftmax<X extends Scores>(x: X, options: Rows & ({ k: number; p?: undefined } | { p: number; k?: undefined })): Like<X>;

  /** The names of the maps. */
  readonly names: readonly Name[];
}

/** The functions, once the engine is there; it is loaded once. `bytes` are those of anymax.wasm, where they come from elsewhere. */
export function load(bytes?: ArrayBuffer | Uint8Array): Promise<Anymax>;
