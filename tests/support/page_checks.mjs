// Checks of the page's modules that need no browser: node --test, beside a copy of the page's files.

import assert from "node:assert/strict";
import { test } from "node:test";

import { Conversation, addEvent, turnOf } from "./page/conversation.js";
import { EventParser } from "./page/events.js";
import * as figures from "./page/figures.js";
import { between, cellSize } from "./page/map.js";
import { keepLeaving, keepTurns } from "./page/keeping.js";
import { inline, parse, render, safeAddress, update } from "./page/markdown.js";
import { MemoryStore, ServerStore, titleOf } from "./page/store.js";

// ---- a document that records what is made

class FakeElement {
  constructor(name, document) {
    this.name = name;
    this.ownerDocument = document;
    this.childNodes = [];
  }

  append(...children) {
    for (const child of children) child.parent = this;
    this.childNodes.push(...children);
  }

  prepend(...children) {
    for (const child of children) child.parent = this;
    this.childNodes.unshift(...children);
  }

  remove() {
    this.parent.childNodes.splice(this.parent.childNodes.indexOf(this), 1);
  }

  get lastChild() {
    return this.childNodes[this.childNodes.length - 1];
  }
}

const fake = {
  createElement: (name) => new FakeElement(name, fake),
  createTextNode: (text) => ({ text }),
};
const OWN = new Set(["name", "ownerDocument", "childNodes", "parent"]);
const NAMES = new Set(
  "p h3 h4 h5 h6 hr blockquote div pre code span ul ol li table thead tbody tr th td a br strong em del".split(" "),
);
const CLASSES = new Set(["code", "language", "table", "left", "right", "center"]);

function elements(text) {
  return parse(text).map((block) => render(block, fake));
}

function textOf(node) {
  return node.text ?? node.childNodes.map(textOf).join("");
}

function outline(node) {
  if (node.text !== undefined) return node.text;
  return `<${node.name}>${node.childNodes.map(outline).join("")}</${node.name}>`;
}

const shown = (text) => elements(text).map(outline).join("");

function assertHarmless(node) {
  if (node.text !== undefined) {
    assert.equal(typeof node.text, "string");
    return;
  }
  assert.ok(NAMES.has(node.name), node.name);
  for (const key of Object.keys(node)) {
    if (OWN.has(key)) continue;
    const value = node[key];
    if (key === "href") assert.match(value, /^(https?:|mailto:)/);
    else if (key === "target") assert.equal(value, "_blank");
    else if (key === "rel") assert.equal(value, "noopener noreferrer nofollow");
    else if (key === "className") assert.ok(CLASSES.has(value), value);
    else if (key === "start") assert.equal(typeof value, "number");
    else assert.fail(`${key} was set to ${value}`);
  }
  node.childNodes.forEach(assertHarmless);
}

// ---- markdown

const HOSTILE = [
  "<script>alert(1)</script>",
  '<img src=x onerror="alert(1)">',
  "[a](javascript:alert(1))",
  "[a](JAVASCRIPT:alert(1))",
  "[a](java\tscript:alert(1))",
  "[a](&#106;avascript:alert(1))",
  "[a](data:text/html,<script>alert(1)</script>)",
  "[a](vbscript:x) [b](file:///etc/passwd) [c](blob:https://x.org/1)",
  "<javascript:alert(1)> <data:text/html;base64,xx>",
  '[a](https://x.org/" onclick="alert(1))',
  "![a](https://x.org/p.png)",
  '```"><script>alert(1)</script>\ncode\n```',
  "```js onload=alert(1)\n</code></pre><script>alert(1)</script>",
  "| a<script> | b |\n|---|---|\n| <iframe src=x> | [x](javascript:1) |",
  "# <svg onload=alert(1)>",
  "> - 1. > <b onmouseover=alert(1)>x</b>",
  "<a href='javascript:alert(1)'>x</a>",
  "https://x.org/<script>alert(1)</script>",
  "__proto__ constructor ** [__proto__](constructor)",
];

test("hostile text yields no element or attribute that runs code", () => {
  for (const text of HOSTILE) {
    for (const element of elements(text)) assertHarmless(element);
  }
  for (const text of HOSTILE.slice(0, 2)) assert.equal(textOf(elements(text)[0]), text);
});

