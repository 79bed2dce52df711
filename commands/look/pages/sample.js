// One sample: its tree, prompt, completion, reward and advantage.

import { html, useAnswer, useEffect, useRef, COLORS, Long, MOST, go, loading, note, number, pillOf, signed, state, EXPORTED } from "./lib.js";
import { Markdown, messages } from "./markdown.js";
import { COLORINGS, Coloring, Tokens } from "./tokens.js";

export function Sample({ run, step, line, url }) {
  const { data, error } = useAnswer("sample", { run, step, line });
  const place = data && `${data.row.step}.${data.row.line}`;
  const { data: tree } = useAnswer(data && "tree", { run, rollout: data?.row.rollout_key });
  const above = data && tree?.find((row) => row.uid === data.row.parent);
  useEffect(() => {
    const pressed = (event) => {
      if (event.ctrlKey || event.metaKey || event.altKey || event.target.matches?.("input, select, textarea")) return;
      if (event.key === "r") go({ raw: state().get("raw") ? null : 1 }, true);
      if (event.key === "u" && above) go({ sample: `${above.step}.${above.line}` });
      if (event.key === "c") {
        const order = ["", ...Object.keys(COLORINGS)];
        go({ color: order[(order.indexOf(state().get("color") ?? "") + 1) % order.length], view: null }, true);
      }
    };
    addEventListener("keydown", pressed);
    return () => removeEventListener("keydown", pressed);
  }, [above?.uid]);
  if (error) return html`<section class="detail"><${Back} />${note(error)}</section>`;
  if (!data) return html`<section class="detail"><${Back} />${loading("the sample")}</section>`;
  const { row, record } = data;
  const views = { text: true, diff: data.diff !== null };
  const view = views[url.get("view")] ? url.get("view") : "text";
  const isRaw = url.get("raw") !== null;
  const coloring = Object.hasOwn(COLORINGS, url.get("color") ?? "") ? url.get("color") : null;
  return html`<section class="detail" aria-label="sample">
    <${Back} />
    <h2>${row.agent} <span class="muted">on</span> <a href="?" class="plain" title="every sample of this problem"
      onClick=${(e) => { e.preventDefault(); go({ problem: row.problem_key }); }}>${row.problem}</a>
      <button class="more small" onClick=${() => go({ page: "pipeline", life: row.rollout_key })}>its life in the pipeline</button></h2>
    <${Tree} rows=${tree ?? []} place=${place} sessions=${data.sessions} />
    <p class="facts">
      <span class=${`pill ${pillOf(row.reward)}`}>reward ${row.reward === null ? "missing" : number(row.reward)}</span>
      <span class="pill">A ${signed(row.advantage)}</span>
      ${row.verdict !== null && html`<span class="pill">says ${row.verdict ? "correct" : "wrong"}</span>`}
      ${record.fate && html`<span class="muted">${record.fate}</span>`}
      ${record.answer !== null && html`<span>answers <code dir="auto">${record.answer.slice(0, 200)}</code></span>`}
      <span class="muted">${number(record.num_prompt_tokens)} + ${number(row.num_tokens)} tokens, ${record.finish}, step ${row.step}</span>
      ${record.segments.length === 1 && html`<span class="muted">policy version ${record.segments[0].version}</span>`}
      ${row.flags.filter((flag) => flag !== "verdict").map((flag) => html`<span class="flag">${flag}</span>`)}
    </p>
    <p class="facts small muted">
      ${Object.entries(record.parts).map(([name, value]) => html`<span>${name} ${number(value)}</span>`)}
      ${record.correct !== null && html`<span>judged ${number(record.correct)}</span>`}
      ${record.note && html`<span>${record.note.slice(0, 500)}</span>`}<span class="uid">${row.uid}</span></p>
    <${Segments} segments=${record.segments} />
    <div class="tabs" role="tablist">${Object.entries(views).map(([name, is]) => is && html`<button role="tab" aria-selected=${name === view}
      class=${name === view ? "here" : ""} onClick=${() => go({ view: name }, true)}>${name === "diff" ? `what it changed in ${data.diff.of.agent}'s` : name}</button>`)}</div>
    ${view === "diff" ? html`<${Diff} diff=${data.diff} />`
      : html`<div class="side"><div><div class="wrote"><h3>read</h3><label class="coloring"><input type="checkbox" checked=${isRaw} onChange=${() => go({ raw: isRaw ? null : 1 }, true)} /> raw text</label></div>
        <${Said} key=${place} text=${record.prompt} isRaw=${isRaw} /></div><div><div class="wrote"><h3>wrote</h3>${!EXPORTED && html`<${Coloring} coloring=${coloring} />`}</div>
        ${coloring ? html`<${Tokens} key=${place} run=${run} step=${step} line=${line} coloring=${coloring} fold=${folds} />` : html`<${Written} key=${place} text=${record.text} isRaw=${isRaw} />`}</div></div>`}
  </section>`;
}

const Back = () => html`<button class="back more" onClick=${() => go({ sample: null })}>‹ list</button>`;

