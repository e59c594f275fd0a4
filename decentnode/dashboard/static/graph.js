// Draws the graph of one run on a canvas, with nodes and edges colored by the chosen quantities.

import { bytes, color, css, dark, KINDS, number, seconds, sharpen } from "./colors.js";
import { Layout } from "./layout.js";
import { unknown } from "./model.js";

const LABELED = 128, LAYOUT_MS = 7;

const column = (run, row, name) => row[run.about.node_columns.indexOf(name)];
const part = (run, row) => {
  const all = column(run, row, "seconds"), wait = column(run, row, "wait");
  return unknown(all) || unknown(wait) || !all ? NaN : Math.min(1, wait / all);
};

export const NODE_COLORS = {
  metric: { title: (run) => (run && run.main ? run.main.text : "accuracy"), ramp: "value",
            value: (run, row) => { const v = column(run, row, "metric"); return unknown(v) ? NaN : v * (run.main ? run.main.scale : 1); },
            text: (v, run) => number(v) + (run.main && run.main.suffix ? " " + run.main.suffix : "") },
  loss: { title: () => "training loss", ramp: "value", value: (run, row) => column(run, row, "loss") ?? NaN, text: (v) => number(v) },
  wait: { title: () => "share of time waited", ramp: "heat", from: 0,
          value: part, text: (v) => `${Math.round(100 * v)} %` },
  generation: { title: () => "generation", kinds: true, value: (run, row) => column(run, row, "generation") ?? NaN, text: (v) => String(v) },
};
export const EDGE_COLORS = {
  bytes: { title: () => "bytes in a round", at: 0, text: bytes, join: (a, b) => a + b },
  latency: { title: () => "waited for, in a round", at: 1, text: seconds, join: Math.max },
  age: { title: () => "age of the last mix", at: 2, text: seconds, join: Math.max },
};

export class Graph {
  constructor(canvas, legend, hooks) {
    Object.assign(this, { canvas, legend, hooks, shape: -1, zoom: 1, panX: 0, panY: 0, places: [], pairs: [] });
    this.listen();
  }

  listen() {
    const { canvas } = this;
    let from = null;
    canvas.addEventListener("pointermove", (event) => {
      if (from && event.buttons) {
        this.panX += event.clientX - from[0]; this.panY += event.clientY - from[1];
        if (Math.abs(event.clientX - from[0]) + Math.abs(event.clientY - from[1]) > 1) this.dragged = true;
        from = [event.clientX, event.clientY];
        this.hooks.redraw();
        return;
      }
      const found = this.hit(event);
      canvas.style.cursor = found === null ? "" : "pointer";
      this.hooks.tip(found === null ? "" : this.describe(found), event);
    });
    canvas.addEventListener("pointerdown", (event) => { from = [event.clientX, event.clientY]; this.dragged = false; });
    canvas.addEventListener("pointerup", (event) => { from = null; if (!this.dragged) this.hooks.choose(this.hit(event)); });
    canvas.addEventListener("pointerleave", () => { from = null; this.hooks.tip(""); });
    canvas.addEventListener("dblclick", () => { this.zoom = 1; this.panX = this.panY = 0; this.hooks.redraw(); });
    canvas.addEventListener("wheel", (event) => {
      event.preventDefault();
      const box = canvas.getBoundingClientRect(), before = this.zoom;
      this.zoom = Math.min(12, Math.max(0.5, this.zoom * Math.exp(-event.deltaY / 500)));
      const x = event.clientX - box.left - box.width / 2, y = event.clientY - box.top - box.height / 2;
      this.panX = x - ((x - this.panX) * this.zoom) / before; this.panY = y - ((y - this.panY) * this.zoom) / before;
      this.hooks.redraw();
    }, { passive: false });
  }

  hit(event) {
    const box = this.canvas.getBoundingClientRect(), x = event.clientX - box.left, y = event.clientY - box.top;
    let best = null, least = Math.max(this.radius || 6, 6) ** 2 * 1.4;
    this.places.forEach(([a, b], i) => {
      const far = (a - x) ** 2 + (b - y) ** 2;
      if (far < least) { least = far; best = i; }
    });
    return best === null ? null : this.run.uids[best];
  }

  describe(uid) {
    const { run, view } = this, i = run.place.get(uid), row = view.node(i), status = run.status[uid];
    const lines = [`node ${uid}`];
    if (unknown(column(run, row, "time"))) lines.push(view.live ? "nothing is known yet" : "not there in this round");
    if (view.live && run.rounds[i] !== undefined) lines.push(`${run.rounds[i]} rounds`);
    for (const each of Object.values(NODE_COLORS)) {
      const value = each.value(run, row);
      if (!unknown(value)) lines.push(`${each.title(run)}: ${each.text(value, run)}`);
    }
    const time = column(run, row, "seconds"), sent = column(run, row, "sent");
    if (!unknown(time)) lines.push(`round: ${seconds(time)}`);
    if (!unknown(sent)) lines.push(`payloads sent: ${bytes(sent)}`);
    if (view.live && status) {
      lines.push(status.doing + (status.for.length ? `; waits ${seconds(status.seconds)} for ${status.for.slice(0, 6).join(", ")}` : ""));
    }
    return lines.join("\n");
  }

