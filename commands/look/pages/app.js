// The frame around the pages: choice of run and page, light or dark theme, keys.

import { Compare } from "./compare.js";
import { Curves } from "./curves.js";
import { html, render, useAnswer, useEffect, useState, useUrl, go, loading, note, number, state, EXPORTED } from "./lib.js";
import { Overview } from "./overview.js";
import { Pipeline } from "./pipeline.js";
import { Problems } from "./problems.js";
import { Samples } from "./samples.js";
import { Warnings } from "./warnings.js";

const PAGES = { overview: Overview, samples: Samples, problems: Problems, curves: Curves, pipeline: Pipeline, warnings: Warnings, compare: Compare };
const FIRST = EXPORTED ? EXPORTED.pages[0] : "overview";
const KEYS = [
  ["j, k", "next, previous sample"],
  ["u", "parent: the sample that this one reads"],
  ["c", "colour the sample's tokens by log-prob, entropy, difference, clip or gate, or not"],
  ["← →", "previous, next coloured token"],
  ["/", "search for words"],
  ["Esc", "leave the field; back to the list"],
  ["r", "raw text, or Markdown with formulas"],
  ["1 – 7", "overview, samples, problems, curves, pipeline, warnings, compare"],
  ["t", "theme: light, dark, or as the system"],
  ["?", "this help"],
];

function setTheme(theme) {
  if (theme) document.documentElement.dataset.theme = theme;
  else delete document.documentElement.dataset.theme;
  localStorage.setItem("theme", theme);
  dispatchEvent(new Event("theme"));
}

function App() {
  const url = useUrl();
  const [tick, setTick] = useState(0);
  const [helps, setHelps] = useState(false);
  const { data: runs, error } = useAnswer("runs", {}, tick);
  useEffect(() => {
    if (EXPORTED) return undefined;
    const timer = setInterval(() => document.hidden || setTick((n) => n + 1), 3000);
    return () => clearInterval(timer);
  }, []);
  useEffect(() => {
    const pressed = (event) => {
      if (event.ctrlKey || event.metaKey || event.altKey) return;
      const isField = event.target.matches?.("input, select, textarea");
      if (event.key === "Escape") {
        setHelps(false);
        if (isField) event.target.blur();
        else if (state().get("sample")) go({ sample: null });
      }
      if (isField) return;
      const names = Object.keys(PAGES);
      if (names[event.key - 1]) go({ page: names[event.key - 1] });
      else if (event.key === "?") setHelps((shows) => !shows);
      else if (event.key === "t") nextTheme();
      else if (event.key === "/") {
        event.preventDefault();
        document.querySelector("#words")?.focus();
      }
    };
    addEventListener("keydown", pressed);
    return () => removeEventListener("keydown", pressed);
  }, []);
  const shown = EXPORTED?.pages ?? Object.keys(PAGES).filter((name) => name !== "compare" || runs?.length > 1);
  const page = shown.includes(url.get("page")) ? url.get("page") : FIRST;
  const chosen = Math.min(Math.max(0, Number(url.get("run") ?? 0) || 0), (runs?.length ?? 1) - 1);
  const run = runs?.[chosen];
  const Page = PAGES[page];
  useEffect(() => {
    if (run) document.title = `${runs.length > 1 && page === "compare" ? `${runs.length} runs` : run.name} – ${page} – marsrl`;
  }, [run?.name, page]);
  return html`<header>
      ${runs && runs.length > 1 && page !== "compare"
        ? html`<select class="run" aria-label="run" value=${chosen} onChange=${(e) => go({ run: e.target.value, sample: null })}>
            ${runs.map((each, i) => html`<option value=${i}>${each.name}</option>`)}</select>`
        : html`<h1>${page === "compare" ? "runs side by side" : (run?.name ?? "marsrl view")}</h1>`}
      <nav>${shown.length > 1 && shown.map(
        (name) => html`<a href="?" class=${name === page ? "here" : ""} aria-current=${name === page ? "page" : undefined}
          onClick=${(e) => { e.preventDefault(); go({ page: name }); }}>${name}</a>`)}</nav>
      <span class="state muted">${run && page !== "compare" && standing(run)}</span>
      <button class="quiet" title="light or dark (t)" aria-label="light or dark" onClick=${nextTheme}>◐</button>
      <button class="quiet" title="keys (?)" aria-label="keys" onClick=${() => setHelps(!helps)}>?</button>
    </header>
    ${error ? note(error) : !runs && html`<main>${loading("the run")}</main>`}
    ${helps && html`<dialog open class="keys"><table>${KEYS.map(([key, what]) => html`<tr><th><kbd>${key}</kbd></th><td>${what}</td></tr>`)}</table>
      <button onClick=${() => setHelps(false)}>close</button></dialog>`}
    ${run && html`<${Page} key=${`${page} ${chosen}`} run=${chosen} about=${run} runs=${runs} url=${url} />`}`;
}

function nextTheme() {
  const order = ["", "light", "dark"];
  setTheme(order[(order.indexOf(localStorage.getItem("theme") ?? "") + 1) % 3]);
}

function standing(run) {
  const left = run.num_files - run.files;
  const parts = [run.standing];
  if (run.last_metrics !== null && run.last_metrics !== undefined) parts.push(`step ${number(run.last_metrics)}`);
  parts.push(`${number(run.samples)} samples`);
  if (left > 0) parts.push(`reading ${number(left)} more steps`);
  return parts.join(" · ");
}

setTheme(localStorage.getItem("theme") ?? "");
document.querySelector("#wait").remove();
render(html`<${App} />`, document.body);
