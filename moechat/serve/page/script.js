// The page: a chat with the model, and the machine at work beside it.

import { Api } from "./api.js";
import { Conversation, addEvent } from "./conversation.js";
import { eventsOf } from "./events.js";
import { count, rate } from "./figures.js";
import { Machine } from "./machine.js";
import { MessageList } from "./messages.js";

// Milliseconds between two paintings of an answer.
const PAINT_MS = 60;
const SETTINGS = ["system", "temperature", "top_p", "top_k", "min_p", "max_tokens", "seed", "thinking"];
const byId = (id) => document.getElementById(id);

const api = new Api(askKey);
const list = new MessageList(byId("messages"), byId("scroll"), { again, edit });
const prompt = byId("prompt");
let conversation = new Conversation();
let running = null; // AbortController of the answer under way
let taken = null; // text and answer that were taken back for editing

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
  list.show(conversation.messages, busy, taken === null);
}

async function answerTo(answer) {
  const model = byId("model").value;
  const control = new AbortController();
  running = control;
  answer.model = model;
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
    const response = await api.request("/v1/chat/completions", {
      body: conversation.request(model, settings()),
      signal: control.signal,
      waiting: (text) => {
        answer.note = text;
        paint();
      },
    });
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
    if (!begun.reason) throw new Error("The connection ended before the answer did");
  } catch (error) {
    answer.wrong = !control.signal.aborted;
    answer.note = control.signal.aborted ? "Stopped" : `No answer: ${error.message}`;
    if (answer.wrong && answer.content) answer.note = `The answer ends here: ${error.message}`;
  } finally {
    if (running === control) running = null;
  }
  if (conversation.last !== answer) return;
  clearTimeout(painting);
  painting = null;
  list.refresh(conversation.messages, false);
  byId("send").hidden = false;
  byId("stop").hidden = true;
  say(answer.wrong ? answer.note : `${answer.note}. ${byId("messages").lastElementChild.querySelector(".body").innerText}`);
  if (!matchMedia("(pointer: coarse)").matches) prompt.focus();
}

function noteOf({ at, usage, reason }) {
  if (!usage) return "";
  const tokens = usage.completion_tokens;
  const seconds = (performance.now() - at) / 1000;
  const speed = at && tokens > 1 && seconds > 0 ? `, ${rate((tokens - 1) / seconds)} tokens/s` : "";
  const cut = reason === "length" ? "; cut off at the limit of tokens" : "";
  return `${count(tokens, "token")}${speed}${cut}`;
}

// ---- what people do

function send() {
  const text = prompt.value;
  if (!text.trim() || running) return;
  taken = null;
  prompt.value = "";
  fit();
  answerTo(conversation.ask(text));
}

// While a message is edited, those before it are as they will be once it is sent.

function again() {
  if (!running && !taken && conversation.messages.length) answerTo(conversation.again());
}

function edit() {
  if (running || taken || !conversation.messages.length) return;
  const messages = [...conversation.messages];
  taken = { messages, draft: prompt.value };
  prompt.value = conversation.takeBack();
  show();
  fit();
  prompt.focus();
}

function cancelEdit() {
  if (!taken) return;
  conversation.messages = taken.messages;
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
  stop();
  running = null;
  taken = null;
  conversation = new Conversation();
  show();
  say("New chat");
  prompt.focus();
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

show();
fit();
await loadModels();
new Machine(api).start();
