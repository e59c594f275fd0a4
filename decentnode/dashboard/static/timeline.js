// Draws events over the rounds, above the scrubber.

import { css, GROUPS, sharpen } from "./colors.js";

const LANES = ["dead", "back", "refused", "fault", "control", "other"], EDGE = 8;

export class Timeline {
  constructor(canvas, hooks) {
    this.canvas = canvas;
    this.hooks = hooks;
    this.marks = [];
    canvas.addEventListener("pointermove", (event) => this.hooks.tip(this.read(event.offsetX), event));
    canvas.addEventListener("pointerleave", () => this.hooks.tip(""));
    canvas.addEventListener("click", (event) => { const found = this.near(event.offsetX); if (found.length) this.hooks.seek(found[0].rounds); });
  }

  near(x) {
    return this.marks.filter((mark) => Math.abs(mark.x - x) < 5).slice(0, 8);
  }

  read(x) {
    return this.near(x).map((mark) => mark.text).join("\n");
  }

  /** from: where the scrubber's track begins and ends, in pixels of this canvas. */
  draw(runs, last, track) {
    const { context, width, height } = sharpen(this.canvas), [left, right] = track || [EDGE, width - EDGE];
    this.marks = [];
    context.strokeStyle = css("--line");
    context.beginPath(); context.moveTo(left, height - 1.5); context.lineTo(right, height - 1.5); context.stroke();
    const lanes = LANES.filter((lane) => runs.some(({ run }) => run.events.some((event) => event.group === lane)));
    const high = height / Math.max(2, lanes.length);
    runs.forEach(({ run }) => {
      for (const event of run.events) {
        const rounds = run.began === null ? 0 : run.roundsAt(event.time - run.began);
        const x = left + (Math.min(rounds, last) / Math.max(1, last)) * (right - left);
        context.fillStyle = GROUPS[event.group] || GROUPS.other;
        const y = lanes.indexOf(event.group) * high;
        context.fillRect(x - 1, y + 1, 2.5, Math.max(4, high - 2));
        this.marks.push({ x, rounds, text: `${runs.length > 1 ? run.about.name + ": " : ""}${describe(event)}` });
      }
    });
    this.canvas.dataset.events = this.marks.length;
  }
}

export function describe(event) {
  const list = (uids) => uids.slice(0, 12).join(", ") + (uids.length > 12 ? ` and ${uids.length - 12} more` : "");
  const parts = [];
  if (event.left && event.left.length) parts.push(`without node ${list(event.left)}`);
  if (event.joined && event.joined.length) parts.push(`with node ${list(event.joined)}`);
  const who = event.kind === "generation" || event.kind === "control" ? "" : `node ${event.uid}: `;
  const peer = event.peer === undefined ? "" : ` (node ${event.peer})`;
  return `${who}${event.kind.replaceAll("_", " ")}${peer} ${parts.join(", ")} ${event.detail || ""}`.trim();
}
