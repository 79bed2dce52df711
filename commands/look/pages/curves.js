// Metrics over steps, tokens or hours, with smoothing, several runs in one chart, and one cursor for all charts.

import { html, useAnswer, useEffect, useMemo, useRef, useState, ask, go, loading, note, tickText, EXPORTED } from "./lib.js";

const { uPlot } = window;
export const AXES = { step: "step", tokens: "tokens trained on", hours: "hours, without evaluations" };
const HEIGHT = 220;
const DASHES = [[], [6, 4], [2, 3], [10, 3, 2, 3]];
const FADED = 0.22;
const WHOLE = [1, 2, 5, 10, 20, 50, 100, 200, 500, 1e3, 2e3, 5e3, 1e4, 2e4, 5e4, 1e5, 1e6]; // steps between ticks

// Return the width of an axis in px, from its longest label.
const widthOf = (_, labels) => 16 + 7 * Math.max(4, ...(labels ?? []).map((label) => label.length));

// Return uPlot's own range; if all values are equal, a narrow one, because uPlot's would reach 100 or twice the value.
export function rangeOf(_, low, high) {
  if (low === null || low !== high) return low === null ? [0, 1] : uPlot.rangeNum(low, high, 0.1, true);
  return low === 0 ? [0, 1] : [low - 0.1 * Math.abs(low), high + 0.1 * Math.abs(high)];
}

export function Curves({ run, runs, url }) {
  const smoothing = Number(url.get("smooth") ?? 0) || 0;
  const others = url.getAll("with").map(Number).filter((each) => runs[each] && each !== run);
  const wanted = (url.get("find") ?? "").toLowerCase();
  const axis = AXES[url.get("x")] ? url.get("x") : "step";
  const isLog = url.get("log") !== null;
  const [places, setPlaces] = useState(null); // positions of each run's steps on the axes
  const tick = [run, ...others].map((each) => runs[each].last_metrics).join();
  useEffect(() => {
    let isOver = false;
    if (axis !== "step") Promise.all([run, ...others].map((each) => ask("axes", { run: each }))).then((found) => isOver || setPlaces(found), () => {});
    return () => { isOver = true; };
  }, [axis, others.join(), tick]);
  const { data: charts, error } = useAnswer("charts", { run }, runs[run].last_metrics ?? -1);
  const [unfolds, setUnfolds] = useState(false);
  const found = (charts ?? []).filter((chart) =>
    wanted ? chart.series.some((each) => each.key.toLowerCase().includes(wanted)) || chart.title.toLowerCase().includes(wanted) : chart.is_main).slice(0, 40);
  const zeros = wanted ? [] : found.filter((chart) => chart.is_zero);
  const grid = (shown) => html`<div class="grid">${shown.map((chart) => html`<${Chart} key=${chart.title} chart=${chart} runs=${[run, ...others]} smoothing=${smoothing}
    tick=${tick} axis=${axis} places=${axis === "step" ? null : places} isLog=${isLog} />`)}</div>`;
  return html`<main>
    <div class="bar">
      ${!EXPORTED && html`<input type="search" placeholder="any metric" aria-label="any metric" value=${url.get("find") ?? ""} onInput=${(e) => go({ find: e.target.value }, true)} />`}
      <label>smoothing <input type="range" min="0" max="0.98" step="0.02" value=${smoothing} onInput=${(e) => go({ smooth: Number(e.target.value) || null }, true)} /> ${smoothing.toFixed(2)}</label>
      <label>over <select aria-label="x axis" value=${axis} onChange=${(e) => go({ x: e.target.value === "step" ? null : e.target.value }, true)}>${Object.entries(AXES).map(([key, name]) => html`<option value=${key}>${name}</option>`)}</select></label>
      <label><input type="checkbox" checked=${isLog} onChange=${() => go({ log: isLog ? null : 1 }, true)} /> log scale</label>
      ${runs.map((each, i) => i !== run && html`<label><input type="checkbox" checked=${others.includes(i)}
        onChange=${() => go({ with: others.includes(i) ? others.filter((o) => o !== i) : [...others, i] })} /> with ${each.name}</label>`)}
      ${others.length > 0 && html`<span class="legend">${[run, ...others].map((each, i) => html`<span><span class=${`dash r${i % 4}`}></span>${runs[each].name}</span>`)}</span>`}
    </div>
    ${error ? note(error) : !charts && loading("the curves")}
    ${charts && !charts.length && html`<p class="muted">No step has been logged yet.</p>`}
    ${grid(found.filter((chart) => !zeros.includes(chart)))}
    ${zeros.length > 0 && html`<details class="zeros" onToggle=${(e) => setUnfolds(e.target.open)}><summary class="muted">Zero in every step: ${zeros.map((chart) => chart.title.toLowerCase()).join(", ")}</summary>
      ${unfolds && grid(zeros)}</details>`}
  </main>`;
}

