// One turn of a conversation on the page: text, thoughts, tokens, tool calls, error, buttons.

import { copyButton, duration, figure, grow, make, oncePerFrame } from "./dom.js";
import { showMarkdown } from "./markdown.js";
import { card, TokenSpans } from "./tokens.js";

const ROLES = {
  user: "You",
  assistant: "Assistant",
  tool: "Tool result",
  prompt: "Prompt",
  completion: "Completion",
};

// The view of `turn`. `actions` are the session's: edit, retry, goOn, branch, results; each gets the
// turn. `options()` says whether Markdown is formatted.
export class TurnView {
  constructor(turn, actions, options) {
    Object.assign(this, { turn, actions, options });
    this.isAnswer = turn.role === "assistant" || turn.role === "completion";
    this.showsTokens = true; // if there are any
    this.thoughts = make("div", { class: "text" });
    this.summary = make("summary");
    this.thinking = make("details", { class: "thinking", hidden: true }, this.summary, this.thoughts);
    this.body = make("div", { class: "body" });
    this.spans = make("div", { class: "tokens", hidden: true });
    this.tokens = new TokenSpans(this.spans, (...where) => this.openCard(...where));
    this.calls = make("div", { class: "calls", hidden: true });
    this.error = make("p", { class: "error", role: "alert", hidden: true });
    this.facts = make("span", { class: "facts" });
    this.buttons = make("span", { class: "buttons" });
    this.element = make(
      "article",
      { class: `turn ${turn.role}` },
      make("h3", { class: this.isAnswer || turn.role === "user" ? "unseen" : "" }, this.title),
      this.thinking,
      this.body,
      this.spans,
      this.calls,
      this.error,
      make("footer", {}, this.facts, this.buttons),
    );
    this.update = oncePerFrame(() => this.render());
    this.render();
  }

  get title() {
    const { role, name } = this.turn;
    return name ? `Result of ${name}` : ROLES[role];
  }

  render() {
    const { turn } = this;
    const isOpen = Boolean(turn.streaming);
    const hasTokens = Boolean(turn.tokens?.length);
    const seesTokens = hasTokens && this.showsTokens;
    this.element.classList.toggle("streaming", isOpen);
    this.element.ariaBusy = String(isOpen);
    this.renderThoughts();
    this.spans.hidden = !seesTokens;
    this.body.hidden = seesTokens || !(turn.content || isOpen);
    if (seesTokens) this.tokens.show(turn.tokens);
    else this.renderText();
    this.renderCalls(isOpen);
    this.error.hidden = !turn.error;
    this.error.textContent = turn.error ?? "";
    this.facts.textContent = factsOf(turn);
    this.renderButtons(isOpen, hasTokens);
  }

  renderThoughts() {
    const { turn } = this;
    this.thinking.hidden = !turn.reasoning;
    if (!turn.reasoning) return;
    this.thoughts.textContent = turn.reasoning.trim();
    const goesOn = turn.streaming && !turn.thought;
    this.summary.textContent = goesOn ? "Thinking" : `Thought for ${duration(turn.thought)}`;
    this.thinking.classList.toggle("open-end", Boolean(goesOn));
  }

  renderText() {
    const { turn, body } = this;
    const formatted = turn.role === "assistant" && this.options().markdown;
    body.classList.toggle("formatted", formatted);
    if (formatted) {
      if (!body.blocks) body.replaceChildren();
      showMarkdown(body, turn.content);
    } else {
      body.blocks = undefined;
      body.textContent = turn.content;
    }
  }

  renderCalls(isOpen) {
    const { turn } = this;
    this.calls.hidden = !turn.calls?.length;
    if (this.calls.hidden || this.shownCalls === JSON.stringify([turn.calls, isOpen, turn.answered])) return;
    this.shownCalls = JSON.stringify([turn.calls, isOpen, turn.answered]);
    const areas = new Map();
    const figures = turn.calls.map((call) => {
      const text = pretty(call.arguments);
      const head = make(
        "figcaption",
        {},
        make("span", {}, `Calls ${call.name}`),
        copyButton("Copy", () => text),
      );
      const figure = make("figure", { class: "code" }, head, make("pre", {}, make("code", {}, text)));
      if (isOpen || turn.answered) return figure;
      const area = make("textarea", {
        rows: 1,
        class: "mono",
        placeholder: "Result, as JSON or text",
        "aria-label": `Result of ${call.name}`,
        oninput: () => grow(area),
      });
      areas.set(call, area);
      figure.append(area);
      return figure;
    });
    this.calls.replaceChildren(...figures);
    if (!areas.size) return;
    const send = () =>
      this.actions.results(
        turn,
        turn.calls.map((call) => areas.get(call).value),
      );
    this.calls.append(
      make(
        "button",
        { type: "button", class: "small", onclick: send },
        areas.size > 1 ? "Send the results" : "Send the result",
      ),
    );
  }

