// Softmax and sparsemax of a row in WebAssembly: node tools/wasm.mjs anymax.wasm
import { readFile } from "node:fs/promises";
import { instantiate, sentence } from "../src/anymax/explorer/engine.mjs";

const library = await instantiate(await readFile(process.argv[2])), { memory } = library;

const [SOFTMAX, SPARSEMAX, F64] = [0, 1, 1];
function rows(map, x) {
  const [from, to] = [library.malloc(8 * x.length), library.malloc(8 * x.length)];
  new Float64Array(memory.buffer, from, x.length).set(x);
  const code = library.anymax_rows(BigInt((map << 8) | (F64 << 16)), from, to, 1n, BigInt(x.length), 0);
  if (code) throw new Error(sentence(library, library.anymax_error(code)));
  const p = Array.from(new Float64Array(memory.buffer, to, x.length));
  library.free(from);
  library.free(to);
  return p;
}
function expect(what, found, wanted) {
  if (!found.every((value, i) => Math.abs(value - wanted[i]) < 1e-15)) throw new Error(`${what}: ${found}, not ${wanted}`);
}

const x = [2, 1, 0.1, -1], total = x.reduce((sum, v) => sum + Math.exp(v), 0);
expect("softmax", rows(SOFTMAX, x), x.map((v) => Math.exp(v) / total));
expect("sparsemax", rows(SPARSEMAX, [0.6, 0.5, 0.4]), [0.6, 0.5, 0.4].map((v) => v - 0.5 / 3));
expect("sparsemax", rows(SPARSEMAX, x), [1, 0, 0, 0]);
let refused = false;
try { rows(99, x); } catch { refused = true; }
if (!refused) throw new Error("a map that is not there is served");
console.log("right: softmax and sparsemax in WebAssembly");
