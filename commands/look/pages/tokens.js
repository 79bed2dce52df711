// The tokens of a sample, coloured by values from engine and trainer, with the numbers of the token under the pointer or focus.

import { html, useAnswer, useMemo, useRef, useState, go, loading, note, number } from "./lib.js";

// Colourings. edges: values at which the next darker level begins; labels: names of the levels. Colourings by marks have neither.
export const COLORINGS = {
  logprob: { name: "log-prob", edges: [0.105, 0.693, 2.303, 4.605, 6.908], labels: ["p ≥ 0.9", "≥ 0.5", "≥ 0.1", "≥ 0.01", "≥ 0.001", "less"] },
  entropy: { name: "entropy", edges: [0.1, 0.5, 1, 2, 3], labels: ["< 0.1 nats", "< 0.5", "< 1", "< 2", "< 3", "more"] },
  difference: { name: "train − rollout", edges: [0.001, 0.01, 0.05, 0.2, 1], labels: ["< 0.001 nats", "< 0.01", "< 0.05", "< 0.2", "< 1", "more"] },
  clipped: { name: "clipped" },
  gated: { name: "gated (DMMPT)" },
};
const MOST = 3000; // maximum number of tokens shown at once
const MOST_CHARS = 300; // maximum number of characters shown of a token

const sum = (a, b) => (a === null || b === null ? null : a - b);
const level = (value, edges) => (value === null ? "" : `l${edges.filter((edge) => value >= edge).length}`);

function classes(kept, coloring) {
  const sets = Object.fromEntries(["given", "clipped", "gated", "masked"].map((name) => [name, new Set(kept[name])]));
  const { edges } = COLORINGS[coloring];
  return kept.text.map((_, i) => {
    if (sets.given.has(i)) return "tok given";
    if (coloring === "logprob") return `tok ${level(negated(kept.trainer[i] ?? kept.rollout[i]), edges)}`;
    if (coloring === "entropy") return `tok ${level(kept.entropy[i], edges)}`;
    if (coloring === "difference") {
      const by = sum(kept.trainer[i], kept.rollout[i]);
      return by === null ? "tok" : `tok ${by > 0 ? "up" : "down"} ${level(Math.abs(by), edges)}`;
    }
    if (coloring === "clipped") return sets.clipped.has(i) ? "tok marked" : "tok";
    return sets.gated.has(i) ? "tok marked" : sets.masked.has(i) ? "tok corrected" : "tok";
  });
}

const negated = (value) => (value === null ? null : -value);

export function Coloring({ coloring }) {
  return html`<label class="coloring">colour tokens by <select aria-label="colour tokens by" value=${coloring ?? ""} onChange=${(e) => go({ color: e.target.value }, true)}>
    <option value="">nothing</option>${Object.entries(COLORINGS).map(([key, each]) => html`<option value=${key}>${each.name}</option>`)}</select></label>`;
}

// fold: function that splits a text at tool calls and tool outputs.
export function Tokens({ run, step, line, coloring, fold }) {
  const { data, error } = useAnswer("tokens", { run, step, line });
  const [at, setAt] = useState(null);
  const [start, setStart] = useState(0);
  const box = useRef(null);
  const kept = data?.kept;
  const colored = useMemo(() => kept && classes(kept, coloring), [kept, coloring]);
  const shown = useMemo(() => kept && pieces(kept, colored, start, fold), [kept, colored, start]);
  if (error) return note(error);
  if (!data) return loading("the tokens");
  if (!kept) return html`<${None} near=${data.near} step=${step} />`;
  const num = kept.text.length;
  const point = (event) => {
    const token = event.target.closest?.("[data-i]");
    if (token) setAt(Number(token.dataset.i));
  };
  const move = (event) => {
    const by = { ArrowRight: 1, ArrowLeft: -1, Home: -Infinity, End: Infinity }[event.key];
    if (!by || event.target.closest("summary")) return;
    event.preventDefault();
    const all = [...box.current.querySelectorAll("[data-i]")].filter((token) => !token.closest("details:not([open])"));
    const to = all[Math.min(all.length - 1, Math.max(0, all.indexOf(event.target) + by))];
    box.current.querySelector("[tabindex='0']")?.setAttribute("tabindex", "-1");
    to?.setAttribute("tabindex", "0");
    to?.focus();
  };
  return html`<${Legend} coloring=${coloring} kept=${kept} />
    <${Numbers} kept=${kept} at=${at} />
    <div ref=${box} class=${`tokens by-${coloring}`} role="group" aria-label="tokens: arrow keys go from one to the next" dir="auto"
      onMouseOver=${point} onFocusCapture=${point} onKeyDown=${move}>${shown}</div>
    ${num > MOST && html`<p class="small facts"><span>tokens ${number(start + 1)} to ${number(Math.min(num, start + MOST))} of ${number(num)}</span>
      <button disabled=${start === 0} onClick=${() => setStart(start - MOST)}>‹ before</button>
      <button disabled=${start + MOST >= num} onClick=${() => setStart(start + MOST)}>after ›</button></p>`}`;
}

