// Draws curves of all shown runs over rounds, seconds or bytes: the range over the nodes, their mean, the merged model.

import { bytes, css, number, seconds, sharpen } from "./colors.js";
import { unknown } from "./model.js";

export const AXES = {
  rounds: { title: "rounds", of: (point) => point[0], text: (v) => String(Math.round(v)) },
  seconds: { title: "seconds", of: (point) => point[1], text: (v) => seconds(v) },
  bytes: { title: "payload bytes of all nodes", of: (point) => point[2], text: (v) => bytes(v) },
};

/** Charts: name -> function that returns rows of [x, mean, low, high, merged] of a run. */
const metric = (index) => ({
  title: (run) => (run.about.metrics[index] ? "test " + run.about.metrics[index].text + (run.about.metrics[index].suffix ? ` (${run.about.metrics[index].suffix})` : "") : ""),
  log: (run) => Boolean(run.about.metrics[index] && run.about.metrics[index].logarithmic),
  rows: (run, place) => {
    const known = run.about.metrics[index];
    if (!known) return [];
    return run.evaluated().filter((each) => each.metrics[known.name]).map((each) => {
      const [mean, low, high, merged] = each.metrics[known.name].map((v) => (v === null ? NaN : v * known.scale));
      return [place(each), mean, low, high, merged];
    });
  },
});
export const CHARTS = {
  metric: { ...metric(0), says: "mean, band of the nodes; dashed: merged model" },
  loss: { title: () => "training loss", log: () => true, says: "mean and band of the nodes",
          rows: (run, place) => run.curve().filter((p) => p[4] !== null).map((p) => [place(p), p[4], p[5], p[6], NaN]) },
  consensus: { title: () => "consensus distance", log: () => true, says: "relative to the mean model",
               rows: (run, place) => run.evaluated().map((e) => [place(e), e.consensus === null ? NaN : e.consensus, NaN, NaN, NaN]) },
  wait: { title: () => "share of time waited (%)", log: () => false, says: "all nodes together",
          rows: (run, place) => run.curve().filter((p) => p[7] !== null).map((p) => [place(p), 100 * p[7], NaN, NaN, NaN]) },
};

const LEFT = 46, RIGHT = 12, TOP = 24, BOTTOM = 22;

export class Chart {
  constructor(holder, name, hooks) {
    this.kind = CHARTS[name];
    this.hooks = hooks;
    this.canvas = holder.appendChild(document.createElement("canvas"));
    this.canvas.setAttribute("role", "img");
    this.canvas.addEventListener("pointermove", (event) => { this.over = event.offsetX; this.hooks.tip(this.read(), event); this.hooks.redraw(); });
    this.canvas.addEventListener("pointerleave", () => { this.over = null; this.hooks.tip(""); this.hooks.redraw(); });
    this.canvas.addEventListener("click", () => { const rounds = this.roundsUnder(); if (rounds !== null) this.hooks.seek(rounds); });
  }

  place(run, axis) {
    return (each) => {
      if (Array.isArray(each)) return AXES[axis].of(each);
      if (axis === "rounds") return each.rounds;
      if (axis === "seconds") return each.time;
      const point = run.pointAt(each.rounds);
      return point ? point[2] : 0;
    };
  }

  draw(runs, axis, position) {
    const { context, width, height } = sharpen(this.canvas);
    this.axis = axis;
    this.series = runs.map(({ run, color }) => ({ run, color, rows: this.kind.rows(run, this.place(run, axis)) }));
    const title = this.kind.title(runs.length ? runs[0].run : { about: { metrics: [] } }), ink = css("--ink"), soft = css("--soft"), line = css("--line");
    this.canvas.setAttribute("aria-label", `${title} over ${AXES[axis].title}`);
    context.font = "600 12px system-ui"; context.fillStyle = ink; context.textBaseline = "alphabetic"; context.textAlign = "left";
    context.fillText(title, LEFT - 34, 15);
    const taken = LEFT - 34 + context.measureText(title).width + 14;
    context.font = "11px system-ui"; context.fillStyle = soft; context.textAlign = "right";
    if (taken + context.measureText(this.kind.says).width < width - RIGHT) context.fillText(this.kind.says, width - RIGHT, 15);
    const every = this.series.flatMap((each) => each.rows);
    this.canvas.dataset.points = every.filter((row) => !unknown(row[1])).length;
    if (!every.some((row) => !unknown(row[1]))) { context.textAlign = "center"; context.fillText("nothing yet", width / 2, height / 2); this.scale = null; return; }
    let [left, right, low, high] = [Infinity, -Infinity, Infinity, -Infinity];
    for (const [x, ...values] of every) {
      left = Math.min(left, x); right = Math.max(right, x);
      for (const value of values) if (!unknown(value)) { low = Math.min(low, value); high = Math.max(high, value); }
    }
    const positive = every.flatMap((row) => row.slice(1)).filter((v) => v > 1e-12);
    const log = runs.length > 0 && this.kind.log(runs[0].run) && positive.length > 0;
    if (log) { // cut off values far below the rest, such as the distance of equal initial models, which would squeeze it
      const sorted = positive.sort((a, b) => a - b);
      low = Math.max(sorted[0], sorted[Math.floor(sorted.length / 2)] / 1e3);
      high = sorted[sorted.length - 1];
      const later = Math.min(...this.series.map((each) => Math.min(...each.rows.slice(1).flatMap((row) => row.slice(1)).filter((v) => v > 1e-12))));
      if (later < high && later > 100 * sorted[0]) low = later / 2;
    }
    if (high <= low) { high = low + (Math.abs(low) || 1) * 0.1; }
    const pad = 0.04, to = log ? (v) => Math.log(Math.max(v, low)) : (v) => v, a = to(low), b = to(high), span = b - a;
    if (right <= left) right = left + 1;
    const X = (x) => LEFT + ((x - left) / (right - left)) * (width - LEFT - RIGHT);
    const Y = (y) => height - BOTTOM - ((to(y) - a) / span * (1 - 2 * pad) + pad) * (height - TOP - BOTTOM);
    this.scale = { left, right, width };
    context.lineWidth = 1; context.textAlign = "right"; context.textBaseline = "middle";
    for (const tick of log ? logTicks(low, high) : ticks(low, high, Math.max(2, Math.floor(height / 34)))) {
      context.strokeStyle = line; context.beginPath(); context.moveTo(LEFT, Y(tick)); context.lineTo(width - RIGHT, Y(tick)); context.stroke();
      context.fillStyle = soft; context.fillText(number(tick), LEFT - 6, Y(tick));
    }
    context.textBaseline = "alphabetic"; context.textAlign = "center";
    for (const tick of ticks(left, right, Math.max(2, Math.floor(width / 75)))) context.fillText(AXES[axis].text(tick), Math.min(X(tick), width - RIGHT - 10), height - 7);
    const cut = (rows) => rows.map((row) => row.map((v, i) => ((i === 1 || i === 4) && v < low ? NaN : v)));
    for (const { color, rows } of this.series) this.line(context, log ? cut(rows) : rows, color, X, Y);
    this.cursor(context, X, position, runs, height, ink);
  }

