/** The playground: the form, one running request, and what is seen of it. */

import { Answer } from "./answer.js";
import { drawCache, occupancy } from "./draw.js";
import { choices, guideFields, KINDS, localError } from "./guides.js";
import { ApiError, BrokenStream, getJson, streamChat } from "./stream.js";

const $ = (id) => document.getElementById(id);
const number = (value, digits = 0) =>
  value == null || !Number.isFinite(value) ? "–" : value.toLocaleString("en", { maximumFractionDigits: digits });
const DEFAULTS = {
  kind: "json_schema", prompt: "", system: "", guide: "", strict: false, backend: "auto",
  temperature: "0.7", top_p: "1", max: "256", seed: "", jump: "verify", lookup: false, theme: "",
};
const FIELDS = Object.keys(DEFAULTS).filter((name) => name !== "kind" && name !== "theme");

const answer = new Answer({ tokens: $("tokens"), spark: $("spark"), tip: $("tip"), legend: $("legend") });
const drafts = {}; // the guide of each kind as it was left
let examples = {};
let model = null;
let facts = null; // the server's facts about its cache
let kind = DEFAULTS.kind;
let theme = "";
let run = null; // the request that is running, or was the last

// --- small helpers -----------------------------------------------------------------------------

function set(id, text, state) {
  const element = $(id);
  if (element.textContent !== text) element.textContent = text;
  if (state !== undefined) element.dataset.state = state;
}

function option(value, text = value) {
  return new Option(text, value);
}

function segments(box, name, entries, onChange) {
  for (const [value, text] of entries) {
    const label = document.createElement("label");
    const input = Object.assign(document.createElement("input"), { type: "radio", name, value });
    label.append(input, text);
    box.append(label);
    input.addEventListener("change", () => onChange(value));
  }
}

function check(name, value) {
  document.querySelector(`input[name="${name}"][value="${value}"]`).checked = true;
}

function after(milliseconds, action) {
  let timer;
  return () => {
    clearTimeout(timer);
    timer = setTimeout(action, milliseconds);
  };
}

async function copy(button, text) {
  const before = button.textContent;
  const copied = await navigator.clipboard.writeText(text).then(() => true, () => false);
  set("status", copied ? "Copied." : "The browser does not let this page copy.");
  button.textContent = copied ? "Copied" : "Not copied";
  setTimeout(() => (button.textContent = before), 1200);
}

// --- state and link ----------------------------------------------------------------------------

function readForm() {
  const state = { kind, theme };
  for (const name of FIELDS) {
    state[name] = $(name).type === "checkbox" ? $(name).checked : $(name).value;
  }
  return state;
}

function link() {
  const state = readForm();
  if (kind === "text") state.guide = "";
  const changed = Object.entries(state).filter(([name, value]) => value !== DEFAULTS[name]);
  return new URLSearchParams(changed.map(([name, value]) => [name, String(value)])).toString();
}

const remember = after(300, () => history.replaceState(null, "", `#${link()}`));

function restore() {
  const given = new URLSearchParams(location.hash.slice(1));
  const state = { ...DEFAULTS };
  for (const name of Object.keys(DEFAULTS)) {
    const value = given.get(name);
    if (value !== null) state[name] = typeof DEFAULTS[name] === "boolean" ? value === "true" : value;
  }
  kind = state.kind in KINDS ? state.kind : DEFAULTS.kind;
  const first = examples[kind]?.[0];
  if (!given.has("guide")) state.guide = first?.guide ?? "";
  if (!given.has("prompt")) state.prompt = first?.prompt ?? "";
  for (const name of FIELDS) {
    const field = $(name);
    if (field.type === "checkbox") field.checked = state[name];
    else if (!field.options || [...field.options].some((known) => known.value === state[name])) {
      field.value = state[name];
    }
  }
  $("system-box").open = Boolean(state.system);
  theme = ["light", "dark"].includes(state.theme) ? state.theme : "";
  check("kind", kind);
  applyTheme();
  showKind();
  showSettings();
}

const prefersDark = matchMedia("(prefers-color-scheme: dark)");

function applyTheme() {
  const dark = theme ? theme === "dark" : prefersDark.matches;
  document.documentElement.dataset.theme = dark ? "dark" : "light";
  set("theme", dark ? "Light" : "Dark");
  $("theme").setAttribute("aria-label", `Switch to ${dark ? "light" : "dark"} colours`);
  redraw();
}

function redraw() {
  answer.redraw();
  showCache();
}

