// The page: a chat with the model, and the machine at work beside it.

import { Api } from "./api.js";
import { Conversation, addEvent } from "./conversation.js";
import { eventsOf } from "./events.js";
import { count, rate } from "./figures.js";
import { keepLeaving, keepTurns } from "./keeping.js";
import { Machine } from "./machine.js";
import { MessageList } from "./messages.js";
import { Sidebar } from "./sidebar.js";
import { MemoryStore, ServerStore } from "./store.js";

// Milliseconds between two paintings of an answer.
const PAINT_MS = 60;
const SETTINGS = ["system", "temperature", "top_p", "top_k", "min_p", "max_tokens", "seed", "thinking"];
const SAVED =
  "Your messages are answered by the machine that runs this server, and saved there beside those of the chat on the terminal.";
const NOT_SAVED =
  "Your messages are answered by the machine that runs this server. They stay in this page until you close or reload it.";
const byId = (id) => document.getElementById(id);

const api = new Api(askKey);
const list = new MessageList(byId("messages"), byId("scroll"), { again, edit, fork });
const prompt = byId("prompt");
let store = new ServerStore(api);
const sidebar = new Sidebar(store, { renamed, deleted: newChat, forked: (id) => go(id), say });
let conversation = new Conversation();
let running = null; // AbortController of the answer under way
let taken = null; // the draft that was there before the last question is edited
let saving = Promise.resolve(); // turns are kept one after the other

// ---- key and models

function askKey(wrong) {
  const dialog = byId("key-dialog");
  byId("key-text").textContent = wrong
    ? "The server did not accept this key."
    : "This server asks for its key. It is kept in this tab until you close it.";
  byId("key").value = "";
  dialog.showModal();
  return new Promise((resolve) => {
    dialog.addEventListener(
      "close",
      () => {
        const key = byId("key").value.trim();
        byId("key").value = "";
        resolve(key);
      },
      { once: true },
    );
  });
}

// Without the key there is nothing to see behind the dialog.
byId("key-dialog").addEventListener("cancel", (event) => event.preventDefault());

async function loadModels() {
  try {
    const { data } = await (await api.request("/v1/models")).json();
    byId("model").replaceChildren(...data.map(({ id }) => new Option(id, id)));
    byId("model").disabled = data.length < 2;
  } catch (error) {
    say(`The models cannot be listed: ${error.message}`);
  }
}

// ---- answers

/** Tell people who listen to the page. */
function say(text) {
  byId("status").textContent = text;
}

function settings() {
  return Object.fromEntries(SETTINGS.map((name) => [name, byId(name).value]));
}

function show() {
  const busy = running !== null;
  byId("empty").hidden = conversation.messages.length > 0 || taken !== null;
  byId("send").hidden = busy;
  byId("stop").hidden = !busy;
  byId("editing").hidden = taken === null;
  // While the last question is edited, the messages before it are shown as they will be once it is sent.
  const { before } = conversation.lastQuestion;
  list.show(taken ? conversation.messages.slice(0, before) : conversation.messages, busy, taken === null);
}

async function answerTo(answer) {
  const talk = conversation;
  const system = systemPrompt();
  const control = new AbortController();
  running = control;
  answer.model = byId("model").value;
  show();
  say("Answering");
  let painting = null;
  const paint = () => {
    painting ??= setTimeout(() => {
      painting = null;
      if (conversation.last === answer) list.refresh(conversation.messages, running !== null);
    }, PAINT_MS);
  };
  const begun = { at: 0, usage: null, reason: null };
  try {
    const waiting = (text) => {
      answer.note = text;
      paint();
    };
    const response = await begin(talk, answer.model, { signal: control.signal, waiting });
    answer.note = "";
    for await (const { data } of eventsOf(response)) {
      if (data === "[DONE]") break;
      const { usage, reason } = addEvent(answer, JSON.parse(data));
      if (!begun.at && (answer.content || answer.thinking)) begun.at = performance.now();
      begun.usage = usage ?? begun.usage;
      begun.reason = reason ?? begun.reason;
      paint();
    }
    answer.note = noteOf(begun);
    answer.mark = begun.reason === "length" ? "cut" : "";
    if (!begun.reason) throw new Error("The connection ended before the answer did");
  } catch (error) {
    answer.mark = control.signal.aborted ? "stopped" : "failed";
    answer.wrong = !control.signal.aborted;
    answer.note = control.signal.aborted ? "Stopped" : `No answer: ${error.message}`;
    if (answer.wrong && answer.content) answer.note = `The answer ends here: ${error.message}`;
  } finally {
    if (running === control) running = null;
  }
  save(talk, system);
  if (conversation.last !== answer) return;
  clearTimeout(painting);
  painting = null;
  list.refresh(conversation.messages, false);
  byId("send").hidden = false;
  byId("stop").hidden = true;
  say(answer.wrong ? answer.note : `${answer.note}. ${byId("messages").lastElementChild.querySelector(".body").innerText}`);
  focusPrompt();
}

