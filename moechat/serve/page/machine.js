// The machine at work: follows the state of the server while somebody looks.

import { pause } from "./api.js";
import { eventsOf } from "./events.js";
import { PLACES, activity, bytes, cellInWords, hitRate, mapInWords, moreMemory, percent } from "./figures.js";
import { MapView } from "./map.js";

const AGAIN_MS = 3000;
const WIDE = "(width >= 60rem)";
const byId = (id) => document.getElementById(id);

/**
 * Shows the state.
 *
 * @param {import("./api.js").Api} api Makes requests.
 */
export class Machine {
  #api;
  #map = null;
  #view = new MapView(byId("map"));
  #following = null;

  constructor(api) {
    this.#api = api;
    const fold = byId("machine-fold");
    fold.open = matchMedia(WIDE).matches;
    fold.addEventListener("toggle", () => this.#reveal(fold));
    document.addEventListener("visibilitychange", () => this.#look());
    for (const input of document.querySelectorAll("input[name=view]")) {
      input.addEventListener("change", () => this.#show(input.value));
    }
    byId("map").addEventListener("pointermove", (event) => this.#point(event));
    byId("map").addEventListener("pointerleave", () => this.#rest());
  }

  /** Follow from now on, while the page is visible. */
  start() {
    this.#look();
  }

  /** On a narrow screen the panel opens below the window. */
  #reveal(fold) {
    if (!fold.open || matchMedia(WIDE).matches) return;
    const still = matchMedia("(prefers-reduced-motion: reduce)").matches;
    fold.scrollIntoView({ block: "start", behavior: still ? "instant" : "smooth" });
  }

  #look() {
    if (document.hidden) {
      this.#following?.abort();
      this.#following = null;
    } else if (!this.#following) {
      this.#following = new AbortController();
      this.#follow(this.#following.signal);
    }
  }

  async #follow(signal) {
    while (!signal.aborted) {
      try {
        const response = await this.#api.request("/moechat/state/stream", { signal });
        for await (const { data } of eventsOf(response)) this.#update(JSON.parse(data));
      } catch (error) {
        if (signal.aborted) return;
        byId("activity").textContent = error.status === 429 ? error.message : "No connection to the server";
      }
      await pause(AGAIN_MS, signal).catch(() => {});
    }
  }

  #update(state) {
    this.#map = state.model ? (state.map ?? this.#map) : null;
    state.map = this.#map;
    set(byId("activity"), activity(state));
    byId("map-part").hidden = !this.#map;
    if (this.#map) this.#drawMap();
    this.#figures(state);
    this.#memory(state);
  }

  #drawMap() {
    const map = this.#map;
    this.#view.show(map);
    byId("map").setAttribute("aria-label", mapInWords(map));
    // Where everything fits, the other places would say nothing.
    const paged = map.uses.length > 0;
    const legend = PLACES.filter(({ key }) => map.counts[key] > 0 || (paged && key !== "cpu"));
    rows(byId("legend"), legend, "li", (item, { key, label }) => {
      item.className = key;
      set(item, `${map.counts[key].toLocaleString("en")} ${label}`);
    });
    for (const input of document.querySelectorAll("input[name=view]")) {
      if (input.value === "uses") input.closest("fieldset").hidden = !map.uses.length;
      if (input.checked && input.value === "uses" && !map.uses.length) {
        document.querySelector("input[name=view][value=places]").checked = true;
        this.#show("places");
      }
    }
  }

  #show(view) {
    this.#view.view = view;
    byId("legend").hidden = view !== "places";
    byId("uses-legend").hidden = view !== "uses";
  }

  #point(event) {
    const cell = this.#view.cellAt(event.clientX, event.clientY);
    if (cell) set(byId("cell"), cellInWords(this.#map, cell.row, cell.column));
  }

  #rest() {
    set(byId("cell"), "One row is a layer, one cell an expert.");
  }

  #figures(state) {
    const figures = [];
    const hits = ["last", "all"].map((span) => hitRate(state.hits[span]));
    if (hits[0] !== null) figures.push(["Hit rate, last answer", percent(hits[0])]);
    if (hits[1] !== null) figures.push(["Hit rate, all answers", percent(hits[1])]);
    if (state.link) {
      figures.push(["Link busy", percent(state.link.busy)]);
      figures.push(["Fetched on demand", `${bytes(state.link.demand_bytes_per_s)}/s`]);
      figures.push(["Fetched ahead", `${bytes(state.link.ahead_bytes_per_s)}/s`]);
    }
    figures.push(["Answers under way", String(state.answers.running)]);
    figures.push(["Requests waiting", String(state.answers.waiting)]);
    if (state.model) {
      const { context, type, experts_form: form, held, device } = state.model;
      figures.push(["Context", `${context.toLocaleString("en")} tokens`]);
      figures.push(["Model type", type], ["Weights of experts", form], ["Experts are", held]);
      figures.push(["Computed on", device === "cpu" ? "the CPU" : `the GPU (${device})`]);
    }
    rows(byId("figures"), figures.flat(), null, (item, text) => set(item, text));
  }

  #memory(state) {
    byId("memory-part").hidden = !state.memory;
    if (!state.memory) return;
    const { parts, budget_bytes: budget } = state.memory;
    const used = parts.reduce((sum, part) => sum + part.nbytes, 0);
    const all = [
      ...parts.map((part, at) => ({ ...part, style: `part-${at % 6}` })),
      { name: "free", nbytes: Math.max(0, budget - used), style: "free" },
    ];
    set(byId("memory-title"), `Memory: ${bytes(budget)}${state.memory.given ? " budget" : ", all that was free"}`);
    rows(byId("memory-bar"), all, "div", (item, part) => {
      item.className = part.style;
      item.style.width = `${(100 * part.nbytes) / Math.max(budget, used)}%`;
    });
    rows(byId("memory-parts"), all, "li", (item, part) => {
      item.className = part.style;
      const filled = state.memory.experts_used_bytes;
      const some = part.name === "experts" && filled < part.nbytes ? `, ${bytes(filled)} filled` : "";
      set(item, `${part.name} ${bytes(part.nbytes)}${some}`);
    });
    const more = moreMemory(state);
    byId("more").hidden = !more;
    set(byId("more"), more);
  }
}

/** Set a text, where it differs: unchanged elements keep a selection. */
function set(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

/** Let a parent have a child for each value; without a name, terms and descriptions in turns. */
function rows(parent, values, name, fill) {
  values.forEach((value, at) => {
    const wanted = name ?? (at % 2 ? "dd" : "dt");
    const child = parent.children[at] ?? parent.appendChild(document.createElement(wanted));
    fill(child, value);
  });
  while (parent.children.length > values.length) parent.lastElementChild.remove();
}
