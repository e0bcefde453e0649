// Shows the data of /api. Every text from there goes through `plain` and into a text node.

const at = (id) => document.getElementById(id);

const FETCH_PATIENCE = 30_000; // ms; longer than the server waits for the store
const LATE = 3; // seconds without an answer before a warning
const PAGE = 200; // keys
const MOST = 1000; // keys, the server's limit
const MOST_NOTED = 3; // lanes with a limit
const NOTICE_TIME = 12_000; // ms

const COLUMNS = [
  ["key", "Key", "ascending"],
  ["task", "Holder", "ascending"],
  ["host", "Host", "ascending"],
  ["held", "Held for", "descending"],
  ["lease", "Lease left", "ascending"],
  ["units", "Units", "descending"],
  ["waiting", "Waiting", "descending"],
  ["token", "Token", "descending"],
];
const SHORT = { held: "held", lease: "lease", units: "units", waiting: "waiting" }; // on a phone
const NUMBERS = ["held", "lease", "units", "waiting", "token"];

const session = { csrf: "", readOnly: true, interval: 2 };
const wish = { q: "", sort: "waiting", desc: true, limit: PAGE, lock: "", first: 0 };
const now = { locks: [], details: null, asked: 0, updated: 0, paused: false, failing: "", late: false };
const rows = new Map();

// Text

const SPELT = { "\n": "\\n", "\r": "\\r", "\t": "\\t" };
const HIDDEN = /[\u0000-\u001f\u007f-\u009f\u00ad\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff]|\p{Cs}/gu;

/** Make invisible characters, and those that change the direction of text, visible. */
function plain(text) {
  const spell = (c) => SPELT[c] || `\\u${c.charCodeAt(0).toString(16).padStart(4, "0")}`;
  return String(text).replace(HIDDEN, spell);
}

function make(tag, className = "", text = "") {
  const element = document.createElement(tag);
  if (className) element.className = className;
  if (text !== "") element.textContent = plain(text);
  return element;
}

function put(element, text) {
  const shown = plain(text);
  if (element.textContent !== shown) element.textContent = shown;
}

function seconds(value) {
  if (value < 9.95) return `${value.toFixed(1)} s`;
  if (value < 120) return `${Math.round(value)} s`;
  if (value < 7200) return `${Math.floor(value / 60)} min ${Math.floor(value % 60)} s`;
  if (value < 172_800) return `${Math.floor(value / 3600)} h ${Math.floor((value % 3600) / 60)} min`;
  return `${Math.floor(value / 86_400)} d ${Math.floor((value % 86_400) / 3600)} h`;
}

const whole = (value) => seconds(Math.round(value)).replace(".0 ", " ");
const clock = (epoch) => new Date(epoch * 1000).toLocaleString();
const count = (number) => number.toLocaleString("en");
const left = (lock, passed = 0) =>
  lock.lease === null ? "no end" : seconds(Math.max(0, lock.lease - passed));
const named = (who) => (who.id ? `${who.task || "task"}[${who.id}]` : who.name);
const sentence = (text) => `${text.charAt(0).toUpperCase()}${text.slice(1)}.`;

/** Return the units of a key in use, and the number of units. */
const share = ({ units, most }) => `${count(units)}/${most === null ? "any" : count(most)}`;
const of = (units, most) => `${count(units)} of ${most === null ? "any number of" : count(most)} units`;

/** Return the units and the rates of an operator's limit. */
const allowed = ({ units, rates }) => [...(units === null ? [] : [count(units)]), ...rates];
const inWords = (limit) => (limit.units === 0 ? "paused" : `limit ${allowed(limit).join(" ")}`);

/** Return the reasons why a key with free units admits no holder, and its delayed calls. */
function notes(lock) {
  const { state, limit, laneLimits, rest, opens, later, due } = lock;
  const said = [];
  if (limit) said.push(inWords(limit));
  const lanes = Object.entries(laneLimits);
  for (const [lane, each] of lanes.slice(0, MOST_NOTED)) said.push(`lane ${lane} ${inWords(each)}`);
  if (lanes.length > MOST_NOTED) said.push(`${lanes.length - MOST_NOTED} lanes more`);
  if (rest) said.push(`rests ${seconds(rest)}`);
  else if (opens !== null && state !== "resting") said.push(`next ${opening(lock)}`);
  if (later) said.push(`${count(later)} later, in ${seconds(due)}`);
  return said;
}

/** Return when time alone admits the first waiter. */
const opening = ({ opens, sooner }) => `in ${seconds(opens)}${sooner ? " at the latest" : ""}`;

