// Force-directed layout: edges attract, nodes repel each other. Computed in small steps; deterministic for a graph.

const MAX_EXACT = 250, ROUNDS = 300;

export class Layout {
  constructor(count, pairs, before) {
    this.count = count;
    this.pairs = [...new Set(pairs.map(([a, b]) => (a < b ? a * 65536 + b : b * 65536 + a)))]
      .map((key) => [Math.floor(key / 65536), key % 65536]).filter(([a, b]) => a !== b && b < count);
    this.x = new Float64Array(count); this.y = new Float64Array(count);
    this.dx = new Float64Array(count); this.dy = new Float64Array(count);
    for (let i = 0; i < count; i++) {
      const angle = (2 * Math.PI * i) / count - Math.PI / 2, radius = 1 + (i % 7) / 70;
      this.x[i] = before && i < before.count ? before.x[i] : Math.cos(angle) * radius;
      this.y[i] = before && i < before.count ? before.y[i] : Math.sin(angle) * radius;
    }
    this.done = before ? ROUNDS / 2 : 0;
    this.ideal = Math.sqrt(4 / Math.max(1, count));
  }

  get over() { return this.done >= ROUNDS || this.count < 3; }

  /** Continues the layout for some milliseconds. */
  run(milliseconds) {
    const until = performance.now() + milliseconds;
    while (!this.over && performance.now() < until) this.step();
  }

  step() {
    const { x, y, dx, dy, count, ideal } = this, heat = 0.12 * (1 - this.done / ROUNDS) + 0.002;
    dx.fill(0); dy.fill(0);
    const push = (i, j) => {
      const a = x[i] - x[j], b = y[i] - y[j], square = a * a + b * b + 1e-6, force = (ideal * ideal) / square;
      dx[i] += a * force; dy[i] += b * force; dx[j] -= a * force; dy[j] -= b * force;
    };
    if (count <= MAX_EXACT) {
      for (let i = 0; i < count; i++) for (let j = i + 1; j < count; j++) push(i, j);
    } else this.pushNear(push);
    for (const [a, b] of this.pairs) {
      const u = x[a] - x[b], v = y[a] - y[b], force = Math.sqrt(u * u + v * v) / ideal * 0.6;
      dx[a] -= u * force; dy[a] -= v * force; dx[b] += u * force; dy[b] += v * force;
    }
    for (let i = 0; i < count; i++) {
      dx[i] -= x[i] * 0.05; dy[i] -= y[i] * 0.05;
      const length = Math.sqrt(dx[i] * dx[i] + dy[i] * dy[i]) || 1, far = Math.min(length, heat) / length;
      x[i] += dx[i] * far; y[i] += dy[i] * far;
    }
    this.done++;
  }

  /** Adds the repulsion. With many nodes, only nearby ones repel each other, and the center of all repels every node. */
  pushNear(push) {
    const size = 3 * this.ideal, cells = new Map();
    for (let i = 0; i < this.count; i++) {
      const key = Math.floor(this.x[i] / size) * 4096 + Math.floor(this.y[i] / size);
      const cell = cells.get(key);
      if (cell) cell.push(i); else cells.set(key, [i]);
    }
    for (const [key, cell] of cells) {
      for (let i = 0; i < cell.length; i++) for (let j = i + 1; j < cell.length; j++) push(cell[i], cell[j]);
      for (const other of [key + 1, key + 4095, key + 4096, key + 4097]) {
        const near = cells.get(other);
        if (near) for (const i of cell) for (const j of near) push(i, j);
      }
    }
    for (let i = 0; i < this.count; i++) {
      const square = this.x[i] ** 2 + this.y[i] ** 2 + 0.05, force = (0.3 * this.count * this.ideal ** 2) / square;
      this.dx[i] += this.x[i] * force * 0.25; this.dy[i] += this.y[i] * force * 0.25;
    }
  }

  /** Scales to a box, with `below` pixels left free for a legend. Returns a function: index of a node -> [x, y]. */
  fit(width, whole, margin, below) {
    const height = whole - below;
    let [left, right, top, bottom] = [Infinity, -Infinity, Infinity, -Infinity];
    for (let i = 0; i < this.count; i++) {
      left = Math.min(left, this.x[i]); right = Math.max(right, this.x[i]);
      top = Math.min(top, this.y[i]); bottom = Math.max(bottom, this.y[i]);
    }
    const across = Math.max(right - left, 1e-3), down = Math.max(bottom - top, 1e-3);
    // positions have no meaning, so stretching one axis by up to a half is allowed, and fills the space better
    let a = (width - 2 * margin) / across, b = (height - 2 * margin) / down;
    const least = Math.min(a, b);
    a = Math.min(a, 1.5 * least); b = Math.min(b, 1.5 * least);
    return (i) => [(this.x[i] - (left + right) / 2) * a + width / 2, (this.y[i] - (top + bottom) / 2) * b + height / 2];
  }
}