  /** Draws the graph. Returns whether positions are still changing. */
  draw(run, view, settings, chosen) {
    Object.assign(this, { run, view });
    const { context, width, height } = sharpen(this.canvas);
    if (this.shape !== run.shape) {
      this.shape = run.shape;
      this.layout = new Layout(run.uids.length, run.pairs.filter(Boolean), this.layout);
      this.pairs = this.layout.pairs;
      this.pairIndex = new Map(this.pairs.map(([a, b], i) => [a * 65536 + b, i]));
      this.edgePair = run.pairs.map((pair) => (pair ? this.pairIndex.get(Math.min(...pair) * 65536 + Math.max(...pair)) : undefined));
    }
    this.layout.run(LAYOUT_MS);
    const count = run.uids.length, place = this.layout.fit(width, height, 30, 40);
    this.radius = Math.max(2.2, Math.min(15, 0.26 * Math.sqrt((width * height) / Math.max(1, count)))) * Math.sqrt(this.zoom);
    this.places = [];
    for (let i = 0; i < count; i++) {
      const [x, y] = place(i);
      this.places.push([(x - width / 2) * this.zoom + width / 2 + this.panX, (y - height / 2) * this.zoom + height / 2 + this.panY]);
    }
    const edges = this.drawEdges(context, EDGE_COLORS[settings.edge], chosen);
    if (view.live && run.state === "running") this.drawWaits(context);
    const nodes = this.drawNodes(context, NODE_COLORS[settings.color], chosen);
    this.showLegend(nodes, edges);
    this.canvas.dataset.nodes = count;
    this.canvas.dataset.edges = this.pairs.length;
    return !this.layout.over;
  }

  drawEdges(context, kind, chosen) {
    const { run, view, places } = this, values = new Float64Array(this.pairs.length).fill(NaN);
    for (let e = 0; e < this.edgePair.length; e++) {
      const at = this.edgePair[e];
      if (at === undefined) continue;
      let value = view.edge(e)[kind.at];
      if (unknown(value)) continue;
      if (kind.at === 2) value = Math.max(0, view.time - value);
      values[at] = Number.isNaN(values[at]) ? value : kind.join(values[at], value);
    }
    let [low, high] = [kind.at === 0 ? Infinity : 0, 0];
    for (const value of values) { if (value > high) high = value; if (value < low) low = value; }
    const ramp = dark() ? "heatDark" : "heat", buckets = new Map(), own = chosen === null ? undefined : run.place.get(chosen);
    this.pairs.forEach(([a, b], i) => {
      const share = Number.isNaN(values[i]) ? 0 : high === low ? (high ? 0.35 : 0) : (values[i] - low) / (high - low);
      const key = Number.isNaN(values[i]) ? "" : color(ramp, share) + (own === a || own === b ? "*" : "");
      if (!buckets.has(key)) buckets.set(key, [share, []]);
      buckets.get(key)[1].push(i);
    });
    const thin = this.pairs.length > 1500 ? 0.6 : 1;
    for (const [key, [share, which]] of [...buckets].sort((a, b) => a[1][0] - b[1][0])) {
      context.strokeStyle = key ? key.replace("*", "") : css("--edge");
      context.lineWidth = (key ? (0.9 + 1.8 * share) : 0.8) * thin * (key.endsWith("*") ? 2.4 : 1);
      context.globalAlpha = own === undefined || key.endsWith("*") ? 1 : 0.35;
      context.setLineDash(key ? [] : [3, 4]);
      context.beginPath();
      for (const i of which) {
        const [a, b] = this.pairs[i];
        context.moveTo(...places[a]); context.lineTo(...places[b]);
      }
      context.stroke();
    }
    context.setLineDash([]); context.globalAlpha = 1;
    return { kind, low, high, ramp };
  }

  /** Draws arrows from waiting nodes to the nodes that they wait for. */
  drawWaits(context) {
    const { run, places, radius } = this;
    context.strokeStyle = context.fillStyle = css("--warn");
    context.lineWidth = 1.6;
    for (const [uid, status] of Object.entries(run.status)) {
      const from = run.place.get(Number(uid));
      if (from === undefined || !status.for.length || status.seconds < 0.05) continue;
      for (const whom of status.for) {
        const to = run.place.get(whom);
        if (to === undefined) continue;
        const [x, y] = places[from], [u, v] = places[to], far = Math.hypot(u - x, v - y) || 1, a = (u - x) / far, b = (v - y) / far;
        const tip = [u - a * (radius + 2), v - b * (radius + 2)];
        context.beginPath();
        context.moveTo(x + a * radius, y + b * radius); context.lineTo(...tip); context.stroke();
        context.beginPath();
        context.moveTo(...tip); context.lineTo(tip[0] - 8 * a + 4 * b, tip[1] - 8 * b - 4 * a);
        context.lineTo(tip[0] - 8 * a - 4 * b, tip[1] - 8 * b + 4 * a); context.fill();
      }
    }
  }