function somewhere(who) {
  return who.host ? `${named(who)} on ${who.host}, process ${who.pid}` : named(who);
}

// Asking the server

class Refused extends Error {
  constructor(status, answer) {
    super(answer.error || `the page's server answered ${status}`);
    this.status = status;
    this.store = answer.store;
  }
}

async function ask(path, body) {
  const options = { signal: AbortSignal.timeout(FETCH_PATIENCE) };
  if (body) {
    options.method = "POST";
    options.headers = { "Content-Type": "application/json", "X-Distlock-CSRF": session.csrf };
    options.body = JSON.stringify(body);
  }
  const response = await fetch(path, options);
  let answer = {};
  try {
    answer = await response.json();
  } catch {
    if (response.ok) throw new Refused(response.status, {});
  }
  if (!response.ok) throw new Refused(response.status, answer);
  return answer;
}

// The list

function buildColumns() {
  for (const [name, label] of COLUMNS) {
    const cell = make("th", `c-${name}${NUMBERS.includes(name) ? " number" : ""}`);
    cell.scope = "col";
    cell.setAttribute("role", "columnheader");
    const button = make("button", "", label);
    button.type = "button";
    button.dataset.sort = name;
    button.addEventListener("click", () => sortBy(name));
    cell.append(button);
    at("columns").append(cell);
  }
}

function sortBy(name) {
  const first = COLUMNS.find(([column]) => column === name)[2] === "descending";
  wish.desc = wish.sort === name ? !wish.desc : first;
  wish.sort = name;
  showOrder();
  refresh();
}

function showOrder() {
  for (const cell of at("columns").children) {
    const chosen = cell.firstChild.dataset.sort === wish.sort;
    if (chosen) cell.setAttribute("aria-sort", wish.desc ? "descending" : "ascending");
    else cell.removeAttribute("aria-sort");
  }
  const state = new URLSearchParams({ q: wish.q, sort: wish.sort, desc: Number(wish.desc) });
  if (wish.lock) state.set("lock", wish.lock);
  history.replaceState(null, "", `#${state}`);
}

function newRow(name) {
  const row = make("tr");
  row.setAttribute("role", "row");
  for (const [column] of COLUMNS) {
    const cell = make("td", `c-${column}${NUMBERS.includes(column) ? " number" : ""}`);
    cell.setAttribute("role", "cell");
    if (column in SHORT) cell.dataset.label = SHORT[column];
    row.append(cell);
  }
  const key = make("button", "key");
  key.type = "button";
  key.addEventListener("click", () => choose(name));
  row.cells[0].append(key, make("div", "notes"));
  row.cells[1].append(make("div"), make("div", "soft mono"));
  row.cells[2].append(make("div"), make("div", "soft"));
  return row;
}

function fillRow(row, lock) {
  const [key, task, host, , , units, waiting, token] = row.cells;
  const holder = lock.holder;
  const more = lock.holders > 1 ? ` +${count(lock.holders - 1)}` : "";
  const away = { waking: "in flight", resting: "rests" }[lock.state];
  put(key.firstChild, lock.key);
  showNotes(key.lastChild, notes(lock));
  put(task.firstChild, holder ? holder.name + more : "free");
  task.firstChild.className = holder ? "" : "tag";
  put(task.lastChild, holder && !more ? holder.id : "");
  put(host.firstChild, holder ? holder.host || away || "" : "");
  host.firstChild.className = away ? "tag waking" : "";
  put(host.lastChild, holder && holder.pid ? `process ${holder.pid}` : "");
  put(units, lock.mode === "shared" ? share(lock) : lock.mode || "–");
  host.classList.toggle("nothing", !holder);
  const waits = lock.waiting + lock.woken;
  put(waiting, waits ? count(waits) : "–");
  waiting.classList.toggle("some", waits > 0);
  put(token, lock.token === "0" ? "–" : lock.token);
  row.classList.toggle("chosen", lock.name === wish.lock);
  row.classList.toggle("free", !holder);
}

function showNotes(place, said) {
  if (place.textContent === said.join("")) return;
  place.replaceChildren(...said.map((text) => make("span", "tag waking", text)));
}

