// Colors that color-blind people can tell apart, and the formatting of numbers.

const RAMP = ["#00224e", "#123570", "#3b496c", "#575d6d", "#707173", "#8a8678", "#a59c74", "#c3b369", "#e1cc55", "#fee838"];
const HEAT_LIGHT = ["#d6dde4", "#e9c9a8", "#f0a35e", "#e0701d", "#a83e00"];
const HEAT_DARK = ["#3a434e", "#6d5340", "#a8673a", "#e0832f", "#ffb45e"];
export const KINDS = ["#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442", "#999999"];
const RUNS_LIGHT = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#B57A00", "#3d9bd1", "#8a6d3b", "#7f7f7f"];
const RUNS_DARK = ["#56B4E9", "#F0863A", "#2fc796", "#E59BC6", "#E69F00", "#8fb7ff", "#c9a66b", "#aaaaaa"];
/** Returns the color of the i-th shown run. */
export const runColor = (i) => (dark() ? RUNS_DARK : RUNS_LIGHT)[i % RUNS_LIGHT.length];
export const GROUPS = { dead: "#D55E00", back: "#009E73", refused: "#CC79A7", fault: "#E69F00", control: "#0072B2", other: "#999999" };
export const STEPS = 24;

const mixed = new Map();

function at(stops, share) {
  const place = Math.min(Math.max(share, 0), 1) * (stops.length - 1), low = Math.floor(place), rest = place - low;
  const [a, b] = [stops[low], stops[Math.min(low + 1, stops.length - 1)]].map((hex) => parseInt(hex.slice(1), 16));
  const part = (shift) => Math.round(((a >> shift) & 255) * (1 - rest) + ((b >> shift) & 255) * rest);
  return `rgb(${part(16)} ${part(8)} ${part(0)})`;
}

/** Returns a color for a share from 0 to 1. There are only a few steps, because edges of equal color are drawn together. */
export function color(ramp, share) {
  const step = Math.round(Math.min(Math.max(share, 0), 1) * STEPS), key = ramp + step;
  if (!mixed.has(key)) mixed.set(key, at({ value: RAMP, heat: HEAT_LIGHT, heatDark: HEAT_DARK }[ramp], step / STEPS));
  return mixed.get(key);
}

export const dark = () => document.documentElement.dataset.theme === "dark" ||
  (document.documentElement.dataset.theme !== "light" && matchMedia("(prefers-color-scheme: dark)").matches);

export const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

export function bytes(count) {
  for (const unit of ["B", "kB", "MB", "GB"]) {
    if (Math.abs(count) < 1000) return `${count < 10 && unit !== "B" ? count.toFixed(1) : Math.round(count)} ${unit}`;
    count /= 1000;
  }
  return `${count.toFixed(1)} TB`;
}

export function seconds(value) {
  if (value < 0.0005) return "0 s";
  if (value < 1) return `${(1000 * value).toPrecision(value < 0.01 ? 2 : 3).replace(/\.0+$/, "")} ms`;
  if (value < 60) return `${value.toFixed(1)} s`;
  if (value < 3600) return `${Math.floor(value / 60)} min ${Math.round(value % 60)} s`;
  return `${Math.floor(value / 3600)} h ${Math.round((value % 3600) / 60)} min`;
}

export function number(value, digits = 3) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  if (value !== 0 && (Math.abs(value) < 0.001 || Math.abs(value) >= 1e5)) return value.toExponential(1).replace('.0e', 'e').replace('e+', 'e');
  return String(Number(value.toPrecision(digits)));
}

/** Gives a canvas the screen's number of pixels, and returns its context, scaled to CSS pixels. */
export function sharpen(canvas) {
  const ratio = Math.min(window.devicePixelRatio || 1, 2), width = canvas.clientWidth, height = canvas.clientHeight;
  if (canvas.width !== Math.round(width * ratio) || canvas.height !== Math.round(height * ratio)) {
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(height * ratio);
  }
  const context = canvas.getContext("2d");
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  context.clearRect(0, 0, width, height);
  return { context, width, height };
}
