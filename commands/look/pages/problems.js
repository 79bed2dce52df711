// Rewards of each problem over the steps: a row for each problem, a cell for each range of steps.

import { html, useAnswer, useState, go, loading, note, number, EXPORTED } from "./lib.js";

const MEASURES = { reward: "mean reward", right: "share right" };
const ORDERS = {
  most: "most played first",
  hardest: "hardest first",
  easiest: "easiest first",
};

export function Problems({ run, about, url }) {
  const agent = url.get("agent") ?? about.agents[0]?.key ?? "";
  const [order, setOrder] = useState("most");
  const at = MEASURES[url.get("of")] ? url.get("of") : "reward";
  const { data, error } = useAnswer("problems", { run, agent }, about.samples);
  if (error) return html`<main>${note(error)}</main>`;
  if (!data) return html`<main>${loading("the problems")}</main>`;
  const value = (cell) => cell?.[at === "reward" ? 1 : 2] ?? null;
  const mean = (row) => {
    const known = row.cells.filter((cell) => value(cell) !== null);
    return known.length ? known.reduce((sum, cell) => sum + cell[0] * value(cell), 0) / known.reduce((sum, cell) => sum + cell[0], 0) : null;
  };
  const rows = data.rows.map((row) => ({ ...row, mean: mean(row) }));
  if (order !== "most") rows.sort((a, b) => (order === "hardest" ? 1 : -1) * ((a.mean ?? Infinity) - (b.mean ?? Infinity)));
  const values = rows.flatMap((row) => row.cells.map(value)).filter((each) => each !== null);
  const low = Math.min(0, ...values);
  const high = Math.max(low + 1e-9, at === "right" ? 1 : 0, ...values);
  const heat = (each) => `l${Math.round((9 * (each - low)) / (high - low))}`;
  const open = (row, first, last) => (e) => { e.preventDefault(); go({ page: "samples", problem: row.key, agent: agent || null, first, last, sample: null, flag: null, low: null, high: null, words: null }); };
  const link = (row, text, first, last) => (EXPORTED ? text : html`<a href="?" class="plain" onClick=${open(row, first, last)}>${text}</a>`);
  return html`<main>
    <div class="bar">
      ${!EXPORTED && html`<select aria-label="agent" value=${agent} onChange=${(e) => go({ agent: e.target.value }, true)}>
        ${about.agents.map((each) => html`<option value=${each.key}>${each.shown}</option>`)}</select>`}
      <select aria-label="measure" value=${at} onChange=${(e) => go({ of: e.target.value }, true)}>${Object.entries(MEASURES).map(([key, name]) => html`<option value=${key}>${name}</option>`)}</select>
      <select aria-label="order" value=${order} onChange=${(e) => setOrder(e.target.value)}>${Object.entries(ORDERS).map(([key, name]) => html`<option value=${key}>${name}</option>`)}</select>
      <span class="muted small">${MEASURES[at]} of ${about.agents.find((each) => each.key === agent)?.shown ?? agent}'s samples, by step; ${number(rows.length)} problems</span>
    </div>
    ${rows.length === 0 ? html`<p class="muted">No sample has been logged yet.</p>` : html`<section class="card"><table class="heat">
      <tr><th>problem</th><th>samples</th><th>all steps</th>${data.columns.map(([first, last]) => html`<th>${first === last ? number(first) : `${number(first)}–${number(last)}`}</th>`)}</tr>
      ${rows.map((row) => html`<tr><th>${link(row, row.problem, null, null)}</th><td>${number(row.cells.reduce((sum, cell) => sum + (cell?.[0] ?? 0), 0))}</td><td>${number(row.mean, 2)}</td>
        ${row.cells.map((cell, i) => html`<td class=${value(cell) === null ? "" : `cell ${heat(value(cell))}`} title=${cell ? `${number(cell[0])} samples` : undefined}>${cell && link(row, number(value(cell), 2), ...data.columns[i])}</td>`)}</tr>`)}</table></section>`}
  </main>`;
}