// --- what constrains ---------------------------------------------------------------------------

function showKind() {
  const { name, label, help } = KINDS[kind];
  $("guide-box").hidden = kind === "text";
  set("guide-label", label ?? name);
  set("guide-help", help ?? "");
  $("strict-box").hidden = kind !== "json_schema";
  const names = (examples[kind] ?? []).map((example, index) => option(index, example.name));
  $("example").replaceChildren(option("", "Examples…"), ...names);
  checkGuide();
}

function chooseKind(next) {
  drafts[kind] = $("guide").value;
  kind = next;
  const first = examples[kind]?.[0];
  $("guide").value = drafts[kind] ?? first?.guide ?? "";
  if (first && isOwnPrompt()) $("prompt").value = first.prompt;
  showKind();
  remember();
}

/** Whether the prompt came with an example: another example may replace it. */
function isOwnPrompt() {
  const prompt = $("prompt").value.trim();
  return !prompt || Object.values(examples).flat().some((example) => example.prompt === prompt);
}

function chooseExample() {
  const example = examples[kind][$("example").value];
  if (!example) return;
  if (example.guide !== undefined) $("guide").value = example.guide;
  if (isOwnPrompt()) $("prompt").value = example.prompt;
  checkGuide();
  remember();
}

let checking = null;
const askServer = after(450, checkOnServer);

function checkGuide() {
  checking?.abort();
  const problem = localError(kind, $("guide").value);
  $("guide").setAttribute("aria-invalid", String(Boolean(problem)));
  set("guide-status", problem ?? "", problem ? "bad" : "");
  if (!problem && kind !== "text") askServer();
}

async function checkOnServer() {
  checking?.abort();
  const state = readForm();
  if (kind === "text" || !model || localError(kind, state.guide)) return;
  const { signal } = (checking = new AbortController());
  set("guide-status", "Checking…", "");
  try {
    const body = `{${guideFields(state)}}`;
    const found = await getJson("v1/guide/check", { body, key: $("key").value, signal });
    const gate = `enforced with a gate${found.notes?.length ? ` (${found.notes.join("; ")})` : ""}`;
    const how = found.exact ? "enforced exactly" : gate;
    const time = number(found.compile_ms, 1);
    set("guide-status", `✓ ${found.backend}, ${how}, compiled in ${time} ms`, "good");
  } catch (error) {
    if (signal.aborted) return;
    set("guide-status", error instanceof ApiError ? error.message : "The server cannot be reached.", "bad");
    $("guide").setAttribute("aria-invalid", String(error instanceof ApiError && error.status === 400));
  }
}

/** Tab indents, Enter keeps the indentation; Esc, then Tab leaves, as people without a mouse must. */
let mayLeave = false;
function edit(event) {
  const field = event.target;
  const { selectionStart: start, value } = field;
  const line = value.slice(value.lastIndexOf("\n", start - 1) + 1, start);
  const plain = !event.ctrlKey && !event.metaKey && !event.altKey && !event.isComposing;
  const insert = (text) => {
    event.preventDefault();
    document.execCommand("insertText", false, text); // the way that can be undone
  };
  if (event.key === "Tab" && plain && !event.shiftKey && !mayLeave) insert("  ");
  if (event.key === "Enter" && plain && kind === "json_schema") {
    insert(`\n${line.match(/^ */)[0]}${/[{[]$/.test(line) ? "  " : ""}`);
  }
  mayLeave = event.key === "Escape";
}

// --- the request -------------------------------------------------------------------------------

function requestBody(state) {
  const messages = [{ role: "user", content: state.prompt }];
  if (state.system.trim()) messages.unshift({ role: "system", content: state.system });
  const body = {
    model,
    messages,
    temperature: Number(state.temperature),
    top_p: Number(state.top_p),
    max_completion_tokens: Number(state.max),
    jump: state.jump,
    lookup: state.lookup,
    stream: true,
    trace: true,
  };
  const guide = guideFields(state);
  // A seed may have more digits than a number of JavaScript.
  const seed = /^-?\d+$/.test(state.seed) ? `,"seed":${BigInt(state.seed)}` : "";
  return `${JSON.stringify(body).slice(0, -1)}${seed}${guide && `,${guide}`}}`;
}

function here() {
  return location.href.split("#")[0];
}

function curl() {
  const body = requestBody(readForm()).replaceAll("'", "'\\''");
  const key = $("key").value ? ` -H "Authorization: Bearer $API_KEY"` : "";
  const url = new URL("v1/chat/completions", here());
  return `curl -N '${url}'${key} -H 'Content-Type: application/json' -d '${body}'`;
}

