// The conversations that are kept, beside the chat; on a narrow screen in front of it.

import { when } from "./figures.js";

const LISTED = 100;
const SEARCH_MS = 250;
const WIDE = matchMedia("(width >= 75rem)");
const byId = (id) => document.getElementById(id);

/**
 * Shows the list.
 *
 * @param {object} store Where conversations are kept, see store.js.
 * @param {{renamed: (kept: object) => void, deleted: (id: number) => void, forked: (id: number) => void,
 *   say: (text: string) => void}} told Called after changes; `say` speaks to people who listen to the page.
 */
export class Sidebar {
  #store;
  #told;
  #current = null;
  #limit = LISTED;
  #found = [];
  #listing = 0;
  #open = WIDE.matches;

  constructor(store, told) {
    this.#store = store;
    this.#told = told;
    let waiting = null;
    byId("search").addEventListener("input", () => {
      clearTimeout(waiting);
      waiting = setTimeout(() => {
        this.#limit = LISTED;
        this.refresh(true);
      }, SEARCH_MS);
    });
    byId("history-more").addEventListener("click", () => {
      this.#limit *= 2;
      this.refresh();
    });
    byId("history-toggle").addEventListener("click", () => this.#show(!this.#open));
    byId("history-close").addEventListener("click", () => this.close());
    byId("shade").addEventListener("click", () => this.close());
    WIDE.addEventListener("change", () => this.#show(WIDE.matches, false));
    byId("rename-cancel").addEventListener("click", () => byId("rename").close());
    byId("delete-cancel").addEventListener("click", () => byId("delete").close());
    byId("rename-form").addEventListener("submit", () => this.#rename());
    byId("delete-form").addEventListener("submit", () => this.#remove());
    this.#show(this.#open, false);
  }

  /** Keep conversations elsewhere from now on. */
  set store(store) {
    this.#store = store;
  }

  /** Whether it hides the chat. */
  get covers() {
    return this.#open && !WIDE.matches;
  }

  /** Hide it where it covers the chat, and return to the button that shows it. */
  close() {
    if (!this.covers) return false;
    this.#show(false);
    byId("history-toggle").focus();
    return true;
  }

  /** Hide it where it covers the chat, to go on there. */
  leave() {
    if (this.covers) this.#show(false);
  }

  /** Mark a conversation as the one that is shown; null for none. */
  set current(id) {
    this.#current = id;
    this.#fill();
  }

  /**
   * Ask for the list again.
   *
   * @param {boolean} spoken Tell how many were found.
   * @returns {Promise<object[] | null>} The conversations; null if they are not known.
   */
  async refresh(spoken = false) {
    const search = byId("search").value.trim();
    const number = (this.#listing += 1);
    try {
      const { saved, more, conversations } = await this.#store.list(search, Math.min(this.#limit, 1000));
      if (number !== this.#listing) return null; // a later search is under way
      this.#found = conversations;
      byId("history-more").hidden = !more || this.#limit >= 1000;
      this.note(this.#noteOf(saved, search));
      this.problem("");
      this.#fill();
      if (spoken && search) this.#told.say(`${conversations.length}${more ? " or more" : ""} found`);
      return conversations;
    } catch (error) {
      if (number === this.#listing) this.problem(`The conversations cannot be listed: ${error.message}`);
      return null;
    }
  }

  /** Show what people should know about the list. */
  note(text) {
    show(byId("history-note"), text);
  }

  /** Show what went wrong. */
  problem(text) {
    show(byId("history-problem"), text);
  }

  #noteOf(saved, search) {
    if (!this.#found.length && search) return "Nothing found.";
    if (!saved) return "This server saves no conversations: these stay in this page until you close or reload it.";
    return this.#found.length ? "" : "None yet. Those of the chat on the terminal are shown here too.";
  }

  #show(open, focus = true) {
    this.#open = open;
    const covers = this.covers;
    byId("history").hidden = !open;
    byId("shade").hidden = !covers;
    byId("history-close").hidden = !covers;
    byId("history-toggle").setAttribute("aria-expanded", String(open));
    for (const element of [document.querySelector("header"), byId("chat"), byId("machine")]) element.inert = covers;
    if (covers && focus) byId("search").focus();
  }

  #fill() {
    const focused = document.activeElement?.dataset.item;
    byId("conversations").replaceChildren(...this.#found.map((conversation) => this.#item(conversation)));
    if (focused) document.querySelector(`#conversations [data-item="${focused}"]`)?.focus();
  }

  #item(conversation) {
    const { id, title, updated, turns, found } = conversation;
    const item = make("li", "");
    const link = make("a", "");
    link.href = `#c${id}`;
    link.dataset.item = `open-${id}`;
    link.append(make("span", "title", title || "Without a title"));
    link.append(make("span", "when", `${when(updated)}, ${turns} ${turns === 1 ? "turn" : "turns"}`));
    if (found) link.append(make("span", "found", found));
    // Also for the one that is shown already, which changes no address.
    link.addEventListener("click", () => this.leave());
    item.append(link);
    if (id === this.#current) {
      item.className = "current";
      link.setAttribute("aria-current", "true");
      item.append(this.#actions(conversation));
    }
    return item;
  }

  #actions(conversation) {
    const row = make("div", "actions");
    const { id, title } = conversation;
    const actions = [
      ["Rename", () => this.#askTitle(conversation)],
      ["Fork", () => this.#fork(id)],
      ["Delete", () => this.#askDelete(conversation)],
    ];
    for (const [label, action] of actions) {
      const button = make("button", "plain", label);
      button.type = "button";
      button.dataset.item = `${label}-${id}`;
      button.setAttribute("aria-label", `${label} ${title}`);
      button.addEventListener("click", action);
      row.append(button);
    }
    return row;
  }

  #askTitle({ title }) {
    byId("rename-title").value = title;
    byId("rename").showModal();
    byId("rename-title").select();
  }

  #askDelete({ title }) {
    byId("delete-text").textContent = this.#store.saved
      ? `“${title}” is deleted for good, for the chat on the terminal too.`
      : `“${title}” is deleted for good.`;
    byId("delete").showModal();
  }

  #rename() {
    const id = this.#current;
    const title = byId("rename-title").value.trim();
    if (title && id !== null) this.#change(async () => this.#told.renamed(await this.#store.rename(id, title)));
  }

  #remove() {
    const id = this.#current;
    if (id === null) return;
    this.#change(async () => {
      await this.#store.remove(id);
      this.#told.deleted(id);
    });
  }

  #fork(id) {
    this.#change(async () => this.#told.forked((await this.#store.fork(id)).id));
  }

  async #change(action) {
    let failed = "";
    try {
      await action();
    } catch (error) {
      failed = error.message;
    }
    await this.refresh();
    if (failed) this.problem(failed);
  }
}

function show(element, text) {
  element.hidden = !text;
  if (element.textContent !== text) element.textContent = text;
}

function make(name, className, text = "") {
  const element = document.createElement(name);
  if (className) element.className = className;
  if (text) element.textContent = text;
  return element;
}
