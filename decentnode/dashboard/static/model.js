// The page's data of one run: the latest state of every node and edge, points of curves, frames for the replay.

import { frames } from "./api.js";

const MAX_FRAME_BYTES = 96e6, AT_ONCE = 32;
export const unknown = (value) => value === null || value === undefined || Number.isNaN(value);

export class Run {
  constructor(id, changed) {
    this.id = id;
    this.changed = changed;
    this.about = { name: id, metrics: [], node_columns: [], edge_columns: [] };
    this.begin();
  }

  begin() {
    this.uids = []; this.place = new Map(); this.pairs = []; this.nodes = []; this.rounds = []; this.edges = [];
    this.points = new Map(); this.evaluations = new Map(); this.events = []; this.status = {}; this.machines = [];
    this.frames = new Map(); this.frameInfo = { stride: 1, last: 0 }; this.fetching = false; this.wanted = null;
    this.state = this.why = ""; this.progress = 0; this.began = this.ended = null; this.sortedPoints = null; this.shape = 0;
    this.skew = 0;
  }

  /** Applies one line of the stream. */
  take(news) {
    if (news.anew) this.begin();
    if (news.about) this.about = news.about;
    if (news.replace) { this.points.clear(); this.frames.clear(); }
    if (news.uids) {
      this.uids = news.uids;
      this.uids.forEach((uid, i) => this.place.set(uid, i));
      this.shape++;
    }
    for (const [i, a, b] of news.pairs) { this.pairs[i] = [a, b]; this.shape++; }
    for (const [i, rounds, ...row] of news.nodes) { this.nodes[i] = row; this.rounds[i] = rounds; }
    for (const [i, ...row] of news.edges) this.edges[i] = row;
    for (const point of news.points) { this.points.set(point[0], point); this.frames.delete(point[0]); }
    for (const each of news.evaluations) this.evaluations.set(each.rounds, each);
    if (news.points.length || news.evaluations.length) this.sortedPoints = null;
    this.events.push(...news.events);
    Object.assign(this.status, news.status);
    this.machines = news.machines;
    Object.assign(this, { frameInfo: news.frames, state: news.state, why: news.why, progress: news.progress, began: news.began,
                          ended: news.ended });
    this.skew = news.now - Date.now() / 1000;
  }

  get main() { return this.about.metrics[0]; }

  curve() {
    if (!this.sortedPoints) {
      this.sortedPoints = [...this.points.values()].sort((a, b) => a[0] - b[0]);
      this.sortedEvaluations = [...this.evaluations.values()].sort((a, b) => a.rounds - b.rounds);
    }
    return this.sortedPoints;
  }

  evaluated() { this.curve(); return this.sortedEvaluations; }

  get lastRound() { return Math.max(this.frameInfo.last, 0); }

  get paused() {
    const states = Object.values(this.status);
    return this.state === "running" && states.some((each) => each.doing === "paused");
  }

  /** Returns the seconds from the begin of the run to its end, or to now while it is in progress. */
  get now() {
    const end = this.state === "running" ? Date.now() / 1000 + this.skew : this.ended;
    return end && this.began ? end - this.began : 0;
  }

  /** Returns the last point of the curves at or before this number of rounds. */
  pointAt(rounds) {
    const points = this.curve();
    let low = 0, high = points.length - 1;
    while (low < high) { const mid = (low + high + 1) >> 1; if (points[mid][0] <= rounds) low = mid; else high = mid - 1; }
    return points[low] || null;
  }

  /** Returns whether the node is known to have left or died. */
  isGone(i) {
    const status = this.status[this.uids[i]];
    return Boolean(status) && (status.doing === "gone" || status.doing === "failed");
  }

  /** Returns the latest values in a column of all nodes that have made a round and are still in the run; if none is, of
   * all that have made a round. A frame would not do, because at any moment few nodes are in the same round. */
  newest(name) {
    const at = this.about.node_columns.indexOf(name), made = this.uids.map((_, i) => i).filter((i) => this.nodes[i] && this.rounds[i] > 0);
    const left = made.filter((i) => !this.isGone(i));
    return (left.length ? left : made).map((i) => this.nodes[i][at]).filter((value) => !unknown(value));
  }

  evaluationAt(rounds) {
    let found = null;
    for (const each of this.evaluated()) { if (each.rounds > rounds) break; found = each; }
    return found;
  }

  /** Returns the number of rounds at a time of the run, for events, which have no round. */
  roundsAt(seconds) {
    const points = this.curve();
    let low = 0, high = points.length - 1;
    while (low < high) { const mid = (low + high) >> 1; if (points[mid][1] < seconds) low = mid + 1; else high = mid; }
    return points.length ? points[low][0] : 0;
  }

  /** Returns the frame at or before this number of rounds; null while it is being fetched. */
  frameAt(rounds) {
    const point = this.pointAt(Math.min(rounds, this.lastRound));
    if (!point) return null;
    const found = this.frames.get(point[0]);
    if (found) {
      const ahead = point[0] + (AT_ONCE / 2) * this.frameInfo.stride;
      if (ahead <= this.lastRound && !this.frames.has(ahead)) this.fetch(point[0] + this.frameInfo.stride);
      return found;
    }
    this.fetch(point[0]);
    return null;
  }

  async fetch(first) {
    if (this.fetching) { this.wanted = first; return; }
    this.fetching = true;
    try {
      const found = await frames(this.id, first, AT_ONCE, this.about.node_columns.length, this.about.edge_columns.length);
      for (const frame of found) {
        frame.nodes = frame.nodes.slice(); frame.edges = frame.edges.slice();
        this.frames.set(frame.rounds, frame);
      }
      const bytes = found.length ? 4 * (found[0].nodes.length + found[0].edges.length) : 1;
      for (const key of this.frames.keys()) {
        if (this.frames.size * bytes <= MAX_FRAME_BYTES) break;
        this.frames.delete(key);
      }
    } catch { /* the stream reports that the server is gone */ }
    this.fetching = false;
    const wanted = this.wanted;
    this.wanted = null;
    if (wanted !== null && wanted !== first) this.fetch(wanted);
    this.changed();
  }

  /** Returns the state at a position (null: the latest): rows of nodes and edges with the columns, and the time. */
  view(position) {
    if (position === null) {
      return { rounds: Math.max(0, ...this.rounds.filter((r) => r !== undefined)), time: this.now, live: true,
               node: (i) => this.nodes[i] || [], edge: (i) => this.edges[i] || [] };
    }
    const frame = this.frameAt(position);
    if (!frame) return this.before || this.view(null);
    const n = this.about.node_columns.length, e = this.about.edge_columns.length, point = this.points.get(frame.rounds);
    this.before = { rounds: frame.rounds, time: point ? point[1] : 0, live: false,
                    node: (i) => frame.nodes.subarray(i * n, i * n + n), edge: (i) => frame.edges.subarray(i * e, i * e + e) };
    return this.before;
  }
}