/** The field that keeps the request from being sent, and why. */
function mistake(state) {
  if (!model) return ["prompt", "No server has answered yet; wait until its model is shown above."];
  if (!state.prompt.trim()) return ["prompt", "The prompt is empty."];
  const problem = localError(kind, state.guide);
  if (problem) return ["guide", `${KINDS[kind].label ?? KINDS[kind].name}: ${problem}`];
  if (!$("max").checkValidity()) {
    return ["max", `Max. tokens must be a whole number from 1 to ${number(Number($("max").max)) || "…"}.`];
  }
  if (!$("seed").checkValidity() || !/^(-?\d+)?$/.test(state.seed)) {
    return ["seed", "The seed must be a whole number, or empty."];
  }
  return [];
}

async function start() {
  if (run?.running) return;
  const state = readForm();
  const [field, problem] = mistake(state);
  if (field) {
    $(field).closest("details")?.setAttribute("open", "");
    $(field).focus();
    return fail(new Error(problem), false);
  }
  const own = (run = {
    running: true,
    abort: new AbortController(),
    began: performance.now(),
    state,
    stats: null,
    first: null, // seconds to the first token
    prompt: 0,
    position: 0,
  });
  $("notice").hidden = $("badge").hidden = $("empty").hidden = true;
  answer.clear();
  show("tokens");
  working(true);
  set("status", "Waiting for the first token…");
  reveal();
  try {
    const options = { key: $("key").value, signal: own.abort.signal };
    await streamChat(requestBody(state), options, (chunk) => take(own, chunk));
    finish(own);
  } catch (error) {
    if (own.abort.signal.aborted) finish(own);
    else fail(error);
  }
  own.running = false;
  own.seconds = (performance.now() - own.began) / 1000;
  answer.flush(true);
  working(false);
  showRun();
}

function take(own, chunk) {
  const [choice] = chunk.choices ?? [];
  const { trace = [], position, ...stats } = chunk.gkv ?? {};
  const { content, reasoning_content: thought } = choice?.delta ?? {};
  if ((trace.length || content || thought) && own.first === null) {
    own.first = (performance.now() - own.began) / 1000;
    set("status", "Writing…");
  }
  if (position != null) {
    own.prompt ||= position - trace.length;
    own.position = position;
  }
  if (choice?.finish_reason) [own.reason, own.stats] = [choice.finish_reason, stats];
  if (trace.length || content || thought) answer.add(content ?? "", trace, thought ?? "");
  own.frame ??= requestAnimationFrame(() => {
    own.frame = null;
    if (own === run) showRun();
  });
}

function finish(own) {
  const { kind: asked, guide } = own.state;
  const count = `${number(answer.tokens.length)} tokens`;
  let [text, state] = ["stopped", "warn"];
  if (own.reason === "length") [text, state] = ["cut off", "warn"];
  else if (own.reason) {
    [text, state] = ["complete", "good"];
    const isJson = parsed() !== undefined;
    if (asked === "json_schema") [text, state] = isJson ? ["valid JSON", "good"] : ["not JSON", "bad"];
    else if (asked === "choice" && !choices(guide).includes(answer.text)) [text, state] = ["no choice", "bad"];
    else if (asked !== "text") text = "matches";
  }
  $("badge").hidden = false;
  set("badge", text, state);
  const backend = own.stats?.backend;
  const by = backend && own.reason === "stop" ? `, enforced by ${backend}${own.stats.exact ? "" : " and a gate"}` : "";
  const why = own.reason === "length" ? ": the limit was reached before the end; raise max. tokens" : "";
  set("status", `${own.reason ? "Done" : "Stopped"}: ${count}, ${text}${by}${why}.`);
  const pretty = asked === "json_schema" && parsed() !== undefined;
  document.querySelector('input[value="json"]').disabled = !pretty;
}

