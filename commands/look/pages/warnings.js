// The run's warnings, unusual metrics and unreadable files in one list, newest first.

import { html, useAnswer, go, loading, note, number } from "./lib.js";

const MOST = 500;

export function Warnings({ run, about }) {
  const { data, error } = useAnswer("warnings", { run }, about.last_metrics ?? -1);
  if (error) return html`<main>${note(error)}</main>`;
  if (!data) return html`<main>${loading("the warnings")}</main>`;
  const steps = (each) => (each.first_step !== undefined && each.first_step !== each.step ? `${each.first_step}–${each.step}` : (each.step ?? ""));
  return html`<main><section class="card"><h3>Warnings <span class="muted small">of the run, of its metrics, of files that cannot be read</span></h3>
    ${data.length === 0 ? html`<p class="muted">No warnings.</p>` : html`<table><tr><th>step</th><th>what</th></tr>
      ${data.slice(0, MOST).map((each) => html`<tr><td>${each.step === null ? "" : html`<a href="?" class="plain" onClick=${(e) => { e.preventDefault(); go({ page: "samples", first: each.first_step ?? each.step, last: each.step, sample: null }); }}>${steps(each)}</a>`}</td>
        <td>${each.text.slice(0, 2000)}</td></tr>`)}</table>`}
    ${data.length > MOST && html`<p class="muted">${number(data.length - MOST)} older ones are not shown.</p>`}
  </section></main>`;
}
