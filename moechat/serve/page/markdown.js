// Markdown of answers, as a tree, and that tree as elements.
//
// Models write what they like, so no text of theirs is ever parsed as HTML: the tree holds strings, and
// `render` makes elements of a fixed set of names, with strings in text nodes. The only attribute that takes
// text of a model is the address of a link, and only of http, https and mailto.
//
// Both functions take time proportional to the text: searches are limited in length and nesting in depth.

const MOST_DEPTH = 6;
const MOST_SEARCH = 4000;
const MOST_CANDIDATES = 64;
const MOST_COLUMNS = 64;

const FENCE = /^( {0,3})(`{3,}|~{3,})\s*([^`]*)$/;
const HEADING = /^ {0,3}(#{1,6})(?:\s+(.*?))?(?:\s+#+)?\s*$/;
const RULE = /^ {0,3}([-*_])(?:[ \t]*\1){2,}[ \t]*$/;
const QUOTE = /^ {0,3}> ?/;
const ITEM = /^( {0,8})([-*+]|\d{1,9}[.)])(?:( {1,4})(?=\S)|[ \t]+|$)/;
const TABLE_RULE = /^ {0,3}\|?\s*:?-+:?\s*(\|\s*:?-+:?\s*)*\|?\s*$/;
const ESCAPABLE = /[!-/:-@[-`{-~]/;
const ADDRESS = /^https?:\/\/[^\s<>"']+/;
const WORD = /[\p{L}\p{N}_]/u;

/**
 * Parse a text, complete or not.
 *
 * @param {string} text Markdown.
 * @returns {Array<object>} Blocks; each has a `type`, and `source`, the lines that it was made from.
 */
export function parse(text) {
  return blocks(text.replace(/\r\n?/g, "\n").split("\n"), 0);
}

function blocks(lines, depth) {
  const found = [];
  let at = 0;
  while (at < lines.length) {
    if (!lines[at].trim()) {
      at += 1;
      continue;
    }
    const begin = at;
    const [block, end] = depth < MOST_DEPTH ? blockAt(lines, at, depth) : paragraphAt(lines, at);
    at = end;
    block.source = lines.slice(begin, end).join("\n");
    found.push(block);
  }
  return found;
}

function blockAt(lines, at, depth) {
  const line = lines[at];
  const fence = FENCE.exec(line);
  if (fence) return codeAt(lines, at, fence);
  const heading = HEADING.exec(line);
  if (heading) {
    return [{ type: "heading", level: heading[1].length, children: inline(heading[2] ?? "") }, at + 1];
  }
  if (RULE.test(line)) return [{ type: "rule" }, at + 1];
  if (QUOTE.test(line)) return quoteAt(lines, at, depth);
  if (ITEM.test(line)) return listAt(lines, at, depth);
  if (line.includes("|") && at + 1 < lines.length && TABLE_RULE.test(lines[at + 1])) {
    const head = cells(line);
    if (head.length === cells(lines[at + 1]).length && head.length <= MOST_COLUMNS) {
      return tableAt(lines, at, head);
    }
  }
  return paragraphAt(lines, at);
}

function codeAt(lines, at, fence) {
  const [, indent, marks, label] = fence;
  const body = [];
  let end = at + 1;
  let closed = false;
  for (; end < lines.length; end += 1) {
    const line = lines[end].trim();
    if (line.startsWith(marks) && line.split(marks[0]).join("") === "") {
      closed = true;
      end += 1;
      break;
    }
    body.push(lines[end].replace(new RegExp(`^ {0,${indent.length}}`), ""));
  }
  return [{ type: "code", language: label.trim().split(/\s/)[0], text: body.join("\n"), closed }, end];
}

function quoteAt(lines, at, depth) {
  const inner = [];
  let end = at;
  while (end < lines.length && lines[end].trim()) {
    if (!QUOTE.test(lines[end]) && begins(lines[end])) break;
    inner.push(lines[end].replace(QUOTE, ""));
    end += 1;
  }
  return [{ type: "quote", children: blocks(inner, depth + 1) }, end];
}

function listAt(lines, at, depth) {
  const first = ITEM.exec(lines[at]);
  const ordered = /\d/.test(first[2]);
  const kind = first[2].slice(-1);
  const items = [];
  let loose = false;
  let end = at;
  while (end < lines.length) {
    const item = ITEM.exec(lines[end]);
    if (!item || item[2].slice(-1) !== kind || RULE.test(lines[end])) break;
    if (item[1].length > first[1].length + 3) break;
    const width = item[1].length + item[2].length + (item[3]?.length ?? 1);
    const inner = [lines[end].slice(item[0].length)];
    end += 1;
    let blank = false;
    while (end < lines.length) {
      const line = lines[end];
      const indent = line.length - line.trimStart().length;
      if (!line.trim()) {
        blank = true;
        inner.push("");
      } else if (indent >= Math.min(width, 2) && (indent >= width || !blank || ITEM.test(line))) {
        if (indent < width && ITEM.test(line) && indent <= first[1].length + 1) break;
        inner.push(line.slice(Math.min(indent, width)));
        if (blank) loose = true;
        blank = false;
      } else if (!blank && !begins(line)) {
        inner.push(line.trimStart());
      } else {
        break;
      }
      end += 1;
    }
    while (inner.length > 1 && !inner[inner.length - 1].trim()) inner.pop();
    if (blank && end < lines.length && ITEM.test(lines[end])) loose = true;
    items.push(blocks(inner, depth + 1));
  }
  const start = ordered ? Number(first[2].slice(0, -1)) : 1;
  return [{ type: "list", ordered, start, loose, items }, end];
}

function cells(line) {
  const trimmed = line.trim().replace(/^\|/, "").replace(/\|$/, "");
  const found = [];
  let cell = "";
  for (let i = 0; i < trimmed.length; i += 1) {
    if (trimmed[i] === "\\" && trimmed[i + 1] === "|") {
      cell += "|";
      i += 1;
    } else if (trimmed[i] === "|") {
      found.push(cell.trim());
      cell = "";
    } else {
      cell += trimmed[i];
    }
  }
  return [...found, cell.trim()];
}

function tableAt(lines, at, head) {
  const align = cells(lines[at + 1]).map((rule) => {
    if (!rule.endsWith(":")) return "left";
    return rule.startsWith(":") ? "center" : "right";
  });
  const rows = [];
  let end = at + 2;
  while (end < lines.length && lines[end].trim() && lines[end].includes("|")) {
    const row = cells(lines[end]).slice(0, head.length);
    while (row.length < head.length) row.push("");
    rows.push(row.map((cell) => inline(cell)));
    end += 1;
  }
  return [{ type: "table", align, head: head.map((cell) => inline(cell)), rows }, end];
}

/** Whether a line begins a block of its own, so that it cannot continue a paragraph. */
function begins(line) {
  return FENCE.test(line) || HEADING.test(line) || RULE.test(line) || QUOTE.test(line) || ITEM.test(line);
}

function paragraphAt(lines, at) {
  const text = [];
  let end = at;
  while (end < lines.length && lines[end].trim() && (end === at || !begins(lines[end]))) {
    text.push(lines[end].trimStart());
    end += 1;
  }
  return [{ type: "paragraph", children: inline(text.join("\n")) }, end];
}

// ---- within a line

/**
 * Parse the text of a paragraph.
 *
 * @param {string} text Without block structure.
 * @param {number} depth Of nesting.
 * @returns {Array<object>} Nodes with a `type`: `text`, `code`, `strong`, `em`, `del`, `link` or `break`.
 */
export function inline(text, depth = 0) {
  const nodes = [];
  let plain = "";
  const flush = () => {
    if (plain) nodes.push({ type: "text", text: plain });
    plain = "";
  };
  let at = 0;
  while (at < text.length) {
    const found = depth < MOST_DEPTH ? spanAt(text, at, depth) : null;
    if (found) {
      const [node, end] = found;
      if (node.type === "text") {
        plain += node.text;
      } else {
        flush();
        nodes.push(node);
      }
      at = end;
    } else {
      plain += text[at];
      at += 1;
    }
  }
  flush();
  return nodes;
}

function spanAt(text, at, depth) {
  const mark = text[at];
  switch (mark) {
    case "\\":
      if (text[at + 1] === "\n") return [{ type: "break" }, at + 2];
      if (ESCAPABLE.test(text[at + 1] ?? "")) return [{ type: "text", text: text[at + 1] }, at + 2];
      return null;
    case "\n":
      return [{ type: "break" }, at + 1];
    case "`":
      return codeSpanAt(text, at);
    case "*":
    case "_":
    case "~":
      return emphasisAt(text, at, depth);
    case "!":
      return text[at + 1] === "[" ? linkAt(text, at + 1, depth) : null;
    case "[":
      return linkAt(text, at, depth);
    case "<":
      return angleAt(text, at);
    case "h":
      return WORD.test(text[at - 1] ?? "") ? null : addressAt(text, at);
    default:
      return null;
  }
}