// Return the tokens from `start` on, with marks at the borders of segments, and with tool calls folded.
function pieces(kept, colored, start, fold) {
  const end = Math.min(kept.text.length, start + MOST);
  const borders = new Map(kept.segments.map(([first, , version]) => [first, version]));
  const token = (i) => html`${borders.has(i) && html`<span class="cut" title=${`from token ${number(i)} on: policy version ${borders.get(i)}`}>v${borders.get(i)}</span>`}<span
    key=${i} class=${colored[i]} data-i=${i} tabindex=${i === start ? 0 : -1}>${seen(kept.text[i])}</span>`;
  const out = [];
  let i = start;
  let place = 0; // of token i in the text
  for (const part of fold(kept.text.slice(start, end).join(""))) {
    const own = [];
    for (; i < end && (place < part.end || kept.text[i] === ""); i++) {
      own.push(token(i));
      place += kept.text[i].length;
    }
    if (part.tag === null) out.push(own);
    else out.push(html`<details class="tool"><summary>${part.tag.replace("_", " ")} <code>${part.text.trim().slice(0, 80)}</code></summary>${own}</details>`);
  }
  return out;
}

// Return a visible text for a token: "·" for a token without text, which forms a character with other tokens, and "↵" for a line end.
// Texts above MOST_CHARS are cut; no vocabulary has tokens that long.
const seen = (text) => (text === "" ? "·" : text.length > MOST_CHARS ? `${seen(text.slice(0, MOST_CHARS))}… ${number(text.length)} characters` : text.replaceAll("\n", "↵\n"));

function Legend({ coloring, kept }) {
  const { labels, name } = COLORINGS[coloring];
  const swatch = (classes, text) => html`<span><i class=${`tok ${classes}`}></i>${text}</span>`;
  const lacks = !kept.update && coloring !== "logprob";
  return html`<p class=${`legend by-${coloring}`} aria-label="legend"><b>${name}</b>
    ${coloring === "difference" ? [swatch("down l0", labels[0]), ...labels.slice(1).map((text, i) => html`<span><i class=${`tok down l${i + 1}`}></i><i class=${`tok up l${i + 1}`}></i>${text}</span>`), html`<span>left: lower under the trainer, right: higher</span>`]
      : labels ? labels.map((text, i) => swatch(`l${i}`, text))
      : coloring === "clipped" ? swatch("marked", `the ratio's clip is active: ${number(kept.clipped.length)} of ${number(kept.text.length)} tokens`)
      : [swatch("marked", `masked by the gate: ${number(kept.gated.length)} of ${number(kept.text.length)} tokens`), swatch("corrected", `masked by loss.correction: ${number(kept.masked.length - kept.gated.length)}`)]}
    ${kept.given.length > 0 && swatch("given", "not sampled by the policy, or not used by its program")}
    ${lacks && html`<span>This sample was not trained, so there are no values from the trainer.</span>`}
    ${!kept.update && coloring === "logprob" && html`<span>values from the engine: this sample was not trained</span>`}
    ${kept.update > 1 && html`<span>trained by update ${kept.update} of its step, after earlier updates had changed the weights</span>`}</p>`;
}

function Numbers({ kept, at }) {
  if (at === null || at >= kept.text.length) return html`<p class="numbers small muted">Point at a token, or use Tab, ← and →.</p>`;
  const nats = (value) => (value === null ? "–" : `${number(value)} (p ${number(Math.exp(value))})`);
  const segment = kept.segments.find(([start, end]) => start <= at && at < end);
  const marks = ["clipped", "gated"].filter((name) => kept[name].includes(at));
  if (kept.masked.includes(at) && !kept.gated.includes(at)) marks.push("masked by loss.correction");
  if (kept.given.includes(at)) marks.push("not sampled by the policy, or not used by its program");
  const difference = sum(kept.trainer[at], kept.rollout[at]);
  return html`<p class="numbers small facts" aria-live="polite"><span>token ${number(at)}: <code>${seen(kept.text[at]).slice(0, 60)}</code> id ${kept.ids[at]}</span>
    <span>rollout ${nats(kept.rollout[at])}</span><span>trainer ${nats(kept.trainer[at])}</span>
    <span>difference ${difference === null ? "–" : `${difference > 0 ? "+" : ""}${number(difference)}`}</span>
    <span>entropy ${number(kept.entropy[at])}</span>${segment && html`<span>version ${segment[2]}</span>`}
    ${marks.map((mark) => html`<span class="flag">${mark}</span>`)}</p>`;
}

function None({ near, step }) {
  return html`<div class="note"><p>The tokens of this sample were not logged. The setting <code>run.token_log_every</code> is the number of steps between logs of
      tokens, and <code>run.token_log_groups</code> the number of groups of each agent in a log.</p>
    ${near && html`<p class="facts"><span>${near.step === step ? "Samples of this step with logged tokens" : `The nearest step with logged tokens is ${number(near.step)}`}:</span>
      ${near.samples.map((each) => html`<button class="chip" onClick=${() => go({ sample: `${near.step}.${each.line}` })}>${each.agent} ${each.line}</button>`)}</p>`}</div>`;
}