function showList(answer) {
  now.locks = answer.locks.map((lock) => ({ ...lock, read: performance.now() }));
  const focused = document.activeElement;
  const shown = new Set();
  let before = null;
  for (const lock of now.locks) {
    shown.add(lock.name);
    const row = rows.get(lock.name) || newRow(lock.name);
    rows.set(lock.name, row);
    fillRow(row, lock);
    const place = before ? before.nextSibling : at("rows").firstChild;
    if (row !== place) at("rows").insertBefore(row, place);
    before = row;
  }
  for (const [name, row] of rows) {
    if (!shown.has(name)) {
      row.remove();
      rows.delete(name);
    }
  }
  at("list").classList.toggle("shares", now.locks.some((lock) => lock.mode === "shared"));
  // A row loses the focus when it is moved.
  if (focused !== document.activeElement && focused.isConnected) focused.focus();
  showCount(answer);
}

function showCount({ locks, matching, total, whole, age }) {
  const all = `${whole ? "" : "at least "}${count(total)} ${total === 1 ? "key" : "keys"}`;
  const of = wish.q ? `${count(matching)} of ${all}` : all;
  const cut = locks.length < matching ? `the first ${count(locks.length)} of ${of}` : of;
  put(at("count"), total ? cut : "");
  now.updated = performance.now() - 1000 * age;
  at("more").hidden = locks.length >= matching || wish.limit >= MOST;
  at("empty").hidden = locks.length > 0;
  const none = `No key is held or waited for at ${session.where}.`;
  put(at("empty"), total ? "No key matches." : none);
  document.querySelector("table").hidden = locks.length === 0;
}

/** Update the durations between two answers. */
function tick() {
  const age = (performance.now() - now.updated) / 1000;
  put(at("updated"), now.updated ? `updated ${ago(age)}` : "");
  if (now.failing) return;
  const silent = now.asked ? (performance.now() - now.asked) / 1000 : 0;
  if (silent > LATE) late(`No answer for ${whole(silent)}, from the lock store or the page's server.`);
  for (const lock of now.locks) {
    const row = rows.get(lock.name);
    if (!row) continue;
    const passed = now.paused ? 0 : (performance.now() - lock.read) / 1000;
    const holder = Boolean(lock.holder);
    put(row.cells[3], holder && lock.since ? seconds(lock.held + passed) : "–");
    put(row.cells[4], holder ? left(lock, passed) : "–");
  }
}

const ago = (passed) => (passed < 1.5 ? "now" : `${whole(passed)} ago`);

// One key

function choose(name) {
  wish.lock = name;
  wish.first = 0;
  now.details = null;
  at("details").hidden = false;
  at("main").classList.add("chosen-one");
  showOrder();
  refresh().then(() => at("details-key").focus());
}

function unchoose() {
  const row = rows.get(wish.lock);
  wish.lock = "";
  now.details = null;
  at("details").hidden = true;
  at("main").classList.remove("chosen-one");
  showOrder();
  for (const each of rows.values()) each.classList.remove("chosen");
  (row ? row.querySelector(".key") : at("search")).focus();
}

function showDetails(details) {
  now.details = details;
  const { lock } = details;
  put(at("details-key"), lock.key);
  const states = { held: "held", waking: "in flight", resting: "rests", free: "free" };
  const facts = [["State", states[lock.state]]];
  const shared = lock.mode === "shared";
  if (shared) facts.push(["Shared", `${of(lock.units, lock.most)} in use`]);
  if (lock.holder && !shared) {
    facts.push([lock.holder.thread ? "Thread" : "Task", lock.holder.task]);
    if (lock.holder.id) facts.push(["Task id", lock.holder.id]);
    if (lock.holder.host) facts.push(["Host", lock.holder.host], ["Process", lock.holder.pid]);
    if (lock.since) facts.push(["Since", clock(lock.since)], ["Held for", seconds(lock.held)]);
    facts.push(["Lease left", left(lock)]);
    const [{ asked }] = details.holds;
    if (asked) facts.push(["Asked to leave", askedBy(asked)]);
  }
  if (lock.holder) facts.push(["Token", lock.token]);
  if (lock.limit) facts.push(["Limit", limited(lock.limit)]);
  for (const [lane, limit] of Object.entries(lock.laneLimits)) {
    facts.push(["Limit of a lane", `${lane}: ${limited(limit)}`]);
  }
  if (lock.rest) facts.push(["Rests", `${seconds(lock.rest)} more, without new grants`]);
  const waits = lock.waiting + lock.woken;
  facts.push(["Waiting", waits ? `${count(waits)}, the first for ${seconds(lock.waited)}` : "–"]);
  if (lock.opens !== null) facts.push(["Next", opening(lock) + (lock.sooner ? "" : ", by time alone")]);
  if (lock.later) facts.push(["Later", `${count(lock.later)}, the first in ${seconds(lock.due)}`]);
  if (details.lanes.length) facts.push(["Lanes", details.lanes.map((lane) => turn(lane, lock)).join(", ")]);
  if (lock.identities) facts.push(["Known calls", known(details.calls, lock.identities)]);
  showFacts(facts, lock.state);
  at("actions").hidden = session.readOnly;
  at("release").hidden = !lock.holder || shared;
  at("recall").hidden = at("release").hidden || lock.state === "resting";
  at("wake").hidden = waits === 0;
  at("resume").hidden = !lock.limit;
  showHolds(details);
  showQueue(details);
  showSeen(details);
  showActions(details);
}