function runLength(text, at, most) {
  let length = 0;
  while (length < most && text[at + length] === text[at]) length += 1;
  return length;
}

function codeSpanAt(text, at) {
  const length = runLength(text, at, 32);
  const marks = "`".repeat(length);
  const limit = Math.min(text.length, at + MOST_SEARCH);
  let end = at + length;
  while (end < limit) {
    if (text[end] !== "`") {
      end += 1;
      continue;
    }
    const run = runLength(text, end, 32);
    if (run === length) {
      const code = text.slice(at + length, end).replace(/\n/g, " ");
      return [{ type: "code", text: /^ .*[^ ].* $/.test(code) ? code.slice(1, -1) : code }, end + run];
    }
    end += run;
  }
  return [{ type: "text", text: marks }, at + length];
}

function emphasisAt(text, at, depth) {
  const mark = text[at];
  const run = runLength(text, at, 3);
  if (mark === "~" && run !== 2) return null;
  if (mark === "_" && WORD.test(text[at - 1] ?? "")) return [{ type: "text", text: mark.repeat(run) }, at + run];
  if (!/\S/.test(text[at + run] ?? "")) return [{ type: "text", text: mark.repeat(run) }, at + run];
  const marks = mark.repeat(run);
  const limit = Math.min(text.length, at + MOST_SEARCH);
  let end = at + run;
  for (let tried = 0; tried < MOST_CANDIDATES; tried += 1) {
    end = text.indexOf(marks, end);
    if (end < 0 || end >= limit) break;
    const closing = runLength(text, end, 4);
    const after = text[end + closing] ?? "";
    const fits = closing === run || (run < 3 && closing === 3);
    if (fits && /\S/.test(text[end - 1]) && text[end - 1] !== "\\" && !(mark === "_" && WORD.test(after))) {
      const from = closing - run; // the inner emphasis ends here too
      const inner = inline(text.slice(at + run, end + from), depth + 1);
      return [wrapped(mark, run, inner), end + closing];
    }
    end += closing;
  }
  return [{ type: "text", text: marks }, at + run];
}

