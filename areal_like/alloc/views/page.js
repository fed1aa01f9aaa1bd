"use strict";
// The mesh is computed here from its sizes, so that the page stays small whatever the world; the tests of this page
// compare its groups with those of areal_like.alloc.Mesh.
const M = JSON.parse(document.getElementById("mesh").textContent);
const GRIDS = { attention: ["tp", "cp", "dp", "pp"], experts: ["etp", "ep", "edp", "pp"] };
const JOINT = { attention: [["dp", "cp"], ["tp", "cp"], ["tp", "pp"]], experts: [["etp", "ep"]] };
const NAMES = { tp: "tensor", cp: "context", dp: "data", pp: "pipeline", etp: "expert tensor", ep: "expert", edp: "expert data" };
const WORLD = M.world_size, STAGE = WORLD / M.sizes.pp, MOE = M.sizes.ep * M.sizes.etp > 1;
const WIDTH = { attention: M.sizes.tp, experts: M.sizes.etp * M.sizes.ep };
const KINDS = MOE ? ["attention", "experts"] : ["attention"];
const LIMIT = 4096, BAND = 32, LISTED = 64;
const $ = (id) => document.getElementById(id);
const root = document.documentElement;

// --- arithmetic ---------------------------------------------------------------------------------------------------
const AXES = {};
for (const kind in GRIDS) {
  AXES[kind] = {};
  let stride = 1;
  for (const dim of GRIDS[kind]) {
    AXES[kind][dim] = { size: M.sizes[dim], stride };
    stride *= M.sizes[dim];
  }
}
const place = (kind, dim, rank) => Math.floor(rank / AXES[kind][dim].stride) % AXES[kind][dim].size;
function members(kind, dims, rank) {
  let ranks = [rank];
  for (const dim of GRIDS[kind].filter((d) => dims.includes(d))) {
    const { size, stride } = AXES[kind][dim], first = place(kind, dim, rank);
    const next = [];
    for (let i = 0; i < size; i++) for (const r of ranks) next.push(r + (i - first) * stride);
    ranks = next;
  }
  return ranks;
}
const node = (rank) => Math.floor(rank / M.nodes.gpus);
const gcd = (a, b) => (b ? gcd(b, a % b) : a);
const UNIT = (WIDTH.attention * WIDTH.experts) / gcd(WIDTH.attention, WIDTH.experts);
const SHOWN = Math.min(M.sizes.pp, Math.max(1, Math.floor(LIMIT / UNIT)));
const SIZE = Math.min(STAGE, Math.max(UNIT, Math.floor(Math.floor(LIMIT / SHOWN) / UNIT) * UNIT));

// --- the grids ----------------------------------------------------------------------------------------------------
let chosen = null, start = 0, first = 0, lit = [];
const drawn = Math.min(SIZE, STAGE) * SHOWN;
const look = drawn <= 256 ? "" : drawn <= 1024 ? "mid" : "tiny";
const size = drawn <= 64 ? 40 : drawn <= 256 ? 34 : drawn <= 1024 ? 27 : drawn <= 2048 ? 15 : 11;
root.style.setProperty("--size", size + "px");
root.style.setProperty("--gap", (look === "tiny" ? 2 : 4) + "px");
document.body.className = (MOE ? "moe " : "") + look;

const rowName = (kind, rank) => kind === "experts" ? "edp " + place(kind, "edp", rank)
  : "dp " + place(kind, "dp", rank) + (M.sizes.cp > 1 ? " cp " + place(kind, "cp", rank) : "");
const columnName = (kind, rank) => kind === "attention" ? "tp " + place(kind, "tp", rank)
  : "ep " + place(kind, "ep", rank) + (M.sizes.etp > 1 ? "·" + place(kind, "etp", rank) : "");