function fail(error, mayRetry = true) {
  const isApi = error instanceof ApiError;
  const details = isApi
    ? [`HTTP ${error.status}`, error.param && `param ${error.param}`, error.code && `code ${error.code}`]
    : [];
  let [text, more] = [error.message, details.filter(Boolean).join(" · ")];
  if (isApi && error.status === 429) {
    const wait = error.retryAfter === null ? "in a moment" : `in ${error.retryAfter} s`;
    more = `The server is busy: try again ${wait}. ${more}`;
  } else if (isApi && error.status === 401) {
    more = `Give the API key under "Sampling and drafts". ${more}`;
    $("settings").open = true;
  } else if (error instanceof TypeError || error.name === "NetworkError") {
    text = "The server cannot be reached.";
    more = "It may be restarting; this page looks for it every few seconds.";
    disconnected();
  } else if (error instanceof BrokenStream) {
    more = "What had arrived is shown below.";
    connect();
  }
  $("notice").hidden = false;
  set("notice-text", text);
  set("notice-more", more);
  $("again").hidden = !mayRetry;
  $("empty").hidden = true;
  set("status", "");
}

/** Where the answer stands below the form, it comes into view. */
function reveal() {
  if ($("answer").getBoundingClientRect().top < innerHeight * 0.6) return;
  const still = matchMedia("(prefers-reduced-motion: reduce)").matches;
  $("answer").scrollIntoView({ behavior: still ? "auto" : "smooth" });
}

function working(running) {
  const hasFocus = [$("run"), $("stop")].includes(document.activeElement);
  $("run").hidden = running;
  $("stop").hidden = !running;
  if (hasFocus) $(running ? "stop" : "run").focus({ preventScroll: true });
  if ($("server").dataset.state !== "down") $("server").dataset.state = running ? "busy" : "up";
  $("copy").disabled = running || !answer.text;
  document.querySelector('input[value="json"]').disabled ||= running;
}

// --- what is seen ------------------------------------------------------------------------------

function parsed() {
  try {
    return JSON.parse(answer.text);
  } catch {
    return undefined;
  }
}

function show(view) {
  check("view", view);
  $("tokens").hidden = view !== "tokens";
  $("plain").hidden = view === "tokens";
  if (view !== "tokens") set("plain", view === "json" ? JSON.stringify(parsed(), null, 2) : answer.text);
}

function showRun() {
  const { stats } = run;
  if (!$("plain").hidden && run.running) set("plain", answer.text);
  const seconds = run.seconds ?? (performance.now() - run.began) / 1000;
  const count = stats?.tokens ?? answer.tokens.length;
  const live = seconds > run.first && run.first !== null ? count / (seconds - run.first) : null;
  const entries = [
    ["first token", run.first === null ? "–" : duration(run.first)],
    ["tokens", number(count)],
    ["tokens/s", number(stats?.tokens_per_second ?? live, 1)],
    ["forwards", number(stats?.forwards)],
    ["tokens per forward", number(stats?.tokens_per_forward, 2)],
    ["prompt tokens", number(stats?.prompt_tokens ?? (run.prompt || null))],
    ["cache", bytes(stats?.cache_bytes)],
    ["masks, per token", stats?.backend ? `${number(stats.grammar_us_per_token)} µs` : "–"],
  ];
  for (const [source, tally] of Object.entries(stats?.drafts ?? {})) {
    entries.push([`${source} drafts`, `${number(tally.accepted)} of ${number(tally.proposed)}`]);
  }
  showNumbers(entries);
  showCache();
}

function showNumbers(entries) {
  const box = $("numbers");
  while (box.childElementCount > entries.length) box.lastChild.remove();
  entries.forEach(([name, value], i) => {
    if (!box.children[i]) {
      const row = document.createElement("div");
      row.append(document.createElement("dt"), document.createElement("dd"));
      box.append(row);
    }
    const [term, description] = box.children[i].children;
    if (term.textContent !== name) term.textContent = name;
    if (description.textContent !== value) description.textContent = value;
  });
}

function duration(seconds) {
  return seconds < 10 ? `${number(1000 * seconds)} ms` : `${number(seconds, 1)} s`;
}

function bytes(count) {
  if (count == null) return "–";
  const power = Math.min(3, Math.floor(Math.log10(Math.max(count, 1)) / 3));
  return `${number(count / 1000 ** power, 1)} ${["B", "kB", "MB", "GB"][power]}`;
}

function showCache() {
  if (!facts) return;
  const position = run?.position ?? 0;
  const held = occupancy(facts, run?.prompt ?? 0, position);
  const size = facts.sinks + facts.kept + facts.window;
  const inside = held.sinks + held.kept + held.ring;
  const turned = held.turns ? ` · ${number(held.evicted)} evicted` : "";
  set("cache-text", `${number(inside)} of ${number(size)} tokens${turned}`);
  $("kept-legend").hidden = !facts.kept;
  drawCache($("cache"), facts, held, !position);
}

