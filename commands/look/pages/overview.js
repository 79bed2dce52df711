// Results of the run before and after training, and its hardware and versions.

import { html, useAnswer, loading, note } from "./lib.js";

const LEFT = 96;
const WIDTH = 520;
const ROW = 62;

export function Overview({ run, about }) {
  const { data, error } = useAnswer("overview", { run }, about.last_metrics ?? -1);
  if (error) return html`<main>${note(error)}</main>`;
  if (!data) return html`<main>${loading("the overview")}</main>`;
  return html`<main>
    <p class="muted">${about.standing}${data.summary ? `: ${data.summary}` : data.last_step === null ? "" : `, last step logged: ${data.last_step}`}</p>
    <section class="card"><h3>Before and after</h3>
      ${data.rows.length > 0 ? html`<${Reached} data=${data} />`
        : note(data.why_not ?? (data.summary ? "This run was not evaluated (run.evaluate=false)." : "No summary.json: the run has not finished, or was stopped. The other pages show its data so far."))}
    </section>
    <section class="card"><h3>What ran</h3>
      ${data.facts.length > 0 ? html`<table>${data.facts.map(([name, text]) => html`<tr><th>${name}</th><td>${text}</td></tr>`)}</table>` : html`<p class="muted">Available once the run has finished.</p>`}
      ${data.num_non_finite > 0 && note(`${data.num_non_finite} values of the metrics were not finite; the curves have gaps there.`)}
      ${data.config !== null && html`<details><summary>config.yaml</summary><pre>${data.config}</pre></details>`}
    </section>
  </main>`;
}

function Reached({ data }) {
  return html`<${Bars} rows=${data.rows.filter((row) => row.is_bar)} />
    <p class="legend"><span><i class="c7"></i>before RL</span><span><i class="c0"></i>after RL</span></p>
    <table><tr><th></th><th>before</th><th>after</th></tr>
      ${data.rows.map((row) => html`<tr><th>${row.name}</th><td><${Interval} value=${row.before} /></td>
        <td><${Interval} value=${row.after} />${row.is_of_other_inputs && html` <span class="pill half">other inputs than before</span>`}</td></tr>`)}</table>
    <p class="muted small">Accuracy on held-out problems, with 95% intervals by bootstrap over problems. System: the team's final answer. An agent that gives verdicts (table below): balanced accuracy on solutions fixed before RL. An agent that repairs solutions: accuracy on wrong, flagged solutions fixed before RL. Other inputs than before: the agent's inputs depend on the other agents, so the two numbers are from different problems (see n).</p>
    ${data.confusions.map((each) => html`<${Confusion} ...${each} />`)}`;
}

function Interval({ value }) {
  if (value === null) return html`<span class="muted">not measured</span>`;
  return html`<b>${value.mean.toFixed(3)}</b> <span class="muted">${value.low.toFixed(3)}–${value.high.toFixed(3)}, n ${value.n}</span>`;
}

// Bars from 0 to 1 with intervals as whiskers; for each row, the bar before training is above the bar after it.
function Bars({ rows }) {
  const x = (share) => LEFT + WIDTH * share;
  const height = ROW * rows.length;
  const bar = (row, when, k, top) => {
    const value = row[when];
    if (value === null) return null;
    const y = top + 21 * k;
    return html`<rect class=${when === "after" ? "c0" : "c7"} x=${LEFT} y=${y} width=${WIDTH * value.mean} height="18"><title>${row.name} ${when}: ${value.mean.toFixed(3)} (${value.low.toFixed(3)} to ${value.high.toFixed(3)}), n = ${value.n}</title></rect>
      <line class="whisker" x1=${x(value.low)} x2=${x(value.high)} y1=${y + 9} y2=${y + 9} />
      ${[value.low, value.high].map((end) => html`<line class="whisker" x1=${x(end)} x2=${x(end)} y1=${y + 5} y2=${y + 13} />`)}
      <text class="value" x=${x(value.high) + 8} y=${y + 13}>${(100 * value.mean).toFixed(1)}</text>`;
  };
  return html`<svg class="bars" viewBox=${`0 0 ${LEFT + WIDTH + 60} ${height + 24}`} role="img" aria-label="before and after">
    ${[0, 25, 50, 75, 100].map((tick) => html`<line class="rule" x1=${x(tick / 100)} x2=${x(tick / 100)} y1="4" y2=${height} /><text class="middle" x=${x(tick / 100)} y=${height + 16}>${tick}%</text>`)}
    ${rows.map((row, i) => html`<text class="end" x=${LEFT - 10} y=${ROW * i + 34}>${row.name}</text>${["before", "after"].map((when, k) => bar(row, when, k, ROW * i + 10))}`)}
  </svg>`;
}

const COLUMNS = { right_correct: "right, said correct", right_wrong: "right, said wrong", wrong_correct: "wrong, said correct", wrong_wrong: "wrong, said wrong", none: "no verdict" };

function Confusion({ title, before, after }) {
  return html`<h3>${title}</h3><table><tr><th></th>${Object.values(COLUMNS).map((name) => html`<th>${name}</th>`)}</tr>
    ${[["before", before], ["after", after]].map(([when, counts]) => counts && html`<tr><th>${when}</th>${Object.keys(COLUMNS).map((name) => html`<td>${counts[name]}</td>`)}</tr>`)}</table>`;
}