function labelEvery(kind) {
  if (look === "tiny") return 8;
  const room = (6.2 * columnName(kind, WIDTH[kind] - 1).length) / (size + 4);
  return room <= 1 ? 1 : room <= 2 ? 2 : 4;
}
function cell(kind, rank, column, row) {
  let classes = "c";
  if (M.nodes) {
    if (column && rank % M.nodes.gpus === 0) classes += " nl";
    if (row && node(rank - WIDTH[kind]) !== node(rank)) classes += " nt";
  }
  const shade = kind === "attention" ? "--t:" + ((column + 1) / WIDTH.attention).toFixed(3) : "";
  const hue = MOE ? ";--e:" + Math.floor((360 * (rank % WIDTH.experts)) / WIDTH.experts) : "";
  return `<b role="gridcell" tabindex="-1" id="${kind[0]}${rank}" data-r="${rank}" class="${classes}" style="${shade}${hue}">${rank}</b>`;
}
function grid(kind, pp) {
  const width = WIDTH[kind], base = pp * STAGE + start, count = Math.min(SIZE, STAGE - start), rows = count / width;
  const every = labelEvery(kind), bands = [], band = rows <= 16 ? rows : Math.min(BAND, 4 * Math.ceil(rows / 16));
  for (let top = 0; top < rows; top += band) {
    const lines = [`<div role="row"><span></span>`];
    for (let c = 0; c < width; c++) {
      lines.push(`<span role="columnheader" class="axis col${every > 1 ? " wide" : ""}">${c % every === 0 ? columnName(kind, base + c) : ""}</span>`);
    }
    lines.push("</div>");
    for (let r = top; r < Math.min(rows, top + band); r++) {
      const rank = base + r * width;
      const named = look !== "tiny" || r % 4 === 0;
      const mark = M.nodes && named && (rank % M.nodes.gpus === 0 || r === top);
      lines.push(`<div role="row"><span role="rowheader" class="axis row">${mark ? `<i>node ${node(rank)}</i>` : ""}${named ? rowName(kind, rank) : ""}</span>`);
      for (let c = 0; c < width; c++) lines.push(cell(kind, rank + c, c, r - top));
      lines.push("</div>");
    }
    bands.push(`<div class="band" style="grid-template-columns:max-content repeat(${width},var(--size))">${lines.join("")}</div>`);
  }
  const caption = MOE ? `<figcaption>${kind === "attention" ? "attention" : "experts"}</figcaption>` : "";
  return `<figure class="${kind}">${caption}<div class="scroll" role="grid" aria-label="${kind} of stage ${pp}">${bands.join("")}</div></figure>`;
}
function stageHolds(pp) {
  if (!M.model) return "";
  const parts = ["layers " + M.model.stages[pp].map(([a, b]) => (a === b ? a : a + "–" + b)).join(" and ")];
  if (pp === 0) parts.push("embedding");
  if (pp === M.sizes.pp - 1) parts.push("output layer");
  return parts.join(", ");
}
function draw() {
  const html = [pager()];
  for (let pp = first; pp < Math.min(first + SHOWN, M.sizes.pp); pp++) {
    const name = M.sizes.pp > 1 ? `Stage ${pp}` : "All ranks";
    html.push(`<section aria-label="${name}"><h2>${name}<small>${stageHolds(pp)}</small></h2><div class="grids">`);
    html.push(KINDS.map((kind) => grid(kind, pp)).join(""), "</div></section>");
  }
  $("stages").innerHTML = html.join("");
  lit = [];
  light();
}
function pager() {
  const parts = [];
  if (SIZE < STAGE) {
    parts.push(`<span><button data-move="-1" aria-label="earlier ranks">◀</button> ranks ${start}–${Math.min(start + SIZE, STAGE) - 1} of the ${STAGE} of each stage <button data-move="1" aria-label="later ranks">▶</button></span>`);
  }
  if (SHOWN < M.sizes.pp) {
    parts.push(`<span><button data-stage="-1" aria-label="earlier stages">◀</button> stages ${first}–${Math.min(first + SHOWN, M.sizes.pp) - 1} of ${M.sizes.pp} <button data-stage="1" aria-label="later stages">▶</button></span>`);
  }
  return parts.length ? `<nav aria-label="Which ranks are drawn">${parts.join("")}</nav>` : "";
}

