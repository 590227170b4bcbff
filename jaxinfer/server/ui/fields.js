// The settings of a request: what each is called, how it is entered, and the body that they make.
//
// A setting without a value is not sent, so the model's or the server's default applies.

const number = (name, label, hint, range) => ({ name, label, hint, kind: "number", ...range });
const text = (name, label, hint, more = {}) => ({ name, label, hint, kind: "text", ...more });
const json = (name, label, hint, example) => ({ name, label, hint, kind: "json", example, bare: true });
const choice = (name, label, hint, options) => ({ name, label, hint, kind: "choice", options });

export const GROUPS = [
  {
    title: "System prompt",
    only: "chat",
    fields: [text("system", "System prompt", null, { rows: 3, bare: true })],
  },
  {
    title: "Sampling",
    fields: [
      number(
        "temperature",
        "Temperature",
        "Higher values make the answer more varied; 0 takes the most probable token.",
        { min: 0, max: 2, step: 0.05, slides: true },
      ),
      number("top_p", "Top p", "Draws from the most probable tokens that together have this share.", {
        min: 0.01,
        max: 1,
        step: 0.01,
        slides: true,
      }),
      number("top_k", "Top k", "Draws from this many of the most probable tokens; 0 or -1 means all.", {
        min: -1,
        step: 1,
      }),
      number(
        "min_p",
        "Min p",
        "Draws from tokens that are at least this probable, relative to the most probable one.",
        { min: 0, max: 1, step: 0.01, slides: true },
      ),
      number("max_tokens", "Max tokens", "The answer ends after this many.", { min: 1, step: 1 }),
      number("seed", "Seed", "The same seed gives the same answer.", { step: 1 }),
    ],
  },
  {
    title: "Tokens",
    fields: [
      choice("logprobs", "Logprobs", "Shows the tokens of the answer, and the alternatives of each.", [
        ["", "off"],
        ["0", "on"],
        ["5", "5 alternatives"],
        ["10", "10 alternatives"],
        ["20", "20 alternatives"],
      ]),
    ],
  },
  {
    title: "Penalties and stops",
    folded: true,
    fields: [
      number("presence_penalty", "Presence", "Subtracted once from tokens of the answer.", {
        min: -2,
        max: 2,
        step: 0.1,
        slides: true,
      }),
      number("frequency_penalty", "Frequency", "Subtracted for each time that a token is in the answer.", {
        min: -2,
        max: 2,
        step: 0.1,
        slides: true,
      }),
      number("repetition_penalty", "Repetition", "Divides tokens of prompt and answer.", {
        min: 0.5,
        max: 2,
        step: 0.05,
        slides: true,
      }),
      text("stop", "Stop", "Texts that end the answer, one a line; \\n is a line break.", {
        rows: 2,
        mono: true,
      }),
    ],
  },
  {
    title: "Thinking",
    only: "chat",
    folded: true,
    fields: [
      choice("reasoning_effort", "Effort", "For models whose chat template reads it.", [
        ["", "default"],
        ["none", "none"],
        ["low", "low"],
        ["medium", "medium"],
        ["high", "high"],
      ]),
      number("thinking_token_budget", "Budget", "The thoughts end after this many tokens.", {
        min: 0,
        step: 1,
      }),
    ],
  },
  {
    title: "Tools",
    only: "chat",
    folded: true,
    fields: [
      json(
        "tools",
        "Tools",
        "A list, in OpenAI's form.",
        '[{"type": "function", "function": {"name": "weather", "parameters": {…}}}]',
      ),
      choice("tool_choice", "Choice", null, [
        ["", "auto"],
        ["required", "required"],
        ["none", "none"],
      ]),
    ],
  },
  {
    title: "Form of the answer",
    folded: true,
    fields: [
      json("schema", "JSON schema", "The answer follows it.", '{"type": "object", "properties": {…}}'),
    ],
  },
  {
    title: "Other fields",
    folded: true,
    fields: [
      json(
        "others",
        "Other fields",
        "An object that is added to the request.",
        '{"structured_outputs": {"regex": "[0-9]+"}}',
      ),
      choice("markdown", "Markdown", null, [
        ["", "shown as formatted text"],
        ["off", "shown as it is"],
      ]),
    ],
  },
];

export const FIELDS = GROUPS.flatMap((group) => group.fields);

// A field's value is text, as entered. Throws an Error that names the field.
function parsed(field, entered) {
  if (field.kind === "number") {
    const value = Number(entered);
    if (!Number.isFinite(value)) throw new Error(`${field.label} must be a number.`);
    return value;
  }
  if (field.kind !== "json") return entered;
  try {
    return JSON.parse(entered);
  } catch (error) {
    throw new Error(`${field.label} is not JSON: ${error.message}.`);
  }
}

// The problem of an entered value in words, or "".
export function problem(field, entered) {
  if (!entered.trim()) return "";
  try {
    const value = parsed(field, entered);
    if (field.name === "tools" && !Array.isArray(value)) return "Tools must be a list.";
    const isObject = value !== null && typeof value === "object" && !Array.isArray(value);
    if (["schema", "others"].includes(field.name) && !isObject) return `${field.label} must be an object.`;
    return "";
  } catch (error) {
    return error.message;
  }
}

// The fields of a request for `mode` ("chat" or "completion"), and `system`; throws an Error in words.
export function sampling(values, mode) {
  const fields = {};
  for (const group of GROUPS) {
    if (group.only && group.only !== mode) continue;
    for (const field of group.fields) {
      const entered = values[field.name] ?? "";
      if (!entered.trim()) continue;
      const wrong = problem(field, entered);
      if (wrong) throw new Error(wrong);
      fields[field.name] = parsed(field, entered);
    }
  }
  return arranged(fields, mode);
}

function arranged({ markdown, logprobs, schema, stop, others, ...fields }, mode) {
  if (logprobs !== undefined && mode === "chat") {
    fields.logprobs = true;
    fields.top_logprobs = Number(logprobs);
  } else if (logprobs !== undefined) {
    fields.logprobs = Number(logprobs);
  }
  if (schema) {
    fields.response_format = { type: "json_schema", json_schema: { name: "answer", schema } };
  }
  if (stop) {
    const lines = stop.split("\n").filter(Boolean);
    fields.stop = lines.map((line) => line.replaceAll("\\n", "\n").replaceAll("\\t", "\t"));
  }
  if (!fields.tools) delete fields.tool_choice;
  return { ...fields, ...others };
}
