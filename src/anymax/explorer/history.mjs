// Undo and redo: earlier states. Consecutive changes of one kind, such as those of a drag, are one step until it is closed.

const MOST = 200; // steps that are kept

export const newHistory = (state) => ({ past: [], now: { ...state }, future: [], kind: null });

// Records the state after a change; `kind` names a change that continues, such as a drag.
export function record(history, state, kind = null) {
  if (same(history.now, state)) return;
  if (kind === null || kind !== history.kind) {
    history.past.push(history.now);
    if (history.past.length > MOST) history.past.shift();
  }
  history.now = { ...state };
  history.future = [];
  history.kind = kind;
}

export const close = (history) => (history.kind = null);

// The state one step back, or null where there is none.
export const back = (history) => step(history, history.past, history.future);
export const forth = (history) => step(history, history.future, history.past);

function step(history, from, to) {
  if (!from.length) return null;
  to.push(history.now);
  history.now = from.pop();
  history.kind = null;
  return { ...history.now };
}

const alike = (one, other) => Object.is(one, other) || (Array.isArray(one) && one.length === other.length && one.every((v, i) => Object.is(v, other[i])));
const same = (one, other) => Object.keys(other).every((key) => alike(one[key], other[key]));