/** Return when a holder was asked to leave, and by what. */
function askedBy({ at, by }) {
  return `${clock(at)}, by ${by}`;
}

/** Describe a lane; the first one has the next turn. */
function turn({ name, waiting, share }, { laneLimits }) {
  const more = share === 1 ? [] : [`share ${share}`];
  if (name in laneLimits) more.push(inWords(laneLimits[name]));
  return `${name || "(none)"}: ${count(waiting)}${more.length ? ` (${more.join(", ")})` : ""}`;
}

/** Return the calls with an identity, which duplicates join. */
function known(calls, all) {
  const said = calls.map((call) => `${call.identity} (${call.where})`);
  if (all > calls.length) said.push(`${count(all - calls.length)} more`);
  return said.join(", ");
}

function limited({ units, rates, author, since, until }) {
  const said = [...rates];
  if (units !== null) said.unshift(units ? `${count(units)} unit${units > 1 ? "s" : ""}` : "0: paused");
  if (author) said.push(`by ${author}`);
  if (since) said.push(`since ${clock(since)}`);
  if (until) said.push(`until ${clock(until)}`);
  return said.join(", ");
}

/** Show the holders of a shared key. */
function showHolds({ lock, holds }) {
  const shared = lock.mode === "shared";
  at("holders-title").hidden = at("holders").hidden = !shared;
  keepFocus(at("holders"), () => {
    at("holders").replaceChildren(...(shared ? holds.map((hold) => holdItem(lock, hold)) : []));
  });
}

function holdItem(lock, hold) {
  const item = make("li");
  const who = person(hold.who);
  const states = { waking: "in flight, ", resting: "rests, ", held: "" };
  const place = hold.who.host ? `on ${hold.who.host}, process ${hold.who.pid}, ` : states[hold.state];
  const slot = hold.slot === null ? "" : `, slot ${hold.slot}`;
  const units = `${count(hold.units)} unit${hold.units > 1 ? "s" : ""}${slot}`;
  const asked = hold.asked ? `, asked to leave ${askedBy(hold.asked)}` : "";
  const times = `${hold.since ? `, for ${seconds(hold.held)}` : ""}, lease left ${left(hold)}${asked}`;
  const about = make("div", "soft", place + units + times);
  if (hold.since) about.title = `since ${clock(hold.since)}`;
  who.append(about);
  item.append(make("span", "place", "•"), who);
  if (!session.readOnly) {
    const text = `Release ${named(hold.who) || "what rests"}`;
    if (hold.state !== "resting") {
      const ask = () => confirmRecall(lock, hold);
      item.append(action("Ask to leave…", `ask ${hold.owner}`, `Ask ${named(hold.who)} to leave`, ask));
    }
    item.append(action("Release…", hold.owner, text, () => confirmRelease(lock, hold)));
  }
  return item;
}

function person(who) {
  const place = make("div", "who");
  place.append(make("div", "", who.name || (who.id ? "task" : "no holder")));
  if (who.id) place.append(make("div", "soft mono", who.id));
  return place;
}

/** Make a button for a list that is rebuilt often; *what* identifies it, to keep the focus. */
function action(text, what, label, act) {
  const button = make("button", "danger", text);
  button.type = "button";
  button.dataset.what = what;
  button.setAttribute("aria-label", plain(label));
  button.addEventListener("click", act);
  return button;
}

function keepFocus(list, fill) {
  const focused = list.contains(document.activeElement) ? document.activeElement.dataset.what : undefined;
  fill();
  if (focused) [...list.querySelectorAll("button")].find((b) => b.dataset.what === focused)?.focus();
}

function showFacts(facts, state) {
  const list = at("facts");
  const shape = facts.map(([name]) => name).join();
  if (list.dataset.shape !== shape) {
    list.replaceChildren(...facts.flatMap(([name]) => [make("dt", "", name), make("dd")]));
    list.dataset.shape = shape;
  }
  const values = list.querySelectorAll("dd");
  facts.forEach(([, value], index) => put(values[index], value));
  let tag = values[0].querySelector(".tag");
  if (!tag) {
    tag = make("span", "tag");
    values[0].replaceChildren(tag);
  }
  tag.className = `tag ${state}`;
  put(tag, facts[0][1]);
}

