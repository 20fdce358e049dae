// A Python program that computes the numbers on the screen.
import { MAPS, float, label } from "./maps.mjs";
import { nameOf } from "./names.mjs";

export const CLOSE = 24; // classes whose Jacobian is shown

export function toPython(state) {
  const n = state.x.length;
  const transforms = [];
  if (state.T !== 1) transforms.push(`anymax.temperature(${float(state.T)})`);
  if (state.tilt !== 0) transforms.push(`anymax.prior(log_p=-${float(state.tilt)} * np.log(np.arange(1, ${n + 1})))`);
  const seen = transforms.length > 1 ? `anymax.compose(${transforms.join(", ")})(x)` : transforms.length ? `${transforms[0]}(x)` : "x";
  const maps = state.maps.map((key) => `    "${label(key, state, n)}": ${MAPS[key].python(state, n)},`);
  const budget = state.maps.includes("budget") && MAPS.budget.number(state, n) !== 1;
  const all = n <= CLOSE, named = state.names.length > 0, moved = state.margin ? "moved" : "scores";
  return [
    "import numpy as np",
    "",
    "import anymax",
    "",
    ...listed("x", state.x.map(float), "np.array([", "])"),
    ...(named ? listed("names", state.x.map((_, i) => JSON.stringify(nameOf(state, i))), "[", "]") : []),
    `scores = ${seen}  # what the maps see`,
    `target = ${state.target}${state.names[state.target] ? `  # ${state.names[state.target]}` : ""}`,
    ...(state.margin ? ["moved = scores.copy()", `moved[target] -= ${float(state.margin)}  # the margin, for the loss`] : []),
    "maps = {",
    ...maps,
    "}",
    "results = {}",
    "for name, mapping in maps.items():",
    "    p = anymax.apply(mapping, scores)",
    "    results[name] = found = {",
    `        "p": p,`,
    `        "support": int(anymax.support(p).sum()),`,
    "    }",
    "    if abs(p.sum() - 1) < 1e-9:  # an entropy is one of probabilities",
    `        found["shannon"] = float(anymax.entropy(p))`,
    `        found["renyi2"] = float(anymax.entropy(p, "renyi2"))`,
    `        found["tsallis"] = float(anymax.entropy(p, "tsallis", ${float(state.alpha)}))`,
    ...(state.draws ? [
      "    if abs(p.sum() - 1) < 1e-9:  # other random numbers than the page's",
      `        drawn = anymax.sample(mapping, scores, generator=${state.seed}, num_samples=${state.draws})`,
      `        found["drawn"] = np.bincount(drawn, minlength=${n})`,
    ] : []),
    `    if mapping.has_threshold:`,
    `        found["tau"] = float(anymax.threshold(mapping, scores).tau)`,
    ...(budget ? ["    if isinstance(mapping, anymax.Budget):  # sums to k, a target class to 1", "        continue"] : []),
    "    if anymax.facts(mapping).has_potential:",
    `        found["loss"] = float(anymax.fenchel_young(mapping, ${moved}, np.array(target)))`,
    `        found["gradient"] = anymax.apply(mapping, ${moved}) - (np.arange(${n}) == target)`,
    "    else:",
    `        found["loss"] = float(anymax.nll(mapping, ${moved}, np.array(target)))`,
    `        found["gradient"] = -anymax.jacobian(mapping, ${moved})[target] / anymax.apply(mapping, ${moved})[target]`,
    "",
    `jacobian = anymax.jacobian(maps["${label(state.focus, state, n)}"], scores)`,
    ...(all ? [] : [`top = np.argsort(-scores, kind="stable")[:${CLOSE}]  # the classes that the page shows`, "jacobian = jacobian[np.ix_(top, top)]"]),
    "",
    "for name, found in results.items():",
    "    print(name)",
    ...(named ? [`    print("  " + ", ".join(f"{who}: {v:.4g}" for who, v in zip(names, found["p"])))`] : []),
    "    for key, value in found.items():",
    `        print(f"  {key}: {value}")`,
    "print(jacobian)",
    "",
  ].join("\n");
}

function listed(name, words, open, end) {
  const whole = `${name} = ${open}${words.join(", ")}${end}`;
  if (whole.length <= 110) return [whole];
  const lines = [`${name} = ${open}`];
  let line = "   ";
  for (const word of words) {
    if (line.length + word.length > 108) {
      lines.push(line);
      line = "   ";
    }
    line += ` ${word},`;
  }
  return [...lines, line, end];
}
