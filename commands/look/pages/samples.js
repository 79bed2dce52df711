// The sample browser: a filter, the list of samples that pass it, and the selected sample.

import { html, useAnswer, useEffect, useMemo, useRef, useState, ask, go, loading, note, number, pillOf, signed, EXPORTED } from "./lib.js";
import { Sample } from "./sample.js";

const FIELDS = ["agent", "first", "last", "low", "high", "flag", "problem", "words"];

const NO_MORE = { rows: [], played: [], next: undefined };

export function Samples({ run, about, url }) {
  const wanted = { run };
  for (const field of EXPORTED ? [] : FIELDS) wanted[field] = field === "flag" ? url.getAll("flag") : url.get(field);
  const key = JSON.stringify(wanted);
  const linked = /^\d{1,9}\.\d{1,9}$/.test(url.get("sample") ?? "") ? url.get("sample") : null;
  const [through, setThrough] = useState({ key, place: linked }); // if the URL names a sample, the list begins with it
  const begin = through.key === key && !EXPORTED ? through.place : null;
  const { data, error } = useAnswer("samples", { ...wanted, through: begin }, about.samples > 0 ? 1 : 0);
  const [more, setMore] = useState({ key, ...NO_MORE });
  const [fresh, setFresh] = useState(about.samples);
  const own = more.key === key ? more : NO_MORE;
  const rows = [...(data?.rows ?? []), ...own.rows];
  const played = [...(data?.played ?? []), ...own.played];
  const next = own.next === undefined ? data?.next : own.next;
  const load = async () => {
    const page = await ask("samples", { ...wanted, before: next });
    setMore({ key, rows: [...own.rows, ...page.rows], played: [...own.played, ...page.played], next: page.next });
  };
  useEffect(() => {
    if (data && rows.length === 0 && next) load(); // a rare match may need several pages
  }, [key, data, own.next]);
  useEffect(() => setFresh(about.samples), [key]);
  const place = linked;
  const isOpen = useRef(place !== null);
  useEffect(() => {
    if (isOpen.current || !rows.length || innerWidth <= 760) return; // narrow screens show either the list or a sample
    isOpen.current = true;
    go({ sample: `${rows[0].step}.${rows[0].line}` }, true);
  }, [rows.length]);
  const [step, line] = (place ?? "").split(".").map(Number);
  const at = rows.findIndex((row) => `${row.step}.${row.line}` === place);
  useEffect(() => {
    const pressed = (event) => {
      if (event.target.matches?.("input, select, textarea") || event.ctrlKey || event.metaKey || event.altKey) return;
      const to = { j: at + 1, k: Math.max(0, at - 1) }[event.key];
      if (to !== undefined && rows[to]) go({ sample: `${rows[to].step}.${rows[to].line}` }, true);
    };
    addEventListener("keydown", pressed);
    return () => removeEventListener("keydown", pressed);
  }, [at, rows.length, key]);
  // Render the filter again only if it changes: rendering a field while the user types would lose text that is not in the URL yet.
  const bar = useMemo(() => html`<${FilterBar} about=${about} url=${url} />`, [url.toString(), JSON.stringify(about.agents)]);
  return html`<main class=${`samples ${place ? "reads" : ""}`}>
    <section class="list" aria-label="samples">
      ${EXPORTED ? html`<p class="muted">The problems with the deepest trees in the first and the last step. <code>marsrl view</code> shows every sample.</p>` : bar}
      <p class="muted count">${data ? counted(data, rows, next) : !error && loading("the samples")}
        ${about.samples > fresh && html` <button class="more" onClick=${() => go({}, true) || location.reload()}>new samples</button>`}</p>
      ${error && note(error)}
      ${begin && html`<button class="more" onClick=${() => setThrough({ key, place: null })}>newer ones</button>`}
      ${rows.map((row, i) => html`${isOther(row, rows[i - 1]) && html`<${Problem} key=${`${row.step}.${row.block}`} row=${row} played=${played} />`}<${Item} key=${`${row.step}.${row.line}`} row=${row} isHere=${`${row.step}.${row.line}` === place} />`)}
      ${data && rows.length === 0 && !next && html`<p class="muted">${about.samples ? "No sample passes this filter." : "No sample has been logged yet."}</p>`}
      ${next && html`<button class="more" onClick=${load}>older ones</button>`}
    </section>
    ${place
      ? html`<${Sample} run=${run} step=${step} line=${line} url=${url} />`
      : html`<section class="detail empty"><p class="muted">Choose a sample, or press <kbd>j</kbd>.</p></section>`}
  </main>`;
}

