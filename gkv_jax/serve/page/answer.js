/** The answer: its tokens, where they are from, and how many the grammar allowed. */

import { color, paint } from "./draw.js";

export const SOURCES = {
  sampled: "sampled by the model",
  forced: "forced by the grammar",
  lookup: "drafted by lookup",
  model: "drafted by the draft model",
  prediction: "drafted by the prediction",
  custom: "drafted by the server's own source",
};
const COLORS = { model: "--draft" };
const PARTIAL = "\ufffd"; // part of a character
const NEARBY = 16; // characters of what is written that no token is found for
const AHEAD = 32; // tokens that are looked at for the end of a character
const SCALE = 30; // pixels for the numbers beside the columns

export class Answer {
  tokens = [];
  text = "";
  #written = ""; // what the tokens write: reasoning and text
  #settled = 0; // tokens whose text is as it will stay
  #read = 0; // characters of the text that these stand for
  #waiting = false;
  #focus = 0;

  constructor({ tokens, spark, tip, legend }) {
    Object.assign(this, { box: tokens, spark, tip, legend, vocabulary: 2 ** 17 });
    for (const kind of ["mouseover", "focusin", "click"]) {
      tokens.addEventListener(kind, (event) => {
        this.#show(this.tokens[event.target.closest(".t")?.dataset.i]);
      });
    }
    tokens.addEventListener("mouseleave", () => this.#show());
    tokens.addEventListener("focusout", () => this.#show());
    tokens.addEventListener("scroll", () => this.#show());
    tokens.addEventListener("keydown", (event) => this.#move(event));
    spark.addEventListener("mousemove", (event) => {
      const share = event.offsetX / (spark.clientWidth - SCALE);
      this.#show(this.tokens[Math.floor(share * Math.max(this.tokens.length, this.#columns()))]);
    });
    spark.addEventListener("mouseleave", () => this.#show());
  }

  clear() {
    this.tokens = [];
    this.text = this.#written = "";
    this.#settled = this.#read = this.#focus = 0;
    this.box.replaceChildren();
    this.#show();
    this.#draw();
  }

  /** Adds tokens at once, and paints them with the next frame. What the model thought is no text of it. */
  add(text, trace, thought = "") {
    this.text += text;
    this.#written += thought + text;
    const isThought = thought !== "" && text === "";
    this.tokens.push(...trace.map((token) => ({ ...token, isThought })));
    if (this.#waiting) return;
    this.#waiting = true;
    requestAnimationFrame(() => this.flush(false));
  }

  flush(ended) {
    this.#waiting = false;
    const { box } = this;
    const atEnd = box.scrollHeight - box.scrollTop - box.clientHeight < 40;
    const fresh = document.createDocumentFragment();
    for (let i = box.childElementCount; i < this.tokens.length; i++) fresh.append(this.#span(i));
    box.append(fresh);
    this.#settle(ended);
    if (atEnd) box.scrollTop = box.scrollHeight;
    this.#draw();
  }

  get guided() {
    return this.tokens.some((token) => token.legal != null);
  }

  #share(legal) {
    return Math.min(1, Math.log2(legal + 1) / Math.log2(this.vocabulary + 1));
  }

  #span(i) {
    const token = this.tokens[i];
    const span = document.createElement("span");
    this.#write(span, token.text);
    span.dataset.i = i;
    span.tabIndex = i === this.#focus ? 0 : -1;
    span.setAttribute("role", "option");
    span.setAttribute("aria-describedby", "tip");
    span.classList.add("t", "new", token.source);
    if (token.isThought) span.classList.add("thought");
    if (token.legal != null) span.style.setProperty("--w", `${100 * this.#share(token.legal)}%`);
    token.span = span;
    return span;
  }

  /** Line breaks get a sign that is seen and not copied. */
  #write(span, text) {
    span.textContent = "";
    for (const part of text.split(/(?=\n)/)) {
      if (part.startsWith("\n")) span.append(document.createElement("i"));
      span.append(part);
    }
  }

  /** Tokens that are parts of characters: the last of a run shows what they make together. */
  #settle(ended) {
    while (this.#settled < this.tokens.length) {
      const first = this.tokens[this.#settled];
      if (!first.text.includes(PARTIAL)) {
        this.#read = this.#find(first.text, NEARBY)?.end ?? this.#read;
        this.#settled++;
        continue;
      }
      let end = this.#settled;
      let longest = 0;
      while (this.tokens[end]?.text.includes(PARTIAL)) longest += this.tokens[end++].text.length;
      // The next ones may be of what the server leaves out: a tag, blanks.
      const ahead = this.tokens.slice(end, end + AHEAD);
      let until = -1;
      for (const { text } of ahead) until = until < 0 ? this.#find(text, 2 * longest)?.start ?? -1 : until;
      if (until < 0 && !ended && ahead.length < AHEAD) return;
      const left = this.#written.length - this.#read;
      if (until < 0 && left <= 2 * longest) until = this.#written.length;
      for (let i = this.#settled; i < end; i++) {
        this.tokens[i].span.textContent = "·";
        this.tokens[i].span.classList.add("part");
      }
      const whole = until < 0 ? "" : this.#written.slice(this.#read, until);
      if (whole) {
        this.#write(this.tokens[end - 1].span, whole);
        this.tokens[end - 1].span.classList.remove("part");
        this.#read = until;
      }
      this.#settled = end;
    }
  }

  /** Where a token is written, at most so many characters on. Blanks at its ends may be left out. */
  #find(text, most) {
    const lean = text.replace(/^[ \t\n\r]+/, "");
    const parts = [text, lean, lean.replace(/[ \t\n\r]+$/, "")].filter((part) => part !== "");
    const near = this.#written.slice(this.#read, this.#read + most + text.length);
    let found = parts.find((part) => near.startsWith(part));
    if (lean !== "") found ??= parts.find((part) => near.includes(part));
    if (found === undefined) return null;
    const start = this.#read + near.indexOf(found);
    return { start, end: start + found.length };
  }

  #show(token) {
    this.box.querySelector(".on")?.classList.remove("on");
    this.tip.hidden = !token?.span;
    if (this.tip.hidden) return;
    const { span, legal } = token;
    span.classList.add("on");
    const count = legal?.toLocaleString("en");
    const guided = legal === 1 ? "the only legal token" : `one of ${count} legal tokens`;
    const allowed = legal == null ? "no grammar" : guided;
    const what = SOURCES[token.source] ?? token.source;
    this.tip.textContent = `${JSON.stringify(token.text)} · token ${token.token}\n${allowed} · ${what}`;
    const around = this.tip.offsetParent.getBoundingClientRect();
    const at = span.getClientRects()[0] ?? span.getBoundingClientRect();
    const left = Math.min(at.left - around.left, around.width - this.tip.offsetWidth - 8);
    const box = this.box.getBoundingClientRect();
    const above = Math.min(Math.max(at.top, box.top), box.bottom) - around.top - this.tip.offsetHeight - 6;
    this.tip.style.left = `${Math.max(8, left)}px`;
    this.tip.style.top = `${above}px`;
  }

  #move(event) {
    const last = this.tokens.length - 1;
    const from = Number(event.target.dataset.i);
    const [next, previous] = [from + 1, from - 1];
    const steps = {
      ArrowRight: next, ArrowDown: next, ArrowLeft: previous, ArrowUp: previous, Home: 0, End: last,
    };
    if (!(event.key in steps) || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    const to = Math.min(Math.max(steps[event.key], 0), last);
    this.tokens[from].span.tabIndex = -1;
    this.tokens[to].span.tabIndex = 0;
    this.#focus = to;
    this.tokens[to].span.focus();
  }

  #columns() {
    return Math.floor((this.spark.clientWidth - SCALE) / 8);
  }

  /** One column a token, or the largest of several where there are more tokens than room. */
  #draw() {
    const seen = new Set(this.tokens.map((token) => token.source));
    this.legend.replaceChildren(
      ...[...seen].map((source) => {
        const item = document.createElement("li");
        item.className = source;
        item.textContent = SOURCES[source] ?? source;
        return item;
      }),
    );
    this.redraw();
  }

