// The conversation: its turns, the requests that they make, and what becomes of the answers.

import { events, request } from "./api.js";
import { sampling } from "./fields.js";
import { chatTokens, completionTokens, textBefore } from "./tokens.js";

const STORED = "jaxinfer.turns"; // of this tab
const ROUTES = { chat: "v1/chat/completions", completion: "v1/completions" };

const seconds = () => performance.now() / 1000;

// `page` has: settings() and model() for a request, added(turn), removed(turn), updated(turn),
// changed() after anything, and refused(error) for a wrong key.
export class Session {
  constructor(page) {
    this.page = page;
    this.mode = "chat";
    this.turnsOf = stored();
    this.abort = null; // of the answer that is being written
    this.cleared = null; // the turns before the last clear()
  }

  get turns() {
    return this.turnsOf[this.mode];
  }

  get busy() {
    return this.abort !== null;
  }

  // What the user has written.
  send(text) {
    this.dropFailures();
    this.add({ role: this.mode === "chat" ? "user" : "prompt", content: text });
    return this.answer();
  }

  stop() {
    this.abort?.abort();
  }

  clear() {
    this.stop();
    this.cleared = { mode: this.mode, turns: this.turns };
    this.cut(0);
    this.keep();
  }

  undo() {
    this.turnsOf[this.cleared.mode] = this.cleared.turns;
    this.cleared = null;
    this.keep();
  }

  // A question with another text is asked again, without what came after it; an answer is changed.
  edit(turn, text) {
    turn.content = text;
    this.page.updated(turn);
    if (turn.role === "user" || turn.role === "prompt") {
      this.stop();
      this.cut(this.turns.indexOf(turn) + 1);
      return this.answer();
    }
    delete turn.tokens; // they were those of the old text
    this.keep();
  }

  retry(turn) {
    this.stop();
    this.cut(this.turns.indexOf(turn));
    return this.answer();
  }

  // Continues an answer that ended early.
  goOn(turn) {
    this.cut(this.turns.indexOf(turn) + 1);
    return this.answer(turn);
  }

  // Continues an answer from one of its tokens, with another in its place.
  branch(turn, index, other) {
    const before = textBefore(turn.tokens, index, turn.content);
    const text = other.bytes ? new TextDecoder().decode(Uint8Array.from(other.bytes)) : other.text;
    const taken = { ...turn.tokens[index], ...other, top: turn.tokens[index].top };
    turn.tokens = [...turn.tokens.slice(0, index), taken];
    turn.content = before + text;
    return this.goOn(turn);
  }

  // The results of an answer's tool calls, in order.
  results(turn, results) {
    turn.answered = true;
    this.page.updated(turn);
    turn.calls.forEach((call, index) => {
      this.add({ role: "tool", name: call.name, id: call.id, content: results[index] });
    });
    return this.answer();
  }

  // The body of the request for the turns as they are, and `draft` if there is one.
  body(draft = "", continued = null) {
    const { mode } = this;
    const { system, ...fields } = sampling(this.page.settings(), mode);
    const common = {
      model: this.page.model(),
      stream: true,
      stream_options: { include_usage: true, continuous_usage_stats: true },
      ...fields,
    };
    if (mode === "completion") {
      const last = this.turns.findLast((turn) => turn.role === "prompt");
      const prompt = draft || (last?.content ?? "");
      return { prompt: prompt + (continued?.content ?? ""), ...common };
    }
    const messages = this.turns.filter((turn) => turn !== this.writing && !isFailure(turn)).map(message);
    if (draft) messages.push({ role: "user", content: draft });
    if (system) messages.unshift({ role: "system", content: system });
    const going = continued ? { continue_final_message: true, add_generation_prompt: false } : {};
    return { messages, ...common, ...going };
  }

