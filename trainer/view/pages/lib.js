// What every page uses: preact and htm, the state in the URL, asking the server, numbers as text.
// Texts of a run come from the server with all that could hide in them made visible, and go into text nodes alone.

const { h, render } = window.preact;
export const { useState, useEffect, useRef, useMemo } = window.preactHooks;
export const html = window.htm.bind(h);
export { render };

export const COLORS = ["c0", "c1", "c2", "c3", "c4", "c5", "c6", "c7"];

// The state of the page is its URL: a link shows what its sender saw.
export function state() {
  return new URLSearchParams(location.search);
}

// Change some of it (null and "" take a key away) and show the page so. An entry of the history, unless `replaces`.
export function go(changes, replaces = false) {
  const params = state();
  for (const [key, value] of Object.entries(changes)) {
    params.delete(key);
    for (const each of Array.isArray(value) ? value : [value]) {
      if (each !== null && each !== undefined && each !== "") params.append(key, each);
    }
  }
  const query = params.toString();
  history[replaces ? "replaceState" : "pushState"](null, "", query ? `?${query}` : location.pathname);
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

export function query(params) {
  const all = new URLSearchParams();
  for (const [key, value] of Object.entries(params)) {
    for (const each of Array.isArray(value) ? value : [value]) {
      if (each !== null && each !== undefined && each !== "") all.append(key, each);
    }
  }
  return all.toString();
}

export async function ask(path, params = {}, signal = undefined) {
  const answer = await fetch(`api/${path}?${query(params)}`, { signal });
  const content = answer.headers.get("content-type")?.includes("json") ? await answer.json() : {};
  if (!answer.ok) throw new Error(content.detail ?? `the server answered ${answer.status}: is the viewer still running?`);
  return content;
}

// { data, error }: the answer to the question, the last one while another is on its way. null: nothing is asked.
export function useAnswer(path, params, tick = 0) {
  const [found, setFound] = useState({ data: null, error: null });
  const key = path && `${path}?${query(params)}`;
  useEffect(() => {
    if (!path) return undefined;
    const stop = new AbortController();
    ask(path, params, stop.signal).then(
      (data) => setFound({ data, error: null, key }),
      (error) => error.name === "AbortError" || setFound({ data: null, error: error.message, key }),
    );
    return () => stop.abort();
  }, [key, tick]);
  return found;
}

export function number(value, digits = 3) {
  if (value === null || value === undefined) return "–";
  return Number.isInteger(value) ? value.toLocaleString("en") : Number(value.toPrecision(digits)).toLocaleString("en", { maximumSignificantDigits: digits });
}

// A number beside an axis, whole and short, as report.html has it.
export function tickText(value) {
  const size = Math.abs(value);
  return value === 0 || (size >= 1e-4 && size < 1e6) ? value.toLocaleString("en", { maximumSignificantDigits: 6 }) : value.toExponential(2).replace(/\.?0+e/, "e");
}

// Round numbers in [low, high], `count` to two and a half times as many steps of 1, 2 or 5 apart.
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

export const note = (text) => html`<p class="note">${text}</p>`;

// A text that may be very long: its beginning and its end, all of it on demand.
const MOST = 30000;
export function Long({ text, class: name = "" }) {
  const [isWhole, setWhole] = useState(false);
  if (isWhole || text.length <= MOST) return html`<pre class=${name} dir="auto">${text}</pre>`;
  const half = MOST / 2;
  return html`<pre class=${name} dir="auto">${text.slice(0, half)}</pre>
    <button class="more" onClick=${() => setWhole(true)}>show the ${number(text.length - MOST)} characters between</button>
    <pre class=${name} dir="auto">${text.slice(-half)}</pre>`;
}
