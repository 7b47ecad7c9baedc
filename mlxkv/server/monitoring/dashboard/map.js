// The map of blocks: a canvas that draws what is in view, so that 20,000 cells scroll as smoothly as 20, and moves over
// it by pointer and keyboard. What a cell says stands in a tip, and is spoken when the keyboard moved.

import { grow, pack } from "./chains.js";
import { TIERS, ago, bytes, count, many } from "./words.js";

const PITCHES = [26, 22, 18, 15, 12, 9]; // pixels from cell to cell, the largest that fits
const MOST_HEIGHT = 440;
const HEADING = 26;
const PADDING = 8;
const AGES_S = [10, 60, 600, 3600];
const STRENGTHS = [1, 0.72, 0.48, 0.28, 0.12]; // of the fill, by age
const JUST_USED_S = 3;
const DIMMED = 0.4;
const BLOCK_TOKENS = 64;

export class BlockMap {
  // `box` scrolls, `canvas` stays in view in it, `tip` and `voice` say what a cell is. `now` gives the server's time.
  constructor({ box, canvas, tip, voice, now }) {
    Object.assign(this, { box, canvas, tip, voice, now });
    this.order = new Map();
    this.answer = null;
    this.nodes = new Map();
    this.cells = [];
    this.groups = [];
    this.cellOf = new Map();
    this.hovered = null; // cells are remembered by name: the next answer makes new ones
    this.selected = null;
    this.room = canvas.parentElement;
    this.frame = null;
    box.addEventListener("scroll", () => this.draw());
    box.addEventListener("keydown", (event) => this.#key(event));
    box.addEventListener("focus", () => this.#select(this.cellOf.get(this.selected) ?? this.cells[0]));
    box.addEventListener("blur", () => this.#point(null));
    box.addEventListener("pointermove", (event) => this.#point(this.#under(event)));
    box.addEventListener("pointerleave", () => this.#point(null));
    box.addEventListener("pointerdown", (event) => this.#select(this.#under(event) ?? undefined, false));
    new ResizeObserver(() => this.#arrange()).observe(box);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.draw());
  }

  show(answer) {
    this.answer = answer;
    const { nodes, roots, checkpoints } = grow(answer, this.order);
    this.nodes = nodes;
    this.roots = roots;
    this.checkpoints = checkpoints;
    for (const name of this.order.keys()) if (!nodes.has(name)) this.order.delete(name);
    this.#arrange();
  }

  #arrange() {
    if (!this.answer || !this.box.clientWidth) return;
    const width = this.box.clientWidth - 2 * PADDING;
    let height = 0;
    for (const pitch of PITCHES) {
      const isLast = pitch === PITCHES.at(-1);
      if (!isLast && this.nodes.size * pitch * pitch > width * MOST_HEIGHT) continue; // cannot fit: not tried
      this.pitch = pitch;
      height = this.#layout(Math.max(Math.floor(width / pitch), 1));
      if (height <= MOST_HEIGHT) break;
    }
    this.height = height;
    this.room.style.height = `${height}px`;
    this.canvas.dataset.cells = this.cells.length;
    this.draw();
  }

  #layout(columns) {
    this.groups = [];
    this.cells = [];
    this.cellOf = new Map();
    let top = 0;
    for (const [root, firsts] of this.roots) {
      const { cells, rows } = pack(firsts, columns);
      this.groups.push({ root, top, blocks: cells.length });
      for (const { node, x, y } of cells) {
        const cell = { node, left: PADDING + x * this.pitch, top: top + HEADING + y * this.pitch };
        this.cells.push(cell);
        this.cellOf.set(node.row.block, cell);
      }
      top += HEADING + rows * this.pitch + PADDING;
    }
    return Math.ceil(top);
  }

  // Once before the next frame, however often it is asked for.
  draw() {
    this.frame ??= requestAnimationFrame(() => {
      this.frame = null;
      this.#draw();
    });
  }

  #draw() {
    const { canvas, box } = this;
    const width = box.clientWidth;
    const height = box.clientHeight;
    const scale = devicePixelRatio;
    if (canvas.width !== Math.round(width * scale) || canvas.height !== Math.round(height * scale)) {
      canvas.width = Math.round(width * scale);
      canvas.height = Math.round(height * scale);
      canvas.style.width = `${width}px`;
      canvas.style.height = `${height}px`;
    }
    const styles = getComputedStyle(box);
    const names = ["hot", "cold", "ink", "line", "soft", "mark"];
    const colours = Object.fromEntries(names.map((name) => [name, styles.getPropertyValue(`--${name}`).trim()]));
    const pen = canvas.getContext("2d");
    pen.setTransform(scale, 0, 0, scale, 0, 0);
    pen.clearRect(0, 0, width, height);
    pen.translate(0, -box.scrollTop);
    const from = box.scrollTop - 2 * this.pitch;
    const to = box.scrollTop + height + this.pitch;
    const chosen = this.#chosen();
    const lit = chosen && this.#related(chosen.node);
    this.#headings(pen, colours, styles.fontFamily, width);
    for (const cell of this.cells) if (cell.top > from) this.#link(pen, cell, colours, lit, to);
    const now = this.now();
    for (const cell of this.cells) {
      if (cell.top < from || cell.top > to) continue;
      pen.globalAlpha = lit && !lit.has(cell.node) ? DIMMED : 1;
      this.#cell(pen, cell, colours, now);
    }
    pen.globalAlpha = 1;
    if (chosen) this.#ring(pen, chosen, colours.ink, 2.5);
    this.#say(chosen);
  }

  #headings(pen, colours, family, width) {
    pen.font = `600 12px ${family}`;
    pen.textBaseline = "middle";
    for (const { root, top, blocks } of this.groups) {
      const own = root === this.answer.root;
      const model = this.answer.roots[root] ?? `root ${root.slice(0, 12)}`;
      pen.fillStyle = own ? colours.ink : colours.soft;
      const text = `${model}${own ? "" : " (other root)"} · ${many(blocks, "block")}`;
      pen.fillText(text, PADDING, top + HEADING / 2, width - 2 * PADDING);
    }
  }

  #link(pen, cell, colours, lit, to) {
    const parent = cell.node.parent && this.cellOf.get(cell.node.parent.row.block);
    if (!parent || parent.top > to) return;
    const size = this.#size();
    const middle = Math.round(cell.top + size / 2) + 0.5;
    const fromMiddle = Math.round(parent.top + size / 2) + 0.5;
    pen.globalAlpha = lit && !(lit.has(cell.node) && lit.has(cell.node.parent)) ? DIMMED : 1;
    pen.strokeStyle = colours.line;
    pen.lineWidth = this.pitch > 12 ? 2 : 1;
    pen.beginPath();
    if (cell.top === parent.top) {
      pen.moveTo(parent.left + size, middle);
      pen.lineTo(cell.left, middle);
    } else if (cell.node === cell.node.parent.children[0]) {
      pen.moveTo(parent.left + size, fromMiddle); // the run goes on in the next row
      pen.lineTo(parent.left + size + 3, fromMiddle);
      pen.moveTo(cell.left - 4, middle);
      pen.lineTo(cell.left, middle);
    } else {
      const rail = Math.round(parent.left + size / 2) + 0.5;
      const bend = Math.min(size / 2, 6, Math.abs(cell.left - rail));
      pen.moveTo(rail, parent.top + size);
      if (cell.left > rail) pen.arcTo(rail, middle, cell.left, middle, bend);
      else pen.lineTo(rail, middle);
      pen.lineTo(cell.left, middle);
    }
    pen.stroke();
  }

  #cell(pen, { node, left, top }, colours, now) {
    const size = this.#size();
    const { tier, used } = node.row;
    const width = this.#width(node);
    const age = Math.max(now - used, 0);
    const strength = STRENGTHS[AGES_S.filter((limit) => age >= limit).length];
    const visible = pen.globalAlpha;
    const main = tier === "cold" ? colours.cold : colours.hot;
    const corner = Math.min(3, width / 2);
    const upper = tier === "both" ? Math.ceil(size * 0.6) : size;
    pen.globalAlpha = visible * strength;
    pen.fillStyle = main;
    this.#box(pen, left, top, width, upper, tier === "both" ? [corner, corner, 0, 0] : corner);
    pen.fill();
    if (tier === "both") {
      pen.fillStyle = colours.cold;
      this.#box(pen, left, top + upper, width, size - upper, [0, 0, corner, corner]);
      pen.fill();
    }
    pen.globalAlpha = visible;
    pen.lineWidth = 1;
    pen.strokeStyle = main;
    this.#box(pen, left + 0.5, top + 0.5, width - 1, size - 1, corner);
    pen.stroke();
    if (node.checkpoint || node.row.kind === "checkpoint") this.#diamond(pen, left + width, top, size, colours);
    if (age < JUST_USED_S) this.#ring(pen, { node, left, top }, main, 1.5);
  }

  #diamond(pen, right, top, size, colours) {
    const half = Math.max(size * 0.28, 3);
    pen.fillStyle = colours.mark;
    pen.strokeStyle = colours.ink;
    pen.lineWidth = 1;
    pen.beginPath();
    pen.moveTo(right - half, top - half / 2);
    pen.lineTo(right, top + half / 2);
    pen.lineTo(right - half, top + (3 * half) / 2);
    pen.lineTo(right - 2 * half, top + half / 2);
    pen.closePath();
    pen.fill();
    pen.stroke();
  }