  // Requests the next answer, or the rest of `continued`.
  async answer(continued = null) {
    const role = this.mode === "chat" ? "assistant" : "completion";
    const turn = continued ?? { role, content: "" };
    const { mode } = this;
    const abort = new AbortController();
    this.abort = abort;
    Object.assign(turn, { streaming: true, timing: {}, usage: null, finish: null, error: null });
    let failed = null;
    try {
      this.writing = continued ? null : turn;
      const body = this.body("", continued);
      if (!continued) this.add(turn);
      this.page.updated(turn);
      this.page.changed();
      const begun = seconds();
      const response = await request(ROUTES[mode], { body, signal: abort.signal });
      for await (const event of events(response)) {
        take(turn, event, mode, seconds() - begun);
        this.page.updated(turn);
      }
    } catch (error) {
      if (error.name === "AbortError") turn.finish = "stopped";
      else failed = error;
    }
    if (failed) {
      turn.error = failed.message;
      if (!this.turns.includes(turn) && !continued) this.add(turn);
      if (failed.status === 401) this.page.refused(failed);
    }
    turn.streaming = false;
    this.page.updated(turn);
    if (this.abort === abort) {
      this.abort = null;
      this.writing = null;
    }
    this.keep();
  }

  add(turn) {
    this.turns.push(turn);
    this.page.added(turn);
  }

  // Forgets the turns from this index on.
  cut(index) {
    const gone = this.turns.slice(index);
    this.turnsOf[this.mode] = this.turns.slice(0, index);
    gone.forEach((turn) => this.page.removed(turn));
  }

  // Answers that failed without a text are in the way of the next question.
  dropFailures() {
    const failures = this.turns.filter(isFailure);
    this.turnsOf[this.mode] = this.turns.filter((turn) => !isFailure(turn));
    failures.forEach((turn) => this.page.removed(turn));
  }

  // Keeps the turns for a reload of the tab; without tokens if they are too large.
  keep() {
    const plain = (name, value) => (["tokens", "streaming"].includes(name) ? undefined : value);
    try {
      sessionStorage.setItem(STORED, JSON.stringify(this.turnsOf));
    } catch {
      try {
        sessionStorage.setItem(STORED, JSON.stringify(this.turnsOf, plain));
      } catch {
        sessionStorage.removeItem(STORED); // a reload begins anew
      }
    }
    this.page.changed();
  }
}

// An answer without anything in it.
function isFailure({ role, content, reasoning, calls, error, finish }) {
  const isAnswer = role === "assistant" || role === "completion";
  return isAnswer && !content && !reasoning && !calls?.length && Boolean(error || finish === "stopped");
}

function stored() {
  try {
    const { chat, completion } = JSON.parse(sessionStorage.getItem(STORED));
    const ended = (turn) => ({ ...turn, streaming: false });
    return { chat: chat.map(ended), completion: completion.map(ended) };
  } catch {
    return { chat: [], completion: [] };
  }
}

// A turn as a message of the request.
function message({ role, content, reasoning, calls, id, name }) {
  if (role === "tool") return { role, tool_call_id: id, name, content };
  const made = { role, content };
  if (reasoning) made.reasoning_content = reasoning;
  if (calls?.length) {
    made.tool_calls = calls.map((call) => ({
      id: call.id,
      type: "function",
      function: { name: call.name, arguments: call.arguments },
    }));
  }
  return made;
}

// Adds an event of the stream, `since` seconds after the request, to the turn.
function take(turn, { choices, usage }, mode, since) {
  if (usage) turn.usage = usage;
  const [choice] = choices;
  if (!choice) return;
  const said = mode === "chat" ? choice.delta : { content: choice.text };
  const reasoning = said.reasoning ?? said.reasoning_content;
  if (said.content || reasoning || said.tool_calls || choice.logprobs) {
    turn.timing.first ??= since;
    turn.timing.last = since;
  }
  if (reasoning) {
    turn.reasoning = (turn.reasoning ?? "") + reasoning;
    turn.thinkingSince ??= since;
  }
  if ((said.content || said.tool_calls || choice.finish_reason) && turn.reasoning) {
    turn.thought ??= since - turn.thinkingSince;
  }
  if (said.content) turn.content += said.content;
  for (const call of said.tool_calls ?? []) takeCall(turn, call);
  if (choice.logprobs) {
    const tokens = mode === "chat" ? chatTokens(choice.logprobs) : completionTokens(choice.logprobs);
    turn.tokens = [...(turn.tokens ?? []), ...tokens];
  }
  if (choice.finish_reason) turn.finish = choice.finish_reason;
  if (choice.stop_reason) turn.stopReason = choice.stop_reason;
}

function takeCall(turn, { index, id, function: said }) {
  turn.calls ??= [];
  turn.calls[index] ??= { id, name: "", arguments: "" };
  turn.calls[index].name += said.name ?? "";
  turn.calls[index].arguments += said.arguments ?? "";
}