function showQueue({ lock, queue, first, page }) {
  const items = queue.map((waiter) => waiterItem(lock, waiter));
  if (!items.length) items.push(make("li", "none", "No waiters."));
  keepFocus(at("queue"), () => at("queue").replaceChildren(...items));
  at("earlier").hidden = first === 0;
  at("later").hidden = first + page >= Math.max(lock.waiting + lock.later, lock.woken);
}

function waiterItem(lock, waiter) {
  const kinds = { woken: "in flight", parked: "parked", blocked: "blocked", later: "delayed" };
  const item = make("li");
  const away = waiter.due === null ? "→" : "⏲";
  item.append(make("span", "place", waiter.place === null ? away : `${waiter.place + 1}.`));
  const who = person({ ...waiter.who, name: waiter.who.name || "task" });
  const place = waiter.who.host ? ` on ${waiter.who.host}, process ${waiter.who.pid}` : "";
  const waited = waiter.waited === null ? "" : ` for ${seconds(waiter.waited)}`;
  const since = waiter.due === null ? waited : `, in ${seconds(waiter.due)}`;
  const wants = waiter.capacity === 1 ? "" : `, wants ${of(waiter.units, waiter.capacity || null)}`;
  const lane = waiter.lane ? `, lane ${waiter.lane}` : "";
  const leaves = waiter.leaves === null ? "" : `, leaves in ${seconds(waiter.leaves)}`;
  const about = make("div", "soft", kinds[waiter.kind] + place + since + wants + lane + leaves);
  if (waiter.since) about.title = `since ${clock(waiter.since)}`;
  who.append(about);
  item.append(who);
  if (waiter.who.id && waiter.kind !== "blocked" && !session.readOnly) {
    const text = `Drop ${named(waiter.who)}`;
    item.append(action("Drop…", waiter.who.id, text, () => confirmDrop(lock, waiter)));
  }
  return item;
}

/** Show the latest holders of the key that the page's server has seen. */
function showSeen({ seen }) {
  const items = seen.grants.map((grant) => {
    const item = make("li");
    item.append(make("div", "", named(grant.who)));
    const place = grant.who.host ? `on ${grant.who.host}, process ${grant.who.pid}, ` : "";
    const about = make("div", "soft", `${place}${lasted(grant)}`);
    about.title = `since ${clock(grant.since)}, token ${grant.token}`;
    item.append(about);
    return item;
  });
  if (!items.length) items.push(make("li", "none", "No holders seen."));
  put(at("seen-title"), `Last holders (${seen.grants.length} seen)`);
  at("seen").replaceChildren(...items);
  const most = seen.mostWaiting
    ? ` At most ${count(seen.mostWaiting)} waited at once, the first in the queue for ${seconds(seen.longestWait)}.`
    : "";
  put(
    at("seen-about"),
    `The page's server reads the store every ${session.interval} s while a page is open, since ` +
      `${clock(seen.since)}. Holders that came and went between two readings are missing.${most}`,
  );
}

/** Show the recorded actions of operators on the key. */
function showActions({ actions }) {
  const items = actions.map(actionItem);
  at("acted").hidden = !items.length;
  put(at("actions-title"), `Operators (${count(items.length)})`);
  at("acts").replaceChildren(...items);
}

function actionItem({ key, name, author, reason, about, at: when }) {
  const item = make("li");
  const did = about ? `${name} ${about}` : name;
  item.append(make("div", "", key === undefined ? did : `${key}: ${did}`));
  item.append(make("div", "soft", `${clock(when)}, by ${author}${reason ? `: ${reason}` : ""}`));
  return item;
}

/** Show what operators did to any key; each look reads the whole store, so it is not repeated. */
async function showRecent() {
  if (!at("recent").open) return;
  try {
    const items = (await ask("/api/actions")).actions.map(actionItem);
    if (!items.length) items.push(make("li", "none", "Nothing."));
    at("recent-acts").replaceChildren(...items);
  } catch (error) {
    at("recent-acts").replaceChildren(make("li", "none", sentence(error.message)));
  }
}

function lasted({ least, most, has }) {
  if (has) return `has held it for ${seconds(least)}`;
  if (most === null) return `held it for ${seconds(least)} or more`;
  const [from, to] = [seconds(least), seconds(most)];
  return `held it for ${from === to ? from : `${from} to ${to}`}`;
}