test("any mixture of marks is harmless and keeps every word", () => {
  const pieces = [
    "*", "**", "_", "~~", "`", "```", "\n", "\n\n", "    ", "- ", "1. ", "> ", "# ", "|", "|---|", "[", "](", ")", "]",
    "<", ">", "\\", "word", "Wort", "слово", "😀", " ", "!", "http", "https://x.org/a", "javascript:", "---", "\t", "\r\n",
  ]; // prettier-ignore
  let seed = 12345;
  const next = (below) => {
    seed = (seed * 1103515245 + 12345) % 2147483648;
    return Math.floor((seed / 2147483648) * below);
  };
  for (let round = 0; round < 3000; round += 1) {
    const text = Array.from({ length: 1 + next(40) }, () => pieces[next(pieces.length)]).join("");
    const made = elements(text);
    made.forEach(assertHarmless);
    const found = made.map(textOf).join(" ");
    for (const word of ["Wort", "слово", "😀"]) {
      const count = (where) => where.split(word).length - 1;
      // Words may stand in addresses and languages of code, which are not shown, and in cut rows of tables.
      if (!/\]\(|```|~~~|\|/.test(text)) assert.equal(count(found), count(text), JSON.stringify(text));
    }
  }
});

test("long texts of marks take time in proportion to their length", () => {
  const marks = ["*a ", "**a", "_", "~~x", "`", "``a", "[", "[a](", "[a](b", "<a:", "> ", "- ", "1. ", "|", "# ", "![", "http",
    "https://", "\\", "a|b\n|--|--|\n", "*a _b ", "***", "  - a\n"]; // prettier-ignore
  for (const mark of marks) {
    const begun = performance.now();
    elements(mark.repeat(Math.ceil(100_000 / mark.length)));
    const took = performance.now() - begun;
    assert.ok(took < 4000, `${JSON.stringify(mark)} took ${took} ms`);
  }
});

test("emphasis, code and breaks", () => {
  assert.equal(shown("a *b* **c** ***d*** ~~e~~ `f`"), "<p>a <em>b</em> <strong>c</strong> <strong><em>d</em></strong> <del>e</del> <code>f</code></p>");
  assert.equal(shown("**a *b***"), "<p><strong>a <em>b</em></strong></p>");
  assert.equal(shown("snake_case_name and 2 * 3 * 4 and _x_"), "<p>snake_case_name and 2 * 3 * 4 and <em>x</em></p>");
  assert.equal(shown("a\nb"), "<p>a<br></br>b</p>");
  assert.equal(shown("`` a`b ``"), "<p><code>a`b</code></p>");
  assert.equal(shown("\\*a\\* **b"), "<p>*a* **b</p>");
});

test("links have safe addresses and end where sentences do", () => {
  const [link] = inline("[the *manual*](https://x.org/a_(b) \"title\").");
  assert.equal(link.type, "link");
  assert.equal(link.href, "https://x.org/a_(b)");
  const found = inline("See https://x.org/a?b=1, (https://x.org/c) and <https://x.org/d>.").filter((n) => n.type === "link");
  assert.deepEqual(found.map((n) => n.href), ["https://x.org/a?b=1", "https://x.org/c", "https://x.org/d"]);
  assert.equal(shown("[a](relative/path) [b](#c)"), "<p><span>a</span> <span>b</span></p>");
  assert.equal(safeAddress("ftp://x.org"), null);
  assert.equal(safeAddress("mailto:a@x.org"), "mailto:a@x.org");
});

test("code keeps its text, closed or not", () => {
  const source = "```python\ndef f():\n    return '<b>' # *x*\n\n```\nafter";
  const [code, after] = parse(source);
  assert.deepEqual([code.language, code.text, code.closed], ["python", "def f():\n    return '<b>' # *x*\n", true]);
  assert.equal(after.type, "paragraph");
  assert.deepEqual(parse("~~~\na\n```\nb")[0].text, "a\n```\nb");
  assert.equal(parse("```\nopen")[0].closed, false);
});

test("lists nest, number and hold blocks", () => {
  assert.equal(shown("- a\n- b\n  - c"), "<ul><li>a</li><li>b<ul><li>c</li></ul></li></ul>");
  assert.equal(elements("3. a\n4. b")[0].start, 3);
  assert.equal(
    shown("1. a\n\n   ```\n   x\n   ```\n2. b"),
    "<ol><li><p>a</p><div><pre><code>x</code></pre></div></li><li><p>b</p></li></ol>",
  );
  assert.equal(shown("text\n- a\nmore"), "<p>text</p><ul><li>a<br></br>more</li></ul>");
});

test("quotes, headings, rules and tables", () => {
  assert.equal(shown("> a\n> > b"), "<blockquote><p>a</p><blockquote><p>b</p></blockquote></blockquote>");
  assert.equal(shown("# a\n###### b #"), "<h3>a</h3><h6>b</h6>");
  assert.equal(shown("a\n\n---\n\nb"), "<p>a</p><hr></hr><p>b</p>");
  const [table] = parse("| a | b |\n|:--|--:|\n| 1 | 2 | 3 |\n| 4 |");
  assert.deepEqual(table.align, ["left", "right"]);
  assert.deepEqual(table.rows.map((row) => row.map((cell) => cell[0]?.text ?? "")), [["1", "2"], ["4", ""]]);
  assert.equal(parse("a | b\nc | d")[0].type, "paragraph");
});

test("a growing text makes only changed blocks anew, and ends like the whole text", () => {
  const text = "# T\n\nfirst **bold** one\n\n- a\n- b\n\n```js\nlet a;\n```\n\n| a | b |\n|--|--|\n| 1 | 2 |\n\nlast";
  const place = new FakeElement("div", fake);
  let made = 0;
  for (let end = 0; end <= text.length; end += 1) {
    const before = place.childNodes[0];
    update(place, text.slice(0, end), () => {
      made += 1;
    });
    if (end > 10) assert.equal(place.childNodes[0], before);
  }
  assert.equal(place.childNodes.map(outline).join(""), shown(text));
  assert.ok(made < text.length + 10);
});

// ---- events

test("events are the same wherever the stream is cut", () => {
  const stream = 'event: a\r\ndata: {"x": "😀"}\r\n\r\n: comment\n\ndata: one\ndata:two\n\ndata: [DONE]\n\n';
  const wanted = [
    { name: "a", data: '{"x": "😀"}' },
    { name: "", data: "one\ntwo" },
    { name: "", data: "[DONE]" },
  ];
  for (let cut = 0; cut <= stream.length; cut += 1) {
    const parser = new EventParser();
    assert.deepEqual([...parser.feed(stream.slice(0, cut)), ...parser.feed(stream.slice(cut))], wanted);
  }
  const parser = new EventParser();
  assert.deepEqual([...stream].flatMap((letter) => parser.feed(letter)), wanted);
});

// ---- conversation

test("requests hold the conversation and the settings that were given", () => {
  const conversation = new Conversation();
  const answer = conversation.ask("Hi");
  const settings = { system: "Be kind.", temperature: "0", top_p: " ", seed: "7", max_tokens: "x", thinking: "off" };
  assert.deepEqual(conversation.request("m", settings), {
    model: "m",
    messages: [
      { role: "system", content: "Be kind." },
      { role: "user", content: "Hi" },
    ],
    stream: true,
    stream_options: { include_usage: true },
    temperature: 0,
    seed: 7,
    chat_template_kwargs: { enable_thinking: false },
  });
  answer.content = "Hello";
  conversation.ask("More");
  assert.deepEqual(conversation.request("m", {}).messages.map((one) => one.content), ["Hi", "Hello", "More"]);
  conversation.last.content = "Yes";
  conversation.again();
  assert.deepEqual(conversation.request("m", {}).messages.map((one) => one.content), ["Hi", "Hello", "More"]);
  assert.deepEqual(conversation.lastQuestion, { text: "More", before: 2 });
  conversation.takeBack();
  assert.equal(conversation.messages.length, 2);
});

test("events of a stream add up to an answer, and errors are thrown", () => {
  const answer = new Conversation().ask("x");
  const event = (delta, finish_reason = null) => ({ choices: [{ delta, finish_reason }] });
  addEvent(answer, event({ role: "assistant", content: "" }));
  addEvent(answer, event({ reasoning_content: "hm" }));
  addEvent(answer, event({ content: "a" }));
  assert.equal(addEvent(answer, event({}, "stop")).reason, "stop");
  assert.deepEqual(addEvent(answer, { choices: [], usage: { completion_tokens: 3 } }).usage, { completion_tokens: 3 });
  assert.deepEqual([answer.content, answer.thinking], ["a", "hm"]);
  assert.throws(() => addEvent(answer, { error: { message: "gone" } }), /gone/);
});

// ---- figures and map

const MAP = {
  layers: [1, 2],
  places: ["mpw", "..c"],
  uses: ["930", "000"],
  counts: { memory: 1, partly: 1, coming: 1, cpu: 1, missing: 2 },
};

test("figures are for people", () => {
  assert.deepEqual([0, 1023, 1024, 1536 * 1024, 300 * 2 ** 30].map(figures.bytes), ["0 B", "1023 B", "1.0 KiB", "1.5 MiB", "300 GiB"]);
  assert.deepEqual([0, 0.0001, 0.5, 0.9999, 1].map(figures.percent), ["0 %", "0.1 %", "50 %", "99.9 %", "100 %"]);
  assert.deepEqual([0.5, 12.34, 147.2].map(figures.rate), ["0.50", "12.3", "147"]);
  assert.equal(figures.mapInWords(MAP), "6 experts in 2 layers: 1 in memory, 1 partly in memory, 1 on its way, 1 computed by the CPU, 2 not in memory");
  assert.equal(figures.cellInWords(MAP, 0, 1), "Layer 1, expert 1: partly in memory; chosen by about 11 % of recent tokens");
  assert.equal(figures.cellInWords({ ...MAP, uses: [] }, 1, 2), "Layer 2, expert 2: computed by the CPU");
});

test("the state in sentences", () => {
  const idle = { loading: null, model: {}, map: MAP, more: null, answers: { running: 0, waiting: 0, tokens_per_s: 0, last_tokens_per_s: null, prompt_total: null } };
  assert.equal(figures.activity(idle), "Idle");
  assert.equal(figures.activity({ ...idle, answers: { ...idle.answers, last_tokens_per_s: 20 } }), "Idle; the last answer ran at 20.0 tokens/s");
  const busy = { ...idle.answers, running: 2, waiting: 1, tokens_per_s: 12.34 };
  assert.equal(figures.activity({ ...idle, answers: busy }), "12.3 tokens/s, 2 answers under way, 1 request waiting");
  assert.equal(figures.activity({ ...idle, answers: { ...busy, prompt_done: 5, prompt_total: 9 } }), "Reading the prompt: 5 of 9 tokens, 1 request waiting");
  assert.equal(figures.activity({ ...idle, loading: { model: "m", doing: "load", share: 0.5 } }), "Loading m: load, 50 %");
  assert.equal(figures.activity({ ...idle, model: null }), "No model is loaded; the next message loads one");
  assert.equal(figures.moreMemory(idle), "");
  assert.match(figures.moreMemory({ ...idle, more: { all_experts_bytes: 2 ** 30, exposed_ms: 12 } }), /^With 1\.0 GiB more.* 12 ms /);
  const all = { ...MAP, counts: { memory: 6, partly: 0, coming: 0, cpu: 0, missing: 0 } };
  assert.match(figures.moreMemory({ ...idle, map: all }), /^Every expert is in memory/);
});

test("cells fill the width they have and no more than they need", () => {
  for (const [rows, columns, width, scale] of [[48, 128, 340, 2], [48, 128, 400, 1], [4, 8, 340, 1], [94, 512, 340, 3]]) {
    const size = cellSize(rows, columns, width, scale);
    assert.ok(Number.isInteger(size.width) && Number.isInteger(size.height) && size.width >= 2);
    assert.ok(size.width * columns <= width * scale || size.width === 2);
    assert.ok(size.height * rows <= 360 * scale || size.height <= 3);
    assert.ok(size.gap < size.width && size.gap < size.height);
  }
  assert.equal(between("#000000", "#ff8040", 0.5), "rgb(128 64 32)");
});

// ---- conversations that are kept

function asked(conversation, question, content) {
  const answer = conversation.ask(question);
  Object.assign(answer, { content, model: "m" });
  return answer;
}

test("turns are kept once, without the answer under way, and failed ones are tried again", async () => {
  const store = new MemoryStore();
  const talk = new Conversation();
  asked(talk, "a", "1");
  const running = asked(talk, "b", "2 so");
  let result = await keepTurns(store, talk, running, "be brief");
  assert.deepEqual(result, { kept: true, deleted: false, others: false });
  assert.equal(talk.system, "be brief");
  assert.deepEqual((await store.read(talk.id)).turns.map(({ question }) => question), ["a"]);
  const { keep } = store;
  store.keep = async () => {
    throw new Error("no connection");
  };
  running.content = "2 so far";
  await assert.rejects(keepTurns(store, talk, null, "be brief"), /no connection/);
  asked(talk, "c", "3");
  // Without a word of an answer there is no turn.
  talk.ask("d");
  store.keep = keep;
  result = await keepTurns(store, talk, null, "be brief");
  const kept = await store.read(talk.id);
  assert.deepEqual(kept.turns.map(({ answer }) => answer), ["1", "2 so far", "3"]);
  assert.deepEqual(kept.turns.map(({ id }) => id), talk.turnIds);
  assert.equal((await keepTurns(store, talk, null, "be brief")).kept, false);
});

test("an answer again, or an edit, replaces the stored turn once there is an answer", async () => {
  const store = new MemoryStore();
  const talk = new Conversation();
  asked(talk, "a", "1");
  asked(talk, "b", "2");
  await keepTurns(store, talk, null, "");
  const failed = talk.again();
  await keepTurns(store, talk, null, "");
  assert.deepEqual((await store.read(talk.id)).turns.map(({ answer }) => answer), ["1", "2"]);
  failed.content = "two";
  await keepTurns(store, talk, null, "");
  assert.deepEqual((await store.read(talk.id)).turns.map(({ answer }) => answer), ["1", "two"]);
  assert.deepEqual(talk.undone, []);
  talk.takeBack();
  talk.takeBack();
  asked(talk, "first, edited", "one");
  await keepTurns(store, talk, null, "");
  const kept = await store.read(talk.id);
  assert.deepEqual(kept.turns.map(({ question }) => question), ["first, edited"]);
  assert.equal(kept.title, "first, edited");
});

test("an answer that is taken back while it is being kept is replaced too", async () => {
  const store = new MemoryStore();
  const talk = new Conversation();
  asked(talk, "a", "1");
  asked(talk, "b", "2");
  const keeping = keepTurns(store, talk, null, "");
  talk.takeBack();
  asked(talk, "c", "3");
  assert.equal((await keeping).others, false);
  await keepTurns(store, talk, null, "");
  assert.deepEqual((await store.read(talk.id)).turns.map(({ question }) => question), ["a", "c"]);
  assert.deepEqual(talk.undone, []);
});

test("a conversation that was deleted elsewhere goes on as a new one with new turns", async () => {
  const store = new MemoryStore();
  const talk = new Conversation();
  asked(talk, "a", "1");
  await keepTurns(store, talk, null, "");
  const before = talk.id;
  await store.remove(before);
  asked(talk, "b", "2");
  assert.deepEqual(await keepTurns(store, talk, null, ""), { kept: true, deleted: true, others: false });
  assert.notEqual(talk.id, before);
  assert.deepEqual((await store.read(talk.id)).turns.map(({ question }) => question), ["b"]);
});

test("turns of others are noticed, and an unchanged system prompt replaces none of theirs", async () => {
  const store = new MemoryStore();
  const talk = new Conversation();
  asked(talk, "a", "1");
  await keepTurns(store, talk, null, "mine");
  await store.keep(talk.id, { turns: [{ question: "x", answer: "y" }], system: "theirs" });
  asked(talk, "b", "2");
  assert.equal((await keepTurns(store, talk, null, "mine")).others, true);
  const kept = await store.read(talk.id);
  assert.equal(kept.system, "theirs");
  const again = Conversation.from(kept);
  assert.deepEqual(again.messages.map(({ content }) => content), ["a", "1", "x", "y", "b", "2"]);
  assert.deepEqual(again.unsaved(null), []);
});

test("a page that closes keeps the part of an answer at once, and only once", async () => {
  const store = new MemoryStore();
  const talk = new Conversation();
  asked(talk, "a", "1");
  await keepTurns(store, talk, null, "");
  const answer = asked(talk, "b", "2 so");
  answer.mark = "stopped";
  keepLeaving(store, talk, "");
  keepLeaving(store, talk, "");
  assert.equal((await keepTurns(store, talk, null, "")).kept, false);
  const { turns } = await store.read(talk.id);
  assert.deepEqual(turns.map(({ answer: text, mark }) => [text, mark]), [["1", ""], ["2 so", "stopped"]]);
});

test("conversations in the page alone are listed, searched, renamed, copied and deleted", async () => {
  const store = new MemoryStore();
  const first = await store.keep(null, { turns: [{ question: "A  Fox\n", answer: "in the garden" }] });
  const second = await store.keep(null, { turns: [{ question: "b", answer: "x" }, { question: "c", answer: "y" }] });
  assert.equal(first.title, "A Fox");
  const titles = async (search) => (await store.list(search, 10)).conversations.map(({ title }) => title);
  assert.deepEqual(await titles(""), ["b", "A Fox"]);
  assert.deepEqual(await titles("GARDEN fox"), ["A Fox"]);
  assert.deepEqual(await titles("garden b"), []);
  assert.equal((await store.list("", 1)).more, true);
  assert.equal((await store.rename(second.id, " New ")).title, "New");
  const copied = await store.fork(second.id, second.added_ids[0]);
  assert.deepEqual((await store.read(copied.id)).turns.map(({ question }) => question), ["b"]);
  await store.remove(second.id);
  await assert.rejects(store.read(second.id), { code: "conversation_not_found" });
  assert.equal((await store.read(copied.id)).title, "New");
  assert.equal(titleOf("word ".repeat(50)).length <= 60, true);
});

test("the store of the server asks for the right addresses", async () => {
  const asked = [];
  const store = new ServerStore({
    request: async (path, options = {}) => {
      asked.push([options.method ?? (options.body ? "POST" : "GET"), path, options.keepalive ?? false]);
      return { json: async () => ({}) };
    },
  });
  await store.list("a & b", 5);
  await store.read(3);
  await store.keep(null, { turns: [] });
  await store.keep(3, { turns: [{ question: "x".repeat(70_000) }] });
  await store.rename(3, "t");
  await store.fork(3, 7);
  await store.remove(3);
  const all = "/moechat/conversations";
  assert.deepEqual(asked, [
    ["GET", `${all}?search=a+%26+b&limit=5`, false],
    ["GET", `${all}/3`, false],
    ["POST", all, true],
    ["POST", `${all}/3/turns`, false],
    ["PATCH", `${all}/3`, false],
    ["POST", `${all}/3/fork`, false],
    ["DELETE", `${all}/3`, false],
  ]);
});

test("the oldest messages are left out of a request, down to the last question", () => {
  const talk = new Conversation();
  asked(talk, "a", "1");
  asked(talk, "b", "2");
  talk.ask("c");
  const sent = () => talk.request("m", {}).messages.map(({ content }) => content).join("");
  assert.equal(sent(), "a1b2c");
  assert.equal(talk.sendLess(), true);
  assert.equal(sent(), "b2c");
  assert.equal(talk.sendLess(), true);
  assert.equal(sent(), "c");
  assert.equal(talk.sendLess(), false);
});

test("stored turns say why an answer is incomplete", () => {
  const turn = (mark) => ({ id: 4, question: "q", answer: "a", thinking: "t", mark, model: "m" });
  for (const [mark, note, wrong] of [
    ["", "", false],
    ["stopped", "Stopped", false],
    ["failed", "Ended by an error", true],
    ["of a newer version", "of a newer version", false],
  ]) {
    const talk = Conversation.from({ id: 1, title: "x", updated: 1, system: null, turns: [turn(mark)] });
    assert.deepEqual([talk.last.note, talk.last.wrong, talk.last.model], [note, wrong, "m"]);
    assert.deepEqual(turnOf(talk.messages), { question: "q", answer: "a", thinking: "t", mark, model: "m" });
  }
});

test("times are the hour of today, the day of this year, or the date", () => {
  const now = new Date(2026, 10, 26, 12);
  const at = (...parts) => new Date(...parts).getTime() / 1000;
  assert.equal(figures.when(at(2026, 10, 26, 9, 5), now), "09:05");
  assert.equal(figures.when(at(2026, 0, 3), now), "3 Jan");
  assert.equal(figures.when(at(2025, 11, 31), now), "31 Dec 2025");
  assert.equal(figures.when(null, now), "some time");
});
