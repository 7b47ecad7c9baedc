// Prompt tokens over time as bars: above the line those that came from a tier, below it those that were computed.

import { clock, count } from "./words.js";

const SPACE = "http://www.w3.org/2000/svg";
const [HEIGHT, LEFT, BOTTOM, TOP] = [220, 52, 22, 8];
const STEP_S = 10;
const MOST_BARS = 90;
const LEAST_BARS = 30;

export function plot(svg, history, now) {
  const width = Math.max(svg.clientWidth, 240);
  const last = Math.floor(now / STEP_S) * STEP_S;
  const steps = history.length ? (last - history[0].time) / STEP_S + 1 : 0;
  const width_s = STEP_S * Math.max(Math.ceil(steps / MOST_BARS), 1);
  const bars = Math.max(Math.ceil((steps * STEP_S) / width_s), LEAST_BARS);
  const from = last + STEP_S - bars * width_s;
  const bins = Array.from({ length: bars }, (_, i) => ({ time: from + i * width_s, hot: 0, cold: 0, computed: 0 }));
  for (const step of history) {
    const bin = bins[Math.floor((step.time - from) / width_s)];
    if (bin) for (const source of ["hot", "cold", "computed"]) bin[source] += step[source];
  }
  const up = Math.max(...bins.map((bin) => bin.hot + bin.cold));
  const down = Math.max(...bins.map((bin) => bin.computed));
  const room = HEIGHT - TOP - BOTTOM;
  const scale = room / Math.max(up + down, 1);
  const zero = up + down ? TOP + up * scale : TOP + room / 2;
  const slot = (width - LEFT) / bars;
  const parts = [];
  for (const [i, bin] of bins.entries()) {
    const x = LEFT + i * slot;
    let y = zero;
    const bar = (source, height, top) => {
      const size = { x: x + slot * 0.12, y: top, width: slot * 0.76, height };
      parts.push(element("rect", { class: source, ...size }));
    };
    for (const source of ["hot", "cold"]) {
      if (!bin[source]) continue;
      y -= bin[source] * scale;
      bar(source, bin[source] * scale, y);
    }
    if (bin.computed) bar("computed", bin.computed * scale, zero);
  }
  parts.push(element("line", { class: "axis", x1: LEFT, x2: width, y1: zero, y2: zero }));
  const label = (text, y, anchor = "end", x = LEFT - 6) => {
    parts.push(element("text", { x, y, "text-anchor": anchor }, text));
  };
  if (up) label(count(up), TOP + 10);
  label("0", zero + 4 + (up && zero < TOP + 24 ? 12 : 0));
  if (down && HEIGHT - BOTTOM - zero > 22) label(count(down), HEIGHT - BOTTOM);
  label(clock(from), HEIGHT - 5, "start", LEFT);
  label(clock(now), HEIGHT - 5, "end", width);
  svg.setAttribute("viewBox", `0 0 ${width} ${HEIGHT}`);
  const kept = svg.querySelectorAll("title, desc");
  svg.replaceChildren(...kept, ...parts);
  return { bins: bins.filter((bin) => bin.hot + bin.cold + bin.computed), width_s };
}

function element(name, attributes, text) {
  const made = document.createElementNS(SPACE, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (text !== undefined) made.textContent = text;
  return made;
}