// The tree of samples: a line of chips for each group, below the sample that the group reads or continues; a line for each session
// if a program plays.
function Tree({ rows, place, sessions }) {
  const known = new Set(rows.map((row) => row.uid));
  const below = new Map();
  for (const row of rows) {
    const parent = known.has(row.parent) ? row.parent : null;
    if (!below.has(parent)) below.set(parent, new Map());
    const groups = below.get(parent);
    const name = sessions && parent === null ? `session ${row.uid.split("/")[0]}` : row.agent;
    if (!groups.has(name)) groups.set(name, []);
    groups.get(name).push(row);
  }
  const chip = (row) => html`<button class=${`chip ${pillOf(row.reward)} ${`${row.step}.${row.line}` === place ? "here" : ""}`}
    aria-label=${`${row.agent}, reward ${number(row.reward)}`} title=${`${row.uid}: reward ${number(row.reward)}, step ${row.step}`}
    onClick=${() => go({ sample: `${row.step}.${row.line}` })}>${sessions && `${row.agent} `}${row.verdict === null ? number(row.reward, 2) : row.verdict ? "✓" : "✗"}</button>`;
  const self = useRef(null);
  useEffect(() => self.current?.querySelector(".chip.here")?.scrollIntoView({ block: "nearest" }), [place, rows.length > 0]);
  const lines = [];
  const walk = (parent, depth) => {
    const groups = below.get(parent);
    below.delete(parent); // prevents an endless loop if parents form a cycle in a damaged log
    for (const [name, members] of groups ?? []) {
      const about = parent === null ? "" : ` on ${parent.slice(parent.lastIndexOf("/") + 1)}`;
      lines.push(html`<div class=${`line d${Math.min(depth, 6)}`}><span class="muted small name">${name}${about}</span>${members.map(chip)}</div>`);
      for (const member of members) walk(member.uid, depth + 1);
    }
  };
  walk(null, 0);
  return html`<div class="tree" ref=${self}>${lines}</div>`;
}

function Segments({ segments }) {
  if (segments.length < 2) return null;
  const total = Math.max(1, segments[segments.length - 1].end);
  const first = Math.min(...segments.map((segment) => segment.version));
  return html`<svg class="segments" viewBox="0 0 1000 16" preserveAspectRatio="none" role="img" aria-label="segments">
      ${segments.map((s) => html`<rect x=${(1000 * s.start) / total} width=${(1000 * (s.end - s.start)) / total} y="0" height="16" class=${COLORS[(s.version - first) % 8]}>
        <title>tokens ${s.start} to ${s.end}: version ${s.version}</title></rect>`)}</svg>
    <p class="small muted facts">${segments.map((s) => html`<span><i class=${COLORS[(s.version - first) % 8]}></i>v${s.version} [${s.start}, ${s.end})</span>`)}</p>`;
}

function Diff({ diff }) {
  if (diff.parts === null) return note("The two texts are too long to be compared here.");
  return html`<p class="small muted"><del>only in ${diff.of.agent}'s (${diff.of.uid})</del> <ins>only in this one</ins></p>
    <pre class="diff" dir="auto">${diff.parts.map(([kind, text]) => (kind === "=" ? text : kind === "-" ? html`<del>${text}</del>` : html`<ins>${text}</ins>`))}</pre>`;
}

const TAGS = ["tool_call", "tool_response"];

// Split a text at tool calls and tool outputs, in a single pass: [{ tag or null, text, end }].
export function folded(text) {
  const pieces = [];
  const open = new Set(TAGS);
  let at = 0;
  while (open.size) {
    let tag = null;
    let start = Infinity;
    for (const each of open) {
      const found = text.indexOf(`<${each}>`, at);
      if (found < 0) open.delete(each);
      else if (found < start) [tag, start] = [each, found];
    }
    if (tag === null) break;
    const close = `</${tag}>`;
    const end = text.indexOf(close, start);
    if (end < 0) {
      open.delete(tag); // no tag of this kind is closed after this point
      continue;
    }
    if (start > at) pieces.push({ tag: null, text: text.slice(at, start), end: start });
    at = end + close.length;
    pieces.push({ tag, text: text.slice(start + tag.length + 2, end), end: at });
  }
  if (at < text.length) pieces.push({ tag: null, text: text.slice(at), end: text.length });
  return pieces;
}

// Split a text as `folded` does, or return one piece if there are too many.
const MOST_PIECES = 400;
function folds(text) {
  const pieces = folded(text);
  return pieces.length > MOST_PIECES ? [{ tag: null, text, end: text.length }] : pieces;
}

function Written({ text, isRaw }) {
  const pieces = folds(text);
  if (pieces.length <= 1) return html`<${Said} text=${text} isRaw=${isRaw} />`;
  return pieces.map((piece, i) => piece.tag === null ? html`<${Said} key=${i} text=${piece.text} isRaw=${isRaw} />`
    : html`<details key=${i} class="tool"><summary>${piece.tag.replace("_", " ")} <code>${piece.text.trim().slice(0, 80)}</code></summary><${Long} text=${piece.text} /></details>`);
}

const LONG_SYSTEM = 600; // characters above which a system prompt is folded

// The turns of a chat with Markdown and LaTeX rendered, or the raw text; long texts are raw, because rendering them is slow.
function Said({ text, isRaw }) {
  if (isRaw || text.length > MOST) return html`<${Long} text=${text} />`;
  return messages(text).map(({ role, text: said }, i) => role === "" ? html`<${Markdown} key=${i} text=${said} />`
    : html`<details key=${i} class=${`message ${role}`} open=${role !== "system" || said.length <= LONG_SYSTEM}>
      <summary><b>${role}</b> <span class="muted">${number(said.length)} characters</span></summary><${Markdown} text=${said} /></details>`);
}