function showSettings() {
  const state = readForm();
  for (const name of ["temperature", "top_p"]) set(`${name}-out`, Number(state[name]).toFixed(2));
  const parts = [`temperature ${Number(state.temperature)}`, `${state.max} tokens`];
  if (state.seed) parts.push(`seed ${state.seed}`);
  set("settings-sum", parts.join(" · "));
}

// --- the server --------------------------------------------------------------------------------

let looking = null;

function disconnected() {
  set("facts", "The server cannot be reached.");
  $("server").dataset.state = "down";
  clearTimeout(looking);
  looking = setTimeout(connect, 3000);
}

async function connect() {
  try {
    const { data } = await getJson("v1/models", { key: $("key").value });
    const { id, gkv = {} } = data[0];
    const known = model !== null;
    model = id;
    facts = gkv.cache ?? null;
    if (gkv.vocab_size) answer.vocabulary = gkv.vocab_size;
    set("model", model);
    const cache = facts && `${facts.policy} cache of ${number(facts.sinks + facts.kept + facts.window)} tokens`;
    const slots = gkv.slots && `${gkv.slots} slot${gkv.slots > 1 ? "s" : ""}`;
    set("facts", [slots, cache, gkv.dtype].filter(Boolean).join(" · "));
    $("server").dataset.state = run?.running ? "busy" : "up";
    if (gkv.limits?.completion_tokens) $("max").max = gkv.limits.completion_tokens;
    if (!known) {
      const chosen = new URLSearchParams(location.hash.slice(1)).get("backend") ?? "auto";
      const names = new Set(["auto", ...(gkv.backends ?? [])]);
      $("backend").replaceChildren(...[...names].map((name) => option(name)));
      if (names.has(chosen)) $("backend").value = chosen;
      checkGuide();
    }
    showCache();
  } catch (error) {
    if (!(error instanceof ApiError)) return disconnected();
    set("facts", error.status === 401 ? "The server wants an API key." : error.message);
    set("model", "");
    $("server").dataset.state = "down";
  }
}

// --- wiring ------------------------------------------------------------------------------------

function stop() {
  if (run?.running) run.abort.abort();
}

const kinds = Object.entries(KINDS).map(([value, { name }]) => [value, name]);
const views = [["tokens", "Tokens"], ["plain", "Text"], ["json", "JSON"]];
segments($("kinds"), "kind", kinds, chooseKind);
segments($("views"), "view", views, show);
check("view", "tokens");
document.querySelector('input[value="json"]').disabled = true;
$("backend").append(option("auto"));

$("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  start();
});
$("ask").addEventListener("input", (event) => {
  if (event.target.id === "key") return sessionStorage.setItem("gkv_jax.key", event.target.value);
  if (["guide", "strict", "backend"].includes(event.target.id)) checkGuide();
  showSettings();
  remember();
});
$("key").addEventListener("change", connect);
$("guide").addEventListener("keydown", edit);
$("example").addEventListener("change", chooseExample);
$("check").addEventListener("click", () => {
  checkGuide();
  checkOnServer();
});
$("stop").addEventListener("click", stop);
$("again").addEventListener("click", start);
for (const [id, text] of [
  ["copy", () => ($("plain").hidden ? answer.text : $("plain").textContent)],
  ["copy-link", () => `${here()}#${link()}`],
  ["copy-curl", curl],
]) {
  $(id).addEventListener("click", () => copy($(id), text()));
}
document.querySelector(".skip").addEventListener("click", (event) => {
  event.preventDefault(); // what follows # is the state
  $("answer").focus();
});
$("theme").addEventListener("click", () => {
  theme = document.documentElement.dataset.theme === "dark" ? "light" : "dark";
  applyTheme();
  remember();
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) {
    event.preventDefault();
    start();
  } else if (event.key === "Escape" && event.target !== $("guide")) stop(); // there it leaves the field
});
prefersDark.addEventListener("change", applyTheme);
addEventListener("hashchange", restore);
new ResizeObserver(redraw).observe($("result"));

$("key").value = sessionStorage.getItem("gkv_jax.key") ?? "";
if (/Mac|iP/.test(navigator.platform)) document.querySelector("#run kbd").textContent = "⌘ ↵";
applyTheme();
showNumbers([["first token", "–"], ["tokens", "–"], ["tokens/s", "–"], ["tokens per forward", "–"]]);
connect();
examples = await getJson("page/examples.json").catch(() => ({}));
for (const example of examples.json_schema ?? []) example.guide = JSON.stringify(example.guide, null, 2);
restore();
