// The texts and tables beside the graph. All data of runs is inserted as text, never as HTML.

import { config } from "./api.js";
import { bytes, GROUPS, number, seconds } from "./colors.js";
import { EDGE_COLORS, NODE_COLORS } from "./graph.js";
import { unknown } from "./model.js";
import { describe } from "./timeline.js";

const MAX_ROWS = 1000, MAX_LINES = 40;

export function element(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (key === "text") made.textContent = value;
    else if (key.startsWith("on")) made.addEventListener(key.slice(2), value);
    else if (key === "style") Object.assign(made.style, value);
    else made.setAttribute(key, value);
  }
  made.append(...children);
  return made;
}

function table(heads, rows, more = () => ({})) {
  return element("table", {}, element("thead", {}, element("tr", {}, ...heads.map((head, i) => element("th", { class: i ? "" : "left", text: head })))),
    element("tbody", {}, ...rows.map((row, at) => element("tr", more(at), ...row.map((cell, i) => element("td", { class: i ? "" : "left", text: cell }))))));
}

/** Returns the nodes that others wait for and that do not wait themselves. */
export function blamed(run) {
  const waited = new Map();
  for (const each of Object.values(run.status)) for (const uid of each.for) waited.set(uid, (waited.get(uid) || 0) + 1);
  return [...waited].filter(([uid]) => !run.status[uid] || !run.status[uid].for.length).sort((a, b) => b[1] - a[1]);
}

function waits(run, view) {
  const parts = [];
  if (view.live && run.state === "running") {
    const roots = blamed(run);
    parts.push(element("p", { class: "blame", text: roots.length
      ? "everything waits for " + roots.slice(0, 4).map(([uid, n]) => `node ${uid} (${run.status[uid] ? run.status[uid].doing : "without a status here"}; ${n} wait for it)`).join(", ")
      : "no node is waiting for long right now" }));
    const waiting = Object.entries(run.status).filter(([, each]) => each.for.length).sort((a, b) => b[1].seconds - a[1].seconds);
    if (waiting.length) {
      parts.push(table(["node", "waits for", "since"], waiting.slice(0, MAX_LINES).map(([uid, each]) => [uid, each.for.slice(0, 10).join(", "), seconds(each.seconds)])));
    }
    const doing = new Map();
    for (const each of Object.values(run.status)) doing.set(each.doing, (doing.get(each.doing) || 0) + 1);
    parts.push(element("p", { class: "soft", text: [...doing].sort((a, b) => b[1] - a[1]).map(([what, n]) => `${n} × ${what}`).join(" · ") }));
  }
  const found = [];
  run.pairs.forEach((pair, e) => {
    if (!pair) return;
    const waited = view.edge(e)[EDGE_COLORS.latency.at];
    if (!unknown(waited) && waited > 0) found.push([run.uids[pair[1]], run.uids[pair[0]], waited]);
  });
  found.sort((a, b) => b[2] - a[2]);
  parts.push(element("h3", { text: view.live ? "longest waits in the newest round" : `longest waits in the round before ${view.rounds}` }));
  parts.push(found.length ? table(["node", "waited for", "seconds"], found.slice(0, MAX_LINES).map(([a, b, c]) => [a, b, seconds(c)]))
    : element("p", { class: "soft", text: "none" }));
  return parts;
}

let order = ["node", 1];

function nodes(run, view, app) {
  const at = (name) => run.about.node_columns.indexOf(name);
  const columns = [["node", (i) => run.uids[i], String], ["round", (i) => (view.live ? run.rounds[i] : view.rounds), String],
    ...Object.values(NODE_COLORS).map((kind) => [kind.title(run), (i) => kind.value(run, view.node(i)), (v) => kind.text(v, run)]),
    ["round time", (i) => view.node(i)[at("seconds")], seconds], ["sent", (i) => view.node(i)[at("sent")], bytes]];
  if (view.live) columns.push(["does", (i) => (run.status[run.uids[i]] || {}).doing || "", String]);
  const chosen = columns.find(([name]) => name === order[0]) || columns[0];
  const rows = run.uids.map((_, i) => i);
  rows.sort((a, b) => { const x = chosen[1](a), y = chosen[1](b); return order[1] * (unknown(x) ? 1 : unknown(y) ? -1 : x < y ? -1 : x > y ? 1 : 0); });
  const made = table(columns.map(([name]) => name), rows.slice(0, MAX_ROWS).map((i) => columns.map(([, value, text]) => { const v = value(i); return unknown(v) || v === "" ? "–" : text(v); })),
    (at) => ({ "data-node": run.uids[rows[at]], class: run.uids[rows[at]] === app.node ? "chosen" : "", onclick: () => app.choose(run.uids[rows[at]]) }));
  made.querySelectorAll("th").forEach((head, i) => head.addEventListener("click", () => {
    order = [columns[i][0], order[0] === columns[i][0] ? -order[1] : 1];
    app.redraw();
  }));
  return [made];
}