  renderButtons(isOpen, hasTokens) {
    const state = JSON.stringify([isOpen, hasTokens, this.showsTokens, this.turn.finish, !this.turn.content]);
    if (isOpen || state === this.shownButtons) {
      if (isOpen && this.shownButtons !== "") this.buttons.replaceChildren();
      if (isOpen) this.shownButtons = "";
      return;
    }
    this.shownButtons = state;
    const { turn, actions } = this;
    const button = (words, work) => make("button", { type: "button", class: "plain", onclick: work }, words);
    const made = [];
    if (hasTokens) {
      made.push(
        button(this.showsTokens ? "Show text" : "Show tokens", () => {
          this.showsTokens = !this.showsTokens;
          this.render();
        }),
      );
    }
    if (turn.content) made.push(copyButton("Copy", () => turn.content));
    if (turn.content && turn.role !== "tool") made.push(button("Edit", () => this.edit()));
    if (this.isAnswer) {
      const isCut = ["length", "stopped", "abort"].includes(turn.finish);
      if (isCut && turn.content && !turn.calls?.length) made.push(button("Go on", () => actions.goOn(turn)));
      made.push(button("Retry", () => actions.retry(turn)));
    }
    this.buttons.replaceChildren(...made);
  }

  // Replaces the text by a box with it. A question is asked again, an answer is kept as changed.
  edit() {
    const { turn } = this;
    if (this.editor) return;
    const area = make("textarea", { rows: 1, value: turn.content, "aria-label": `Edit: ${this.title}` });
    const close = () => {
      this.editor.remove();
      this.editor = null;
      this.element.classList.remove("editing");
    };
    const save = () => {
      const text = area.value;
      close();
      if (this.isAnswer ? text !== turn.content : text.trim()) this.actions.edit(turn, text);
    };
    area.addEventListener("input", () => grow(area));
    area.addEventListener("keydown", (event) => {
      if (event.key === "Escape") close();
      else if (event.key !== "Enter" || event.isComposing) return;
      else if (turn.role === "user" ? event.shiftKey : !(event.ctrlKey || event.metaKey)) return;
      else save();
      event.preventDefault();
      event.stopPropagation();
    });
    this.editor = make(
      "div",
      { class: "editor" },
      area,
      make(
        "div",
        { class: "row" },
        make("button", { type: "button", class: "small plain", onclick: close }, "Cancel"),
        make(
          "button",
          { type: "button", class: "small main", onclick: save },
          this.isAnswer ? "Save" : "Send",
        ),
      ),
    );
    this.element.classList.add("editing");
    this.element.append(this.editor);
    grow(area);
    area.focus();
    area.setSelectionRange(area.value.length, area.value.length);
  }

  openCard(index, span, pinned) {
    const { turn } = this;
    const possible = !turn.streaming && !turn.reasoning && !turn.calls?.length;
    const choose = (other) => {
      card.hide();
      this.actions.branch(turn, index, other);
    };
    card.show(turn.tokens[index], span, { pinned, choose: possible ? choose : null });
  }
}

function pretty(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text; // still being streamed
  }
}

const ENDS = {
  length: "ended at its limit of tokens",
  stopped: "stopped",
  abort: "ended by the server",
  tool_calls: "waits for the tool",
};

// What is known of an answer: tokens, speed, times, and its end if it is not the usual one.
function factsOf({ role, usage, timing, finish, stopReason, tokens, streaming, answered }) {
  if (role !== "assistant" && role !== "completion") return "";
  const facts = [];
  const count = usage?.completion_tokens;
  if (count) facts.push(`${count.toLocaleString("en")} token${count === 1 ? "" : "s"}`);
  if (count > 1 && timing?.last > timing?.first) {
    facts.push(`${figure((count - 1) / (timing.last - timing.first))} tokens/s`);
  }
  if (timing?.first && !streaming) facts.push(`first after ${duration(timing.first)}`);
  const cached = usage?.prompt_tokens_details?.cached_tokens;
  if (usage && !streaming) {
    const prompt = usage.prompt_tokens.toLocaleString("en");
    facts.push(cached ? `prompt ${prompt}, ${cached.toLocaleString("en")} of it cached` : `prompt ${prompt}`);
  }
  const known = (tokens ?? []).filter((one) => one.logprob !== null);
  if (known.length && !streaming) {
    const mean = known.reduce((sum, one) => sum + one.logprob, 0) / known.length;
    facts.push(`perplexity ${figure(Math.exp(-mean))}`);
  }
  if (typeof stopReason === "string") facts.push(`stopped at ${JSON.stringify(stopReason)}`);
  if (ENDS[finish] && !answered) facts.push(ENDS[finish]);
  return facts.join(" · ");
}
