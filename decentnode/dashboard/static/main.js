// The page: the shown runs, the view, keys and buttons. The view is kept in the address.

import * as api from "./api.js";
import { dark, runColor } from "./colors.js";
import { AXES, Chart, CHARTS } from "./curves.js";
import { EDGE_COLORS, Graph, NODE_COLORS } from "./graph.js";
import { Run } from "./model.js";
import { element, figures, PANELS } from "./panels.js";
import { Timeline } from "./timeline.js";

const SPEEDS = { "1/s": 1, "4/s": 4, "10/s": 10, "30/s": 30 }, MAX_RUNS = 8, PANEL_MS = 900;
const $ = (id) => document.getElementById(id);

const app = {
  runs: [], panes: new Map(), listed: [], color: "metric", edge: "bytes", axis: "rounds", tab: "waits", speed: "10/s",
  position: null, node: null, focus: 0, playing: false, dirty: true, panelAt: 0, stopStream: null,
  redraw() { this.dirty = true; this.panelAt = 0; },
  choose(uid) { this.node = uid === this.node ? null : uid; this.remember(); this.redraw(); },
  seek(rounds) { this.setPosition(rounds); },
  setPosition(rounds) {
    const last = this.last();
    this.position = rounds === null ? null : Math.min(Math.max(0, Math.round(rounds)), last);
    this.remember(); this.redraw();
  },
  last() { return Math.max(0, ...this.runs.map((run) => run.lastRound)); },

  // -- the address
  remember() {
    const found = new URLSearchParams();
    if (this.runs.length) found.set("runs", this.runs.map((run) => run.id).join(","));
    for (const [key, usual] of [["color", "metric"], ["edge", "bytes"], ["axis", "rounds"], ["tab", "waits"], ["speed", "10/s"]]) if (this[key] !== usual) found.set(key, this[key]);
    if (this.position !== null) found.set("round", this.position);
    if (this.node !== null) found.set("node", this.node);
    const theme = document.documentElement.dataset.theme;
    if (theme) found.set("theme", theme);
    const hash = "#" + found;
    if (hash !== location.hash) history.replaceState(null, "", hash);
  },
  recall() {
    const found = new URLSearchParams(location.hash.slice(1));
    const among = (key, table, usual) => { const value = found.get(key); this[key] = value !== null && Object.hasOwn(table, value) ? value : usual; };
    among("color", NODE_COLORS, "metric"); among("edge", EDGE_COLORS, "bytes"); among("axis", AXES, "rounds");
    among("tab", PANELS, "waits"); among("speed", SPEEDS, "10/s");
    const whole = (key) => (/^\d{1,12}$/.test(found.get(key) || "") ? Number(found.get(key)) : null);
    this.position = whole("round"); this.node = whole("node");
    const theme = found.get("theme");
    if (theme === "dark" || theme === "light") document.documentElement.dataset.theme = theme;
    else delete document.documentElement.dataset.theme;
    return (found.get("runs") || "").split(",").filter(Boolean);
  },
};

// -- runs

async function list() {
  app.listed = await api.runs();
  const filter = $("filter").value.toLowerCase(), shown = new Set(app.runs.map((run) => run.id));
  const rows = app.listed.filter((each) => each.id.toLowerCase().includes(filter)).slice(0, 120);
  document.querySelector("#runs ul").replaceChildren(...rows.map((each) => {
    const box = element("input", { type: "checkbox", onchange: () => pick(each.id, box.checked) });
    box.checked = shown.has(each.id);
    return element("li", {}, element("label", {}, box, element("span", {}, each.name, " ", element("small", { text: `${each.id.split("/").pop()} · ${each.state}` }))));
  }));
}

function pick(id, wanted) {
  const ids = app.runs.map((run) => run.id).filter((each) => each !== id);
  show(wanted ? [...ids, id].slice(-MAX_RUNS) : ids);
}

function show(ids) {
  const known = new Map(app.runs.map((run) => [run.id, run]));
  app.runs = ids.map((id) => known.get(id) || new Run(id, () => app.redraw()));
  for (const [id, pane] of app.panes) if (!ids.includes(id)) { pane.holder.remove(); app.panes.delete(id); }
  app.runs.forEach((run) => {
    if (!app.panes.has(run.id)) app.panes.set(run.id, makePane(run));
    $("panes").append(app.panes.get(run.id).holder);
  });
  app.focus = 0;
  app.remember();
  app.redraw();
  follow();
}

