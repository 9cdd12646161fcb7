// A conversation as data: its messages, and the requests that continue it. Knows nothing of the page.

/**
 * @typedef {{role: "user" | "assistant", content: string, thinking: string, note: string, wrong: boolean,
 *   turn: number | null, mark: string, model: string}} Message `turn` is the key of the stored turn, of a question
 *   and its answer; null before it is stored.
 */

const NUMBERS = ["temperature", "top_p", "top_k", "min_p", "max_tokens", "seed"];
const MARKS = { stopped: "Stopped", cut: "Cut off at a limit", failed: "Ended by an error" };

/** The messages of a conversation. */
export class Conversation {
  /** @type {Message[]} */
  messages = [];
  /** Its key where it is kept; null before its first turn is. */
  id = null;
  title = "";
  updated = 0;
  /** The system prompt where it is kept. */
  system = "";
  /** Index of the first message that is sent; older ones no longer fit the model's context. */
  firstSent = 0;
  /** @type {Message[]} Answers that were deleted here; the server may not know yet. */
  dropped = [];

  /** A stored conversation. */
  static from({ id, title, updated, system, turns }) {
    const made = new Conversation();
    Object.assign(made, { id, title, updated, system: system ?? "" });
    for (const turn of turns) {
      const answer = { ...message("assistant", turn.answer), thinking: turn.thinking, mark: turn.mark };
      answer.model = turn.model;
      answer.note = turn.mark ? (MARKS[turn.mark] ?? turn.mark) : "";
      answer.wrong = turn.mark === "failed";
      answer.turn = turn.id;
      made.messages.push({ ...message("user", turn.question), turn: turn.id }, answer);
    }
    return made;
  }

  /** Add a question, and an empty answer to it, which is returned. */
  ask(text) {
    this.messages.push(message("user", text));
    return this.#answer();
  }

  /** Drop the last answer, and return an empty one in its place. */
  again() {
    if (this.last?.role === "assistant") this.#drop();
    if (this.last) this.last.turn = null;
    return this.#answer();
  }

  /** Drop the last question and its answer. */
  takeBack() {
    while (this.last?.role === "assistant") this.#drop();
    this.messages.pop();
  }

  /** The text of the last question, and the number of messages before it. */
  get lastQuestion() {
    const at = this.messages.findLastIndex(({ role }) => role === "user");
    return { text: this.messages[at]?.content ?? "", before: Math.max(0, at) };
  }

  /** Keys of deleted answers that the server has stored. An answer that is being stored gets its key then. */
  get undone() {
    return this.dropped.map(({ turn }) => turn).filter(Boolean);
  }

  /** The last message. */
  get last() {
    return this.messages[this.messages.length - 1];
  }

  /** The keys of its stored turns. */
  get turnIds() {
    return this.messages.filter(({ role, turn }) => role === "assistant" && turn !== null).map(({ turn }) => turn);
  }

  /**
   * The turns that are not stored, as pairs of messages: questions with an answer, or a part of one.
   *
   * @param {Message | null} running An answer under way, which is left out.
   */
  unsaved(running) {
    return this.messages.flatMap((answer, at) => {
      const question = this.messages[at - 1];
      const whole = answer.role === "assistant" && answer.content && question?.role === "user";
      return whole && answer.turn === null && answer !== running ? [[question, answer]] : [];
    });
  }

  /** Forget the oldest question that is sent, and its answer; false if there is only one. */
  sendLess() {
    const next = this.messages.findIndex(({ role }, at) => at > this.firstSent && role === "user");
    if (next < 0) return false;
    this.firstSent = next;
    return true;
  }

  #drop() {
    this.dropped.push(this.messages.pop());
  }

  #answer() {
    const answer = message("assistant", "");
    this.messages.push(answer);
    return answer;
  }

  /**
   * The body of the request for the last, empty answer.
   *
   * @param {string} model A name from /v1/models.
   * @param {Record<string, string>} settings Values of the fields of the form; empty: the model's own.
   */
  request(model, settings) {
    const messages = this.messages
      .slice(this.firstSent, -1)
      // An answer that failed before its first word is no part of the conversation.
      .filter(({ role, content }) => role === "user" || content)
      .map(({ role, content }) => ({ role, content }));
    if (settings.system?.trim()) messages.unshift({ role: "system", content: settings.system });
    const body = { model, messages, stream: true, stream_options: { include_usage: true } };
    for (const name of NUMBERS) {
      const value = Number(settings[name]);
      if ((settings[name] ?? "").trim() && Number.isFinite(value)) body[name] = value;
    }
    if (settings.thinking) body.chat_template_kwargs = { enable_thinking: settings.thinking === "on" };
    return body;
  }
}

function message(role, content) {
  return { role, content, thinking: "", note: "", wrong: false, turn: null, mark: "", model: "" };
}

/**
 * Add an event of a stream to an answer.
 *
 * @param {Message} answer Changed.
 * @param {object} event From the stream.
 * @returns {{usage: object | null, reason: string | null}}
 */
export function addEvent(answer, event) {
  if (event.error) throw new Error(event.error.message);
  const choice = event.choices?.[0];
  answer.content += choice?.delta?.content ?? "";
  answer.thinking += choice?.delta?.reasoning_content ?? "";
  return { usage: event.usage ?? null, reason: choice?.finish_reason ?? null };
}

/** A pair of messages as the body of a request has it. */
export function turnOf([question, answer]) {
  return {
    question: question.content,
    answer: answer.content,
    thinking: answer.thinking,
    mark: answer.mark,
    model: answer.model,
  };
}
