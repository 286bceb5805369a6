// The page of hgate's admin port: asks for /overview every two seconds and shows it.
// What it shows comes from strangers. It becomes text by textContent, never markup.
"use strict";

const EVERY_MS = 2000;
const TIMEOUT_MS = 8000;
const TYPING_MS = 250;

const $ = (id) => document.getElementById(id);

// Texts.

function bytes(count) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
  let unit = 0;
  while (count >= 1024 && unit < units.length - 1) {
    count /= 1024;
    unit += 1;
  }
  return `${unit === 0 || count >= 100 ? Math.round(count) : count.toFixed(1)} ${units[unit]}`;
}

const rate = (perSecond) => (perSecond === null ? "…" : `${bytes(perSecond)}/s`);

function duration(seconds) {
  const left = Math.abs(seconds);
  if (left < 60) return `${Math.round(left)} s`;
  if (left < 3600) return `${Math.floor(left / 60)} min ${Math.floor(left % 60)} s`;
  if (left < 86400) return `${Math.floor(left / 3600)} h ${Math.floor((left % 3600) / 60)} min`;
  return `${Math.floor(left / 86400)} d ${Math.floor((left % 86400) / 3600)} h`;
}

function expiry(seconds) {
  if (seconds === null) return "";
  return seconds > 0 ? `in ${duration(seconds)}` : `expired ${duration(seconds)} ago`;
}

const counted = (count, one, many) => `${count} ${count === 1 ? one : many}`;

// Bytes a second, from what was shown before.

let before = new Map();
let after = new Map();

function rates(key, row, now) {
  const last = before.get(key);
  let found = { up: null, down: null };
  if (last && now <= last.now) {
    found = last.found; // the same numbers once more
  } else if (last) {
    // Less than before: a worker has begun anew.
    const each = (count, earlier) => Math.max(0, count - earlier) / (now - last.now);
    found = { up: each(row.bytes_sent, last.sent), down: each(row.bytes_recv, last.received) };
  }
  after.set(key, { sent: row.bytes_sent, received: row.bytes_recv, now, found });
  return found;
}

// Elements.

function made(tag, text = "", className = "") {
  const element = document.createElement(tag);
  element.textContent = text;
  element.className = className;
  return element;
}

function say(element, text, className) {
  if (element.textContent !== text) element.textContent = text;
  if (className !== undefined && element.className !== className) element.className = className;
}

// Rows stay the same elements as long as they are shown, and so do a selection, a focus and an opened detail.
// What moves loses the focus: unless `ordered`, nothing does.
function keep(parent, items, keyOf, make, update, ordered = true) {
  const known = parent.known || (parent.known = new Map());
  const wanted = new Set();
  let place = parent.firstElementChild;
  for (const item of items) {
    const key = keyOf(item);
    if (wanted.has(key)) continue;
    wanted.add(key);
    if (!known.has(key)) known.set(key, make(item));
    const element = known.get(key);
    update(element, item);
    if (element === place) place = place.nextElementSibling;
    else if (ordered || !element.parentNode) parent.insertBefore(element, place);
  }
  for (const [key, element] of known) {
    if (!wanted.has(key)) {
      element.remove();
      known.delete(key);
    }
  }
}

const classOf = (className, row) => (typeof className === "function" ? className(row) : className || "");

// A column is [heading, the text of a row, the class of a row's cell].
function table(parent, label, columns) {
  const scroll = made("div", "", "scroll");
  scroll.tabIndex = 0;
  scroll.setAttribute("role", "region");
  scroll.setAttribute("aria-label", label);
  const whole = made("table");
  const head = made("tr");
  for (const [heading, , className] of columns) {
    const cell = made("th", heading, classOf(className, {}));
    cell.scope = "col";
    head.append(cell);
  }
  const body = made("tbody");
  const top = made("thead");
  top.append(head);
  whole.append(top, body);
  scroll.append(whole);
  scroll.hidden = true;
  parent.append(scroll);
  return (rows, keyOf) => {
    scroll.hidden = rows.length === 0;
    keep(
      body,
      rows,
      keyOf,
      () => {
        const line = made("tr");
        for (const _ of columns) line.append(made("td"));
        return line;
      },
      (line, row) => {
        columns.forEach(([, text, className], place) => {
          say(line.children[place], String(text(row) ?? ""), classOf(className, row));
        });
      },
    );
  };
}

function list(id, columns, keyOf) {
  const section = $(id);
  const heading = section.querySelector("h2");
  const label = heading.textContent;
  const count = made("span", "", "count");
  heading.append(" ", count);
  const none = made("p", "None.", "none");
  none.hidden = true;
  section.append(none);
  const fill = table(section, label, columns);
  return ({ of, rows }) => {
    const shown = of > rows.length ? `the first ${rows.length} of ${of}; all are in the JSON` : `${of}`;
    say(count, of ? shown : "");
    none.hidden = of > 0;
    fill(rows, keyOf);
  };
}

