// The live readouts, from /metrics in Prometheus's text format.

import { request } from "./api.js";
import { $, duration, figure } from "./dom.js";

const SECONDS = 2; // between two readings
const BUSY_SECONDS = 1; // while this page waits for an answer
const POINTS = 60; // of the trace: two minutes
const RATE_WINDOW = 3; // seconds over which tokens are counted
const WINDOW = 60; // seconds over which the time to the first token is averaged

// The sum of each series over its labels, by the name of its samples.
export function sums(text) {
  const found = new Map();
  for (const line of text.split("\n")) {
    const match = /^([a-zA-Z_:][\w:]*)(?:\{.*\})? (\S+)/.exec(line);
    if (match) found.set(match[1], (found.get(match[1]) ?? 0) + Number(match[2]));
  }
  return found;
}

// Polls while the page is visible. `told` gets an error, or null after a reading.
export class Metrics {
  constructor(told) {
    this.told = told;
    this.readings = []; // the oldest first
    this.rates = [];
    this.timer = 0;
    this.busy = false;
    document.addEventListener("visibilitychange", () => this.resume());
  }

  // Reads now, and then regularly.
  resume() {
    clearTimeout(this.timer);
    if (!document.hidden) this.poll();
  }

  // Whether this page waits for an answer; a change is read at once.
  setBusy(busy) {
    if (busy === this.busy) return;
    this.busy = busy;
    this.resume();
  }

  pause() {
    clearTimeout(this.timer);
  }

  async poll() {
    try {
      this.show(sums(await (await request("metrics")).text()));
      this.told(null);
    } catch (error) {
      this.told(error);
      if (error.status === 401) return; // until there is a key
    }
    clearTimeout(this.timer);
    this.timer = setTimeout(() => this.resume(), (this.busy ? BUSY_SECONDS : SECONDS) * 1000);
  }

  show(series) {
    const now = {
      time: performance.now() / 1000,
      tokens: series.get("vllm:generation_tokens_total") ?? 0,
      waits: series.get("vllm:time_to_first_token_seconds_sum") ?? 0,
      firsts: series.get("vllm:time_to_first_token_seconds_count") ?? 0,
    };
    const before = this.readings.at(-1);
    if (before && now.tokens < before.tokens) this.readings = []; // the server was restarted
    const last = this.readings.find((one) => now.time - one.time <= RATE_WINDOW);
    if (last) {
      this.rates.push((now.tokens - last.tokens) / (now.time - last.time));
      this.rates = this.rates.slice(-POINTS);
      $("rate").textContent = figure(this.rates.at(-1));
      drawTrace(this.rates);
    }
    this.readings.push(now);
    this.readings = this.readings.filter((one) => now.time - one.time <= WINDOW);
    const first = this.readings[0];
    const recent = (now.waits - first.waits) / (now.firsts - first.firsts);
    const mean = Number.isFinite(recent) ? recent : now.waits / now.firsts;
    const cache = series.get("vllm:kv_cache_usage_perc");
    $("ttft").textContent = duration(mean);
    $("running").textContent = figure(series.get("vllm:num_requests_running"));
    $("waiting").textContent = figure(series.get("vllm:num_requests_waiting"));
    $("cache").textContent = cache === undefined ? "–" : `${figure(cache * 100)} %`;
    $("cache").style.setProperty("--share", `${Math.min(1, cache ?? 0) * 100}%`);
  }
}

function drawTrace(rates) {
  const all = [...Array(POINTS - rates.length).fill(0), ...rates];
  const most = Math.max(...all, 1);
  const points = all.map((rate, index) => `${index},${(15 - (rate / most) * 14).toFixed(1)}`);
  $("trace").firstElementChild.setAttribute("points", points.join(" "));
}