function wrapped(mark, run, children) {
  if (mark === "~") return { type: "del", children };
  if (run === 1) return { type: "em", children };
  if (run === 2) return { type: "strong", children };
  return { type: "strong", children: [{ type: "em", children }] };
}

function linkAt(text, at, depth) {
  const limit = Math.min(text.length, at + MOST_SEARCH);
  let level = 0;
  let close = -1;
  for (let i = at; i < limit; i += 1) {
    if (text[i] === "\\") i += 1;
    else if (text[i] === "[") {
      level += 1;
      if (level > MOST_CANDIDATES) return null;
    } else if (text[i] === "]") {
      level -= 1;
      if (level === 0) {
        close = i;
        break;
      }
    }
  }
  if (close < 0 || text[close + 1] !== "(") return null;
  const target = /^\(\s*<?([^\s<>()]*(?:\([^\s<>()]*\)[^\s<>()]*)*)>?(?:\s+["'][^"']*["'])?\s*\)/.exec(
    text.slice(close + 1, close + 1 + MOST_SEARCH),
  );
  if (!target) return null;
  const children = inline(text.slice(at + 1, close), depth + 1);
  const href = safeAddress(target[1]);
  const end = close + 1 + target[0].length;
  if (!href) return [{ type: "span", children }, end];
  return [{ type: "link", href, children: children.length ? children : [{ type: "text", text: href }] }, end];
}

function angleAt(text, at) {
  const found = /^<([a-z]{3,6}:[^\s<>]{1,2000})>/i.exec(text.slice(at, at + 2010));
  const href = found && safeAddress(found[1]);
  return href ? [{ type: "link", href, children: [{ type: "text", text: found[1] }] }, at + found[0].length] : null;
}

