// Softmax and sparsemax of a row in WebAssembly: node tools/wasm.mjs anymax.wasm
import { readFile } from "node:fs/promises";

const module = await WebAssembly.compile(await readFile(process.argv[2]));
let memory;
const system = { // what of WASI the C library may ask for: no environment, no files, an end
  environ_sizes_get: (count, size) => (new Uint32Array(memory.buffer).fill(0, count / 4, count / 4 + 1).fill(0, size / 4, size / 4 + 1), 0),
  environ_get: () => 0,
  proc_exit: (code) => { throw new Error(`the library left with ${code}`); },
};
const imports = {};
for (const { module: from, name } of WebAssembly.Module.imports(module)) {
  (imports[from] ??= {})[name] = system[name] ?? (() => 52); // 52: not implemented
}
const { exports: library } = await WebAssembly.instantiate(module, imports);
memory = library.memory;
library._initialize?.();

const [SOFTMAX, SPARSEMAX, F64] = [0, 1, 1];
function rows(map, x) {
  const [from, to] = [library.malloc(8 * x.length), library.malloc(8 * x.length)];
  new Float64Array(memory.buffer, from, x.length).set(x);
  const code = library.anymax_rows(BigInt((map << 8) | (F64 << 16)), from, to, 1n, BigInt(x.length), 0);
  if (code) {
    const bytes = new Uint8Array(memory.buffer, library.anymax_error(code));
    throw new Error(new TextDecoder().decode(bytes.slice(0, bytes.indexOf(0))));
  }
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