function Chart({ chart, runs, smoothing, tick, axis, places, isLog }) {
  const [curves, setCurves] = useState(null);
  const [at, setAt] = useState(null);
  const shown = chart.series.slice(0, 64);
  const names = [...shown.map((each) => each.key), ...shown.filter((each) => each.has_band).flatMap((each) => [`${each.key}/low`, `${each.key}/high`])];
  useEffect(() => {
    let isOver = false;
    Promise.all(runs.map((run) => ask("curves", { run, name: names }))).then((found) => isOver || setCurves(found), () => {});
    return () => { isOver = true; };
  }, [runs.join(), names.join(), tick]);
  const isReady = curves && (axis === "step" || places?.length === curves.length);
  const lines = useMemo(() => isReady && linesOf(chart, curves, smoothing, isLog, (r, step) => (places ? placeOf(places[r], axis, step) : step)), [curves, smoothing, isLog, axis, places]);
  return html`<section class="card"><h3>${chart.title} <span class="muted small">${chart.about}</span></h3>
    ${!lines ? html`<div class="chart">${loading("the curve")}</div>` : html`<${Plot} lines=${lines} onCursor=${setAt} title=${chart.title} x=${AXES[axis]} y=${chart.unit} isLog=${isLog} />
      <p class="legend">${lines.series.slice(0, shown.length).map((line, i) => html`<span><i class=${chart.series[i].color}></i>${chart.series[i].label} <b>${shownValue(valueAt(lines, line, at))}</b></span>`)}
        <span>${at === null ? "" : `${AXES[axis].split(",")[0]} ${tickText(Number(lines.steps[at].toPrecision(4)))}`}${isLog && lines.hasRest ? " values that are not above 0 are left out" : ""}${lines.every > 1 ? `, each point the mean of ${lines.every} steps` : ""}</span></p>`}
  </section>`;
}

// Return the position of a step on an axis, by linear interpolation between known positions.
function placeOf(places, axis, step) {
  const after = places.step.findIndex((each) => each >= step);
  if (after <= 0) return after < 0 ? places[axis].at(-1) ?? step : places[axis][0];
  const [a, b] = [places.step[after - 1], places.step[after]];
  return places[axis][after - 1] + ((step - a) / (b - a)) * (places[axis][after] - places[axis][after - 1]);
}

// Return the series of all runs over the union of their steps (or of their positions on another axis). values: smoothed; raw: as
// measured.
function linesOf(chart, curves, smoothing, isLog, xOf) {
  const xs = curves.map((run, r) => run.map((curve) => curve.steps.map((step) => xOf(r, step))));
  const steps = [...new Set(xs.flat(2))].sort((a, b) => a - b);
  let hasRest = false;
  const place = new Map(steps.map((step, i) => [step, i]));
  const series = [];
  let every = 1;
  const onSteps = (curve, r) => {
    const raw = new Array(steps.length).fill(undefined);
    curve.values.forEach((value, k) => {
      const isLeftOut = isLog && value !== null && value <= 0;
      hasRest ||= isLeftOut;
      raw[place.get(xs[r][curves[r].indexOf(curve)][k])] = isLeftOut ? null : value;
    });
    return raw;
  };
  curves.forEach((run, r) => {
    const bands = run.slice(Math.min(64, chart.series.length));
    chart.series.slice(0, 64).forEach((each, i) => {
      const raw = onSteps(run[i], r);
      const band = each.has_band ? bands.splice(0, 2).map((curve) => onSteps(curve, r)) : null;
      series.push({ raw, band, values: smoothed(raw, smoothing), color: each.color, dash: DASHES[r % 4] });
      every = Math.max(every, run[i].every);
    });
  });
  return { steps, series, every, hasRest, isSmooth: smoothing > 0 };
}

