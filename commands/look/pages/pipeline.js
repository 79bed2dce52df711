// Activity of engines, ranks and judges over time, the lifetimes of one problem's samples, staleness, and measured speed compared with the plan.

import { html, useAnswer, useEffect, useRef, useState, go, loading, note, number, roundTicks, tickText, EXPORTED } from "./lib.js";

const ROW = 22;

export function Pipeline({ run, about, url }) {
  const low = url.get("low_s");
  const high = url.get("high_s");
  const rollout = url.get("life");
  const tick = about.last_metrics ?? -1;
  const { data, error } = useAnswer("spans", EXPORTED ? { run } : { run, low, high }, tick);
  const spans = data && EXPORTED ? { ...data, low: Number(low ?? data.low), high: Number(high ?? data.high) } : data;
  const { data: life } = useAnswer(rollout ? "life" : null, { run, rollout }, tick);
  const { data: speed } = useAnswer("speed", { run }, tick);
  return html`<main>
    <section class="card"><h3>Timeline</h3>
      ${error && note(error)}
      ${spans && spans.spans.length > 0 ? html`<${Timeline} found=${spans} life=${rollout ? life : null} />` : spans ? html`<p class="muted">No trace.json yet.</p>` : !error && loading("the timeline")}
    </section>
    <section class="card"><h3>Throughput against the plan</h3>${speed ? html`<${Speed} speed=${speed} />` : loading("the speed")}</section>
    <section class="card"><h3>Staleness <span class="muted small">versions between a sample's oldest token and its training, if no step was skipped</span></h3>
      ${speed && html`<${Ages} ages=${speed.ages} />`}</section>
  </main>`;
}

function zoom(low, high) {
  go({ low_s: low === null ? null : low.toFixed(4), high_s: high === null ? null : high.toFixed(4) }, true);
}

function Timeline({ found, life }) {
  const place = useRef(null);
  const [width, setWidth] = useState(900);
  const [drag, setDrag] = useState(null);
  const [about, setAbout] = useState(null);
  useEffect(() => {
    const wide = new ResizeObserver(() => setWidth(place.current?.clientWidth || 900));
    wide.observe(place.current);
    return () => wide.disconnect();
  }, []);
  const { low, high } = found;
  const left = width < 600 ? 76 : 130;
  const x = (second) => left + ((second - low) / (high - low || 1)) * (width - left - 8);
  const second = (event) => {
    const at = event.clientX - place.current.getBoundingClientRect().left;
    return low + ((Math.min(width - 8, Math.max(left, at)) - left) / (width - left - 8)) * (high - low);
  };
  const marks = found.spans.filter((span) => span[0].startsWith("mark/"));
  const work = found.spans.filter((span) => !span[0].startsWith("mark/"));
  const lanes = [...new Set(work.map((span) => span[0]))].sort((a, b) => a.localeCompare(b, "en", { numeric: true }));
  const names = [...new Set(work.map((span) => span[1]))].sort();
  const lives = (life?.lives ?? []).filter((each) => each.start !== null && each.end !== null);
  const height = ROW * (lanes.length + lives.length) + 22;
  const fits = (text) => (text.length > left / 7 ? `${text.slice(0, Math.floor(left / 7) - 1)}…` : text);
  const clipped = (start, end) => [Math.max(left, x(start)), Math.min(width - 8, x(end))];
  const by = (factor) => {
    const middle = (low + high) / 2;
    const half = ((high - low) / 2) * factor;
    zoom(Math.max(0, middle - half), Math.min(found.end, middle + half));
  };
  const shift = (share) => zoom(Math.max(0, low + share * (high - low)), Math.min(found.end, high + share * (high - low)));
  return html`<div class="bar small">
      <button onClick=${() => by(0.5)} aria-label="closer">+</button><button onClick=${() => by(2)} aria-label="wider">−</button>
      <button onClick=${() => shift(-0.5)} aria-label="earlier">‹</button><button onClick=${() => shift(0.5)} aria-label="later">›</button>
      <button onClick=${() => zoom(null, null)}>all</button>
      ${life && html`<span>the life of ${life.rollout.slice(0, 60)} <button onClick=${() => lives.length && zoom(Math.min(...lives.map((l) => l.start)), Math.max(...lives.map((l) => l.end)))}>zoom to it</button>
        <button class="more" onClick=${() => go({ life: null })}>leave</button></span>`}
      <span class="muted">${number(Number(low.toFixed(3)), 6)} to ${number(Number(high.toFixed(3)), 6)} s${found.num_left_out ? `, ${number(found.num_left_out)} shorter spans left out: zoom in` : ""}</span></div>
    <div ref=${place} class="wheel"
      onPointerDown=${(e) => setDrag([second(e), second(e)])} onPointerMove=${(e) => drag && setDrag([drag[0], second(e)])}
      onPointerLeave=${() => setDrag(null)}
      onPointerUp=${() => { if (drag && Math.abs(x(drag[0]) - x(drag[1])) > 6) zoom(Math.min(...drag), Math.max(...drag)); setDrag(null); }}>
    <svg class="timeline" width=${width} height=${height} role="img" aria-label="timeline">
      ${lives.map((each, i) => { const [a, b] = clipped(each.start, each.end); return b >= a && html`<text x="0" y=${ROW * i + 15}>${fits(each.agent)}</text>
        <rect class=${`hot ${each.color}`} x=${a} y=${ROW * i + 3} width=${Math.max(2, b - a)} height=${ROW - 6}><title>${each.samples} samples of ${each.agent}: ${each.version === null ? "" : `from version ${number(each.version)} on, `}trained in step ${number(each.step)}</title></rect>`; })}
      ${lanes.map((lane, i) => html`<text x="0" y=${ROW * (i + lives.length) + 15}>${fits(lane)}</text>
        <line class="rule" x1="0" x2=${width} y1=${ROW * (i + lives.length)} y2=${ROW * (i + lives.length)} />`)}
      ${work.map((span) => { if (span[3] < low || span[2] > high) return null; const [a, b] = clipped(span[2], span[3]); return html`<rect class=${found.colors[span[1]]} x=${a} y=${ROW * (lanes.indexOf(span[0]) + lives.length) + 3}
        width=${Math.max(0.7, b - a)} height=${ROW - 6} onPointerEnter=${() => setAbout(span)} />`; })}
      ${marks.map((mark) => mark[2] >= low && mark[2] <= high && html`<line class=${`mark ${mark[0].slice(5)}`} x1=${x(mark[2])} x2=${x(mark[2])} y1="0" y2=${height - 20}><title>${mark[1]}</title></line>`)}
      ${roundTicks(low, high, width < 600 ? 2 : 4).map((tick) => html`<text class="middle" x=${x(tick)} y=${height - 6}>${tickText(tick)} s</text>`)}
      ${drag && html`<rect class="drag" x=${Math.min(x(drag[0]), x(drag[1]))} width=${Math.abs(x(drag[0]) - x(drag[1]))} y="0" height=${height} opacity="0.2" />`}
    </svg></div>
    <p class="legend">${names.slice(0, 24).map((name) => html`<span><i class=${found.colors[name]}></i>${name.slice(0, 80)}</span>`)}</p>
    <p class="small muted">${about ? `${about[1].slice(0, 80)} on ${about[0].slice(0, 40)}: ${number(about[2], 6)} to ${number(about[3], 6)} s (${number(about[3] - about[2], 3)} s) ${Object.entries(about[4]).filter(([, value]) => value !== null).map(([key, value]) => `${key} ${value}`).join(", ").slice(0, 300)}`
      : "A full line marks the start of a step, a dashed line the start of a stage. Drag over the lanes to zoom in; point at a span for its details."}</p>`;
}

