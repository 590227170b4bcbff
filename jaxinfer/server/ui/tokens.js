// The tokens of an answer, tinted by probability, and the card with the alternatives of one.

import { $, make } from "./dom.js";

const FULL_TINT = 5; // the negative logprob, in nats, of the strongest tint: 0.7 %
const HIDE_AFTER = 200; // milliseconds, in which the pointer can move from a token to its card

// The tokens of a chunk of a chat: `{text, bytes, logprob, top}`.
export function chatTokens(logprobs) {
  const record = ({ token, bytes, logprob }) => ({ text: token, bytes, logprob });
  return logprobs.content.map((one) => ({ ...record(one), top: one.top_logprobs.map(record) }));
}

// The same of a chunk of a completion, with `offset` instead of bytes.
export function completionTokens({ tokens, token_logprobs, top_logprobs, text_offset }) {
  return tokens.map((text, index) => {
    const others = Object.entries(top_logprobs?.[index] ?? {});
    const top = others.map(([other, logprob]) => ({ text: other, logprob }));
    const record = { text, logprob: token_logprobs[index], offset: text_offset[index] };
    return { ...record, top: top.length > 1 ? top.sort((a, b) => b.logprob - a.logprob) : [] };
  });
}

// The text before the token with this index.
export function textBefore(tokens, index, text) {
  if (tokens[index].offset !== undefined) return [...text].slice(0, tokens[index].offset).join("");
  return new TextDecoder().decode(Uint8Array.from(tokens.slice(0, index).flatMap((one) => one.bytes ?? [])));
}

const hex = (byte) => `\\x${byte.toString(16).padStart(2, "0")}`;

// A token's own text: part of a character as bytes, white space visible.
export function shown({ text, bytes }) {
  const part = text.includes("\ufffd") && bytes?.length;
  if (part) return bytes.map(hex).join("");
  const seen = text.replaceAll("\n", "↵").replaceAll("\t", "⇥").replaceAll(" ", "·") || "(empty)";
  return seen.replace(/[\x00-\x1f\x7f]/g, (sign) => hex(sign.charCodeAt(0)));
}

const percent = (logprob) => {
  const share = Math.exp(logprob) * 100;
  return share >= 99.95 || share < 0.1 ? (share < 0.1 ? "< 0.1 %" : "100 %") : `${share.toFixed(1)} %`;
};

// The spans of tokens in `element`, with the arrow keys; `opened(index, span, pinned)` shows a card.
export class TokenSpans {
  constructor(element, opened) {
    this.element = element;
    this.opened = opened;
    this.tokens = [];
    element.addEventListener("pointerover", (event) => this.point(event, false));
    element.addEventListener("click", (event) => this.point(event, true));
    element.addEventListener("focusin", (event) => this.focus(event.target));
    element.addEventListener("pointerout", () => card.hideSoon());
    element.addEventListener("focusout", () => card.hideSoon());
    element.addEventListener("keydown", (event) => this.move(event));
  }

  // Shows these tokens; those that are shown already keep their spans.
  show(tokens) {
    const kept = this.tokens.findIndex((one, index) => one !== tokens[index]);
    const from = kept < 0 ? this.tokens.length : kept;
    while (this.element.children.length > from) this.element.lastElementChild.remove();
    this.element.append(...tokens.slice(from).map((token, index) => span(token, from + index)));
    this.tokens = [...tokens];
  }

  point(event, pinned) {
    const index = [...this.element.children].indexOf(event.target);
    if (index < 0 || (event.pointerType === "touch" && !pinned)) return;
    this.opened(index, event.target, pinned);
  }

  focus(span) {
    if (!span.matches(":focus-visible")) return;
    this.opened([...this.element.children].indexOf(span), span, false);
  }

  move(event) {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    const spans = this.element.children;
    const index = [...spans].indexOf(event.target);
    if (index < 0) return;
    if (event.key === "Enter") this.opened(index, event.target, true);
    const next = spans[index + (step ?? 0)];
    if (!step || !next) return;
    event.preventDefault();
    event.target.tabIndex = -1;
    next.tabIndex = 0;
    next.focus({ focusVisible: true });
  }
}

