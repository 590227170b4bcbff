// The server's API: requests with the key, errors in words, events of a stream.

const ROOT = new URL("../", import.meta.url); // where the server is, also below a proxy's path
const KEY = "jaxinfer.key";

// What a status says if the body does not.
const WORDS = {
  413: "The request is larger than the server allows.",
  429: "The server's queue is full.",
  431: "The request's head is larger than the server allows.",
  502: "A proxy in front of the server has got no answer from it.",
  503: "The server takes no requests at the moment.",
  504: "A proxy in front of the server has waited too long for it.",
};

// The key for this tab, or "".
export const key = {
  get: () => sessionStorage.getItem(KEY) ?? "",
  set: (value) => sessionStorage.setItem(KEY, value),
  forget: () => sessionStorage.removeItem(KEY),
};

// A request that failed; `message` is for people, `status` 0 if there was no response.
export class ApiError extends Error {
  constructor(message, { status = 0, code = null, param = null } = {}) {
    super(message);
    Object.assign(this, { status, code, param });
  }
}

// The absolute address of a route.
export const address = (path) => new URL(path, ROOT).href;

// The response to a GET, or to a POST of `body` as JSON; throws ApiError unless it is a success.
export async function request(path, { body, signal } = {}) {
  const headers = {};
  if (key.get()) headers.Authorization = `Bearer ${key.get()}`;
  if (body !== undefined) headers["Content-Type"] = "application/json";
  let response;
  try {
    response = await fetch(address(path), {
      method: body === undefined ? "GET" : "POST",
      headers,
      body: body === undefined ? undefined : JSON.stringify(body),
      signal,
      cache: "no-store",
    });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError("The server cannot be reached. Is it still running?");
  }
  if (!response.ok) throw await failure(response);
  return response;
}

// The JSON of each event of a response, until [DONE].
// Throws ApiError for an event that is an error, and for a stream that breaks off.
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let pending = "";
  try {
    for (;;) {
      const { value, done } = await reader.read().catch(brokenOff);
      if (done) brokenOff();
      pending += value;
      const frames = pending.split(/\r?\n\r?\n/);
      pending = frames.pop();
      for (const data of frames.map(dataOf)) {
        if (data === "[DONE]") return;
        if (!data) continue;
        const event = JSON.parse(data);
        if (event.error) throw errorOf(event.error, 200);
        yield event;
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

function dataOf(frame) {
  const lines = frame.split(/\r?\n/).filter((line) => line.startsWith("data:"));
  return lines.map((line) => line.slice(5).trimStart()).join("\n");
}

function brokenOff(error) {
  if (error?.name === "AbortError") throw error;
  throw new ApiError("The connection ended before the answer was complete.");
}

async function failure(response) {
  const { status } = response;
  let error = null;
  try {
    error = (await response.json()).error;
  } catch {
    // not the server's own JSON: a proxy's page
  }
  return error?.message
    ? errorOf(error, status, response.headers.get("Retry-After"))
    : new ApiError(WORDS[status] ?? `The server answered with status ${status}.`, { status });
}

function errorOf({ message, code, param }, status, retryAfter = null) {
  const when = retryAfter ? ` Try again in ${retryAfter} s.` : "";
  return new ApiError(sentence(message) + when, { status, code, param });
}

function sentence(message) {
  const text = String(message);
  const begun = /^[a-z]+ /.test(text) ? text[0].toUpperCase() + text.slice(1) : text;
  return /[.!?]$/.test(begun) ? begun : `${begun}.`;
}