// Return the exponential moving average, which begins at the first value. Gaps stay gaps.
function smoothed(values, weight) {
  let mean = 0;
  let total = 0;
  return values.map((value) => {
    if (value === null || value === undefined) return value;
    mean = weight * mean + (1 - weight) * value;
    total = weight * total + (1 - weight);
    return mean / total;
  });
}

function valueAt(lines, line, at) {
  if (at !== null) return line.values[at] ?? null;
  return line.values.findLast((value) => value !== null && value !== undefined) ?? null;
}

const shownValue = (value) => (value === null ? "–" : tickText(Number(value.toPrecision(4))));

// Return the current colour of a CSS class, because a canvas cannot use CSS variables.
function colorOf(name) {
  const probe = document.createElement("span");
  probe.className = `color ${name}`;
  document.body.append(probe);
  const { color } = getComputedStyle(probe);
  probe.remove();
  return color;
}

// A chart. x, y: labels of the axes. lines: { steps, series: [{ values, color, dash, band: [low, high] or null, raw, ... }], isSmooth }.
// spansGaps: draw lines across missing values.
export function Plot({ lines, onCursor, title, x, y, isLog, spansGaps = false }) {
  const place = useRef(null);
  useEffect(() => {
    const draw = () => {
      const muted = colorOf("muted");
      const rule = colorOf("ruled");
      const axis = { stroke: muted, grid: { stroke: rule, width: 1 }, ticks: { stroke: rule, width: 1 }, font: "11px system-ui, sans-serif", labelFont: "11px system-ui, sans-serif", labelSize: 18, labelGap: 0 };
      const all = lines.isSmooth ? [...lines.series.map((line) => ({ ...line, values: line.raw, alpha: FADED })), ...lines.series] : lines.series;
      const bounds = all.filter((line) => line.band);
      const at = (k) => 1 + all.length + 2 * k;
      const plot = new uPlot({
        width: place.current.clientWidth, height: HEIGHT, legend: { show: false },
        scales: { x: { time: false }, y: isLog ? { distr: 3, range: (_, low, high) => (low === null ? [1, 10] : uPlot.rangeLog(low, high, 10, false)) } : { range: rangeOf } },
        bands: bounds.map((line, k) => ({ series: [at(k) + 1, at(k)], fill: colorOf(line.color).replace("rgb(", "rgba(").replace(")", ", 0.16)") })),
        cursor: { sync: { key: "curves" }, drag: { x: true, y: false } },
        axes: [{ ...axis, size: 30, label: x, values: (_, ticks) => ticks.map(tickText), ...(x === AXES.step ? { incrs: WHOLE } : {}) },
          { ...axis, size: widthOf, label: y || undefined, values: (_, ticks) => ticks.map((tick) => (tick === null ? "" : tickText(tick))) }],
        series: [{}, ...all.map((line) => ({ stroke: colorOf(line.color), width: 1.6, dash: line.dash, alpha: line.alpha ?? 1, spanGaps: spansGaps, points: { show: lines.steps.length < 60 } })),
          ...bounds.flatMap(() => [0, 1].map(() => ({ stroke: "transparent", width: 0, spanGaps: spansGaps, points: { show: false } })))],
        hooks: { setCursor: [(self) => onCursor(self.cursor.idx ?? null)] },
      }, [lines.steps, ...all.map((line) => line.values), ...bounds.flatMap((line) => line.band)], place.current);
      return plot;
    };
    let plot = draw();
    const again = () => { plot.destroy(); plot = draw(); };
    const wide = new ResizeObserver(() => plot.setSize({ width: place.current.clientWidth, height: HEIGHT }));
    wide.observe(place.current);
    const scheme = matchMedia("(prefers-color-scheme: dark)");
    scheme.addEventListener("change", again);
    addEventListener("theme", again);
    return () => {
      wide.disconnect();
      scheme.removeEventListener("change", again);
      removeEventListener("theme", again);
      plot.destroy();
    };
  }, [lines]);
  return html`<div class="chart" ref=${place} role="img" aria-label=${`${title}${y && `, ${y}`}, over ${x}`}></div>`;
}
