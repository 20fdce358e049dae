// The compiled kernels of the library, from the bytes of their WebAssembly: what they export, `memory` among it.

export async function instantiate(bytes) {
  let memory;
  const system = { // the parts of WASI that the C library may call: no environment, no files, an exit
    environ_sizes_get: (count, size) => (new DataView(memory.buffer).setUint32(count, 0, true), new DataView(memory.buffer).setUint32(size, 0, true), 0),
    environ_get: () => 0,
    proc_exit: (code) => { throw new Error(`the kernels left with ${code}`); },
  };
  const module = await WebAssembly.compile(bytes);
  const imports = {};
  for (const { module: from, name } of WebAssembly.Module.imports(module)) {
    (imports[from] ??= {})[name] = system[name] ?? (() => 52); // 52: not implemented
  }
  const { exports: library } = await WebAssembly.instantiate(module, imports);
  memory = library.memory;
  library._initialize?.();
  return library;
}

// The text that ends in a 0 at a place of the memory.
export function sentence({ memory }, place) {
  const bytes = new Uint8Array(memory.buffer, place);
  return new TextDecoder().decode(bytes.slice(0, bytes.indexOf(0)));
}
