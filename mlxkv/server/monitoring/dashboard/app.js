// The dashboard: asks the server at most once a second while the tab is seen, and shows what it answers.
// Whatever comes from the server goes into the page as text, never as markup.

import { BlockMap } from "./map.js";
import { plot } from "./plot.js";
import { TIERS, ago, bytes, clock, count, many, percent, seconds } from "./words.js";

const EVERY_MS = 1000;
const GONE_MS = 3000; // between tries while the server does not answer
const TIMEOUT_MS = 10000;
const KEY = "mlxkv.key";
const SHOWN_REQUESTS = 50;
const TABLE_ROWS = 200;
// A long list of blocks costs the server and the page something: it is asked for less often. [blocks, milliseconds]
const LIST_EVERY = [[10000, 10000], [2000, 4000], [0, 1000]];

const at = (id) => document.getElementById(id);

let clockOffset_s = 0; // the server's clock minus this one
const now = () => Date.now() / 1000 + clockOffset_s;

const box = at("map");
const map = new BlockMap({ box, canvas: box.querySelector("canvas"), tip: at("tip"), voice: at("voice"), now });

class Refused extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

class Gone extends Error {}

async function get(path) {
  const key = sessionStorage.getItem(KEY);
  const headers = key ? { authorization: `Bearer ${key}` } : {};
  let answer, told;
  try {
    answer = await fetch(path, { headers, cache: "no-store", signal: AbortSignal.timeout(TIMEOUT_MS) });
    told = await answer.json();
  } catch (error) {
    throw new Gone(path, { cause: error });
  }
  if (!answer.ok) throw new Refused(answer.status, told.error?.message ?? `status ${answer.status}`);
  return told;
}

// polling

let timer = 0;
let asking = false;
let listing = false;
let listed = { stamp: "", at_ms: -Infinity, total: 0 };

function again(ms) {
  clearTimeout(timer);
  timer = setTimeout(look, ms);
}

async function look() {
  if (document.hidden || asking) return;
  asking = true;
  let wait = EVERY_MS;
  try {
    const [cache, requests] = await Promise.all([get("/v1/cache"), get("/v1/cache/requests")]);
    clockOffset_s = cache.time - Date.now() / 1000;
    showState(cache);
    showFigures(cache);
    showTiers(cache);
    showPlot(cache);
    showRunning(requests.running, cache);
    showRequests(requests.requests);
    map.draw();
    list(cache);
  } catch (error) {
    wait = failed(error);
  } finally {
    asking = false;
    if (wait) again(wait);
  }
}

// The blocks, when something says that they changed; a busy engine may answer late, and the rest does not wait for it.
async function list(cache) {
  const { hot, cold, tokens, requests, evicted, quarantined } = cache;
  const stamp = JSON.stringify([hot, cold, tokens, requests, evicted, quarantined, cache.started]);
  const [, every_ms] = LIST_EVERY.find(([blocks]) => listed.total >= blocks);
  if (listing || stamp === listed.stamp || performance.now() - listed.at_ms < every_ms) return;
  listing = true;
  try {
    const answer = await get("/v1/cache/blocks");
    listed = { stamp, at_ms: performance.now(), total: answer.total };
    showBlocks(answer);
  } catch (error) {
    listed.at_ms = performance.now();
    if (error instanceof Refused && error.status === 401) failed(error);
    else if (error instanceof Refused) say("map-text", `There is no list of blocks now: ${error.message}`);
    else if (!(error instanceof Gone)) throw error; // the next look says that the server is gone
  } finally {
    listing = false;
  }
}

function showState({ ready, requests, version, uncached }) {
  document.body.dataset.state = ready ? "live" : "gone";
  say("state-text", ready ? "live" : "in trouble");
  say("about", `${many(requests.finished, "request")} answered · version ${version}`);
  at("key-form").hidden = true;
  at("main").hidden = false;
  at("main").classList.remove("stale");
  if (!ready) trouble("The engine does not run: requests are refused. The server's own lines say why.");
  else trouble(uncached ? `This model runs without a cache: ${uncached}` : "");
}

