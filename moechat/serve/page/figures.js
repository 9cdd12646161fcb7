// Figures and sentences about the machine, from its state.

/** The places of an expert, by their characters in a map, in the order of the legend. */
export const PLACES = [
  { mark: "m", key: "memory", label: "in memory" },
  { mark: "p", key: "partly", label: "partly in memory" },
  { mark: "w", key: "coming", label: "on its way" },
  { mark: "c", key: "cpu", label: "computed by the CPU" },
  { mark: ".", key: "missing", label: "not in memory" },
];

/** Bytes for people: `1.5 GiB`. */
export function bytes(count) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  let value = count;
  while (value >= 1024 && unit < units.length - 1) {
    value /= 1024;
    unit += 1;
  }
  return `${value >= 100 || unit === 0 ? Math.round(value) : value.toFixed(1)} ${units[unit]}`;
}

/** A share for people: `97 %`, `99.8 %`. */
export function percent(share) {
  const value = 100 * share;
  // Nearly all is not all, and nearly none is not none.
  if (value > 99 && value < 100) return `${Math.min(99.9, value).toFixed(1)} %`;
  if (value > 0 && value < 1) return `${Math.max(0.1, value).toFixed(1)} %`;
  return `${value.toFixed(0)} %`;
}

/** A rate with three figures: `0.82`, `12.3`, `147`. */
export function rate(value) {
  return value >= 100 ? value.toFixed(0) : value >= 10 ? value.toFixed(1) : value.toFixed(2);
}

/** A number with its noun: `1 token`, `5 tokens`. */
export function count(number, noun) {
  return `${number.toLocaleString("en")} ${noun}${number === 1 ? "" : "s"}`;
}

/** Share of experts that were there when they were needed, of rates from the state. */
export function hitRate(rates) {
  return rates === null ? null : rates.full + rates.prefetched;
}

/** The map in words, for those who do not see it. */
export function mapInWords(map) {
  const total = Object.values(map.counts).reduce((sum, number) => sum + number, 0);
  const parts = PLACES.filter(({ key }) => map.counts[key] > 0).map(
    ({ key, label }) => `${map.counts[key].toLocaleString("en")} ${label}`,
  );
  return `${count(total, "expert")} in ${count(map.layers.length, "layer")}: ${parts.join(", ")}`;
}

/** What the machine does, in a short line. */
export function activity(state) {
  if (state.loading) {
    return `Loading ${state.loading.model}: ${state.loading.doing}, ${percent(state.loading.share)}`;
  }
  if (!state.model) return "No model is loaded; the next message loads one";
  const { answers } = state;
  const queue = answers.waiting ? `, ${count(answers.waiting, "request")} waiting` : "";
  if (answers.prompt_total) {
    return `Reading the prompt: ${answers.prompt_done} of ${count(answers.prompt_total, "token")}${queue}`;
  }
  if (answers.running) {
    return `${rate(answers.tokens_per_s)} tokens/s, ${count(answers.running, "answer")} under way${queue}`;
  }
  const last = answers.last_tokens_per_s;
  return last ? `Idle; the last answer ran at ${rate(last)} tokens/s` : "Idle";
}

/** What a larger memory budget would buy; empty if nothing is known. */
export function moreMemory(state) {
  if (!state.model || !state.map) return "";
  if (state.map.counts.memory === Object.values(state.map.counts).reduce((sum, number) => sum + number, 0)) {
    return "Every expert is in memory; a larger budget would not make answers faster.";
  }
  if (!state.more) return "";
  const missing = bytes(state.more.all_experts_bytes);
  const wait = state.more.exposed_ms;
  const time = wait >= 10 ? wait.toFixed(0) : wait.toFixed(1);
  const all = `With ${missing} more, every expert would be in memory.`;
  if (time === "0.0") return all;
  return `${all} The plan expects each token to wait ${time} ms for experts now, and none then.`;
}

/** One cell of the map in words. */
export function cellInWords(map, row, column) {
  const place = PLACES.find(({ mark }) => mark === map.places[row][column]);
  const text = `Layer ${map.layers[row]}, expert ${column}: ${place ? place.label : "unknown"}`;
  if (!map.uses.length) return text;
  const share = (Number(map.uses[row][column]) / 9) ** 2;
  return share ? `${text}; chosen by about ${percent(share)} of recent tokens` : `${text}; not chosen lately`;
}

/**
 * A time for people: the hour of today, the day of this year, or the date.
 *
 * @param {number | null} seconds Since 1970; null if it is not known.
 * @param {Date} now The time that it is compared with.
 */
export function when(seconds, now = new Date()) {
  if (seconds === null) return "some time";
  const then = new Date(1000 * seconds);
  if (then.toDateString() === now.toDateString()) {
    return then.toLocaleTimeString("en-GB", { hour: "2-digit", minute: "2-digit" });
  }
  const year = then.getFullYear() === now.getFullYear() ? {} : { year: "numeric" };
  return then.toLocaleDateString("en-GB", { day: "numeric", month: "short", ...year });
}