// --- the chosen rank ----------------------------------------------------------------------------------------------
function light() {
  for (const [element, name] of lit) element.classList.remove(name);
  lit = [];
  const mark = (element, name) => { if (element) { element.classList.add(name); lit.push([element, name]); } };
  document.body.classList.toggle("picked", chosen !== null);
  for (const old of document.querySelectorAll('.c[tabindex="0"]')) { old.tabIndex = -1; old.removeAttribute("aria-selected"); }
  for (const kind of KINDS) {
    const home = $(kind[0] + (chosen ?? first * STAGE + start)) ?? document.querySelector(`.${kind} .c`);
    home.tabIndex = 0;
    if (chosen === null) continue;
    for (const dim of GRIDS[kind]) {
      for (const rank of members(kind, [dim], chosen)) {
        if (rank !== chosen) mark($(kind[0] + rank), "g-" + dim);
      }
    }
    const me = $(kind[0] + chosen);
    mark(me, "me");
    if (me) me.setAttribute("aria-selected", "true");
  }
}
function choose(rank, focus) {
  if (rank !== null && !(Number.isInteger(rank) && rank >= 0 && rank < WORLD)) {
    $("said").textContent = `There is no rank ${rank}: ranks are 0 to ${WORLD - 1}.`;
    return;
  }
  chosen = rank;
  if (rank !== null) {
    const pp = Math.floor(rank / STAGE), to = Math.floor((rank % STAGE) / SIZE) * SIZE, stage = Math.floor(pp / SHOWN) * SHOWN;
    if (to !== start || stage !== first) { start = to; first = stage; draw(); } else light();
    $("number").value = rank;
    history.replaceState(null, "", "#rank=" + rank);
  } else {
    light();
    $("number").value = "";
    history.replaceState(null, "", location.pathname + location.search);
  }
  $("panel").innerHTML = rank === null ? about() : story(rank);
  if (rank !== null) $("said").textContent = `Rank ${rank}. ` + sentences(rank);
  const target = $((focus ?? "attention")[0] + rank);
  if (target && focus) target.focus();
  if (target) target.scrollIntoView({ block: "nearest", inline: "nearest" });
}
const dims = (kind) => GRIDS[kind].filter((d) => M.sizes[d] > 1 && !(kind === "experts" && d === "pp"));
function reach(ranks) {
  if (!M.nodes) return "";
  const nodes = new Set(ranks.map(node));
  return nodes.size === 1 ? "in this node" : `over ${nodes.size} nodes`;
}
const sentences = (rank) => KINDS.flatMap((kind) => dims(kind).map((d) => `${NAMES[d]} group of ${M.sizes[d]}`)).join(", ");
function list(ranks, all) {
  const shown = all ? ranks : ranks.slice(0, LISTED);
  const buttons = shown.map((r) => `<button data-go="${r}"${r === chosen ? ' aria-current="true"' : ""}>${r}</button>`);
  if (shown.length < ranks.length) buttons.push(`<button data-all aria-label="show all ${ranks.length}">+ ${ranks.length - shown.length} more</button>`);
  return buttons.join("");
}
function group(kind, names, rank) {
  const ranks = members(kind, names, rank), name = names.join("-");
  const words = names.length === 1 ? NAMES[name] + " parallel" : names.map((n) => NAMES[n]).join(" × ");
  const note = [names.length === 1 ? M.shared[name] : "", reach(ranks)].filter(Boolean).join(" · ");
  return `<div class="group" data-group="${name}" data-kind="${kind}"><h3><span class="chip g-${names.length === 1 ? name : ""}">${name}</span> ${words}</h3>` +
    `<p>${ranks.length} ranks${note ? " · " + note : ""}</p><div class="members">${list(ranks)}</div></div>`;
}
function holds(rank) {
  if (!M.model) return "";
  const lines = [`${stageHolds(place("attention", "pp", rank))} <span class="soft">of ${M.model.layers} layers</span>`];
  if (M.model.experts) {
    const each = M.model.experts / M.sizes.ep, ep = place("experts", "ep", rank);
    const share = M.sizes.etp > 1 ? `, 1/${M.sizes.etp} of each` : "";
    lines.push(`experts ${ep * each}–${(ep + 1) * each - 1} <span class="soft">of ${M.model.experts}${share}</span>`);
    if (M.model.dense_layers.length) lines.push(`<span class="soft">${M.model.dense_layers.length} layers have no experts</span>`);
  }
  return `<div class="holds" id="holds">${lines.map((l) => `<div>${l}</div>`).join("")}</div>`;
}
function story(rank) {
  const places = KINDS.flatMap((kind) => dims(kind).map((d) => `<li class="g-${d}"><b>${d}</b> ${place(kind, d, rank)}</li>`));
  const at = M.nodes ? `node ${node(rank)}, GPU ${rank % M.nodes.gpus}` : `of ${WORLD}`;
  const joint = KINDS.flatMap((kind) => JOINT[kind].filter((names) => names.every((d) => M.sizes[d] > 1)).map((names) => group(kind, names, rank)));
  return `<h2>Rank ${rank}<small>${at}</small></h2><ul class="places">${places.join("")}</ul>${holds(rank)}` +
    KINDS.map((kind) => dims(kind).map((d) => group(kind, [d], rank)).join("")).join("") +
    (joint.length ? `<details><summary>Joint groups</summary>${joint.join("")}</details>` : "") +
    (places.length ? "" : "<p>It is alone in every group.</p>");
}
function about() {
  const rows = KINDS.flatMap((kind) => dims(kind).map((d) => `<tr><td><span class="chip g-${d}">${d}</span> ${NAMES[d]}</td><td>${M.sizes[d]}</td><td>${WORLD / M.sizes[d]}</td></tr>`));
  const colours = MOE
    ? "Columns of the attention grid have a shade of blue each; ranks of one shade hold the same part of each layer. The bar below a rank has the colour of the experts that it holds."
    : "Ranks of one shade hold the same part of each layer.";
  return `<h2>Pick a rank</h2><p class="soft">Click one, or focus a grid and move with the arrow keys: <kbd>←</kbd> <kbd>→</kbd> <kbd>↑</kbd> <kbd>↓</kbd>, <kbd>Page</kbd> between stages, <kbd>Esc</kbd> to let go. Its groups light up, each in its colour.</p>` +
    (rows.length ? `<table><thead><tr><th>dimension</th><th>ranks</th><th>groups</th></tr></thead><tbody>${rows.join("")}</tbody></table>` : "") +
    `<p class="soft" style="margin-top:12px">${colours}${M.nodes ? " A line lies between two nodes." : ""}</p>`;
}