async function follow() {
  if (app.stopStream) app.stopStream.abort();
  if (!app.runs.length) return;
  const stop = app.stopStream = new AbortController(), status = $("connection");
  for (let wait = 500; !stop.signal.aborted; wait = Math.min(wait * 2, 8000)) {
    try {
      for (const run of app.runs) run.begin();
      await api.stream(app.runs.map((run) => run.id), (news) => {
        wait = 500;
        status.textContent = "";
        status.className = "";
        const run = app.runs.find((each) => each.id === news.run);
        if (run) { run.take(news); app.dirty = true; }
      }, stop.signal);
    } catch (error) {
      if (stop.signal.aborted) return;
      if (error instanceof api.Locked) return locked();
      status.textContent = error.message && !/fetch|network/i.test(error.message) ? error.message : "the dashboard is gone: decentnode dashboard RUN shows the run again";
      status.className = "lost";
    }
    await new Promise((over) => setTimeout(over, wait));
  }
}

// -- one pane per run

function makePane(run) {
  const name = element("span", { class: "name" }), chip = element("span", { class: "chip" }), controls = element("span", { class: "controls" });
  const numbers = element("div", { class: "figures" }), canvas = element("canvas", { role: "img", tabindex: "-1" }), legend = element("div", { class: "legend" });
  const said = element("div", { class: "said", role: "status" }), bar = element("i"), reading = element("div", { class: "reading" }, bar);
  const holder = element("article", { class: "pane" }, reading, element("div", { class: "head" }, name, chip, controls), numbers,
    element("div", { class: "canvas" }, canvas, legend, said));
  const pane = { run, holder, name, chip, numbers, legend, said, bar, reading };
  const button = (text, action, title) => element("button", { text, title, "data-action": action, onclick: () => command(pane, action) });
  pane.buttons = [button("pause", "pause", "Hold all nodes before their next round (p)"), button("stop", "stop", "Stop after this round"),
    button("evaluate", "evaluate", "Evaluate all models now (v)")];
  controls.append(...pane.buttons);
  pane.graph = new Graph(canvas, legend, { redraw: () => { app.dirty = true; }, tip, choose: (uid) => { app.focus = app.runs.indexOf(run); if (uid !== null) app.choose(uid); } });
  return pane;
}

async function command(pane, action) {
  if (action === "stop" && !(await sure(`Stop ${pane.run.about.name} after the round under way?`))) return;
  try {
    pane.said.textContent = await api.control(pane.run.id, action);
  } catch (error) {
    pane.said.textContent = error instanceof api.Locked ? "the token is wrong" : "the dashboard did not answer";
  }
  clearTimeout(pane.saidUntil);
  pane.saidUntil = setTimeout(() => { pane.said.textContent = ""; }, 8000);
}

function sure(question) {
  const dialog = $("sure");
  dialog.querySelector("p").textContent = question;
  dialog.returnValue = "no";
  dialog.showModal();
  return new Promise((over) => dialog.addEventListener("close", () => over(dialog.returnValue === "yes"), { once: true }));
}

function drawPane(pane) {
  const { run } = pane, view = run.view(app.position), state = run.paused ? "paused" : run.state || "reading";
  const called = (one) => one.about.name + (one.about.seed === null || one.about.seed === undefined ? "" : ` · seed ${one.about.seed}`);
  const alike = app.runs.some((other) => other !== run && other.about && called(other) === called(run));
  set(pane.name, called(run) + (alike ? ` · ${run.id.split("/").pop()}` : ""));
  pane.name.title = run.id;
  set(pane.chip, state);
  pane.chip.className = `chip ${state}`;
  const running = run.state === "running", [pause, ...others] = pane.buttons;
  pause.dataset.action = run.paused ? "resume" : "pause";
  set(pause, run.paused ? "resume" : "pause");
  for (const each of [pause, ...others]) each.hidden = !running;
  pane.reading.hidden = run.progress >= 1;
  pane.bar.style.width = `${100 * run.progress}%`;
  const told = figures(run, view), key = JSON.stringify(told);
  if (pane.told !== key) {
    pane.told = key;
    pane.numbers.replaceChildren(...told.map(([what, value]) => element("span", { "data-figure": what }, `${what} `, element("b", { text: value }))));
  }
  const canvas = pane.graph.canvas;
  canvas.setAttribute("aria-label", `graph of ${run.uids.length} nodes of ${run.about.name}`);
  canvas.dataset.rounds = view.rounds;
  return pane.graph.draw(run, view, app, app.node);
}

const set = (node, text) => { if (node.textContent !== text) node.textContent = text; };

// -- drawing

const charts = Object.keys(CHARTS).map((name) => new Chart($("curves").appendChild(element("div", { class: "chart", "data-chart": name })), name,
  { tip, redraw: () => { app.dirty = true; }, seek: (rounds) => app.setPosition(rounds) }));
const timeline = new Timeline(document.querySelector("#marks canvas"), { tip, seek: (rounds) => app.setPosition(rounds) });

let drawn = 0;