/** Ask for an answer; where the conversation does not fit the model's context, without its oldest messages. */
async function begin(talk, model, options) {
  for (;;) {
    try {
      return await api.request("/v1/chat/completions", { body: talk.request(model, settings()), ...options });
    } catch (error) {
      if (error.code !== "context_length_exceeded" || !talk.sendLess()) throw error;
      if (talk === conversation) list.leftOut(talk.firstSent);
    }
  }
}

function noteOf({ at, usage, reason }) {
  if (!usage) return "";
  const tokens = usage.completion_tokens;
  const seconds = (performance.now() - at) / 1000;
  const speed = at && tokens > 1 && seconds > 0 ? `, ${rate((tokens - 1) / seconds)} tokens/s` : "";
  const cut = reason === "length" ? "; cut off at the limit of tokens" : "";
  return `${count(tokens, "token")}${speed}${cut}`;
}

// ---- conversations that are kept

/** Keep the new turns of a conversation; those that could not be are tried again with each call. */
function save(talk, system) {
  saving = saving
    .then(() => keep(talk, system))
    .catch((error) => {
      sidebar.problem(`This conversation is not saved: ${error.message}. The next answer tries again.`);
    });
}

async function keep(talk, system) {
  const answer = talk === conversation && running ? talk.last : null;
  const { kept, deleted, others } = await keepTurns(store, talk, answer, system);
  if (!kept) return;
  if (deleted) say("The conversation was deleted meanwhile; it goes on as a new one");
  if (talk === conversation) {
    if (others && !deleted) await reopen();
    showPlace();
    if (!taken) list.refresh(conversation.messages, running !== null);
  }
  await sidebar.refresh();
}

function systemPrompt() {
  const text = byId("system").value;
  return text.trim() ? text : "";
}

/** Let the address and the title of the page name the conversation. */
function showPlace() {
  const { id, title } = conversation;
  document.title = title ? `${title} · moechat` : "moechat";
  const place = id === null ? location.pathname : `#c${id}`;
  if (id === null ? location.hash : location.hash !== place) history.replaceState(null, "", place);
  sidebar.current = id;
}

/** Show a kept conversation; null for a new one. */
function go(id) {
  if (id === conversation.id) return;
  history.pushState(null, "", id === null ? location.pathname : `#c${id}`);
  route();
}

