// Markdown as elements: paragraphs, headings, lists, quotes, tables, code, emphasis, links.
//
// Text becomes text nodes, never HTML. Pictures are not loaded; links are http(s) only.

import { copyButton, make } from "./dom.js";

const FENCE = /^ {0,3}(`{3,}|~{3,})\s*([^\s`]*)[^`]*$/;
const HEADING = /^ {0,3}(#{1,6})\s+(.*?)\s*#*$/;
const RULE = /^ {0,3}([-*_])(?:\s*\1){2,}\s*$/;
const ITEM = /^(\s*)(?:([-*+])|(\d{1,9})[.)])(?:\s+|$)(.*)$/;
const TABLE_LINE = /^\s*\|?\s*:?-+:?\s*(\|\s*:?-+:?\s*)*\|?\s*$/;
const MAX_DEPTH = 8; // of lists and quotes; what is deeper is shown as it is
const MAX_INLINE = 10_000; // characters of a block in which marks are looked for: it takes quadratic time
// code, strong, emphasis, strike-through, link or picture, bare link
const INLINE = new RegExp(
  [
    "(?<!`)(?<ticks>`{1,3})(?<code>[^]*?[^`])\\k<ticks>(?!`)",
    "(?<stars>\\*\\*|__)(?=\\S)(?<strong>[^]*?\\S)\\k<stars>",
    "(?<![\\w*])(?<star>[*_])(?=[^\\s*_])(?<soft>[^]*?[^\\s*_])\\k<star>(?!\\w)",
    "~~(?<struck>[^]+?)~~",
    "!?\\[(?<words>[^\\]]*)\\]\\((?<target>[^()\\s]+(?:\\([^()\\s]*\\))?)[^)]*\\)",
    "(?<bare>https?://[^\\s<>()\\[\\]\"'`]+[^\\s<>()\\[\\]\"'`.,;:!?])",
    "\\\\(?<escaped>[!-/:-@\\[-`{-~])",
  ].join("|"),
);

// Shows `text` in `element`; blocks whose text is as before keep their elements.
export function showMarkdown(element, text, depth = 0) {
  const before = element.blocks ?? [];
  const sources = blocksOf(text.split("\n"));
  element.blocks = sources.map((source, index) => {
    const kept = before[index];
    if (kept?.source === source) return kept;
    const node = depth < MAX_DEPTH ? blockElement(source.split("\n"), depth) : make("p", {}, source);
    if (kept) kept.node.replaceWith(node);
    else element.append(node);
    return { source, node };
  });
  for (const { node } of before.slice(sources.length)) node.remove();
}

// The lines of a text, joined again for each block.
function blocksOf(lines) {
  const blocks = [];
  for (let at = 0; at < lines.length;) {
    if (!lines[at].trim()) {
      at += 1;
      continue;
    }
    const end = endOfBlock(lines, at);
    blocks.push(lines.slice(at, end).join("\n"));
    at = end;
  }
  return blocks;
}

function endOfBlock(lines, at) {
  const fence = FENCE.exec(lines[at]);
  let end = at + 1;
  if (fence) {
    const closes = (line) => line.trim().startsWith(fence[1]) && !line.trim().replaceAll(fence[1][0], "");
    while (end < lines.length && !closes(lines[end])) end += 1;
    return Math.min(end + 1, lines.length);
  }
  if (HEADING.test(lines[at]) || RULE.test(lines[at])) return end;
  const goesOn = ITEM.test(lines[at]) ? continuesList : continuesParagraph;
  while (end < lines.length && goesOn(lines, end)) end += 1;
  return end;
}

const beginsBlock = (line) => [FENCE, HEADING, RULE, ITEM].some((pattern) => pattern.test(line));

function continuesParagraph(lines, at) {
  return Boolean(lines[at].trim()) && !beginsBlock(lines[at]);
}

