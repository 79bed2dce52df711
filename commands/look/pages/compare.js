// Runs and evaluations side by side: last results with paired differences, cost of an episode, settings that differ, curves.

import { html, useAnswer, useMemo, loading, note, number } from "./lib.js";
import { AXES, Plot } from "./curves.js";

export function Compare() {
  const { data, error } = useAnswer("compare", {});
  if (error) return html`<main>${note(error)}</main>`;
  if (!data) return html`<main>${loading("the runs")}</main>`;
  if (data.why_not) return html`<main>${note(data.why_not)}</main>`;
  const heads = data.names.map((name) => html`<th>${name}</th>`);
  return html`<main>
    <p class="legend">${data.names.map((name, i) => html`<span><i class=${data.colors[i]}></i>${name}</span>`)}</p>
    <section class="card"><h3>Last evaluations</h3>
      <table><tr><th></th>${heads}</tr>${data.rows.map((row) => html`<tr><th>${row.name}</th>${row.cells.map((cell) => html`<td><${Cell} ...${cell} /></td>`)}</tr>`)}</table>
      <p class="muted small">95% intervals by bootstrap over problems. Below a result: its difference from the first run, paired over the problems that both answered; green or red if the interval excludes 0. Other inputs: n differs from the first run's, so the problems are not the same.</p></section>
    <section class="card"><h3>Cost of an episode</h3>
      <table><tr><th></th>${data.columns.map((column) => html`<th>${column}</th>`)}</tr>
        ${data.costs.map((run) => html`<tr><th>${run.name}</th>${run.cells.map((cell) => html`<td>${cell}</td>`)}</tr>
          ${run.parts.map((part) => html`<tr><td>${part.name}</td>${part.cells.map((cell) => html`<td>${cell}</td>`)}</tr>`)}`)}</table>
      <p class="muted small">In the last evaluations; ${data.meaning}.</p></section>
    <section class="card"><h3>Settings that differ</h3>
      ${Object.keys(data.settings).length === 0 ? html`<p class="muted">No setting differs.</p>`
        : html`<table><tr><th></th>${heads}</tr>${Object.entries(data.settings).map(([key, values]) => html`<tr><th>${key}</th>${values.map((value) => html`<td>${value}</td>`)}</tr>`)}</table>`}</section>
    ${data.charts.map((chart) => html`<h3>${chart.title}</h3><div class="grid">${data.axes.map((axis) => html`<${Chart} key=${axis} chart=${chart} axis=${axis} colors=${data.colors} />`)}</div>`)}
  </main>`;
}

function Cell({ value, gap, num_problems, is_clear, is_better, is_of_other_inputs }) {
  if (value === null) return html`<span class="muted">–</span>`;
  return html`<b>${value.mean.toFixed(3)}</b> <span class="muted">${value.low.toFixed(3)}–${value.high.toFixed(3)}, n ${value.n}</span>
    ${is_of_other_inputs && html` <span class="pill half">other inputs</span>`}
    ${gap && html`<br /><span class=${is_clear ? `pill ${is_better ? "good" : "bad"}` : "muted"}>${gap}${num_problems > 1 ? `, ${number(num_problems)} problems` : ""}</span>`}`;
}

function Chart({ chart, axis, colors }) {
  const lines = useMemo(() => {
    const steps = [...new Set(chart.curves.flatMap((curve) => curve[axis]))].sort((a, b) => a - b);
    const place = new Map(steps.map((x, i) => [x, i]));
    const onSteps = (curve, values) => {
      const all = new Array(steps.length).fill(undefined);
      curve[axis].forEach((x, k) => { all[place.get(x)] = values[k]; });
      return all;
    };
    const series = chart.curves.map((curve, i) => ({
      values: onSteps(curve, curve.mean),
      band: curve.low.every((low) => low !== null) ? [onSteps(curve, curve.low), onSteps(curve, curve.high)] : null,
      color: colors[i],
    }));
    return { steps, series, isSmooth: false };
  }, [chart, axis]);
  return html`<section class="card"><h3>${AXES[axis]}</h3><${Plot} lines=${lines} title=${chart.title} onCursor=${() => {}} x=${AXES[axis]} y=${chart.title.split(": ").at(-1)} isLog=${false} spansGaps=${true} /></section>`;
}
