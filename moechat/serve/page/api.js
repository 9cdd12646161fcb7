// Requests to the server, with its key where it has one.

const KEY = "moechat-key";
const RETRY_MS = 1500;

/** An answer with an error, in words. */
export class ServerError extends Error {
  constructor(status, message, code) {
    super(message);
    this.status = status;
    this.code = code;
  }
}

/**
 * Makes requests; asks for the key once the server wants one.
 *
 * @param {(again: boolean) => Promise<string>} askKey Asks the person for the key; `again`: the last was wrong.
 */
export class Api {
  #askKey;
  #asking = null;

  constructor(askKey) {
    this.#askKey = askKey;
  }

  /**
   * A response that is no error.
   *
   * @param {string} path On this server.
   * @param {{body?: object, method?: string, signal?: AbortSignal, keepalive?: boolean,
   *   waiting?: (text: string) => void}} options `body` is posted, unless there is another method; `keepalive`:
   *   the page may close before the answer; `waiting` is called while the model is loaded.
   * @returns {Promise<Response>}
   */
  async request(path, { body, method, signal, keepalive = false, waiting = () => {} } = {}) {
    for (;;) {
      const key = sessionStorage.getItem(KEY);
      const response = await fetch(path, {
        method: method ?? (body ? "POST" : "GET"),
        headers: {
          ...(body && { "Content-Type": "application/json" }),
          ...(key && { Authorization: `Bearer ${key}` }),
        },
        body: body && JSON.stringify(body),
        signal,
        keepalive,
        credentials: "omit",
        cache: "no-store",
      });
      if (response.ok) return response;
      const error = await errorOf(response);
      if (error.status === 401) {
        await this.#newKey(key);
      } else if (error.code === "model_loading") {
        waiting(error.message);
        await pause(RETRY_MS, signal);
      } else {
        throw error;
      }
    }
  }

  /** Ask for the key; several requests that need it ask once. */
  async #newKey(tried) {
    if (sessionStorage.getItem(KEY) !== tried) return;
    this.#asking ??= this.#askKey(tried !== null)
      .then((key) => sessionStorage.setItem(KEY, key))
      .finally(() => {
        this.#asking = null;
      });
    await this.#asking;
  }
}

async function errorOf(response) {
  let found;
  try {
    found = (await response.json()).error;
  } catch {
    found = null;
  }
  return new ServerError(response.status, found?.message ?? `The server answered ${response.status}`, found?.code);
}

/** Wait; an abort ends it with an error. */
export function pause(milliseconds, signal) {
  return new Promise((resolve, reject) => {
    const timer = setTimeout(done, milliseconds);
    function done() {
      signal?.removeEventListener("abort", stop);
      resolve();
    }
    function stop() {
      clearTimeout(timer);
      reject(signal.reason);
    }
    if (signal?.aborted) stop();
    else signal?.addEventListener("abort", stop, { once: true });
  });
}