// Says what went wrong; returns after how many milliseconds to look again, 0 for not by itself.
function failed(error) {
  if (error instanceof Refused && error.status === 401) {
    document.body.dataset.state = "locked";
    say("state-text", "locked");
    const tried = sessionStorage.getItem(KEY) !== null;
    sessionStorage.removeItem(KEY);
    at("main").hidden = true;
    at("key-form").hidden = false;
    trouble(tried ? "The server does not accept this key." : "");
    at("key").focus();
    clearTimeout(timer);
    return 0;
  }
  document.body.dataset.state = "gone";
  at("main").classList.add("stale");
  if (error instanceof Refused) {
    say("state-text", "in trouble");
    trouble(`The server answers, but not well: ${error.message}`);
  } else if (error instanceof Gone) {
    say("state-text", "gone");
    trouble("The server does not answer. What you see is the last it said; this page comes back when the server does.");
  } else throw error;
  return GONE_MS;
}

function trouble(text) {
  if (at("trouble").textContent !== text) at("trouble").textContent = text;
  at("trouble").hidden = !text;
}

at("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  sessionStorage.setItem(KEY, at("key").value);
  at("key").value = "";
  look();
});
document.addEventListener("visibilitychange", () => (document.hidden ? clearTimeout(timer) : look()));

// showing

const say = (id, text) => {
  if (at(id).textContent !== text) at(id).textContent = text;
};