  line(context, rows, color, X, Y) {
    const band = rows.filter((row) => !unknown(row[2]) && !unknown(row[3]));
    if (band.length > 1) {
      context.fillStyle = color; context.globalAlpha = 0.18; context.beginPath();
      band.forEach((row, i) => context[i ? "lineTo" : "moveTo"](X(row[0]), Y(row[3])));
      for (let i = band.length - 1; i >= 0; i--) context.lineTo(X(band[i][0]), Y(band[i][2]));
      context.fill(); context.globalAlpha = 1;
    }
    for (const [at, dash, thick] of [[1, [], 1.8], [4, [5, 4], 1.6]]) {
      const known = rows.filter((row) => !unknown(row[at]));
      if (!known.length) continue;
      context.strokeStyle = color; context.lineWidth = thick; context.setLineDash(dash); context.lineJoin = "round";
      context.beginPath();
      rows.forEach((row, i) => { // interrupt the line at evaluations that lack this metric
        if (unknown(row[at])) return;
        const x = X(row[0]), y = Y(row[at]), [before, after] = [rows[i - 1], rows[i + 1]].map((each) => Boolean(each) && !unknown(each[at]));
        if (before) context.lineTo(x, y); else context.moveTo(x, y);
        if (!before && !after) { context.moveTo(x + 2, y); context.arc(x, y, 2, 0, 7); }
      });
      context.stroke();
    }
    context.setLineDash([]);
  }

  cursor(context, X, position, runs, height, ink) {
    const draw = (x, alpha) => {
      if (!(x >= LEFT - 1)) return;
      context.strokeStyle = ink; context.globalAlpha = alpha; context.lineWidth = 1;
      context.beginPath(); context.moveTo(x, TOP - 4); context.lineTo(x, height - BOTTOM); context.stroke(); context.globalAlpha = 1;
    };
    if (position !== null && runs.length) {
      const point = runs[0].run.pointAt(position);
      if (point) draw(X(AXES[this.axis].of(point)), 0.75);
    }
    if (this.over) draw(this.over, 0.3);
  }

  under() {
    if (!this.scale || !this.over) return null;
    const { left, right, width } = this.scale;
    return left + ((this.over - LEFT) / (width - LEFT - RIGHT)) * (right - left);
  }

  read() {
    const x = this.under();
    if (x === null) return "";
    const lines = [`${AXES[this.axis].text(x)} ${this.axis === "rounds" ? "rounds" : ""}`];
    for (const { run, rows } of this.series) {
      let best = null;
      for (const row of rows) if (!unknown(row[1]) && (best === null || Math.abs(row[0] - x) < Math.abs(best[0] - x))) best = row;
      if (!best) continue;
      const band = unknown(best[2]) ? "" : ` (${number(best[2])} to ${number(best[3])})`;
      lines.push(`${this.series.length > 1 ? run.about.name + ": " : ""}${number(best[1])}${band}${unknown(best[4]) ? "" : `, merged ${number(best[4])}`}`);
    }
    return lines.join("\n");
  }

  roundsUnder() {
    const x = this.under();
    if (x === null || !this.series.length) return null;
    if (this.axis === "rounds") return Math.round(x);
    let best = null;
    for (const point of this.series[0].run.curve()) {
      const far = Math.abs(AXES[this.axis].of(point) - x);
      if (best === null || far < best[0]) best = [far, point[0]];
    }
    return best && best[1];
  }
}

function ticks(low, high, count) {
  const rough = (high - low) / Math.max(1, count), power = 10 ** Math.floor(Math.log10(rough || 1));
  const step = power * [1, 2, 5, 10].find((each) => each * power >= rough), found = [];
  for (let at = Math.ceil(low / step); at * step <= high + step * 1e-9; at++) found.push(at * step);
  return found;
}

function logTicks(low, high) {
  const found = [];
  for (let power = Math.floor(Math.log10(low)); power <= Math.ceil(Math.log10(high)); power++) {
    for (const each of high / low < 30 ? [1, 2, 5] : [1]) { const tick = each * 10 ** power; if (tick >= low && tick <= high) found.push(tick); }
  }
  return found.length > 6 ? found.filter((_, i) => i % Math.ceil(found.length / 6) === 0) : found;
}
