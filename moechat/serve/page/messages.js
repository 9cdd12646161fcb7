// The messages of the conversation, as elements.

import { update } from "./markdown.js";

/**
 * Shows messages.
 *
 * @param {HTMLElement} list Their list.
 * @param {HTMLElement} scroll Scrolls it.
 * @param {{again: () => void, edit: () => void, fork: (message: object) => void}} actions What the buttons of
 *   messages do; the first two are for the last messages.
 */
export class MessageList {
  #list;
  #scroll;
  #actions;
  #follows = true;
  #open = true;

  constructor(list, scroll, actions) {
    this.#list = list;
    this.#scroll = scroll;
    this.#actions = actions;
    scroll.addEventListener("scroll", () => {
      this.#follows = scroll.scrollHeight - scroll.scrollTop - scroll.clientHeight < 60;
    });
  }

  /**
   * Show all messages anew.
   *
   * @param {Array<object>} messages Of the conversation.
   * @param {boolean} busy The last answer is under way.
   * @param {boolean} open The last messages may be changed.
   */
  show(messages, busy, open) {
    this.#open = open;
    this.#list.replaceChildren(...messages.map((message) => this.#element(message)));
    this.#follows = true;
    this.refresh(messages, busy);
  }

  /** Mark the first messages as no longer sent to the model. */
  leftOut(count) {
    [...this.#list.children].forEach((element, at) => element.classList.toggle("left-out", at < count));
    this.#list.querySelectorAll(".left-out-note").forEach((note) => note.remove());
    const text = `The ${count} oldest messages no longer fit the model's context and are not sent.`;
    if (count) this.#list.children[count - 1]?.append(make("p", "note left-out-note", text));
  }

  /** Show what has changed of the last message, and the buttons. */
  refresh(messages, busy) {
    const last = messages.length - 1;
    [...this.#list.children].forEach((element, at) => {
      const message = messages[at];
      const working = busy && at === last;
      if (at === last) this.#fill(element, message, working);
      const actions = element.querySelector(".actions");
      actions.hidden = working;
      actions.firstChild.hidden = !message.content; // nothing to copy
      const fork = actions.querySelector("[data-fork]");
      if (fork) fork.hidden = busy || !this.#open || message.turn === null;
      for (const button of actions.querySelectorAll("[data-last]")) {
        // The last question is before the last answer.
        button.hidden = busy || !this.#open || at < last - 1;
      }
    });
    if (this.#follows) this.#scroll.scrollTop = this.#scroll.scrollHeight;
  }

  #element(message) {
    const element = make("li", `message ${message.role}`);
    element.append(make("h2", "", message.role === "user" ? "You" : message.model || "Answer"));
    if (message.role === "assistant") {
      const fold = make("details", "thinking");
      fold.append(make("summary", "", "Thinking"), make("div", ""));
      element.append(fold);
    }
    element.append(make("div", "body"), make("p", "note"), this.#buttons(message));
    this.#fill(element, message, false);
    return element;
  }

  #fill(element, message, working) {
    const body = element.querySelector(".body");
    if (message.role === "user") {
      body.textContent = message.content;
    } else {
      update(body, message.content, addCopy);
      const fold = element.querySelector(".thinking");
      fold.hidden = !message.thinking;
      fold.lastChild.textContent = message.thinking.trim();
      fold.firstChild.textContent = working && !message.content ? "Thinking…" : "Thinking";
    }
    body.classList.toggle("waiting", working && !message.content);
    element.setAttribute("aria-busy", String(working));
    const note = element.querySelector(":scope > .note");
    note.hidden = !message.note;
    note.textContent = message.note;
    note.classList.toggle("wrong", message.wrong);
  }

  #buttons(message) {
    const row = make("div", "actions");
    const copy = button("Copy", () => copyText(message.content, copy));
    row.append(copy);
    const [label, action] =
      message.role === "user" ? ["Edit", this.#actions.edit] : ["Answer again", this.#actions.again];
    const last = button(label, action);
    last.dataset.last = "";
    row.append(last);
    if (message.role === "assistant") {
      const fork = button("Fork here", () => this.#actions.fork(message));
      fork.title = "Go on in a copy of the conversation up to here";
      fork.dataset.fork = "";
      row.append(fork);
    }
    return row;
  }
}

function addCopy(element, block) {
  if (block.type !== "code" || !block.closed) return;
  const copy = button("Copy", () => copyText(block.text, copy));
  copy.classList.add("copy");
  copy.setAttribute("aria-label", "Copy this code");
  element.append(copy);
}

async function copyText(text, from) {
  const before = from.textContent;
  try {
    await navigator.clipboard.writeText(text);
    from.textContent = "Copied";
  } catch {
    from.textContent = "Not copied: the browser refused";
  }
  setTimeout(() => {
    from.textContent = before;
  }, 1500);
}

function button(text, action) {
  const element = make("button", "plain", text);
  element.type = "button";
  element.addEventListener("click", action);
  return element;
}

function make(name, className, text = "") {
  const element = document.createElement(name);
  if (className) element.className = className;
  if (text) element.textContent = text;
  return element;
}