// Changes

let agreed = null;

/** Ask for a confirmation and a reason, and for the *terms*: the ids of further fields. */
function confirm(title, lines, yes, change, terms = []) {
  for (const id of ["units", "rate", "minutes"]) {
    at(id).value = "";
    at(id).parentElement.hidden = !terms.includes(id);
  }
  at("terms").hidden = !terms.length;
  put(at("confirm-title"), title);
  at("confirm-text").replaceChildren(...lines);
  put(at("yes"), yes);
  agreed = change;
  at("reason").value = "";
  at("confirm").showModal();
  at("no").focus();
}

function paragraph(...parts) {
  const line = make("p");
  for (const part of parts) line.append(typeof part === "string" ? plain(part) : part);
  return line;
}

const strong = (text) => make("strong", "mono", text);

/** Ask for a confirmation: for the only holder, or for *hold*, one of several. */
function confirmRelease(lock, hold) {
  const holder = hold ? hold.who : lock.holder;
  const name = somewhere(holder) || "What rests";
  const { since, held } = hold || lock;
  const many = hold ? "more units than there are may be in use" : "two may run under this key";
  const notice =
    (hold || lock).state === "waking"
      ? "It is in flight and has not started. It will request the key again when it arrives."
      : `It is not asked. Until it notices, within a third of its lease, ${many}.` +
        " Then it is aborted, unless its lock_on_lost says otherwise.";
  const others = hold && lock.holders > 1 ? " Its other holders keep what they have." : "";
  const next = lock.waiting ? "The next waiter gets it." : "It has no waiters.";
  const asked = { name: lock.name, token: lock.token, ...(hold ? { holder: hold.owner } : {}) };
  confirm(
    "Release this key?",
    [
      paragraph(strong(lock.key)),
      paragraph(strong(name), since ? ` loses it, after ${seconds(held)}.` : " loses it."),
      paragraph(notice),
      paragraph(next + others),
    ],
    "Release it",
    (reason) =>
      change("/api/release", { ...asked, reason }, () => {
        return `Released: ${named(holder) || "what rests"} has lost ${lock.key}.`;
      }),
  );
}

/** As `confirmRelease`, for a holder that keeps the key until it leaves. */
function confirmRecall(lock, hold) {
  const holder = hold ? hold.who : lock.holder;
  const asked = { name: lock.name, token: lock.token, ...(hold ? { holder: hold.owner } : {}) };
  confirm(
    "Ask it to leave?",
    [
      paragraph(strong(lock.key)),
      paragraph(strong(somewhere(holder)), " keeps it until it leaves."),
      paragraph(
        "It is told within a third of its lease. A task is interrupted then by RecalledError, unless" +
          " it declares otherwise; other code sees it in its lock, and goes on.",
      ),
    ],
    "Ask it",
    (reason) =>
      change("/api/recall", { ...asked, reason }, () => {
        return `Asked: ${named(holder)} is to leave ${lock.key}.`;
      }),
  );
}

function confirmDrop(lock, waiter) {
  confirm(
    "Drop this task?",
    [
      paragraph(strong(named(waiter.who)), " is removed from the queue of"),
      paragraph(strong(lock.key)),
      paragraph("It will not run. Its state becomes REVOKED, and a chord that waits for it fails."),
    ],
    "Drop it",
    (reason) =>
      change("/api/drop", { name: lock.name, task_id: waiter.who.id, reason }, () => {
        return `Dropped: ${named(waiter.who)} will not run.`;
      }),
  );
}

function confirmWake({ name, key }) {
  confirm(
    "Wake this key?",
    [paragraph(strong(key)), paragraph("Its next tasks are sent again, if it is free.")],
    "Wake it",
    (reason) =>
      change("/api/wake", { name, reason }, ({ sent }) =>
        sent ? `Sent: ${count(sent)} for ${key}.` : "There was nothing to send.",
      ),
  );
}

/** Return the number in a field; other text as it is, which the server refuses. */
function entered(id, factor = 1) {
  const text = at(id).value.trim();
  const number = factor * Number(text);
  return Number.isFinite(number) ? number : text;
}

const ending = () => ({ seconds: entered("minutes", 60) });

function confirmPause({ name, key }) {
  const text = "Nothing gets it until it is resumed. Its holders keep it.";
  const done = () => `Paused: ${key}.`;
  const pause = (reason) => change("/api/pause", { name, reason, ...ending() }, done);
  confirm("Pause this key?", [paragraph(strong(key)), paragraph(text)], "Pause it", pause, ["minutes"]);
}