function machines(run, view) {
  if (!run.machines.length) return [element("p", { class: "soft", text: "the run says nothing of machines" })];
  const at = (name) => run.about.node_columns.indexOf(name);
  return run.machines.map((machine) => {
    let rate = 0;
    const own = new Set(machine.uids.map((uid) => run.place.get(uid)));
    const leaves = run.pairs.reduce((sum, pair, e) => {
      if (!pair || !own.has(pair[0]) || own.has(pair[1])) return sum;
      return sum + (view.edge(e)[0] || 0);
    }, 0);
    let time = 0, count = 0;
    for (const i of own) { const s = view.node(i) && view.node(i)[at("seconds")]; if (!unknown(s)) { time += s; count++; } }
    run.pairs.forEach((pair, e) => { if (pair && own.has(pair[0])) rate += view.edge(e)[0] || 0; });
    const round = count ? time / count : 0, facts = [];
    facts.push(`${machine.uids.length} node${machine.uids.length === 1 ? "" : "s"}: ${ranges(machine.uids)}`);
    if (machine.cpu || machine.cores) facts.push(`${machine.cores || "?"} cores, ${machine.cpu || ""}`);
    if (machine.memory) facts.push(`memory ${machine.memory.endsWith(" kB") ? bytes(1024 * parseInt(machine.memory, 10)) : machine.memory}`);
    if (round) facts.push(`payloads ${bytes(rate / round)}/s sent by its nodes, ${bytes(leaves / round)}/s of them to other machines`);
    const card = element("div", { class: "machine" }, element("h3", { text: `machine ${machine.machine}: ${machine.host}` }), ...facts.map((text) => element("p", { class: "soft", text })));
    if (machine.load && view.live) {
      const { load } = machine, [used, total] = load.memory;
      card.append(element("div", { class: "bars", title: "cores that are busy" }, ...load.busy.map((each) => element("i", { style: { height: `${each}%` } }))),
        element("p", { text: `cores: ${load.run_cores.toFixed(1)} of ${load.cores} busy with this run, ${(load.busy.reduce((a, b) => a + b, 0) / 100).toFixed(1)} in all` }),
        element("div", { class: "meter", title: "memory" }, element("i", { style: { width: `${(100 * used) / total}%` } })),
        element("p", { text: `memory: ${bytes(load.run_memory)} of this run, ${bytes(used)} of ${bytes(total)} in all` }),
        element("p", { text: `network: ${bytes(load.network[0])}/s out, ${bytes(load.network[1])}/s in, loopback included` }));
    }
    return card;
  });
}

function ranges(uids) {
  const found = [];
  for (const uid of [...uids].sort((a, b) => a - b)) {
    const last = found[found.length - 1];
    if (last && last[1] === uid - 1) last[1] = uid; else found.push([uid, uid]);
  }
  return found.map(([a, b]) => (a === b ? a : `${a}–${b}`)).slice(0, 12).join(", ") + (found.length > 12 ? " …" : "");
}

function events(run, view, app) {
  const all = [...run.events].sort((a, b) => a.time - b.time);
  const counts = Object.keys(GROUPS).map((group) => [group, all.filter((each) => each.group === group).length]).filter(([, n]) => n);
  const parts = [element("p", {}, ...counts.flatMap(([group, n]) => [element("span", { class: "dot", style: { background: GROUPS[group] } }), `${group} ${n}   `]))];
  const rows = all.slice(-MAX_ROWS);
  if (!rows.length) return [element("p", { class: "soft", text: "nothing but rounds" })];
  const made = table(["seconds", "what happened"], rows.map((event) => [run.began === null ? "" : (event.time - run.began).toFixed(1), describe(event)]),
    (at) => ({ "data-node": rows[at].uid, onclick: () => app.seek(run.roundsAt(rows[at].time - run.began)) }));
  made.querySelectorAll("td:last-child, th:last-child").forEach((cell) => cell.classList.add("words"));
  return [...parts, made];
}

const texts = new Map();

function settings(run, view, app) {
  if (!texts.has(run.id)) {
    texts.set(run.id, "");
    config(run.id).then((text) => { texts.set(run.id, text || "(none)"); app.redraw(); }).catch(() => texts.delete(run.id));
  }
  return [element("pre", { text: texts.get(run.id) })];
}

export const PANELS = { waits: ["Who waits", waits], nodes: ["Nodes", nodes], machines: ["Machines", machines], events: ["Events", events], config: ["Config", settings] };

/** Returns the results of a run at a position, in one line. */
export function figures(run, view) {
  const point = run.pointAt(view.rounds), evaluation = run.evaluationAt(view.rounds), found = [];
  const planned = run.about.rounds, main = run.main, of = (name) => (view.live ? run.newest(name) : []);
  if (view.live && run.why) found.push(["because", run.why]);
  found.push(["round", `${view.rounds}${planned ? ` of ${planned}` : ""}`]);
  if (evaluation && main && evaluation.metrics[main.name]) {
    const now = of("metric"), told = evaluation.metrics[main.name];
    const values = now.length ? [told[4] ?? now.reduce((a, b) => a + b, 0) / now.length, Math.min(...now), Math.max(...now), told[3]] : told;
    const [mean, low, high, merged] = values.map((v) => (v === null ? NaN : v * main.scale));
    found.push([main.text, `${number(mean)} (${number(low)} to ${number(high)})`]);
    if (!unknown(merged)) found.push(["merged", number(merged)]);
    if (evaluation.consensus !== null) found.push(["consensus distance", number(evaluation.consensus, 2)]);
  }
  if (point) {
    const losses = of("loss"), loss = losses.length ? losses.reduce((a, b) => a + b, 0) / losses.length : point[4];
    if (loss !== null) found.push(["loss", number(loss)]);
    found.push(["time", seconds(Math.max(0, point[1]))], ["sent", bytes(point[2] || 0)], ["nodes", String(of("time").length || point[3])]);
  }
  return found;
}
