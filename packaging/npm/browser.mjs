// The package in browsers: the engine is fetched from beside this module, which bundlers know how to keep.
import { loader } from "./anymax.mjs";

export const load = loader(async () => {
  const answer = await fetch(new URL("./anymax.wasm", import.meta.url));
  if (!answer.ok) throw new Error(`anymax: ${answer.url} answers ${answer.status}; serve anymax.wasm beside the package's modules, or give load() its bytes`);
  return answer.arrayBuffer();
});
