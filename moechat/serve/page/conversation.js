// A conversation as data: its messages, and the requests that continue it. Knows nothing of the page.

/**
 * @typedef {{role: "user" | "assistant", content: string, thinking: string, note: string, wrong: boolean}} Message
 */

const NUMBERS = ["temperature", "top_p", "top_k", "min_p", "max_tokens", "seed"];

/** The messages of a conversation. */
export class Conversation {
  /** @type {Message[]} */
  messages = [];

  /** Add a question, and an empty answer to it, which is returned. */
  ask(text) {
    this.messages.push(message("user", text));
    return this.#answer();
  }

  /** Drop the last answer, and return an empty one in its place. */
  again() {
    if (this.last?.role === "assistant") this.messages.pop();
    return this.#answer();
  }

  /** Drop the last question and its answer; returns the question's text. */
  takeBack() {
    while (this.last?.role === "assistant") this.messages.pop();
    return this.messages.pop()?.content ?? "";
  }

  /** The last message. */
  get last() {
    return this.messages[this.messages.length - 1];
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
      .slice(0, -1)
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
  return { role, content, thinking: "", note: "", wrong: false };
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
