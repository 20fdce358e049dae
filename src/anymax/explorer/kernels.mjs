// The kernels of the library, which compute every number on the page.
import { instantiate, sentence } from "./engine.mjs";
import { MAPS, NOISES } from "./maps.mjs";

export async function kernels(bytes) {
  const library = await instantiate(bytes), { memory } = library;

  // Runs f with memory for each of the arrays given (numbers are sizes, in doubles) and frees it.
  function held(parts, f) {
    const places = parts.map((part) => library.malloc(8 * Math.max(1, part.length ?? part)));
    if (places.includes(0)) throw new Error("out of memory");
    parts.forEach((part, i) => part.length !== undefined && new Float64Array(memory.buffer, places[i], part.length).set(part));
    try {
      return f(...places);
    } finally {
      places.forEach((place) => library.free(place));
    }
  }
  function checked(code) {
    if (code) throw new Error(sentence(library, library.explorer_error(code)));
  }
  const doubles = (place, count) => new Float64Array(memory.buffer, place, count).slice();
  const integers = (place, count) => Array.from(new Int32Array(memory.buffer, place, count));
  const map = (key, settings, n) => [MAPS[key].kind, NOISES.indexOf(settings.noise), MAPS[key].number?.(settings, n) ?? 0];

  const plain = {
    // The scores that the maps get; with a target, its score minus the margin.
    scores(x, settings, target = -1) {
      return held([x, x.length], (from, to) => {
        library.explorer_scores(from, x.length, settings.T, settings.tilt, target, target < 0 ? 0 : settings.margin, to);
        return doubles(to, x.length);
      });
    },
    apply(key, settings, s) {
      return held([s, s.length], (from, to) => {
        checked(library.explorer_apply(...map(key, settings, s.length), from, 1, s.length, to));
        return doubles(to, s.length);
      });
    },
    threshold(key, settings, s) {
      return held([s, 1], (from, to) => {
        checked(library.explorer_threshold(...map(key, settings, s.length), from, s.length, to));
        return doubles(to, 1)[0];
      });
    },
    entropies(p, alpha) {
      return held([p, 3], (from, to) => {
        library.explorer_entropies(from, p.length, alpha, to);
        const [shannon, renyi2, tsallis] = doubles(to, 3);
        return { shannon, renyi2, tsallis };
      });
    },
    jacobian(key, settings, s, p, which) {
      const m = which.length;
      return held([s, p, m, m * m], (from, at, list, to) => {
        new Int32Array(memory.buffer, list, m).set(which);
        checked(library.explorer_jacobian(...map(key, settings, s.length), from, at, s.length, list, m, to));
        return doubles(to, m * m);
      });
    },
    loss(key, settings, moved, target) {
      return held([moved, 1], (from, to) => {
        checked(library.explorer_loss(...map(key, settings, moved.length), from, moved.length, target, to));
        return doubles(to, 1)[0];
      });
    },
    gradient(key, settings, moved, target) {
      return held([moved, moved.length], (from, to) => {
        checked(library.explorer_gradient(...map(key, settings, moved.length), from, moved.length, target, to));
        return doubles(to, moved.length);
      });
    },
    largest(x, k) {
      return held([x, k], (from, to) => {
        checked(library.explorer_largest(from, x.length, k, to));
        return integers(to, k);
      });
    },
    two(key, settings, from, to, count) {
      return held([count, count], (p, losses) => {
        const code = library.explorer_two(...map(key, settings, 2), from, to, count, settings.T, settings.tilt, settings.margin, p, losses);
        const refused = code === 100; // the map has no loss, as `loss` says in words
        if (!refused) checked(code);
        return { p: doubles(p, count), losses: refused ? null : doubles(losses, count) };
      });
    },
    classic(name, from, to, count) {
      return held([count], (place) => {
        checked(library.explorer_classic(["hinge", "logistic", "modified Huber", "hard sigmoid"].indexOf(name), from, to, count, place));
        return doubles(place, count);
      });
    },
    simplex(key, settings, extent, size, heat, first = 0, last = size) {
      const count = size * (last - first);
      return held([count, count], (values, support) => {
        checked(library.explorer_simplex(...map(key, settings, 3), extent, size, first, last, settings.T, settings.tilt, heat, values, support));
        return {
          values: new Float32Array(memory.buffer, values, count).slice(),
          support: new Uint8Array(memory.buffer, support, count).slice(),
        };
      });
    },
  };
  return { ...plain, ...withHidden(plain) };
}

// The same functions for maps with a class that the page does not show: the kernels get it after the others.
function withHidden(plain) {
  const hides = (key) => MAPS[key].hidden !== undefined;
  const wide = (key, settings, s) => Float64Array.of(...s, MAPS[key].hidden(settings));
  const seen = (function_) => (key, settings, s, ...more) => hides(key) ? function_(key, settings, wide(key, settings, s), ...more) : function_(key, settings, s, ...more);
  const part = (function_) => (key, settings, s, ...more) => seen(function_)(key, settings, s, ...more).slice(0, s.length);
  const apply = part(plain.apply), loss = seen(plain.loss);
  return {
    apply, loss, threshold: seen(plain.threshold), gradient: part(plain.gradient),
    jacobian(key, settings, s, p, which) {
      if (!hides(key)) return plain.jacobian(key, settings, s, p, which);
      const all = wide(key, settings, s);
      return plain.jacobian(key, settings, all, plain.apply(key, settings, all), which);
    },
    two(key, settings, from, to, count) {
      if (!hides(key)) return plain.two(key, settings, from, to, count);
      const rows = Array.from({ length: count }, (_, i) => [from + ((to - from) * i) / (count - 1), 0]);
      return {
        p: Float64Array.from(rows, (x) => apply(key, settings, plain.scores(x, settings))[0]),
        losses: Float64Array.from(rows, (x) => loss(key, settings, plain.scores(x, settings, 0), 0)),
      };
    },
    simplex(key, settings, extent, size, heat, first = 0, last = size) {
      if (!hides(key)) return plain.simplex(key, settings, extent, size, heat, first, last);
      const values = new Float32Array(size * (last - first)), support = new Uint8Array(values.length);
      for (let at = 0; at < values.length; at++) { // the plane of scores that sum to 0, as explorer_simplex goes over it
        const u = extent * ((2 * (at % size)) / (size - 1) - 1), v = extent * (1 - (2 * (first + Math.floor(at / size))) / (size - 1));
        const x = [u / Math.SQRT2 - v / Math.sqrt(6), -u / Math.SQRT2 - v / Math.sqrt(6), (2 * v) / Math.sqrt(6)];
        const p = apply(key, settings, plain.scores(x, settings));
        values[at] = heat === 0 ? Math.max(...p) : heat === 1 ? p[0] : plain.entropies(p, 1).shannon;
        support[at] = p.reduce((count, v) => count + (v > 0), 0);
      }
      return { values, support };
    },
  };
}

// The compressed kernels inside the page.
export async function unpack(text) {
  const packed = Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
  return new Uint8Array(await new Response(stream).arrayBuffer());
}
