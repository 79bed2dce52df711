// Chats rendered for reading: the messages of a prompt, Markdown and LaTeX. Texts become only text nodes and the elements listed here,
// never HTML, links or images, and characters that the server made visible stay visible. Libraries: markdown-it parses the structure,
// Temml renders formulas as MathML.

import { html, useEffect, useMemo, useRef } from "./lib.js";

const { markdownit, temml } = window;
// Disabled: reference definitions, which vanish from the text, and entities, which could restore characters that the server replaced.
const parser = markdownit({ html: false }).disable(["reference", "entity", "lheading"]);
const DEEPEST = 90; // the parser drops elements that are nested 100 levels deep
const MOST_FORMULAS = 500;

// CUT matches code, which stays unchanged, and formulas, in which the parser would interpret backslashes, underscores and signs.
// Dollar signs with a space on the inside, or a letter or digit on the outside, are amounts of money and enclose no formula. CUT also
// matches an asterisk between factors, which is not emphasis, and the two characters that mark formulas (MARKED).
const CODE = "```[^]*?(?:```|$)|~~~[^]*?(?:~~~|$)|`[^`\\n]+`";
const BRACED = "\\{(?:[^{}]|\\{(?:[^{}]|\\{[^{}]{0,500}\\}){0,500}\\}){0,500}\\}";
const FORMULA = [
  "\\$\\$(?<display>[^$]{1,4000})\\$\\$", "\\\\\\[(?<square>[^]{1,4000}?)\\\\\\]", "\\\\\\((?<round>[^]{1,2000}?)\\\\\\)",
  "(?<environment>\\\\begin\\{(?<name>(?:align|aligned|equation|gather|cases|[bpv]?matrix|array)\\*?)\\}[^]{1,4000}?\\\\end\\{\\k<name>\\})",
  `(?<boxed>\\\\boxed${BRACED})`, "(?<![\\\\$\\w])\\$(?<inline>[^\\s$](?:[^$\\n]{0,1000}[^\\s$\\\\])?)\\$(?![\\w$])",
].join("|");
const CUT = new RegExp(`(?<code>${CODE})|${FORMULA}|(?<=[\\w)])\\*(?=[\\w(])|[\uE000\uE001]`, "gu");
const MARKED = /\uE000(\d+)\uE001/;
const HIDDEN = /[\p{Cc}\p{Cf}\p{Cs}]/u; // characters that \char could restore

// A rendered formula, or its source if Temml cannot parse it.
function Formula({ source, tex, isDisplay }) {
  const place = useRef(null);
  useEffect(() => {
    const shown = document.createElement("span");
    try {
      temml.render(tex, shown, { displayMode: isDisplay, throwOnError: true, trust: false, maxSize: [20, 20], maxExpand: 100 });
      for (const each of shown.querySelectorAll("[id], [href]")) ["id", "href"].forEach((name) => each.removeAttribute(name)); // \label, \ref
    } catch {
      shown.replaceChildren(source);
    }
    place.current.replaceChildren(...(HIDDEN.test(shown.textContent.replaceAll(/[\n\t\u2061-\u2064\u200b]/g, "")) ? [source] : shown.childNodes));
  }, [source]);
  return html`<span class=${isDisplay ? "formula display" : "formula"} ref=${place} title=${source}></span>`;
}

const PLAIN = { paragraph: "p", bullet_list: "ul", list_item: "li", blockquote: "blockquote", strong: "strong", em: "em", s: "s", table: "table", thead: "thead", tbody: "tbody", tr: "tr", th: "th", td: "td" };

