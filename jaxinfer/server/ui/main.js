// The page: composer, mode, model, status, theme, keyboard, and where the turns are shown.

import { address, key, request } from "./api.js";
import { $, copy, grow, make } from "./dom.js";
import { Metrics } from "./metrics.js";
import { Panel } from "./panel.js";
import { Session } from "./session.js";
import { card } from "./tokens.js";
import { TurnView } from "./turn.js";

const THEMES = ["light dark", "light", "dark"]; // the first: as the system
const THEME_WORDS = ["as the system", "light", "dark"];
const CONTEXT = new Map(); // of each model, in tokens

const views = new Map(); // of turns
const metrics = new Metrics(tellStatus);
const panel = new Panel(() => views.forEach((view) => view.update()));
const session = new Session({
  settings: () => panel.values,
  model: () => $("model").value || undefined,
  added: show,
  removed: (turn) => {
    views.get(turn)?.element.remove();
    views.delete(turn);
  },
  updated: (turn) => {
    views.get(turn)?.update();
    follow();
  },
  changed: refresh,
  refused: askForKey,
});

// turns

const actions = Object.fromEntries(
  ["edit", "retry", "goOn", "branch", "results"].map((name) => [name, (...given) => session[name](...given)]),
);

function show(turn) {
  const view = new TurnView(turn, actions, () => ({ markdown: !panel.values.markdown }));
  views.set(turn, view);
  $("turns").append(view.element);
  follow(true);
}

function showAll() {
  views.clear();
  $("turns").replaceChildren();
  session.turns.forEach(show);
  refresh();
}

// Keeps the end of the conversation in sight while the reader is there.
let follows = true;
function follow(now = false) {
  if (now) follows = true;
  if (follows) requestAnimationFrame(() => requestAnimationFrame(() => ($("transcript").scrollTop = 1e9)));
}

$("transcript").addEventListener("scroll", () => {
  const { scrollTop, scrollHeight, clientHeight } = $("transcript");
  follows = scrollHeight - scrollTop - clientHeight < 40;
  $("latest").hidden = follows;
});
$("latest").addEventListener("click", () => follow(true));

// What depends on whether there are turns, and whether an answer is being written.
function refresh() {
  const isEmpty = !session.turns.length;
  $("welcome").hidden = !isEmpty;
  $("undo").hidden = session.cleared?.mode !== session.mode || !session.cleared.turns.length;
  $("new").hidden = isEmpty;
  $("send").hidden = session.busy;
  $("stop").hidden = !session.busy;
  const wrong = panel.problem();
  $("composer-hint").textContent = wrong;
  $("composer-hint").classList.toggle("wrong", Boolean(wrong));
  metrics.setBusy(session.busy);
}

// composer

const isTouch = matchMedia("(pointer: coarse)").matches;

function setMode(mode) {
  session.mode = mode;
  sessionStorage.setItem("jaxinfer.mode", mode);
  document.querySelector(`[name=mode][value=${mode}]`).checked = true;
  const isChat = mode === "chat";
  $("draft").placeholder = isChat ? "Write a message" : "Write a text for the model to continue";
  $("draft").ariaLabel = isChat ? "Message" : "Prompt";
  $("send").textContent = isChat ? "Send" : "Complete";
  $("welcome-words").textContent = isChat
    ? "Messages go through the model's chat template."
    : "The model continues the text as it is, without a chat template.";
  const sends = isChat ? ["Enter"] : ["Ctrl", "Enter"];
  const keys = [
    ...sends.flatMap((name) => [make("kbd", {}, name), " "]),
    isChat ? "sends" : "completes",
    " · ",
    make("kbd", {}, "?"),
    " lists the keys",
  ];
  document.querySelector(".keys").replaceChildren(...(isTouch ? [] : keys));
  panel.setMode(mode);
  showAll();
}

function submit() {
  const text = $("draft").value;
  if (!text.trim() || session.busy) return;
  $("draft").value = "";
  grow($("draft"));
  session.send(text);
}

$("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  submit();
});
$("draft").addEventListener("input", () => grow($("draft")));
$("draft").addEventListener("keydown", (event) => {
  if (event.key === "ArrowUp" && !$("draft").value && !session.busy) {
    const last = session.turns.findLast((turn) => turn.role === "user" || turn.role === "prompt");
    if (last) {
      event.preventDefault();
      views.get(last).edit();
    }
  }
  if (event.key !== "Enter" || event.isComposing) return;
  const isPlain = !event.shiftKey && !event.altKey && session.mode === "chat" && !isTouch;
  if (isPlain || event.ctrlKey || event.metaKey) {
    event.preventDefault();
    submit();
  }
});
$("stop").addEventListener("click", () => session.stop());
for (const input of document.getElementsByName("mode")) {
  input.addEventListener("change", () => {
    session.stop();
    setMode(input.value);
  });
}

function clear() {
  session.clear();
  showAll();
  $("draft").focus();
}
$("new").addEventListener("click", clear);
$("undo").addEventListener("click", () => {
  session.undo();
  showAll();
});

// the server: models, version, state, key

