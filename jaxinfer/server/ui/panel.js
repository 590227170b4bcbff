// The panel of settings: inputs made from `GROUPS`, kept in localStorage.

import { $, grow, make } from "./dom.js";
import { FIELDS, GROUPS, problem } from "./fields.js";

const STORED = "jaxinfer.settings";
const OPENED = "jaxinfer.groups";

// The entered values, and a call of `changed` for each change.
export class Panel {
  constructor(changed) {
    this.values = stored(STORED);
    this.changed = changed;
    this.setters = [];
    this.folded = stored(OPENED);
    this.groups = GROUPS.map((group) => ({ group, element: this.group(group) }));
    $("fields").append(...this.groups.map(({ element }) => element));
    $("reset").addEventListener("click", () => this.reset());
  }

  // Hides what the mode has no use for.
  setMode(mode) {
    for (const { group, element } of this.groups) {
      element.hidden = Boolean(group.only) && group.only !== mode;
    }
  }

  // Fits the heights of texts; needed once the panel is visible.
  fit() {
    for (const area of $("fields").querySelectorAll("textarea")) grow(area);
  }

  reset() {
    this.values = {};
    for (const set of this.setters) set("");
    this.keep();
  }

  // The first problem of an entered value in words, or "".
  problem() {
    const problems = FIELDS.map((field) => problem(field, this.values[field.name] ?? ""));
    return problems.find(Boolean) ?? "";
  }

  keep() {
    const entered = Object.entries(this.values).filter(([, value]) => value.trim());
    localStorage.setItem(STORED, JSON.stringify(Object.fromEntries(entered)));
    this.changed();
  }

  group({ title, folded, fields }) {
    const rows = fields.map((field) => this.field(field));
    if (!folded) return make("section", { class: "group" }, make("h3", {}, title), ...rows);
    const given = fields.some((field) => this.values[field.name]);
    const details = make(
      "details",
      { class: "group", open: this.folded[title] ?? given },
      make("summary", {}, title),
      ...rows,
    );
    details.addEventListener("toggle", () => {
      this.folded[title] = details.open;
      localStorage.setItem(OPENED, JSON.stringify(this.folded));
      this.fit();
    });
    return details;
  }

  field(field) {
    const input = this[field.kind](field);
    const wrong = make("p", { class: "wrong", hidden: true });
    const slider = field.slides ? sliderOf(field) : null;
    const show = (value) => {
      if (input.value !== value) input.value = value;
      if (slider) slide(slider, field, value);
      wrong.textContent = problem(field, value);
      wrong.hidden = !wrong.textContent;
      row.classList.toggle("given", Boolean(value.trim()));
    };
    const enter = (value) => {
      this.values[field.name] = value;
      show(value);
      this.keep();
    };
    input.addEventListener("input", () => enter(input.value));
    slider?.addEventListener("input", () => enter(slider.value));
    // the usual numbers of sampling are explained only where the pointer rests
    const isQuiet = field.kind === "number";
    const hint = make(
      "small",
      { id: `${field.name}-hint`, class: isQuiet ? "unseen" : "" },
      field.hint ?? "",
    );
    hint.hidden = !field.hint;
    if (field.hint) input.setAttribute("aria-describedby", hint.id);
    const label = make("label", { htmlFor: input.id, class: field.bare ? "unseen" : "" }, field.label);
    const row = make(
      "div",
      { class: `field ${field.kind}`, title: isQuiet ? field.hint : "" },
      label,
      input,
      slider,
      hint,
      wrong,
    );
    show(this.values[field.name] ?? "");
    this.setters.push(show);
    return row;
  }

  number({ name, min, max, step }) {
    const bounds = Object.fromEntries(
      Object.entries({ min, max }).filter(([, value]) => value !== undefined),
    );
    return make("input", {
      type: "number",
      id: `set-${name}`,
      ...bounds,
      step: step < 1 ? "any" : "1",
      placeholder: "default",
      inputMode: "decimal",
    });
  }

  text({ name, rows, mono }) {
    const area = make("textarea", { id: `set-${name}`, rows, class: mono ? "mono" : "", spellcheck: !mono });
    area.addEventListener("input", () => grow(area));
    return area;
  }

  json({ name, example }) {
    const area = this.text({ name, rows: 3, mono: true });
    area.placeholder = example;
    return area;
  }

  choice({ name, options }) {
    const all = options.map(([value, words]) => make("option", { value }, words));
    return make("select", { id: `set-${name}` }, ...all);
  }
}

function sliderOf({ min, max, step, label }) {
  return make("input", { type: "range", min, max, step, "aria-label": label, tabIndex: -1 });
}

// Where a slider stands; without a value in the middle, and dim.
function slide(slider, { min, max }, value) {
  slider.value = value.trim() ? value : String((Number(min) + Number(max)) / 2);
  slider.classList.toggle("unset", !value.trim());
  const share = (Number(slider.value) - min) / (max - min);
  slider.style.setProperty("--share", `${share * 100}%`);
}

function stored(name) {
  try {
    return JSON.parse(localStorage.getItem(name)) ?? {};
  } catch {
    return {};
  }
}