  #ring(pen, { node, left, top }, colour, thick) {
    pen.strokeStyle = colour;
    pen.lineWidth = thick;
    this.#box(pen, left - 1.5, top - 1.5, this.#width(node) + 3, this.#size() + 3, 4);
    pen.stroke();
  }

  // Rounded corners are not to be seen on the smallest cells, and cost half of drawing them.
  #box(pen, left, top, width, height, corners) {
    pen.beginPath();
    if (this.pitch < 12) pen.rect(left, top, width, height);
    else pen.roundRect(left, top, width, height, corners);
  }

  // A tail is as wide as its share of a block.
  #width({ row }) {
    const size = this.#size();
    return row.kind === "block" ? Math.max((size * row.tokens) / BLOCK_TOKENS, 3) : size;
  }

  #size() {
    return this.pitch - (this.pitch > 15 ? 5 : this.pitch > 9 ? 3 : 2);
  }

  // The blocks before a node in its chain, and all that continue it.
  #related(node) {
    const found = new Set();
    for (let above = node; above; above = above.parent) found.add(above);
    const below = [node];
    for (let i = 0; i < below.length; i++) {
      found.add(below[i]);
      below.push(...below[i].children);
    }
    return found;
  }

  #chosen() {
    const focused = document.activeElement === this.box ? this.selected : null;
    return this.cellOf.get(this.hovered) ?? this.cellOf.get(focused) ?? null;
  }

  #under(event) {
    const frame = this.box.getBoundingClientRect();
    const x = event.clientX - frame.left;
    const y = event.clientY - frame.top + this.box.scrollTop;
    const size = this.pitch;
    return this.cells.find((one) => x >= one.left && x < one.left + size && y >= one.top && y < one.top + size);
  }

  #point(cell) {
    const name = cell?.node.row.block ?? null;
    if (name === this.hovered && name !== null) return;
    this.hovered = name;
    this.draw();
  }

  #select(cell, speak = true) {
    if (!cell) return;
    this.hovered = null;
    this.selected = cell.node.row.block;
    const { box } = this;
    if (cell.top - HEADING < box.scrollTop) box.scrollTop = cell.top - HEADING;
    const below = cell.top + this.pitch - box.clientHeight;
    if (below > box.scrollTop) box.scrollTop = below;
    this.draw();
    if (speak) this.voice.textContent = this.describe(cell.node).join(". ");
  }

  #key(event) {
    const at = this.cellOf.get(this.selected) ?? this.cells[0];
    if (!at || event.ctrlKey || event.metaKey || event.altKey) return;
    const { node } = at;
    let next;
    if (event.key === "ArrowRight") next = this.cellOf.get(node.children[0]?.row.block) ?? this.#beside(at, 1);
    else if (event.key === "ArrowLeft") next = this.cellOf.get(node.parent?.row.block) ?? this.#beside(at, -1);
    else if (event.key === "ArrowDown") next = this.#beyond(at, 1);
    else if (event.key === "ArrowUp") next = this.#beyond(at, -1);
    else if (event.key === "Home") next = this.#end(node, (one) => one.parent);
    else if (event.key === "End") next = this.#end(node, (one) => one.children[0]);
    else return;
    event.preventDefault();
    this.#select(next ?? at);
  }

  #end(node, step) {
    while (step(node)) node = step(node);
    return this.cellOf.get(node.row.block);
  }

  // The nearest cell on the same row to the right (1) or left (-1).
  #beside(at, way) {
    return this.#nearest((cell) => (cell.top === at.top ? way * (cell.left - at.left) : 0));
  }

  // The nearest cell below (1) or above (-1); nearness across counts less than rows.
  #beyond(at, way) {
    return this.#nearest((cell) => {
      const rows = way * (cell.top - at.top);
      return rows > 0 ? rows + Math.abs(cell.left - at.left) / 1000 : 0;
    });
  }

  #nearest(distance) {
    let best;
    let least = Infinity;
    for (const cell of this.cells) {
      const far = distance(cell);
      if (far > 0 && far < least) [best, least] = [cell, far];
    }
    return best;
  }

  // What a cell is, in short phrases.
  describe(node) {
    const { row } = node;
    const first = node.place * BLOCK_TOKENS;
    const isTail = row.kind === "block" && row.tokens < BLOCK_TOKENS;
    const what = row.kind === "checkpoint" ? "Checkpoint" : isTail ? "Tail" : "Block";
    const said = [`${what} ${node.place + 1} of its chain`];
    if (row.tokens) said.push(`tokens ${count(first)} to ${count(first + row.tokens - 1)}`);
    said.push(`in ${TIERS[row.tier]}, ${bytes(row.bytes)}`);
    said.push(`${many(row.hits, "hit")}, used ${ago(Math.max(this.now() - row.used, 0))}`);
    if (node.checkpoint) said.push(`checkpoint after it, ${bytes(node.checkpoint.bytes)}`);
    if (node.children.length > 1) said.push(`shared: ${node.children.length} ways go on from here`);
    else if (!node.children.length) said.push("nothing continues it");
    said.push(`name ${row.block.slice(0, 12)}`);
    return said;
  }

  #say(chosen) {
    this.tip.hidden = !chosen;
    if (!chosen) return;
    const lines = this.describe(chosen.node).map((text) => {
      const line = document.createElement("span");
      line.textContent = text;
      return line;
    });
    this.tip.replaceChildren(...lines);
    const { box, tip } = this;
    const below = chosen.top - box.scrollTop + this.pitch + 6;
    const above = chosen.top - box.scrollTop - tip.offsetHeight - 8;
    const goesAbove = above >= 0 && below + tip.offsetHeight > box.clientHeight;
    tip.style.top = `${box.offsetTop + (goesAbove ? above : below)}px`;
    tip.style.left = `${box.offsetLeft + Math.max(Math.min(chosen.left, box.clientWidth - tip.offsetWidth - 4), 0)}px`;
  }
}