  redraw() {
    this.spark.parentElement.hidden = !this.guided;
    if (!this.guided) return;
    paint(this.spark, (context, width, height) => {
      context.font = "10px system-ui, sans-serif";
      context.textBaseline = "middle";
      context.textAlign = "right";
      for (let power = 0; 10 ** power < this.vocabulary; power += 2) {
        const y = Math.round(height * (1 - this.#share(10 ** power)));
        context.fillStyle = color("--line");
        context.fillRect(0, y, width - SCALE, 1);
        context.fillStyle = color("--muted");
        context.fillText(["1", "100", "10k"][power / 2], width, Math.min(y, height - 6));
      }
      width -= SCALE;
      const room = Math.max(this.tokens.length, this.#columns());
      const columns = Math.min(room, Math.floor(width / 2));
      const wide = width / columns;
      const per = room / columns;
      for (let column = 0; column * per < this.tokens.length; column++) {
        const group = this.tokens.slice(Math.floor(column * per), Math.floor((column + 1) * per));
        const top = group.reduce((a, b) => ((b.legal ?? 0) > (a.legal ?? 0) ? b : a));
        const high = Math.max(2, height * this.#share(top.legal ?? 0));
        context.fillStyle = color(COLORS[top.source] ?? `--${top.source}`);
        context.fillRect(column * wide, height - high, wide > 3 ? wide - 1.5 : wide - 0.5, high);
      }
    });
    const counts = this.tokens.map((token) => token.legal).filter((legal) => legal != null);
    const only = counts.filter((legal) => legal === 1).length;
    const most = counts.reduce((a, b) => Math.max(a, b), 0).toLocaleString("en");
    const label = `Legal tokens at each of ${counts.length} steps: at most ${most}; ${only} steps had no choice.`;
    this.spark.setAttribute("aria-label", label);
  }
}