async function connect() {
  const { data } = await (await request("v1/models")).json();
  const chosen = $("model").value || sessionStorage.getItem("jaxinfer.model");
  data.forEach((model) => CONTEXT.set(model.id, model.max_model_len));
  $("model").replaceChildren(...data.map(({ id }) => make("option", { value: id }, id)));
  if (CONTEXT.has(chosen)) $("model").value = chosen;
  showModel();
  const { version } = await (await request("version")).json();
  $("version").textContent = `jaxinfer ${version}`;
}

function showModel() {
  const name = $("model").value;
  const context = CONTEXT.get(name)?.toLocaleString("en");
  sessionStorage.setItem("jaxinfer.model", name);
  $("model").disabled = CONTEXT.size < 2;
  $("model").title = `${name}, context of ${context} tokens`;
  $("welcome-model").textContent = name.split("/").at(-1);
  $("welcome-context").textContent = `Context of ${context} tokens`;
  document.title = `${name} · jaxinfer`;
}
$("model").addEventListener("change", showModel);

let connected = false;
let connecting = false;

// After each reading of the metrics: null, or the error.
async function tellStatus(error) {
  if (!error && !connected && !connecting) {
    connecting = true;
    try {
      await connect();
      connected = true;
    } catch (failure) {
      error = failure;
    } finally {
      connecting = false;
    }
  }
  if (error) connected = false; // the server may come back with another model
  if (error?.status === 401) askForKey();
  const state = !error ? "ready" : error.code === "loading" ? "loading" : "away";
  const words = {
    ready: "ready",
    loading: "loading the model",
    away: error?.status === 401 ? "needs a key" : "no answer",
  };
  $("status").className = state;
  $("status").lastElementChild.textContent = words[state];
  $("status").title = error?.message ?? "";
  $("forget").hidden = !key.get();
}

function askForKey() {
  metrics.pause();
  if ($("key-dialog").open) return;
  $("key-wrong").hidden = !key.get();
  $("key-wrong").textContent = "The server does not accept this key.";
  $("key").value = "";
  $("key-dialog").showModal();
  $("key").focus();
}

$("key-dialog").addEventListener("submit", (event) => {
  event.preventDefault();
  const entered = $("key").value.trim();
  if (!/^[!-~][ -~]*$/.test(entered)) {
    $("key-wrong").textContent = "A key has only letters, digits and signs of ASCII.";
    $("key-wrong").hidden = false;
    return;
  }
  key.set(entered);
  $("key-dialog").close();
  metrics.resume();
  $("draft").focus();
});
// without a key the page is of no use
$("key-dialog").addEventListener("cancel", (event) => event.preventDefault());
$("forget").addEventListener("click", () => {
  key.forget();
  location.reload();
});

// panel and theme

function togglePanel(open = !document.body.classList.contains("panel-open")) {
  document.body.classList.toggle("panel-open", open);
  $("toggle-panel").ariaExpanded = String(open);
  localStorage.setItem("jaxinfer.panel", open ? "open" : "closed");
  panel.fit();
}
$("toggle-panel").addEventListener("click", () => togglePanel());
$("close-panel").addEventListener("click", () => togglePanel(false));
$("copy-request").addEventListener("click", async () => {
  try {
    await copy($("copy-request"), curl(session.body($("draft").value)));
  } catch (error) {
    $("composer-hint").textContent = error.message;
  }
});

function curl(body) {
  const route = session.mode === "chat" ? "v1/chat/completions" : "v1/completions";
  const quoted = JSON.stringify(body, null, 2).replaceAll("'", "'\\''");
  const auth = key.get() ? ' -H "Authorization: Bearer $API_KEY"' : "";
  return `curl ${address(route)}${auth} -H 'Content-Type: application/json' -d '${quoted}'`;
}

function setTheme(index) {
  document.documentElement.style.colorScheme = THEMES[index];
  localStorage.setItem("jaxinfer.theme", String(index));
  $("theme").title = `Theme: ${THEME_WORDS[index]}`;
}
$("theme").addEventListener("click", () => {
  setTheme((Number(localStorage.getItem("jaxinfer.theme")) + 1) % THEMES.length);
});

// keyboard

const KEYS = {
  "/": () => $("draft").focus(),
  ",": () => togglePanel(),
  n: clear,
  "?": () => $("help").showModal(),
};
$("show-keys").addEventListener("click", KEYS["?"]);

document.addEventListener("keydown", (event) => {
  if (document.querySelector("dialog[open]")) return;
  if (event.key === "Escape") {
    const isNarrow = matchMedia("(max-width: 60rem)").matches;
    if (card.isOpen) card.hide();
    else if (session.busy) session.stop();
    else if (isNarrow && document.body.classList.contains("panel-open")) togglePanel(false);
    return;
  }
  const isTyping = event.target.closest("input:not([type=radio]), textarea, select");
  if (isTyping || event.ctrlKey || event.metaKey || event.altKey) return;
  const work = KEYS[event.key.toLowerCase()];
  if (!work) return;
  event.preventDefault();
  work();
});

window.addEventListener("pagehide", () => session.keep());
setTheme(Number(localStorage.getItem("jaxinfer.theme")) || 0);
setMode(sessionStorage.getItem("jaxinfer.mode") === "completion" ? "completion" : "chat");
const isWide = matchMedia("(min-width: 60rem)").matches;
togglePanel(isWide && localStorage.getItem("jaxinfer.panel") !== "closed");
metrics.resume();