const pause = (seconds) => (seconds ? `; the next attempt is due in ${seconds} s` : "");
const bad = (isBad) => (row) => (isBad(row) ? "bad" : "");
const soon = (field, seconds) => bad((row) => row[field] !== null && row[field] < seconds);
const SOON_S = 86400;
const TOKEN_SOON_S = 120;

const shows = {
  routes: list(
    "routes",
    [
      ["Names", (row) => row.host],
      ["Kind", (row) => row.kind, "whole"],
      ["Leads to", (row) => row.to],
      ["Token", (row) => row.token],
      ["Comes from", (row) => row.source],
      ["Connections", (row) => row.connections, "number"],
      ["Open", (row) => row.tunnels, "number"],
      ["Opened", (row) => row.opened, "number"],
      ["Failed", (row) => row.failed, (row) => (row.failed ? "number bad" : "number")],
      ["To origin", (row) => rate(row.up), "number"],
      ["To client", (row) => rate(row.down), "number"],
    ],
    (row) => `${row.host}\n${row.source}`,
  ),
  origins: list(
    "origins",
    [
      ["Origin", (row) => row.origin],
      ["Connections", (row) => row.connections, "number"],
      ["Draining", (row) => row.draining, "number"],
      ["Streams", (row) => row.streams, "number"],
      ["Room", (row) => row.room, "number"],
      ["Waiting", (row) => row.waiting, "number"],
      [
        "Last failure",
        (row) => row.failure && `${row.failure}, ${duration(row.failed_s_ago)} ago${pause(row.next_dial_s)}`,
        bad((row) => row.failure),
      ],
    ],
    (row) => row.origin,
  ),
  tunnels: list(
    "tunnels",
    [
      ["Client", (row) => (row.worker ? `${row.from} (worker ${row.worker})` : row.from), "whole"],
      ["Name", (row) => row.name],
      ["Identity", (row) => row.identity],
      ["Route", (row) => row.route],
      ["Goes to", (row) => row.to, "whole"],
      ["State", (row) => row.state, "whole"],
      ["Age", (row) => duration(row.age_s), "number"],
      ["Sent", (row) => bytes(row.bytes_sent), "number"],
      ["Received", (row) => bytes(row.bytes_recv), "number"],
      ["To origin", (row) => rate(row.up), "number"],
      ["To client", (row) => rate(row.down), "number"],
    ],
    (row) => row.id,
  ),
  tokens: list(
    "tokens",
    [
      ["Of", (row) => row.identity],
      ["For", (row) => row.audience],
      ["Expires", (row) => expiry(row.left_s), soon("left_s", TOKEN_SOON_S)],
      ["Accepted so far", (row) => (row.accepted ? "yes" : "no")],
      ["Last failure", (row) => row.failure, bad((row) => row.failure)],
    ],
    (row) => `${row.identity}\n${row.audience}`,
  ),
  certificates: list(
    "certificates",
    [
      ["Certificate", (row) => row.certificate],
      ["Identity", (row) => row.identity],
      ["File", (row) => row.path],
      ["Expires", (row) => expiry(row.left_s), soon("left_s", SOON_S)],
      ["Roots expire", (row) => expiry(row.roots_left_s), soon("roots_left_s", SOON_S)],
    ],
    (row) => `${row.certificate}\n${row.path}`,
  ),
};

function showRefusals(flags, minutes) {
  const section = $("refusals");
  const total = flags.reduce((sum, one) => sum + one.count, 0);
  say(section.querySelector(".count"), `${total} in the last ${minutes} minutes`);
  section.querySelector(".none").hidden = flags.length > 0;
  const parent = section.querySelector(".flags");
  keep(parent, flags, (one) => one.flag, makeFlag, (element, one) => element.show(one), false);
  return total;
}

function makeFlag(one) {
  const element = made("article", "", "flag");
  const heading = made("h3");
  const cause = made("p", `Cause: ${one.meaning}.`);
  const cure = made("p", `Cure: ${one.cure} `);
  const link = made("a", "Read on");
  link.href = `docs/troubleshoot.md#${encodeURIComponent(one.section)}`;
  link.setAttribute("aria-label", `Read on about ${one.flag}`);
  cure.append(link);
  const details = made("details");
  const summary = made("summary");
  details.append(summary);
  const fill = table(details, `Cases of ${one.flag}`, [
    ["Name", (row) => row.name || "none"],
    ["Client", (row) => row.from, "whole"],
    ["Identity", (row) => row.identity],
    ["Message", (row) => row.message],
    ["Tunnel", (row) => (row.was_open ? "was open" : "refused")],
    ["Times", (row) => row.count, "number"],
    ["Last", (row) => `${duration(row.last_s_ago)} ago`, "number"],
  ]);
  element.append(heading, cause, cure, details);
  element.show = (now) => {
    say(heading, `${now.flag}: ${counted(now.count, "time", "times")}`);
    say(summary, counted(now.cases.length, "case", "cases"));
    fill(now.cases, (row) => `${row.name}\n${row.from}\n${row.was_open}`);
  };
  return element;
}

