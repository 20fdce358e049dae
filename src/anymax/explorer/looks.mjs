// How maps differ: each has a colour for light and for dark pages, and a sign, so that nobody has to rely on colours.

const polygon = (...points) => `M${points.map(([x, y]) => `${x.toFixed(2)} ${y.toFixed(2)}`).join("L")}Z`;
const round = (count, inner) => polygon(...Array.from({ length: 2 * count }, (_, i) => {
  const size = i % 2 ? inner : 1.15, turn = (Math.PI * i) / count;
  return [size * Math.sin(turn), -size * Math.cos(turn)];
}));

// Outlines within a distance of about 1 from the middle.
const SIGNS = {
  circle: "M1 0A1 1 0 1 1-1 0A1 1 0 1 1 1 0Z",
  square: "M-.9-.9H.9V.9H-.9Z",
  up: "M0-1.1L1.1 .85H-1.1Z",
  down: "M0 1.1L1.1-.85H-1.1Z",
  right: "M1.1 0L-.85 1.1V-1.1Z",
  left: "M-1.1 0L.85 1.1V-1.1Z",
  diamond: "M0-1.2L1.2 0 0 1.2-1.2 0Z",
  plus: "M-.38-1.1H.38V-.38H1.1V.38H.38V1.1H-.38V.38H-1.1V-.38H-.38Z",
  cross: "M-1-.55L-.55-1 0-.45 .55-1 1-.55 .45 0 1 .55 .55 1 0 .45-.55 1-1 .55-.45 0Z",
  star: round(5, 0.5),
  hexagon: polygon([1.1, 0], [0.55, 0.95], [-0.55, 0.95], [-1.1, 0], [-0.55, -0.95], [0.55, -0.95]),
  glass: "M-1-1H1L-1 1H1Z",
  pillar: "M-.42-1.15H.42V1.15H-.42Z",
  beam: "M-1.15-.42H1.15V.42H-1.15Z",
};

export const LOOKS = {
  softmax: { inks: ["#0066a3", "#5cb8f5"], sign: "circle" },
  entmax: { inks: ["#cc520a", "#ff8f47"], sign: "square" },
  sparsemax: { inks: ["#007a5c", "#3dcca3"], sign: "up" },
  normmax: { inks: ["#471f5c", "#9952c2"], sign: "diamond" },
  topk: { inks: ["#8f331f", "#a3851f"], sign: "down" },
  topp: { inks: ["#705ceb", "#d65cc2"], sign: "star" },
  budget: { inks: ["#33290a", "#998fa3"], sign: "plus" },
  perturb: { inks: ["#0a5c5c", "#1f8599"], sign: "cross" },
  taylor: { inks: ["#3385ff", "#b8f585"], sign: "right" },
  sigsoftmax: { inks: ["#ff0a52", "#cc3366"], sign: "left" },
  square: { inks: ["#33993d", "#33c229"], sign: "glass" },
  sigmoid: { inks: ["#4785a3", "#a3ebe0"], sign: "pillar" },
  sink: { inks: ["#d70ecb", "#f6b6fc"], sign: "hexagon" },
  relu: { inks: ["#5c1fcc", "#14f55c"], sign: "beam" },
};
export const dark = () => document.documentElement.dataset.theme === "dark";
export const colour = (key) => LOOKS[key].inks[dark() ? 1 : 0];
export const signOf = (key) => SIGNS[LOOKS[key].sign];

// The sign as a picture, in the colour `--map`.
export const badge = (key) => `<svg class="sign" viewBox="-1.4 -1.4 2.8 2.8" aria-hidden="true"><path d="${signOf(key)}"/></svg>`;
