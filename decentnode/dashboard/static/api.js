// Talks to the server: keeps the token, sends requests and reads the stream of changes.

let token = "";

/** Removes the token from the address, which histories and bookmarks would keep, and stores it for this tab. */
export function takeToken() {
  const hash = new URLSearchParams(location.hash.slice(1)), query = new URLSearchParams(location.search);
  token = hash.get("token") || query.get("token") || sessionStorage.getItem("token") || "";
  if (hash.has("token") || query.has("token")) {
    hash.delete("token");
    history.replaceState(null, "", location.pathname + (hash.size ? "#" + hash : ""));
  }
  keepToken(token);
}

export function keepToken(given) {
  token = given;
  if (token) sessionStorage.setItem("token", token);
}

export class Locked extends Error {}

async function ask(path, options = {}) {
  const answer = await fetch(path, { ...options, headers: { ...options.headers, authorization: "Bearer " + token },
                                     cache: "no-store", credentials: "omit", referrerPolicy: "no-referrer" });
  if (answer.status === 401) throw new Locked();
  return answer;
}

export async function runs() {
  return (await (await ask("/api/runs")).json()).runs;
}

export async function config(run) {
  const answer = await ask("/api/config?run=" + encodeURIComponent(run));
  return answer.ok ? (await answer.json()).text : "";
}

/** Returns {first, nodes, edges} of frames: an array of {rounds, nodes: Float32Array, edges: Float32Array}. */
export async function frames(run, first, count, nodeColumns, edgeColumns) {
  const answer = await ask(`/api/frames?run=${encodeURIComponent(run)}&first=${first}&count=${count}`);
  if (!answer.ok) return [];
  const data = new Float32Array(await answer.arrayBuffer()), [number, nodes, edges] = data;
  const found = [];
  for (let at = 3, i = 0; i < number; i++) {
    const rounds = data[at++], n = nodes * nodeColumns, e = edges * edgeColumns;
    found.push({ rounds, nodes: data.subarray(at, at + n), edges: data.subarray(at + n, at + n + e) });
    at += n + e;
  }
  return found;
}

/** Orders a run to do something. Returns the server's answer as a sentence. */
export async function control(run, action) {
  const answer = await ask("/api/control", { method: "POST", headers: { "content-type": "application/json" },
                                             body: JSON.stringify({ run, action }) });
  const said = await answer.json();
  return said.said || said.error || "";
}

/** Reads the stream of changes and calls take(news) for each line, until it is aborted by the signal or ends. */
export async function stream(ids, take, signal) {
  const answer = await ask("/api/stream?" + new URLSearchParams(ids.map((id) => ["runs", id])), { signal });
  if (!answer.ok) throw new Error((await answer.json()).error);
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) if (line) take(JSON.parse(line));
  }
}