// --- what the user does -------------------------------------------------------------------------------------------
const cellOf = (event) => event.target.closest && event.target.closest(".c");
const kindOf = (element) => element.closest("figure").className;
$("stages").addEventListener("click", (event) => {
  const element = cellOf(event), button = event.target.closest("button");
  if (element) choose(Number(element.dataset.r), kindOf(element));
  else if (button) {
    if (button.dataset.move) start = Math.min(Math.max(0, start + SIZE * button.dataset.move), Math.floor((STAGE - 1) / SIZE) * SIZE);
    if (button.dataset.stage) first = Math.min(Math.max(0, first + SHOWN * button.dataset.stage), Math.floor((M.sizes.pp - 1) / SHOWN) * SHOWN);
    const label = button.getAttribute("aria-label");
    draw();
    document.querySelector(`nav [aria-label="${label}"]`).focus();
  }
});
$("stages").addEventListener("keydown", (event) => {
  const element = cellOf(event);
  if (!element) return;
  const kind = kindOf(element), rank = Number(element.dataset.r), width = WIDTH[kind], column = rank % width;
  const steps = { ArrowLeft: column ? -1 : 0, ArrowRight: column < width - 1 ? 1 : 0, ArrowUp: -width, ArrowDown: width,
    PageUp: -STAGE, PageDown: STAGE, Home: -column, End: width - 1 - column, Enter: 0, " ": 0 };
  if (event.ctrlKey || event.metaKey || event.altKey || !(event.key in steps)) return;
  event.preventDefault();
  const to = rank + steps[event.key];
  const leaves = event.key.startsWith("Arrow") && Math.floor(to / STAGE) !== Math.floor(rank / STAGE);
  if (to >= 0 && to < WORLD && !leaves) choose(to, kind);
});
document.addEventListener("keydown", (event) => { if (event.key === "Escape" && chosen !== null) choose(null); });
let twins = [];
$("stages").addEventListener("mouseover", (event) => {
  for (const twin of twins) twin.classList.remove("twin");
  twins = [];
  const element = cellOf(event);
  if (!element) return;
  const rank = Number(element.dataset.r);
  twins = KINDS.map((kind) => $(kind[0] + rank)).filter((t) => t && t !== element);
  for (const twin of twins) twin.classList.add("twin");
  element.title = `rank ${rank}: ` + KINDS.flatMap((kind) => dims(kind).map((d) => `${d} ${place(kind, d, rank)}`)).join(", ") + (M.nodes ? `; node ${node(rank)}` : "");
});
$("panel").addEventListener("click", (event) => {
  const button = event.target.closest("button");
  if (!button) return;
  if (button.dataset.go !== undefined) return choose(Number(button.dataset.go), "attention");
  const block = button.closest(".group");
  block.querySelector(".members").innerHTML = list(members(block.dataset.kind, block.dataset.group.split("-"), chosen), true);
});
$("choose").addEventListener("submit", (event) => {
  event.preventDefault();
  const text = $("number").value;
  choose(text === "" ? null : Number(text));
});
$("clear").addEventListener("click", () => choose(null));
function fromAddress() {
  const found = /^#rank=(\d+)$/.exec(location.hash);
  if (found) choose(Number(found[1]));
}
window.addEventListener("hashchange", fromAddress);

// --- the beginning ------------------------------------------------------------------------------------------------
$("number").max = WORLD - 1;
$("number").placeholder = "0–" + (WORLD - 1);
const colon = M.allocation.indexOf(":");
const LETTER = { d: "dp", t: "tp", p: "pp", c: "cp", e: "ep", v: "pp" };
$("allocation").innerHTML = M.allocation.slice(0, colon + 1) + M.allocation.slice(colon + 1).replace(/([dtpcev])(\d+)/g, (all, letter) => `<span class="w g-${LETTER[letter]}">${all}</span>`);
$("panel").innerHTML = about();
draw();
if (M.rank !== null) choose(M.rank);
fromAddress();
