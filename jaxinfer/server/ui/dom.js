// Small helpers for elements. Text from the model only ever becomes text nodes.

export const $ = (id) => document.getElementById(id);

// An element with properties, and children that are nodes or texts.
// `class` and names with a dash or a colon are attributes; `on...` are listeners.
export function make(tag, properties = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (value === undefined || value === null) continue;
    if (name === "class") element.className = value;
    else if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name.includes("-") || name === "role") element.setAttribute(name, value);
    else element[name] = value;
  }
  element.append(...children.filter((child) => child !== null && child !== undefined));
  return element;
}

// A button that shows for a moment that it has done its work.
export function copyButton(words, text) {
  const button = make("button", { type: "button", class: "plain" }, words);
  button.addEventListener("click", () => copy(button, text()));
  return button;
}

// Copies a text; the button says how it went.
export async function copy(button, text) {
  const words = button.textContent;
  try {
    await navigator.clipboard.writeText(text);
    button.textContent = "Copied";
  } catch {
    button.textContent = copyBySelection(text) ? "Copied" : "Copying is not allowed here";
  }
  setTimeout(() => (button.textContent = words), 1500);
}

// navigator.clipboard exists only over HTTPS and on localhost.
function copyBySelection(text) {
  const area = make("textarea", { value: text, class: "unseen" });
  document.body.append(area);
  area.select();
  const copied = document.execCommand("copy");
  area.remove();
  return copied;
}

// A textarea as tall as its text, up to the height that the style sheet allows.
export function grow(area) {
  area.style.height = "auto";
  area.style.height = `${area.scrollHeight + 2}px`;
}

// Calls `work` once in the next frame, however often it is asked for before.
export function oncePerFrame(work) {
  let planned = false;
  return () => {
    if (planned) return;
    planned = true;
    requestAnimationFrame(() => {
      planned = false;
      work();
    });
  };
}

// A number as people read it: 1,234 or 12.3 or 0.45.
export function figure(value) {
  if (!Number.isFinite(value)) return "–";
  if (Math.abs(value) >= 100) return Math.round(value).toLocaleString("en");
  return value.toFixed(Math.abs(value) >= 10 ? 1 : 2).replace(/\.0+$/, "");
}

// Seconds: 84 ms, 1.2 s, 75 s.
export function duration(seconds) {
  if (!Number.isFinite(seconds)) return "–";
  return seconds < 1 ? `${Math.round(seconds * 1000)} ms` : `${figure(seconds)} s`;
}