function addressAt(text, at) {
  if (!text.startsWith("http", at)) return null;
  const found = ADDRESS.exec(text.slice(at, at + 2000));
  if (!found) return null;
  // What ends a sentence is no part of an address; a bracket only if it was opened in it.
  let shown = found[0].replace(/[.,;:!?*_~`]+$/, "");
  if (shown.endsWith(")") && !shown.includes("(")) shown = shown.slice(0, -1);
  const href = safeAddress(shown);
  return href ? [{ type: "link", href, children: [{ type: "text", text: shown }] }, at + shown.length] : null;
}

/**
 * An address that a link may have.
 *
 * @param {string} address From a model.
 * @returns {string | null} It, as the browser writes it; null: it is relative or of another kind.
 */
export function safeAddress(address) {
  let url;
  try {
    url = new URL(address);
  } catch {
    return null;
  }
  return ["http:", "https:", "mailto:"].includes(url.protocol) ? url.href : null;
}

// ---- as elements

const TAGS = { strong: "strong", em: "em", del: "del", span: "span" };

/**
 * Elements for a block.
 *
 * @param {object} block From `parse`.
 * @param {Document} document Makes elements.
 * @returns {HTMLElement}
 */
export function render(block, document) {
  const make = (name, ...children) => {
    const element = document.createElement(name);
    element.append(...children);
    return element;
  };
  const spans = (nodes) =>
    nodes.map((node) => {
      if (node.type === "text") return document.createTextNode(node.text);
      if (node.type === "break") return make("br");
      if (node.type === "code") return make("code", document.createTextNode(node.text));
      if (node.type !== "link") return make(TAGS[node.type], ...spans(node.children));
      const link = make("a", ...spans(node.children));
      link.href = node.href;
      link.target = "_blank";
      link.rel = "noopener noreferrer nofollow";
      return link;
    });
  const inside = (children) => children.map((child) => render(child, document));
  switch (block.type) {
    case "heading":
      // The page has headings of its own above them.
      return make(`h${Math.min(6, block.level + 2)}`, ...spans(block.children));
    case "rule":
      return make("hr");
    case "quote":
      return make("blockquote", ...inside(block.children));
    case "code": {
      const code = make("code", document.createTextNode(block.text));
      const figure = make("div", make("pre", code));
      figure.className = "code";
      if (block.language) {
        const label = make("span", document.createTextNode(block.language.slice(0, 40)));
        label.className = "language";
        figure.prepend(label);
      }
      return figure;
    }
    case "list": {
      const list = make(block.ordered ? "ol" : "ul");
      if (block.ordered && block.start !== 1) list.start = block.start;
      for (const item of block.items) {
        const tight = !block.loose && item[0]?.type === "paragraph";
        const first = tight ? spans(item[0].children) : [];
        list.append(make("li", ...first, ...inside(tight ? item.slice(1) : item)));
      }
      return list;
    }
    case "table": {
      const row = (name, values) =>
        make(
          "tr",
          ...values.map((value, column) => {
            const cell = make(name, ...spans(value));
            cell.className = block.align[column];
            return cell;
          }),
        );
      const table = make("table", make("thead", row("th", block.head)));
      table.append(make("tbody", ...block.rows.map((values) => row("td", values))));
      const scroll = make("div", table);
      scroll.className = "table";
      return scroll;
    }
    default:
      return make("p", ...spans(block.children));
  }
}

/**
 * Show a text that grows: only blocks that have changed are made again.
 *
 * @param {HTMLElement} place Holds the blocks, and nothing else.
 * @param {string} text All of the text so far.
 * @param {(element: HTMLElement, block: object) => void} made Called for each new block.
 */
export function update(place, text, made = () => {}) {
  const wanted = parse(text);
  const shown = place.shownBlocks ?? [];
  let same = 0;
  while (same < shown.length && same < wanted.length && shown[same] === key(wanted[same])) same += 1;
  while (place.childNodes.length > same) place.lastChild.remove();
  for (const block of wanted.slice(same)) {
    const element = render(block, place.ownerDocument);
    made(element, block);
    place.append(element);
  }
  place.shownBlocks = wanted.map(key);
}

function key(block) {
  return `${block.type} ${block.closed ?? ""} ${block.source}`;
}