function addressed() {
  return Number(/^#c(\d{1,15})$/.exec(location.hash)?.[1] ?? 0) || null;
}

/** Show the conversation that the address names. */
async function route() {
  const id = addressed();
  if (id === conversation.id) return;
  leaveConversation();
  let found = new Conversation();
  if (id !== null) {
    try {
      found = Conversation.from(await store.read(id));
    } catch (error) {
      if (store.saved) sidebar.problem(`That conversation cannot be opened: ${error.message}`);
    }
    if (addressed() !== id) return; // people were faster
    byId("system").value = found.system;
  }
  conversation = found;
  show();
  showPlace();
  say(conversation.id === null ? "New chat" : `${conversation.title}, opened`);
  focusPrompt();
}

/** Read the conversation that is shown again: another program has changed it. */
async function reopen() {
  const talk = conversation;
  const found = Conversation.from(await store.read(talk.id));
  if (talk !== conversation || running || taken) return;
  // What is not kept yet stays.
  for (const pair of talk.unsaved(null)) found.messages.push(...pair);
  if (found.system !== talk.system) byId("system").value = found.system;
  conversation = found;
  show();
}

/** See what other programs have changed. */
async function lookAgain() {
  await saving; // it lists the conversations too, and a list that is overtaken by another tells nothing
  const listed = await sidebar.refresh();
  const now = listed?.find(({ id }) => id === conversation.id);
  if (!now || now.updated === conversation.updated || running || taken) return;
  await reopen().catch((error) => sidebar.problem(error.message));
}

function renamed({ id, title, updated }) {
  if (id !== conversation.id) return;
  Object.assign(conversation, { title, updated });
  showPlace();
}

async function fork({ turn }) {
  if (running || taken || conversation.id === null) return;
  try {
    const { id } = await store.fork(conversation.id, turn);
    go(id);
  } catch (error) {
    sidebar.problem(`The conversation cannot be copied: ${error.message}`);
  }
  await sidebar.refresh();
}

/** Stop what goes on in the conversation that is shown; what was written is kept. */
function leaveConversation() {
  stop();
  running = null;
  if (taken) cancelEdit();
}

// ---- what people do

function send() {
  const text = prompt.value;
  if (!text.trim() || running) return;
  if (taken) conversation.takeBack();
  taken = null;
  prompt.value = "";
  fit();
  answerTo(conversation.ask(text));
}

function again() {
  if (!running && !taken && conversation.messages.length) answerTo(conversation.again());
}

function edit() {
  if (running || taken || !conversation.messages.length) return;
  taken = { draft: prompt.value };
  prompt.value = conversation.lastQuestion.text;
  show();
  fit();
  prompt.focus();
}

function cancelEdit() {
  if (!taken) return;
  prompt.value = taken.draft;
  taken = null;
  show();
  fit();
  prompt.focus();
}

function stop() {
  running?.abort();
}

function newChat() {
  sidebar.leave();
  leaveConversation();
  conversation = new Conversation();
  if (location.hash) history.pushState(null, "", location.pathname);
  show();
  showPlace();
  say("New chat");
  focusPrompt();
}

/** Without a keyboard, one on the screen would open and hide the text. */
function focusPrompt() {
  if (!matchMedia("(pointer: coarse)").matches) prompt.focus();
}

function fit() {
  prompt.style.height = "auto";
  prompt.style.height = `${prompt.scrollHeight + 2}px`;
}

prompt.addEventListener("input", fit);
prompt.addEventListener("keydown", (event) => {
  // Input methods for Chinese, Japanese and others end a word with Enter.
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  send();
});
document.addEventListener("keydown", (event) => {
  if (event.key !== "Escape" || document.querySelector("dialog[open]")) return;
  if (sidebar.close()) return;
  if (running) stop();
  else cancelEdit();
});
byId("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  send();
});
byId("stop").addEventListener("click", stop);
byId("new").addEventListener("click", newChat);
byId("editing-cancel").addEventListener("click", cancelEdit);
byId("settings-open").addEventListener("click", () => byId("settings").showModal());
byId("settings-clear").addEventListener("click", () => {
  for (const name of SETTINGS) byId(name).value = "";
});

window.addEventListener("hashchange", route);
window.addEventListener("popstate", route);
document.addEventListener("visibilitychange", () => {
  if (!document.hidden) lookAgain();
});
window.addEventListener("focus", lookAgain);
window.addEventListener("pagehide", () => {
  const answer = conversation.last;
  if (!running || !answer.content) return;
  answer.mark = "stopped";
  stop();
  keepLeaving(store, conversation, systemPrompt());
});
// Back from the browser's cache, the page may not know its conversation's key.
window.addEventListener("pageshow", (event) => {
  if (event.persisted) location.reload();
});

async function start() {
  show();
  fit();
  await loadModels();
  const { saved } = await store.list("", 1).catch(() => ({ saved: true }));
  if (!saved) {
    store = new MemoryStore();
    sidebar.store = store;
  }
  byId("empty-text").textContent = saved ? SAVED : NOT_SAVED;
  await sidebar.refresh();
  await route();
  new Machine(api).start();
}

await start();