function make(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

// A bar of parts, [class, amount] each, of a whole.
function bar(parts, whole, attributes = {}) {
  const made = make("div", { class: "bar", ...attributes });
  for (const [name, amount] of parts) {
    const part = make("i", { class: name });
    part.style.width = `${whole ? Math.min((100 * amount) / whole, 100) : 0}%`;
    made.append(part);
  }
  return made;
}

const meter = (label, value, most, text) => ({
  role: "meter",
  "aria-label": label,
  "aria-valuemin": 0,
  "aria-valuenow": value,
  "aria-valuemax": most,
  "aria-valuetext": text,
});

function showFigures({ model, tokens, requests }) {
  say("model", model);
  document.title = `${model} · mlxkv`;
  const saved = tokens.hot + tokens.cold;
  const all = saved + tokens.computed;
  say("share", percent(saved, all));
  const share = `${count(saved)} of ${count(all)} prompt tokens were not computed again.`;
  say("share-text", all ? share : "No prompt has come yet.");
  for (const source of ["hot", "cold", "computed"]) say(`tokens-${source}`, count(tokens[source]));
  const waiting = requests.queued ? `, ${count(requests.queued)} waiting` : "";
  const running = requests.running ? count(requests.running) : "None";
  say("running-text", `${running} of at most ${count(requests.limit)}${waiting}.`);
}

let tiersShown = "";

function showTiers({ hot, cold, checkpoint_bytes, live_bytes, live_budget_bytes, evicted, quarantined }) {
  const shown = JSON.stringify([hot, cold, live_bytes, evicted, quarantined]);
  if (shown === tiersShown) return;
  tiersShown = shown;
  const held = (blocks) => (checkpoint_bytes ? `${count(blocks)} blocks and checkpoints` : many(blocks, "block"));
  const tiers = [tier("Memory (hot tier)", "hot", hot.used_bytes, hot.budget_bytes, held(hot.blocks))];
  if (cold) {
    const written = `${held(cold.blocks)}, ${bytes(cold.written_today_bytes)} written today`;
    const extra = cold.offline ? `offline: ${cold.offline}` : written;
    tiers.push(tier("SSD (cold tier)", "cold", cold.used_bytes, cold.budget_bytes, extra));
  } else tiers.push(make("p", { class: "tier" }, "The SSD (cold tier) is off."));
  if (live_budget_bytes !== null) {
    tiers.push(tier("Running requests", "computed", live_bytes, live_budget_bytes, "what their arrays hold"));
  }
  const lost = Object.entries(evicted).map(([reason, blocks]) => `${count(blocks)} evicted (${reason})`);
  if (quarantined) lost.push(`${count(quarantined)} damaged and set aside`);
  if (lost.length) tiers.push(make("p", { class: "hint" }, `Since the start: ${lost.join(", ")}.`));
  at("tiers").replaceChildren(...tiers);
}

function tier(name, colour, used, budget, extra) {
  const text = `${bytes(used)} of ${bytes(budget)}`;
  const words = make("p", {}, make("span", {}, make("b", {}, name), ` ${extra}`), make("span", {}, text));
  return make("div", { class: "tier" }, words, bar([[colour, used]], budget, meter(name, used, budget, text)));
}

function showPlot({ history, time }) {
  const { bins, width_s } = plot(at("plot"), history, time);
  const sum = (source) => bins.reduce((total, bin) => total + bin[source], 0);
  const saved = sum("hot") + sum("cold");
  const sums = `${count(saved)} saved (above the line), ${count(sum("computed"))} computed (below)`;
  say("plot-text", bins.length ? `Prompt tokens, ${seconds(width_s)} a bar: ${sums}.` : "Nothing yet.");
  if (!at("plot-table").closest("details").open) return;
  const cells = (bin) => [clock(bin.time), count(bin.hot), count(bin.cold), count(bin.computed)];
  at("plot-table").replaceChildren(...bins.reverse().map((bin) => row(cells(bin))));
}

const row = (texts) => make("tr", {}, ...texts.map((text) => make("td", {}, text)));

function showRunning(running) {
  at("running").replaceChildren(...running.map((one) => {
    const { prompt_tokens: prompt, done_tokens: done, held_tokens: held, output_tokens: output } = one;
    const phases = {
      restore: `restoring ${many(held, "token")} of ${count(prompt)}`,
      prefill: `prefill, ${count(done)} of ${many(prompt, "token")}, ${count(held)} of them from the cache`,
      decode: `writing, ${many(output, "token")} so far after a prompt of ${count(prompt)}`,
    };
    const text = phases[one.phase] ?? one.phase;
    const name = one.request.slice(0, 12);
    const since = make("span", {}, seconds(now() - one.since));
    const words = make("p", {}, make("span", {}, make("b", {}, name), ` ${text}`), since);
    const known = Math.min(done, prompt);
    const told = { ...meter(`Request ${name}`, known, prompt, text), role: "progressbar" };
    const parts = [["hot", Math.min(held, known)], ["computed", Math.max(known - held, 0)]];
    return make("li", {}, words, bar(parts, prompt, told));
  }));
}

let requestsShown = "";

function showRequests(requests) {
  const shown = `${requests.length} ${requests[0]?.request} ${requests[0]?.time}`;
  if (shown === requestsShown) return;
  requestsShown = shown;
  const ended = Math.min(requests.length, SHOWN_REQUESTS);
  say("requests-text", ended ? `${many(ended, "request")}, newest first.` : "No request has ended yet.");
  at("requests").replaceChildren(...requests.slice(0, SHOWN_REQUESTS).map((one) => {
    const parts = [["hot", one.hot_tokens], ["cold", one.cold_tokens], ["computed", one.computed_tokens]];
    const time = make("time", { datetime: new Date(one.time * 1000).toISOString() }, clock(one.time));
    return make("li", {}, time, bar(parts, one.prompt_tokens, { "aria-hidden": "true" }), make("span", {}, one.line));
  }));
  at("requests").tabIndex = requests.length ? 0 : -1; // it scrolls, so the keyboard must reach it
}

let lastAnswer = null;

function showBlocks(answer) {
  lastAnswer = answer;
  map.show(answer);
  const { blocks, total, roots } = answer;
  const nodes = [...map.nodes.values()];
  const shared = nodes.filter((node) => node.children.length > 1).length;
  const chains = nodes.filter((node) => !node.children.length).length;
  const held = blocks.length - map.checkpoints;
  const marks = map.checkpoints ? ` and ${many(map.checkpoints, "checkpoint")}` : "";
  const cut = blocks.length < total ? `The ${count(blocks.length)} last used of ${count(total)} are shown. ` : "";
  const models = Object.keys(roots).length;
  say("map-text", !total
    ? "Nothing is held yet. Send a prompt of more than 64 tokens."
    : `${cut}${many(held, "block")}${marks} in ${many(chains, "chain")}` +
      `${shared ? `, which part at ${many(shared, "place")}` : ""}` +
      `${models > 1 ? `, of ${many(models, "root")}` : ""}.`);
  showTable();
}

function showTable() {
  if (!lastAnswer || !at("table-details").open) return;
  const { blocks } = lastAnswer;
  const most = Math.min(blocks.length, TABLE_ROWS);
  const cut = `The ${count(most)} last used of ${count(blocks.length)}.`;
  say("table-text", most < blocks.length ? cut : `All ${count(most)}, the last used first.`);
  at("table").replaceChildren(...blocks.slice(0, most).map((one) => row([
    one.block.slice(0, 12),
    one.parent.slice(0, 12),
    TIERS[one.tier],
    one.kind === "checkpoint" ? "checkpoint" : count(one.tokens),
    bytes(one.bytes),
    count(one.hits),
    ago(Math.max(now() - one.used, 0)),
  ])));
}

at("table-details").addEventListener("toggle", showTable);
look();