function draw(now) {
  requestAnimationFrame(draw);
  if (app.playing) advance(now);
  const stale = app.panelAt < now - PANEL_MS;
  if (!app.dirty || document.hidden) return;
  app.dirty = false;
  const moving = [...app.panes.values()].map(drawPane).some(Boolean);
  const shown = app.runs.map((run, i) => ({ run, color: runColor(i) }));
  for (const { run, color } of shown) app.panes.get(run.id).holder.style.setProperty("--run", color);
  const settling = moving && drawn++ % 6; // while the layout is still moving, redraw everything else less often
  if (!settling) {
    for (const chart of charts) chart.draw(shown, app.axis, app.position);
    drawTransport(shown);
    if (stale) { app.panelAt = now; drawPanel(); }
  }
  if (moving) app.dirty = true;
}

function drawTransport(shown) {
  const scrub = $("scrub"), last = app.last(), box = scrub.getBoundingClientRect(), canvas = timeline.canvas.getBoundingClientRect();
  scrub.max = last;
  const at = app.position === null ? last : Math.min(app.position, last);
  if (Number(scrub.value) !== at && document.activeElement !== scrub) scrub.value = at;
  if (document.activeElement === scrub && app.position === null) scrub.value = last;
  const run = app.runs[app.focus] || app.runs[0], point = run && run.pointAt(at);
  set($("position"), run ? `${at} of ${last}${point && point[1] ? ` · ${point[1].toFixed(1)} s` : ""}` : "–");
  $("live").setAttribute("aria-pressed", String(app.position === null));
  set($("play"), app.playing ? "❚❚" : "▶");
  timeline.draw(shown, last, [box.left - canvas.left + 8, box.right - canvas.left - 8]);
}

function drawPanel() {
  const run = app.runs[app.focus] || app.runs[0], panel = $("panel");
  for (const tab of $("tabs").children) tab.setAttribute("aria-selected", String(tab.dataset.tab === app.tab));
  if (!run) { panel.replaceChildren(element("p", { class: "soft", text: "no run is chosen" })); return; }
  const parts = PANELS[app.tab][1](run, run.view(app.position), app);
  if (app.runs.length > 1) parts.unshift(element("p", { class: "soft", text: `of ${run.about.name}; click another graph to see its own` }));
  const [left, top] = [panel.scrollLeft, panel.scrollTop];
  panel.replaceChildren(...parts);
  panel.scrollTo(left, top);
}

let advanced = 0;

function advance(now) {
  const pause = 1000 / SPEEDS[app.speed];
  if (now - advanced < pause) return;
  advanced = now;
  const run = app.runs[0];
  if (!run) { app.playing = false; return; }
  const last = app.last(), stride = Math.max(1, run.frameInfo.stride);
  if (app.position === null || app.position >= last) { app.playing = false; app.setPosition(last); return; }
  if (!run.frameAt(Math.min(app.position + stride, run.lastRound)) && run.fetching) return; // wait for the frame that is being fetched
  app.setPosition(app.position + stride);
}

function togglePlay() {
  app.playing = !app.playing;
  if (app.playing && (app.position === null || app.position >= app.last())) app.setPosition(0);
  app.redraw();
}

function tip(text, event) {
  const box = $("tip");
  box.hidden = !text;
  if (!text || !event) return;
  box.textContent = text;
  const x = event.clientX + 14, y = event.clientY + 14;
  box.style.left = `${Math.min(x, innerWidth - box.offsetWidth - 8)}px`;
  box.style.top = `${y + box.offsetHeight > innerHeight ? event.clientY - box.offsetHeight - 10 : y}px`;
}

// -- keys and buttons

const cycle = (key, table) => { const names = Object.keys(table); app[key] = names[(names.indexOf(app[key]) + 1) % names.length]; sync(); };
const KEYS = {
  " ": ["replay, or hold it", togglePlay],
  ArrowLeft: ["a round back", () => app.setPosition((app.position ?? app.last()) - 1)],
  ArrowRight: ["a round on", () => app.setPosition((app.position ?? app.last()) + 1)],
  Home: ["the first round", () => app.setPosition(0)],
  End: ["the last round", () => app.setPosition(app.last())],
  l: ["the newest, live", () => { app.playing = false; app.setPosition(null); }],
  c: ["color of nodes", () => cycle("color", NODE_COLORS)],
  e: ["color of edges", () => cycle("edge", EDGE_COLORS)],
  x: ["axis of curves", () => cycle("axis", AXES)],
  t: ["next table", () => cycle("tab", PANELS)],
  n: ["choose the next node", () => nextNode()],
  g: ["next graph", () => { app.focus = (app.focus + 1) % Math.max(1, app.runs.length); app.redraw(); }],
  p: ["pause or resume the run", () => { const pane = app.panes.get((app.runs[app.focus] || {}).id); if (pane && pane.run.state === "running") command(pane, pane.run.paused ? "resume" : "pause"); }],
  v: ["evaluate now", () => { const pane = app.panes.get((app.runs[app.focus] || {}).id); if (pane && pane.run.state === "running") command(pane, "evaluate"); }],
  r: ["choose runs", () => togglePicker()],
  d: ["light or dark", () => { document.documentElement.dataset.theme = dark() ? "light" : "dark"; sync(); }],
  Escape: ["no node chosen", () => { app.node = null; togglePicker(false); app.remember(); app.redraw(); }],
  "?": ["these keys", () => $("keys").showModal()],
};