function confirmLimit({ name, key }) {
  const text = "The limit overrides what tasks declare. Its holders keep it.";
  const limit = (reason) => {
    const units = at("units").value.trim() ? entered("units") : null;
    const asked = { name, units, rate: at("rate").value.trim(), reason, ...ending() };
    return change("/api/limit", asked, () => `Limited: ${key}.`);
  };
  const lines = [paragraph(strong(key)), paragraph(text)];
  confirm("Limit this key?", lines, "Limit it", limit, ["units", "rate", "minutes"]);
}

function confirmResume({ name, key, limit }) {
  const text = `It was: ${limit.units === 0 ? "paused" : allowed(limit).join(" ")}, by ${limit.author}.`;
  const resume = (reason) =>
    change("/api/resume", { name, reason }, () => `Resumed: ${key} has no limit.`);
  confirm("Remove the limit?", [paragraph(strong(key)), paragraph(text)], "Remove it", resume);
}

async function change(path, body, done) {
  try {
    notify(done(await ask(path, body)));
  } catch (error) {
    const unsure = !(error.status < 500);
    notify(`${sentence(error.message)}${unsure ? " It may have been done all the same." : ""}`, true);
    if (error.status === 403) begin();
  }
  refresh();
  showRecent();
}

let noticeTimer = 0;

function notify(text, bad = false) {
  at("notice").classList.toggle("bad", bad);
  put(at("notice"), text);
  clearTimeout(noticeTimer);
  noticeTimer = setTimeout(() => put(at("notice"), ""), NOTICE_TIME);
}

// Updates

let timer = 0;
let asking = 0;

async function refresh() {
  clearTimeout(timer);
  const turn = ++asking;
  now.asked = performance.now();
  try {
    const query = new URLSearchParams({ sort: wish.sort, desc: Number(wish.desc), limit: wish.limit });
    if (wish.q) query.set("q", wish.q);
    const asked = [ask(`/api/locks?${query}`)];
    const chosen = wish.lock;
    if (chosen) {
      asked.push(ask(`/api/lock?${new URLSearchParams({ name: chosen, first: wish.first })}`));
    }
    const [list, details] = await Promise.all(asked);
    if (turn !== asking) return;
    now.asked = 0;
    if (list.late) late(`The lock store has not answered for ${whole(list.late)}.`);
    else recovered();
    showList(list);
    tick();
    if (details) showDetails(details);
  } catch (error) {
    if (turn !== asking) return;
    now.asked = 0;
    failed(error);
  }
  if (turn === asking) again();
}

function again() {
  clearTimeout(timer);
  if (!now.paused && !document.hidden && !at("main").hidden) {
    timer = setTimeout(refresh, 1000 * session.interval);
  }
}

function failed(error) {
  if (error.status === 401) {
    begin();
    return;
  }
  let [text, cause] = ["The page's server does not answer", "Is celery locks web still running?"];
  if (error.store === "silent") [text, cause] = ["The lock store does not answer", error.message];
  else if (error instanceof Refused) [text, cause] = ["The locks cannot be shown", error.message];
  const silent = now.updated ? performance.now() - now.updated : 0;
  if (!now.failing) now.failing = new Date(Date.now() - silent).toLocaleTimeString();
  warn(`${text}, since ${now.failing}.`, cause);
}

/** Warn of a late answer, before the request fails. */
function late(text) {
  now.late = true;
  warn(text, "");
}

function warn(text, cause) {
  const shown = now.updated ? "; the data below is older" : "";
  put(at("trouble"), `${text} Still trying${shown}.`);
  put(at("cause"), cause);
  at("banner").hidden = false;
  document.body.classList.add("stale");
}

function recovered() {
  if (!now.failing && !now.late) return;
  const failed = now.failing;
  now.failing = "";
  now.late = false;
  at("banner").hidden = true;
  put(at("trouble"), "");
  put(at("cause"), "");
  document.body.classList.remove("stale");
  if (failed) begin(); // the page's server may have been restarted
}

async function begin() {
  let about;
  try {
    about = await ask("/api/session");
  } catch (error) {
    failed(error);
    timer = setTimeout(begin, 1000 * session.interval);
    return;
  }
  const were = at("main").hidden;
  Object.assign(session, about);
  at("login").hidden = !about.login;
  at("main").hidden = about.login;
  at("pause").hidden = about.login;
  at("leave").hidden = !about.leaves;
  at("mode").hidden = !about.readOnly || about.login;
  if (about.login) {
    clearTimeout(timer);
    asking++;
    forget();
    at("token").focus();
    return;
  }
  put(at("title"), `of ${about.title}`);
  put(at("where"), about.where);
  document.title = plain(`Locks of ${about.title}`);
  if (were) refresh();
}

