// Server-sent events from a response's body: the browser's EventSource can neither post nor send a key.

/** Cuts a stream of text into events. */
export class EventParser {
  #rest = "";
  #data = [];
  #name = "";

  /**
   * Take a piece of the stream.
   *
   * @param {string} text Cut anywhere.
   * @returns {Array<{name: string, data: string}>} The events that are complete.
   */
  feed(text) {
    const lines = (this.#rest + text).split("\n");
    this.#rest = lines.pop();
    const events = [];
    for (const each of lines) {
      const line = each.endsWith("\r") ? each.slice(0, -1) : each;
      if (line === "") {
        if (this.#data.length) events.push({ name: this.#name, data: this.#data.join("\n") });
        this.#data = [];
        this.#name = "";
        continue;
      }
      const colon = line.indexOf(":");
      const field = colon < 0 ? line : line.slice(0, colon);
      const value = colon < 0 ? "" : line.slice(colon + 1).replace(/^ /, "");
      if (field === "data") this.#data.push(value);
      else if (field === "event") this.#name = value;
    }
    return events;
  }
}

/**
 * The events of a response, as they come.
 *
 * @param {Response} response With a stream of events.
 * @yields {{name: string, data: string}}
 */
export async function* eventsOf(response) {
  const reader = response.body.getReader();
  const decoder = new TextDecoder();
  const parser = new EventParser();
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      yield* parser.feed(decoder.decode(value, { stream: true }));
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}