function span(token, index) {
  const part = token.text.includes("\ufffd") && token.bytes?.length;
  const made = make("span", { class: "token", tabIndex: index ? -1 : 0 }, part ? shown(token) : token.text);
  if (part) made.classList.add("part");
  if (token.text.includes("\n")) made.classList.add("line");
  if (token.logprob !== null) {
    const surprise = Math.min(-token.logprob / FULL_TINT, 1);
    made.style.setProperty("--doubt", `${(surprise * 100).toFixed(1)}%`);
  }
  return made;
}

// The card of one token. A pinned card stays until Escape or a click elsewhere.
class Card {
  constructor() {
    this.element = $("card");
    this.timer = 0;
    this.span = null;
    this.pinned = false;
    this.element.addEventListener("pointerenter", () => clearTimeout(this.timer));
    this.element.addEventListener("pointerleave", () => this.hideSoon());
    document.addEventListener("pointerdown", (event) => {
      if (!this.element.contains(event.target) && !event.target.closest(".token")) this.hide();
    });
    document.addEventListener(
      "scroll",
      (event) => {
        if (!this.element.contains(event.target)) this.hide();
      },
      true,
    );
  }

  get isOpen() {
    return !this.element.hidden;
  }

  // `choose(alternative)` goes on with another token; null if that is not possible.
  show(token, span, { pinned, choose }) {
    if (this.pinned && !pinned) return;
    clearTimeout(this.timer);
    this.span?.classList.remove("open");
    span.classList.add("open");
    Object.assign(this, { span, pinned });
    this.element.replaceChildren(...content(token, choose));
    this.element.hidden = false;
    this.place();
  }

  hideSoon() {
    clearTimeout(this.timer);
    if (!this.pinned) this.timer = setTimeout(() => this.hide(), HIDE_AFTER);
  }

  hide() {
    clearTimeout(this.timer);
    this.span?.classList.remove("open");
    this.element.hidden = true;
    Object.assign(this, { span: null, pinned: false });
  }

  // Below the token, or above it where the window ends.
  place() {
    const at = this.span.getClientRects()[0] ?? this.span.getBoundingClientRect();
    const { width, height } = this.element.getBoundingClientRect();
    const below = at.bottom + 6 + height < window.innerHeight;
    const left = Math.max(8, Math.min(at.left, window.innerWidth - width - 8));
    this.element.style.left = `${left}px`;
    this.element.style.top = `${below ? at.bottom + 6 : Math.max(8, at.top - height - 6)}px`;
  }
}

function content(token, choose) {
  if (token.logprob === null) return [make("p", { class: "token-head" }, make("code", {}, shown(token)))];
  const head = make(
    "p",
    { class: "token-head" },
    make("code", {}, shown(token)),
    make("b", {}, percent(token.logprob)),
    make("span", {}, `logprob ${token.logprob.toFixed(3).replace("-", "−")}`),
  );
  if (!token.top.length) {
    return [head, make("p", { class: "note" }, "Set Logprobs to a number of alternatives to see them here.")];
  }
  const isChosen = (one) => one.text === token.text && one.logprob === token.logprob;
  const rows = token.top.some(isChosen) ? token.top : [...token.top, token];
  const list = make("div", { class: "alternatives" }, ...rows.map((one) => row(one, isChosen(one), choose)));
  const note = choose ? make("p", { class: "note" }, "Choose another token to go on from there.") : null;
  return [head, list, note].filter(Boolean);
}

function row(one, chosen, choose) {
  const bar = make("i");
  bar.style.setProperty("--share", `${Math.exp(one.logprob) * 100}%`);
  const parts = [make("code", {}, shown(one)), bar, make("span", {}, percent(one.logprob))];
  if (chosen || !choose) return make("div", { class: chosen ? "chosen" : "" }, ...parts);
  return make("button", { type: "button", onclick: () => choose(one) }, ...parts);
}

export const card = new Card();
