// Where conversations are kept: by the server, or in this page alone. Both have the same methods.

/**
 * @typedef {{id: number, title: string, model: string, updated: number | null, turns: number, found?: string}} Summary
 * @typedef {{id: number, question: string, answer: string, thinking: string, mark: string, model: string}} Turn
 * @typedef {{id: number, title: string, updated: number, turn_ids: number[], added_ids: number[]}} Kept `turn_ids`
 *   are those of all its turns, `added_ids` those of new ones.
 */

const ADDRESS = "/moechat/conversations";
const TITLE_CHARACTERS = 60;
const MOST_KEPT_ALIVE = 15_000; // characters: of up to 4 bytes

/** The conversations that the server keeps: those of the chat on the terminal. */
export class ServerStore {
  #api;
  saved = true;

  /** @param {import("./api.js").Api} api Makes requests. */
  constructor(api) {
    this.#api = api;
  }

  /** @returns {Promise<{saved: boolean, more: boolean, conversations: Summary[]}>} Those used last first. */
  list(search, limit) {
    return this.#json(`${ADDRESS}?${new URLSearchParams({ search, limit })}`);
  }

  /** @returns {Promise<{id: number, title: string, system: string | null, updated: number, turns: Turn[]}>} */
  read(id) {
    return this.#json(`${ADDRESS}/${id}`);
  }

  /**
   * Keep new turns.
   *
   * @param {number | null} id The conversation; null begins one.
   * @param {{turns: object[], undone: number[], system?: string}} change New turns, and keys of those taken back.
   * @returns {Promise<Kept>}
   */
  keep(id, change) {
    const path = id === null ? ADDRESS : `${ADDRESS}/${id}/turns`;
    // So that it is kept if the page closes now; browsers allow that for 64 KiB.
    const keepalive = JSON.stringify(change).length < MOST_KEPT_ALIVE;
    return this.#json(path, { body: change, keepalive });
  }

  /** @returns {Promise<Kept>} */
  rename(id, title) {
    return this.#json(`${ADDRESS}/${id}`, { method: "PATCH", body: { title } });
  }

  /** Copy a conversation, up to a turn. @returns {Promise<Kept>} */
  fork(id, through = null) {
    return this.#json(`${ADDRESS}/${id}/fork`, { body: { through } });
  }

  /** Delete a conversation for good. */
  remove(id) {
    return this.#json(`${ADDRESS}/${id}`, { method: "DELETE" });
  }

  async #json(path, options) {
    return (await this.#api.request(path, options)).json();
  }
}

/** Conversations that live as long as the page. */
export class MemoryStore {
  #conversations = new Map();
  #last = 0;
  saved = false;

  async list(search, limit) {
    const words = search.toLowerCase().split(/\s+/).filter(Boolean);
    const found = [...this.#conversations.values()].filter(({ turns }) =>
      words.length ? turns.some((turn) => has(turn, words)) : turns.length,
    );
    found.sort((a, b) => b.updated - a.updated || b.id - a.id);
    return { saved: false, more: found.length > limit, conversations: found.slice(0, limit).map(summary) };
  }

  async read(id) {
    return structuredClone(this.#get(id));
  }

  async keep(id, { turns, undone = [], system }) {
    const kept = id === null ? this.#add({ title: "", system: null, turns: [] }) : this.#get(id);
    const before = kept.turns[0]?.question;
    const added = turns.map((turn) => ({ ...turn, id: this.#number() }));
    kept.turns = [...kept.turns.filter((turn) => !undone.includes(turn.id)), ...added];
    const first = kept.turns[0]?.question ?? "";
    // A title that comes from the first question changes with it.
    if (!kept.title || (before !== undefined && kept.title === titleOf(before))) kept.title = titleOf(first);
    if (system !== undefined) kept.system = system || null;
    kept.updated = Date.now() / 1000;
    return keptOf(kept, added);
  }

  async rename(id, title) {
    const kept = this.#get(id);
    kept.title = titleOf(title) || kept.title;
    return keptOf(kept);
  }

  async fork(id, through = null) {
    const { title, system, turns } = this.#get(id);
    const count = through === null ? turns.length : turns.findIndex((turn) => turn.id === through) + 1;
    const copied = turns.slice(0, count).map((turn) => ({ ...turn, id: this.#number() }));
    return keptOf(this.#add({ title, system, turns: copied }), copied);
  }

  async remove(id) {
    this.#get(id);
    this.#conversations.delete(id);
  }

  #get(id) {
    const found = this.#conversations.get(id);
    if (!found) throw Object.assign(new Error("There is no such conversation"), { code: "conversation_not_found" });
    return found;
  }

  #add(fields) {
    const made = { id: this.#number(), updated: Date.now() / 1000, ...fields };
    this.#conversations.set(made.id, made);
    return made;
  }

  #number() {
    this.#last += 1;
    return this.#last;
  }
}

function has({ question, answer }, words) {
  const text = `${question}\n${answer}`.toLowerCase();
  return words.every((word) => text.includes(word));
}

function summary({ id, title, updated, turns }) {
  return { id, title, model: turns.at(-1)?.model ?? "", updated, turns: turns.length };
}

function keptOf({ id, title, updated, turns }, added = []) {
  const ids = (some) => some.map((turn) => turn.id);
  return { id, title, updated, turn_ids: ids(turns), added_ids: ids(added) };
}

/** The beginning of a question, on one line. */
export function titleOf(question) {
  const words = question.trim().replace(/\s+/g, " ");
  if ([...words].length <= TITLE_CHARACTERS) return words;
  const cut = [...words].slice(0, TITLE_CHARACTERS - 1).join("");
  return `${cut.replace(/ [^ ]*$/, "")}…`;
}