const PARTS = { rollout: "rollout", step: "updates", publish: "publishing", total: "a whole step" };

const seconds = (value) => (value === null || value === undefined ? "–" : `${number(value)} s`);

function Speed({ speed }) {
  const { parts } = speed.planned;
  return html`${!parts && note(speed.planned.why_not)}
    <table><tr><th></th><th>measured</th>${parts && html`<th>planned, ${speed.planned.gpus}</th><th>measured / planned</th>`}</tr>
    ${Object.entries(PARTS).map(([key, name]) => html`<tr><th>${name}</th><td>${seconds(speed.measured[key])}</td>
      ${parts && html`<td>${seconds(parts[key])}</td><td>${parts[key] && speed.measured[key] !== null ? number(speed.measured[key] / parts[key]) : "–"}</td>`}</tr>`)}
    <tr><th>tokens per second</th><td>${number(speed.tokens_per_s)}</td>${parts && html`<td></td><td></td>`}</tr></table>
    <p class="small muted">Measured: medians of the last 50 steps.</p>`;
}

function Ages({ ages }) {
  if (!ages.length) return html`<p class="muted">No samples yet.</p>`;
  const most = Math.max(...ages.map((each) => each[1]));
  const agents = [...new Set(ages.map((each) => each[0]))];
  const columns = [...Array(Math.min(most, 12) + 1).keys()];
  const count = (agent, age) => ages.filter((each) => each[0] === agent && (each[1] === age || (age === 12 && each[1] > 12))).reduce((sum, each) => sum + each[2], 0);
  return html`<table><tr><th></th>${columns.map((age) => html`<th>${age === 12 && most > 12 ? "12+" : age}</th>`)}</tr>
    ${agents.map((agent) => html`<tr><th>${agent}</th>${columns.map((age) => html`<td>${count(agent, age) ? number(count(agent, age)) : ""}</td>`)}</tr>`)}</table>`;
}