function counted(data, rows, next) {
  if (data.num !== null) return `${number(data.num)} samples`;
  return `${number(rows.length)}${next ? " or more" : ""} samples`;
}

const isOther = (row, last) => row.step !== last?.step || row.block !== last.block;

// The heading of a problem's samples in a step: number of samples and mean reward of each agent.
function Problem({ row, played }) {
  const own = new Map(played.filter((each) => each.step === row.step && each.block === row.block).map((each) => [each.agent, each])); // two pages may both have these counts
  return html`<div class="group"><a href="?" class="plain clip" title="every sample of this problem" onClick=${(e) => { e.preventDefault(); go({ problem: row.problem_key, sample: null }); }}>${row.problem}</a>
    <span class="muted small">step ${row.step}</span>
    <span class="agents small">${[...own.values()].map((each) => html`<span>${each.agent} ${number(each.num)} × <span class=${`pill ${pillOf(each.reward)}`}>${number(each.reward, 2)}</span></span>`)}</span></div>`;
}

function Item({ row, isHere }) {
  const self = useRef(null);
  useEffect(() => {
    if (isHere) self.current.scrollIntoView({ block: "nearest" });
  }, [isHere]);
  const place = `${row.step}.${row.line}`;
  return html`<a ref=${self} href=${`?page=samples&sample=${place}`} class=${`item ${isHere ? "here" : ""}`}
    onClick=${(e) => { if (!e.ctrlKey && !e.metaKey) { e.preventDefault(); go({ sample: place }); } }}>
    <span class=${`pill ${pillOf(row.reward)}`}>${number(row.reward)}</span>
    <span class="who"><b>${row.agent}</b></span>
    <span class="muted small">${row.verdict === null ? "" : row.verdict ? "says correct · " : "says wrong · "}${row.advantage === null ? "" : `A ${signed(row.advantage)} · `}${number(row.num_tokens)} tokens${
      row.answer === null ? "" : html` · answers <bdi>${row.answer}</bdi>`}</span>
    <span class="flags">${row.flags.filter((flag) => flag !== "verdict").map((flag) => html`<span class="flag">${flag}</span>`)}</span>
  </a>`;
}

function FilterBar({ about, url }) {
  const set = (field) => (event) => go({ [field]: event.target.value, sample: null }, true);
  const flags = url.getAll("flag");
  const toggle = (flag) => go({ flag: flags.includes(flag) ? flags.filter((each) => each !== flag) : [...flags, flag], sample: null }, true);
  const num = (field, text) => html`<input type="number" step="any" placeholder=${text} aria-label=${text} value=${url.get(field) ?? ""} onChange=${set(field)} />`;
  const isUsed = FIELDS.some((field) => url.get(field));
  return html`<form class="filter" onSubmit=${(e) => e.preventDefault()}>
    <input id="words" type="search" placeholder="words (/)" aria-label="words" value=${url.get("words") ?? ""} onChange=${set("words")} />
    <select aria-label="agent" value=${url.get("agent") ?? ""} onChange=${set("agent")}>
      <option value="">every agent</option>
      ${about.agents.map((agent) => html`<option value=${agent.key}>${agent.shown}</option>`)}</select>
    <span class="pair">${num("first", "from step")}${num("last", "to step")}</span>
    <span class="pair">${num("low", "reward from")}${num("high", "reward to")}</span>
    <span class="flags">${about.flags.map((flag) => html`<button type="button" class=${flags.includes(flag) ? "flag on" : "flag"} aria-pressed=${flags.includes(flag)}
      onClick=${() => toggle(flag)}>${flag}</button>`)}</span>
    ${url.get("problem") && html`<button type="button" class="flag on" onClick=${() => go({ problem: null }, true)}>one problem ✕</button>`}
    ${isUsed && html`<button type="button" class="more" onClick=${() => go(Object.fromEntries(FIELDS.map((field) => [field, null])), true)}>clear</button>`}
  </form>`;
}