// Turn the parser's flat list of tokens into a tree of elements, and put formulas back in place of their marks.
function tree(tokens, formulas) {
  const back = (text) => text.split(MARKED).map((part, i) => (i % 2 ? formulas[part].source : part)).join("");
  const words = (text) => text.split(MARKED).map((part, i) => (i % 2 ? (formulas[part].tex === null ? formulas[part].source : html`<${Formula} ...${formulas[part]} />`) : part));
  const stack = [{ children: [] }];
  const put = (child) => stack[stack.length - 1].children.push(child);
  for (const token of tokens) {
    if (token.nesting === 1) stack.push({ token, children: [] });
    else if (token.nesting === -1) {
      const { token: open, children } = stack.pop();
      const kind = token.type.replace("_close", "");
      if (token.hidden) put(children); // a paragraph of a tight list
      else if (kind === "link") put(html`<span class="link">${children} <code>${back(open.attrGet("href"))}</code>${open.attrGet("title") && ` ${back(open.attrGet("title"))}`}</span>`);
      else if (kind === "ordered_list") put(html`<ol start=${open.attrGet("start") ?? 1}>${children}</ol>`);
      else if (kind === "heading") put(html`<h4><span class="muted">${open.markup} </span>${children}</h4>`);
      else put(html`<${PLAIN[kind] ?? "span"}>${children}<//>`);
    } else if (token.type === "inline") put(tree(token.children, formulas));
    else if (token.type === "fence" || token.type === "code_block") put(html`<pre class="code" dir="auto">${token.info && html`<span class="muted small">${`${back(token.info)}\n`}</span>`}${back(token.content)}</pre>`);
    else if (token.type === "code_inline") put(html`<code>${back(token.content)}</code>`);
    else if (token.type === "softbreak" || token.type === "hardbreak") put(html`<br />`); // keep the model's line breaks
    else if (token.type === "hr") put(html`<hr />`);
    else if (token.type === "image") put(html`<span class="link">${back(token.content)} <code>${back(token.attrGet("src"))}</code>${token.attrGet("title") && ` ${back(token.attrGet("title"))}`}</span>`);
    else put(words(token.content));
  }
  return stack[0].children;
}

export function Markdown({ text }) {
  const shown = useMemo(() => {
    const formulas = [];
    const marked = text.replaceAll(CUT, (source, ...found) => {
      const { code, display, square, round, environment, boxed, inline } = found.at(-1);
      if (code !== undefined) return source.replaceAll(/[\uE000\uE001]/g, "\uFFFD");
      const isDisplay = (display ?? square ?? environment) !== undefined;
      const tex = formulas.length < MOST_FORMULAS ? (display ?? square ?? round ?? environment ?? boxed ?? inline ?? null) : null;
      return `\uE000${formulas.push({ source, tex, isDisplay }) - 1}\uE001`;
    });
    const tokens = parser.parse(marked, {});
    return tokens.some((token) => token.level > DEEPEST) ? html`<pre dir="auto">${text}</pre>` : tree(tokens, formulas);
  }, [text]);
  return html`<div class="markdown" dir="auto">${shown}</div>`;
}

// Headers and ends of turns in the chat templates ChatML, Llama 3, <|role|> and Mistral.
const HEADER = /<\|im_start\|>([\w -]{1,40})\n|<\|start_header_id\|>([\w -]{1,40})<\|end_header_id\|>\n{0,2}|<\|(system|user|assistant|tool|observation)\|>\n?|(\[INST\]|\[\/INST\]|\[SYSTEM_PROMPT\]|\[\/SYSTEM_PROMPT\]) ?/;
const MISTRAL = { "[INST]": "user", "[/INST]": "assistant", "[SYSTEM_PROMPT]": "system", "[/SYSTEM_PROMPT]": "" };
const ENDS = ["<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<|end_of_text|>", "<|endoftext|>", "</s>"];
const BEGIN = /^\s*(?:<\|begin_of_text\|>|<s>|<\|endoftext\|>)\s*/;

// Return the turns of a rendered chat, [{ role, text }]; one turn without a role if the template is unknown. Empty turns, such as the
// one that the model is about to write, are left out.
export function messages(text, first = "") {
  const pieces = text.replace(BEGIN, "").split(HEADER);
  const found = [{ role: first, text: pieces[0] }];
  for (let i = 1; i < pieces.length; i += 5) {
    const [own, header, short, mistral] = pieces.slice(i, i + 4);
    found.push({ role: own ?? header ?? short ?? MISTRAL[mistral], text: pieces[i + 4] });
  }
  return found.map(({ role, text: said }) => ({ role, text: ended(said) })).filter((each) => each.text.trim());
}

function ended(text) {
  let rest = text.trimEnd();
  for (let end = ""; end !== undefined; end = ENDS.find((each) => rest.endsWith(each))) rest = rest.slice(0, rest.length - end.length).trimEnd();
  return rest;
}
