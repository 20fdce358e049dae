// What the package for JavaScript answers to requests, in Node and in Chromium. A request: { call, map, x, more, options }, with arrays as { kind, numbers }
// and what JSON has no word for as { js }, an expression.
const special = { NaN, Infinity, "-Infinity": -Infinity };
const array = ({ kind, numbers }) => globalThis[kind].from(numbers, (v) => special[v] ?? v);
const plain = (v) => ({ kind: v.constructor.name, numbers: Array.from(v, (number) => Number.isFinite(number) ? number : String(number)) });
const read = (value) => value?.kind ? array(value) : value?.js ? (0, eval)(value.js) : value;

// Numbers from 0 to 1 as the request has them.
const from = (numbers) => { let at = 0; return () => numbers[at++]; };

export async function answer(load, requests) {
  const anymax = await load();
  return requests.map(({ call, map, x, more = [], options = {} }) => {
    const random = Array.isArray(options.random) ? from(options.random) : read(options.random);
    const given = { ...options, ...(random !== undefined && { random }) };
    const scores = read(x), kept = x.kind && scores.slice();
    const rest = more.map(read);
    try {
      const result = anymax[call](...(map === undefined ? [] : [map]), scores, ...rest, given);
      if (kept && !scores.every((v, i) => Object.is(v, kept[i]))) throw new Error("the scores have changed");
      return plain(result);
    } catch (error) {
      return { refused: error.message, kind: error.constructor.name };
    }
  });
}