// The picture.

function showPath(now, refused) {
  const choice = $("choice");
  keep(
    choice,
    [{ host: "", name: "all routes" }, ...now.routes.rows.map((row) => ({ host: row.host, name: row.host }))],
    (one) => one.host,
    (one) => {
      const option = choice.querySelector(`option[value=""]`);
      if (one.host === "" && option) return option;
      const another = made("option", one.name);
      another.value = one.host;
      return another;
    },
    () => {},
  );
  const route = now.routes.rows.find((row) => choice.value && row.host === choice.value);
  const of = route || now.totals;
  const connections = route ? route.connections : now.connections;
  const streams = now.origins.rows.reduce((sum, row) => sum + row.streams, 0);
  const pooled = now.origins.rows.reduce((sum, row) => sum + row.connections + row.draining, 0);
  const texts = {
    "client-1": counted(connections, "connection", "connections"),
    "client-2": route ? "" : `of ${now.connections_limit} at most`,
    "hgate-1": `${counted(of.tunnels, "tunnel", "tunnels")} open, ${of.opened} so far`,
    "hgate-2": route ? `${of.failed} failed` : `${refused} refused or failed lately`,
    "origin-1": route ? "" : counted(now.origins.of, "origin", "origins"),
    "origin-2": `${counted(pooled, "connection", "connections")}, ${counted(streams, "stream", "streams")}`,
  };
  if (route) {
    const [kind, way] = route.kind.split(", ");
    texts["origin-1"] = kind;
    texts["origin-2"] = way ? `by ${way}` : "";
  }
  for (const place of [1, 2]) {
    texts[`up-${place}`] = rate(of.up);
    texts[`down-${place}`] = rate(of.down);
  }
  for (const [id, text] of Object.entries(texts)) say($(id), text);
  say($("goes"), route ? `${route.host} leads to ${route.to} (${route.source})` : "");
  say(
    $("picture-title"),
    `client: ${texts["client-1"]}; to hgate ${rate(of.up)}, back ${rate(of.down)}; ` +
      `hgate: ${texts["hgate-1"]}, ${texts["hgate-2"]}; origin: ${texts["origin-1"]} ${texts["origin-2"]}`,
  );
}

// The whole.

let latest = null;
let paused = false;
let busy = false;
let timer = 0;

function show(now) {
  latest = now;
  after = new Map();
  for (const row of now.tunnels.rows) Object.assign(row, rates(`tunnel ${row.id}`, row, now.now));
  for (const row of now.routes.rows) {
    Object.assign(row, rates(`route ${row.host}\n${row.source}`, row, now.now));
  }
  Object.assign(now.totals, rates("totals", now.totals, now.now));
  before = after;
  say($("version"), now.version);
  for (const [id, fill] of Object.entries(shows)) fill(now[id]);
  showPath(now, showRefusals(now.refusals, now.refusals_minutes));
  const wrong = [...now.pending, ...now.silent];
  if (!now.reload_is_good) wrong.push("the file has a mistake and is not in effect: see the log");
  const workers = now.workers > 1 ? ` with ${now.workers} workers` : "";
  say($("state"), wrong.join("; ") || "running", wrong.length ? "bad" : "good");
  const at = new Date(now.now * 1000).toLocaleTimeString();
  say($("updated"), `for ${duration(now.up_s)}${workers}, updated ${at}`);
}

async function update(text) {
  try {
    const asked = text ? `overview?find=${encodeURIComponent(text)}` : "overview";
    const response = await fetch(asked, { signal: AbortSignal.timeout(TIMEOUT_MS), redirect: "error" });
    if (!response.ok) throw new Error(`it answered ${response.status}`);
    show(await response.json());
  } catch (error) {
    say($("state"), `hgate does not answer: ${error.message}; what is shown is old`, "bad");
  }
}

async function go(once = false) {
  clearTimeout(timer);
  if (busy || document.hidden || (paused && once !== true)) return;
  busy = true;
  const text = $("find").value;
  await update(text);
  busy = false;
  const isNew = text !== $("find").value;
  timer = setTimeout(go, isNew ? 0 : EVERY_MS, isNew);
}

$("pause").addEventListener("click", () => {
  paused = !paused;
  $("pause").setAttribute("aria-pressed", String(paused));
  go();
});
$("choice").addEventListener("change", () => {
  if (latest) showPath(latest, latest.refusals.reduce((sum, one) => sum + one.count, 0));
});
$("find").addEventListener("input", () => {
  clearTimeout(timer);
  timer = setTimeout(go, TYPING_MS, true);
});
document.addEventListener("visibilitychange", go);
go();
