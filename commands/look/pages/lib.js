// Parts that all pages share: preact and htm, the state in the URL, queries to the server, numbers as text.
// The server makes hidden characters in a run's texts visible. Pages put these texts only into text nodes.

export const render = window.preact.render;
export const useState = window.preactHooks.useState;
export const useEffect = window.preactHooks.useEffect;
export const useRef = window.preactHooks.useRef;
export const useMemo = window.preactHooks.useMemo;
export const html = window.htm.bind(window.preact.h);

// { pages, answers } of a page that was written to a file (export.py) and has no server; else null.
export const EXPORTED = window.EXPORTED;

export const COLORS = ["c0", "c1", "c2", "c3", "c4", "c5", "c6", "c7"];

// Return the state of the page. It is stored in the URL, so that a link shows what its sender saw.
export function state() {
  return new URLSearchParams(EXPORTED ? location.hash.slice(1) : location.search);
}

// Change keys of the state (null and "" remove a key) and show the page again. Adds an entry to the history, unless `replaces`.
export function go(changes, replaces = false) {
  const params = state();
  for (const [key, value] of Object.entries(changes)) {
    params.delete(key);
    for (const each of Array.isArray(value) ? value : [value]) {
      if (each !== null && each !== undefined && each !== "") params.append(key, each);
    }
  }
  const query = params.toString();
  const address = EXPORTED ? `#${query}` : query ? `?${query}` : location.pathname;
  history[replaces ? "replaceState" : "pushState"](null, "", address);
  dispatchEvent(new Event("state"));
}

export function useUrl() {
  const [, again] = useState(0);
  useEffect(() => {
    const changed = () => again((n) => n + 1);
    addEventListener("state", changed);
    addEventListener("popstate", changed);
    return () => {
      removeEventListener("state", changed);
      removeEventListener("popstate", changed);
    };
  }, []);
  return state();
}

// Return the [name, value] pairs of a query. A list gives one pair for each element; null and "" give none.
function pairs(params) {
  const given = Object.entries(params).flatMap(([name, value]) => (Array.isArray(value) ? value : [value]).map((each) => [name, each]));
  return given.filter(([, value]) => value !== null && value !== undefined && value !== "");
}

const key = (question, params) => [question, ...pairs(params).map(([name, value]) => `${name}=${value}`)].join("\n");

export async function ask(question, params = {}, signal = undefined) {
  if (EXPORTED) {
    const kept = EXPORTED.answers[key(question, params)];
    if (kept === undefined) throw new Error("This file contains only a part of the run; `marsrl view` shows all of it.");
    return kept;
  }
  const answer = await fetch(`api/${question}?${new URLSearchParams(pairs(params))}`, { signal });
  const content = answer.headers.get("content-type")?.includes("json") ? await answer.json() : {};
  if (!answer.ok) throw new Error(content.detail ?? `the server answered ${answer.status}: is the viewer still running?`);
  return content;
}

// Return { data, error } of a query; while the query is pending, the previous query's. question null: no query.
export function useAnswer(question, params, tick = 0) {
  const [found, setFound] = useState({ data: null, error: null });
  const asked = question && key(question, params);
  useEffect(() => {
    if (!question) return undefined;
    const stop = new AbortController();
    ask(question, params, stop.signal).then(
      (data) => setFound({ data, error: null, asked }),
      (error) => error.name === "AbortError" || setFound({ data: null, error: error.message, asked }),
    );
    return () => stop.abort();
  }, [asked, tick]);
  return found;
}

export function number(value, digits = 3) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  return Number.isInteger(value) ? value.toLocaleString("en") : Number(value.toPrecision(digits)).toLocaleString("en", { maximumSignificantDigits: digits });
}

// Return a short text for a number beside an axis, without losing digits.
export function tickText(value) {
  const size = Math.abs(value);
  if (size >= 1e6 && size < 1e15) return value.toLocaleString("en", { notation: "compact", maximumSignificantDigits: 4 });
  return value === 0 || (size >= 1e-4 && size < 1e6) ? value.toLocaleString("en", { maximumSignificantDigits: 6 }) : value.toExponential(2).replace(/\.?0+e/, "e");
}

// Return round numbers in [low, high], spaced by 1, 2 or 5 times a power of 10: between `count` and 2.5 times `count` intervals.
export function roundTicks(low, high, count) {
  if (high <= low) return [low];
  const raw = (high - low) / count;
  const magnitude = 10 ** Math.floor(Math.log10(raw));
  const step = magnitude * [5, 2, 1].find((m) => magnitude * m <= raw * (1 + 1e-9));
  const first = Math.ceil(low / step - 1e-9);
  return [...Array(Math.floor(high / step + 1e-9) - first + 1).keys()].map((k) => (first + k) * step);
}

export const signed = (value) => (value === null ? "–" : `${value >= 0 ? "+" : "−"}${Math.abs(value).toFixed(2)}`);

export const pillOf = (reward) => (reward === null ? "missing" : reward >= 1 ? "good" : reward <= 0 ? "bad" : "half");

export const loading = (what) => html`<span class="loading muted" role="status">Loading ${what} …</span>`;

export const note = (text) => html`<p class="note">${text}</p>`;

// Show a text that may be very long: its beginning and end, and the rest on demand.
export const MOST = 30000;
export function Long({ text, class: name = "" }) {
  const [isWhole, setWhole] = useState(false);
  if (isWhole || text.length <= MOST) return html`<pre class=${name} dir="auto">${text}</pre>`;
  const half = MOST / 2;
  return html`<pre class=${name} dir="auto">${text.slice(0, half)}</pre>
    <button class="more" onClick=${() => setWhole(true)}>show the ${number(text.length - MOST)} characters between</button>
    <pre class=${name} dir="auto">${text.slice(-half)}</pre>`;
}
