// Draws the map of experts on a canvas: a row for each layer, a cell for each expert.

import { PLACES } from "./figures.js";

const SMALLEST = 2;
const LARGEST = 22;
const TALLEST = 360;

/**
 * Sizes of a map, in the canvas' own pixels.
 *
 * @param {number} rows Layers.
 * @param {number} columns Experts of a layer.
 * @param {number} width Room, in CSS pixels.
 * @param {number} scale Pixels of the canvas for a CSS pixel.
 * @returns {{width: number, height: number, gap: number}} Of a cell, with its gap.
 */
export function cellSize(rows, columns, width, scale) {
  const fit = Math.floor((width * scale) / columns);
  const cell = Math.min(Math.max(fit, SMALLEST), LARGEST * scale);
  const most = Math.max(SMALLEST + 1, Math.floor((TALLEST * scale) / rows));
  const height = Math.min(Math.max(Math.round(cell * 1.2), Math.round(4 * scale)), most);
  // Between small cells a gap would be most of what one sees.
  const gap = Math.min(cell, height) >= 5 * scale ? Math.round(scale) : 0;
  return { width: cell, height, gap };
}

/** A canvas with a map. */
export class MapView {
  #canvas;
  #map = null;
  #view = "places";
  #size = null;
  #drawn = null;

  /** @param {HTMLCanvasElement} canvas Its parent's width is the room. */
  constructor(canvas) {
    this.#canvas = canvas;
    new ResizeObserver(() => this.#redraw()).observe(canvas.parentElement);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.#redraw());
  }

  /** Show a map. */
  show(map) {
    this.#map = map;
    this.#draw();
  }

  /** Show places or uses. */
  set view(view) {
    this.#view = view;
    this.#redraw();
  }

  /** Row and column of the cell at a point of the screen, or null. */
  cellAt(x, y) {
    if (!this.#size || !this.#map) return null;
    const box = this.#canvas.getBoundingClientRect();
    const scale = this.#canvas.width / box.width;
    const row = Math.floor(((y - box.top) * scale) / this.#size.height);
    const column = Math.floor(((x - box.left) * scale) / this.#size.width);
    return this.#map.places[row]?.[column] ? { row, column } : null;
  }

  #redraw() {
    this.#drawn = null;
    this.#draw();
  }

  #draw() {
    const map = this.#map;
    if (!map) return;
    const marks = this.#view === "uses" ? map.uses : map.places;
    const rows = map.places.length;
    const columns = map.places[0]?.length ?? 0;
    const scale = window.devicePixelRatio || 1;
    const size = cellSize(rows, columns, this.#canvas.parentElement.clientWidth, scale);
    if (!this.#drawn || this.#canvas.width !== size.width * columns || this.#drawn.length !== rows) {
      this.#canvas.width = size.width * columns;
      this.#canvas.height = size.height * rows;
      this.#canvas.style.width = `${this.#canvas.width / scale}px`;
      this.#canvas.style.height = `${this.#canvas.height / scale}px`;
      this.#drawn = new Array(rows).fill("");
    }
    this.#size = size;
    const context = this.#canvas.getContext("2d");
    const colours = this.#colours();
    for (let row = 0; row < rows; row += 1) {
      const text = marks[row] ?? "";
      if (text === this.#drawn[row]) continue;
      for (let column = 0; column < columns; column += 1) {
        if (text[column] === this.#drawn[row][column]) continue;
        const [x, y] = [column * size.width, row * size.height];
        context.clearRect(x, y, size.width, size.height);
        context.fillStyle = colours.get(text[column]) ?? "transparent";
        context.fillRect(x, y, size.width - size.gap, size.height - size.gap);
      }
      this.#drawn[row] = text;
    }
  }

  #colours() {
    const style = getComputedStyle(document.documentElement);
    const colour = (name) => style.getPropertyValue(name).trim();
    if (this.#view === "places") return new Map(PLACES.map(({ mark, key }) => [mark, colour(`--${key}`)]));
    const [low, high] = [colour("--use-low"), colour("--use-high")];
    const digits = Array.from({ length: 10 }, (_, digit) => digit);
    return new Map(digits.map((digit) => [String(digit), between(low, high, digit / 9)]));
  }
}

/** A colour between two of the form `#rrggbb`. */
export function between(low, high, share) {
  const mixed = [1, 3, 5].map((at) => {
    const [from, to] = [low, high].map((colour) => parseInt(colour.slice(at, at + 2), 16));
    return Math.round(from + (to - from) * share);
  });
  return `rgb(${mixed.join(" ")})`;
}