function continuesList(lines, at) {
  const isPart = (line) => /^\s/.test(line) || (ITEM.test(line) && !RULE.test(line));
  if (lines[at].trim()) return isPart(lines[at]) || (lines[at - 1].trim() && continuesParagraph(lines, at));
  const next = lines.slice(at).find((line) => line.trim());
  return next !== undefined && isPart(next);
}

function blockElement(lines, depth) {
  const fence = FENCE.exec(lines[0]);
  if (fence) return codeElement(lines, fence);
  const heading = HEADING.exec(lines[0]);
  if (heading) return make(`h${Math.min(heading[1].length + 2, 6)}`, {}, ...inline(heading[2]));
  if (RULE.test(lines[0])) return make("hr");
  if (ITEM.test(lines[0])) return listElement(lines, depth);
  if (/^ {0,3}>/.test(lines[0])) {
    const quoted = make("blockquote");
    showMarkdown(quoted, lines.map((line) => line.replace(/^ {0,3}> ?/, "")).join("\n"), depth + 1);
    return quoted;
  }
  if (lines.length > 1 && lines[0].includes("|") && TABLE_LINE.test(lines[1])) return tableElement(lines);
  return make("p", {}, ...inline(lines.join("\n")));
}

function codeElement(lines, fence) {
  const isClosed = lines.length > 1 && lines.at(-1).trim().startsWith(fence[1]);
  const code = lines.slice(1, isClosed ? -1 : undefined).join("\n");
  const head = make(
    "figcaption",
    {},
    make("span", {}, fence[2]),
    copyButton("Copy", () => code),
  );
  return make("figure", { class: "code" }, head, make("pre", {}, make("code", {}, code)));
}

function listElement(lines, depth) {
  const [, indent, , start] = ITEM.exec(lines[0]);
  const list = make(start === undefined ? "ul" : "ol", start === undefined ? {} : { start: Number(start) });
  let item = [];
  const end = () => {
    if (!item.length) return;
    const element = make("li");
    showMarkdown(element, item.join("\n"), depth + 1);
    list.append(element);
  };
  for (const line of lines) {
    const match = ITEM.exec(line);
    if (match && match[1].length <= indent.length + 1) {
      end();
      item = [match[4]];
    } else {
      item.push(line.replace(/^(?: {1,4}|\t)/, ""));
    }
  }
  end();
  return list;
}

function tableElement(lines) {
  const cells = (line) =>
    line
      .trim()
      .replace(/^\||\|$/g, "")
      .split(/(?<!\\)\|/);
  const row = (line, tag) =>
    make("tr", {}, ...cells(line).map((cell) => make(tag, {}, ...inline(cell.trim()))));
  const body = lines.slice(2).map((line) => row(line, "td"));
  const table = make("table", {}, make("thead", {}, row(lines[0], "th")), make("tbody", {}, ...body));
  return make("div", { class: "table" }, table);
}

// The nodes of a line's text.
function inline(text) {
  if (text.length > MAX_INLINE) return [text];
  const nodes = [];
  for (let rest = text; rest;) {
    const match = INLINE.exec(rest);
    if (!match) {
      nodes.push(rest);
      break;
    }
    if (match.index) nodes.push(rest.slice(0, match.index));
    nodes.push(inlineElement(match));
    rest = rest.slice(match.index + match[0].length);
  }
  return nodes;
}

function inlineElement({ 0: whole, groups }) {
  const { code, strong, soft, struck, words, target, bare, escaped } = groups;
  if (code !== undefined) return make("code", {}, code.replace(/^ (.+) $/, "$1"));
  if (strong !== undefined) return make("strong", {}, ...inline(strong));
  if (soft !== undefined) return make("em", {}, ...inline(soft));
  if (struck !== undefined) return make("del", {}, ...inline(struck));
  if (escaped !== undefined) return escaped;
  const href = bare ?? target;
  if (!/^https?:\/\//i.test(href)) return whole;
  const shown = bare ? [bare] : inline(words || href);
  return make("a", { href, target: "_blank", rel: "noopener noreferrer" }, ...shown);
}