/** Remove all data about locks from the page after the session has ended. */
function forget() {
  at("rows").replaceChildren();
  rows.clear();
  now.locks = [];
  Object.assign(now, { failing: "", late: false, asked: 0, updated: 0 });
  for (const id of ["trouble", "cause", "where", "updated", "count", "empty", "seen-about"]) put(at(id), "");
  at("banner").hidden = true;
  document.body.classList.remove("stale");
  at("details").hidden = true;
  at("facts").replaceChildren();
  delete at("facts").dataset.shape;
  at("holders").replaceChildren();
  at("queue").replaceChildren();
  at("seen").replaceChildren();
  at("acts").replaceChildren();
  at("recent-acts").replaceChildren();
  put(at("details-key"), "");
  if (at("confirm").open) at("confirm").close();
}

async function logIn(event) {
  event.preventDefault();
  const token = at("token").value;
  at("token").value = "";
  put(at("wrong"), "");
  try {
    await ask("/api/login", { token });
  } catch (error) {
    put(at("wrong"), sentence(error.message));
  }
  begin();
}

function restore() {
  const state = new URLSearchParams(location.hash.slice(1));
  const sort = state.get("sort");
  if (COLUMNS.some(([name]) => name === sort)) wish.sort = sort;
  if (state.has("desc")) wish.desc = state.get("desc") === "1";
  const strange = [...state.keys()].filter((name) => !["q", "sort", "desc", "lock"].includes(name));
  if (sort !== null && sort !== wish.sort) strange.push(`sort=${sort}`);
  if (!["0", "1", null].includes(state.get("desc"))) strange.push(`desc=${state.get("desc")}`);
  if (strange.length) notify(`Unknown parameters in the page's address: ${strange.join(", ")}.`, true);
  wish.q = at("search").value = state.get("q") || "";
  wish.lock = state.get("lock") || "";
  at("details").hidden = !wish.lock;
  at("main").classList.toggle("chosen-one", Boolean(wish.lock));
}

let typing = 0;

function listen() {
  at("login").addEventListener("submit", logIn);
  at("leave").addEventListener("click", () => ask("/api/logout", {}).finally(begin));
  at("search").addEventListener("input", () => {
    clearTimeout(typing);
    typing = setTimeout(() => {
      wish.q = at("search").value.trim();
      wish.limit = PAGE;
      showOrder();
      refresh();
    }, 150);
  });
  at("more").addEventListener("click", () => {
    wish.limit = Math.min(MOST, 5 * wish.limit);
    refresh();
  });
  at("pause").addEventListener("click", () => {
    now.paused = !now.paused;
    put(at("pause"), now.paused ? "Resume updates" : "Pause updates");
    if (!now.paused) refresh();
    else clearTimeout(timer);
  });
  at("close").addEventListener("click", unchoose);
  at("release").addEventListener("click", () => confirmRelease(now.details.lock));
  at("recall").addEventListener("click", () => confirmRecall(now.details.lock));
  at("wake").addEventListener("click", () => confirmWake(now.details.lock));
  at("stop").addEventListener("click", () => confirmPause(now.details.lock));
  at("limit").addEventListener("click", () => confirmLimit(now.details.lock));
  at("resume").addEventListener("click", () => confirmResume(now.details.lock));
  at("recent").addEventListener("toggle", showRecent);
  at("earlier").addEventListener("click", () => turnPage(-1));
  at("later").addEventListener("click", () => turnPage(1));
  at("no").addEventListener("click", () => at("confirm").close());
  at("yes").addEventListener("click", () => {
    at("confirm").close();
    agreed(at("reason").value);
  });
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape" && wish.lock && !at("confirm").open) unchoose();
    if (event.key === "/" && !at("main").hidden && event.target.tagName !== "INPUT") {
      event.preventDefault();
      at("search").focus();
    }
  });
  document.addEventListener("visibilitychange", () => {
    if (document.hidden) clearTimeout(timer);
    else if (!now.paused && !at("main").hidden) refresh();
  });
  setInterval(tick, 1000);
}

function turnPage(by) {
  wish.first = Math.max(0, wish.first + by * now.details.page);
  refresh();
}

buildColumns();
restore();
showOrder();
listen();
begin();