function nextNode() {
  const uids = (app.runs[app.focus] || app.runs[0] || { uids: [] }).uids;
  if (uids.length) app.choose(uids[(uids.indexOf(app.node) + 1) % uids.length]);
}

document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || document.querySelector("dialog[open]")) return;
  const typing = /^(INPUT|SELECT|TEXTAREA)$/.test(event.target.tagName);
  if (typing && event.key !== "Escape" && !(event.target.type === "range" && event.key.length === 1 && event.key !== " ")) return;
  if (event.key === " " && event.target.tagName === "BUTTON") return;
  const found = KEYS[event.key];
  if (!found) return;
  event.preventDefault();
  found[1]();
});

function togglePicker(open = $("runs").hidden) {
  $("runs").hidden = !open;
  $("pick").setAttribute("aria-expanded", String(open));
  if (open) { list().catch(() => {}); $("filter").focus(); }
  else if ($("runs").contains(document.activeElement)) document.activeElement.blur(); // else it takes keys until a frame is drawn
}

function sync() {
  $("color").value = app.color; $("edge").value = app.edge; $("axis").value = app.axis; $("speed").value = app.speed;
  app.remember();
  app.redraw();
}

function fill(id, names) {
  $(id).replaceChildren(...Object.entries(names).map(([value, text]) => element("option", { value, text })));
  $(id).addEventListener("change", () => { app[id] = $(id).value; sync(); });
}

function locked() {
  const dialog = $("locked");
  document.body.dataset.locked = "yes";
  $("connection").textContent = "a token is needed";
  if (dialog.open) return;
  dialog.showModal();
  dialog.addEventListener("close", () => { api.keepToken($("token").value.trim()); $("token").value = ""; begin(); }, { once: true });
}

async function begin() {
  try {
    await list();
  } catch (error) {
    if (error instanceof api.Locked) return locked();
    $("connection").textContent = "the dashboard does not answer";
    return;
  }
  delete document.body.dataset.locked;
  $("connection").textContent = "";
  const known = new Set(app.listed.map((each) => each.id)), named = app.listed.filter((each) => each.named);
  let wanted = app.recall().filter((id) => known.has(id)).slice(0, MAX_RUNS);
  if (!wanted.length) wanted = (named.length ? named : app.listed.slice(0, 1)).slice(0, MAX_RUNS).map((each) => each.id);
  show(wanted);
  sync();
  if (!wanted.length) $("connection").textContent = "no runs are there yet";
}

api.takeToken();
app.recall();
fill("color", { metric: "test metric", loss: "training loss", wait: "share waited", generation: "generation" });
fill("edge", { bytes: "bytes", latency: "time waited", age: "age of last mix" });
fill("axis", { rounds: "rounds", seconds: "seconds", bytes: "bytes" });
fill("speed", Object.fromEntries(Object.keys(SPEEDS).map((name) => [name, name])));
$("tabs").replaceChildren(...Object.entries(PANELS).map(([name, [title]]) => element("button", { role: "tab", "data-tab": name, text: title, onclick: () => { app.tab = name; sync(); } })));
$("keys").querySelector("dl").replaceChildren(...Object.entries(KEYS).flatMap(([key, [text]]) => [element("dt", { text: { " ": "space", ArrowLeft: "←", ArrowRight: "→", Escape: "Esc" }[key] || key }), element("dd", { text })]));
$("scrub").addEventListener("input", () => { app.playing = false; app.setPosition(Number($("scrub").value)); });
$("play").addEventListener("click", togglePlay);
$("live").addEventListener("click", KEYS.l[1]);
$("theme").addEventListener("click", KEYS.d[1]);
$("help").addEventListener("click", KEYS["?"][1]);
$("pick").addEventListener("click", () => togglePicker());
$("filter").addEventListener("input", () => list().catch(() => {}));
window.addEventListener("hashchange", () => { api.takeToken(); begin(); });
window.addEventListener("resize", () => app.redraw());
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => app.redraw());
document.addEventListener("visibilitychange", () => app.redraw());
setInterval(() => { app.dirty = true; }, 1000); // ages and waiting times grow even without changes
requestAnimationFrame(draw);
begin();
