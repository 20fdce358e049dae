// The package in Node, Deno and Bun: the engine is a file beside this one.
import { readFile } from "node:fs/promises";
import { loader } from "./anymax.mjs";

export const load = loader(() => readFile(new URL("./anymax.wasm", import.meta.url)));