  drawNodes(context, kind, chosen) {
    const { run, view, places, radius } = this, values = run.uids.map((_, i) => kind.value(run, view.node(i)));
    const known = values.filter((value) => !unknown(value));
    const low = kind.from ?? Math.min(...known), high = Math.max(...known, kind.from ?? -Infinity);
    const ramp = kind.ramp === "heat" && dark() ? "heatDark" : kind.ramp, kinds = [...new Set(known)].sort((a, b) => a - b);
    const gone = run.uids.map((_, i) => this.isGone(i));
    const buckets = new Map();
    values.forEach((value, i) => {
      const fill = gone[i] || unknown(value) ? "" : kind.kinds ? KINDS[kinds.indexOf(value) % KINDS.length]
        : color(ramp, high > low ? (value - low) / (high - low) : 0.5);
      if (!buckets.has(fill)) buckets.set(fill, []);
      buckets.get(fill).push(i);
    });
    const page = css("--page"), ink = css("--ink");
    context.lineWidth = radius > 5 ? 1.5 : 0.7;
    for (const [fill, which] of buckets) {
      context.fillStyle = fill || page; context.strokeStyle = fill ? page : css("--warn");
      context.beginPath();
      for (const i of which) { context.moveTo(places[i][0] + radius, places[i][1]); context.arc(...places[i], radius, 0, 2 * Math.PI); }
      context.fill(); context.stroke();
    }
    context.strokeStyle = css("--warn");
    context.beginPath();
    gone.forEach((is, i) => {
      if (!is) return;
      const [x, y] = places[i], r = radius * 0.5;
      context.moveTo(x - r, y - r); context.lineTo(x + r, y + r); context.moveTo(x + r, y - r); context.lineTo(x - r, y + r);
    });
    context.stroke();
    if (chosen !== null && run.place.has(chosen)) {
      context.strokeStyle = ink; context.lineWidth = 2.5;
      context.beginPath(); context.arc(...places[run.place.get(chosen)], radius + 3, 0, 2 * Math.PI); context.stroke();
    }
    if (run.uids.length <= LABELED && radius > 6.5) {
      context.font = `600 ${Math.min(12, radius * 0.95)}px system-ui`; context.textAlign = "center"; context.textBaseline = "middle";
      run.uids.forEach((uid, i) => {
        if (gone[i]) return;
        const share = high > low ? (values[i] - low) / (high - low) : 0.5;
        const light = unknown(values[i]) ? !dark() : kind.ramp === "value" ? share > 0.55 : kind.kinds ? true : dark() ? share > 0.6 : share < 0.6;
        context.fillStyle = light ? "#111" : "#fff";
        context.fillText(uid, ...places[i]);
      });
    }
    return { kind, low, high, ramp, kinds, any: known.length > 0 };
  }

  /** Returns whether a node does not take part in the run at the shown moment. */
  isGone(i) {
    const { run, view } = this;
    if (!view.live) return unknown(column(run, view.node(i), "time"));
    return run.isGone(i);
  }

  showLegend(nodes, edges) {
    const { run } = this, lines = [];
    if (nodes.any) {
      if (nodes.kind.kinds) lines.push([null, nodes.kind.title(run) + " " + nodes.kinds.slice(-6).join(", ")]);
      else lines.push([nodes.ramp, nodes.kind.text(nodes.low, run), nodes.kind.text(nodes.high, run), nodes.kind.title(run)]);
    }
    if (edges.high > 0 && edges.high === edges.low) lines.push([null, `${edges.kind.text(edges.high)} over every edge, ${edges.kind.title(run)}`]);
    else if (edges.high > edges.low) lines.push([edges.ramp, edges.kind.text(edges.low), edges.kind.text(edges.high), edges.kind.title(run)]);
    const key = JSON.stringify([lines, dark()]);
    if (key === this.legendKey) return;
    this.legendKey = key;
    this.legend.replaceChildren(...lines.map(([ramp, low, high, title]) => {
      const line = document.createElement("div");
      line.className = "ramp";
      if (!ramp) { line.append(low); return line; }
      const canvas = document.createElement("canvas");
      canvas.width = 90; canvas.height = 1;
      const context = canvas.getContext("2d");
      for (let x = 0; x < 90; x++) { context.fillStyle = color(ramp, x / 89); context.fillRect(x, 0, 1, 1); }
      line.append(low, canvas, `${high}  ${title}`);
      return line;
    }));
  }
}
