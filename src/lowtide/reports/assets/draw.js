// Small helpers: numbers as the report's Python writes them, escaping, ticks, and SVG as text.

const NAMED = { "&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;", "'": "&#39;" };
const escape = (text) => String(text).replace(/[&<>"']/g, (character) => NAMED[character]);
const three = (x) => x.toFixed(Math.abs(x) < 9.995 ? 2 : Math.abs(x) < 99.95 ? 1 : 0);
const percent = (share) => `${(100 * share).toFixed(1)} %`;
const slug = (kind) => kind.replace(/[^a-z]+/g, "-");
const byId = (id) => document.getElementById(id);

function size(bytes) {
  const units = ["KiB", "MiB", "GiB", "TiB"];
  for (let power = 4; power > 0; power--) {
    if (Math.abs(bytes) >= 1024 ** power) return `${three(bytes / 1024 ** power)} ${units[power - 1]}`;
  }
  return `${bytes.toFixed(0)} B`;
}

function duration(nanoseconds) {
  if (nanoseconds >= 1e9) return `${three(nanoseconds / 1e9)} s`;
  if (nanoseconds >= 1e6) return `${three(nanoseconds / 1e6)} ms`;
  return nanoseconds ? `${three(nanoseconds / 1e3)} µs` : "0 s";
}

// A round step: 1, 2 or 5 times a power of ten.
function roundStep(span, most) {
  const raw = span / Math.max(1, most);
  const power = 10 ** Math.floor(Math.log10(raw));
  return power * [1, 2, 5, 10].find((factor) => factor * power >= raw * 0.999);
}

function ticks(low, high, most) {
  if (!(high > low)) return [low];
  const step = roundStep(high - low, most);
  const found = [];
  for (let k = Math.ceil(low / step - 1e-9); k * step <= high * (1 + 1e-12); k++) found.push(k * step);
  return found;
}

// Ticks that are round in the unit they are written in.
function byteTicks(low, high, most) {
  const power = Math.max(0, Math.min(4, Math.floor(Math.log(Math.max(high, 1)) / Math.log(1024))));
  const unit = 1024 ** power;
  const name = ["B", "KiB", "MiB", "GiB", "TiB"][power];
  return ticks(low / unit, high / unit, most).map((tick) => [tick * unit, `${+tick.toPrecision(4)} ${name}`]);
}

function timeTicks(low, high, most) {
  const [scale, name] = high >= 1e9 ? [1e9, "s"] : high >= 1e6 ? [1e6, "ms"] : [1e3, "µs"];
  return ticks(low / scale, high / scale, most).map((tick) => [tick * scale, `${+tick.toPrecision(6)} ${name}`]);
}

// Colours of the page follow its theme; the exported PNG uses those of white paper.
const themed = (name) => `var(--${name})`;
const onPaper = (name) => getComputedStyle(byId("paper")).getPropertyValue(`--${name}`).trim() || "#888888";

const line = (x1, y1, x2, y2, color, more = "") =>
  `<line x1="${x1.toFixed(1)}" y1="${y1.toFixed(1)}" x2="${x2.toFixed(1)}" y2="${y2.toFixed(1)}" style="stroke:${color}" ${more}/>`;
const label = (x, y, text, color, more = "") =>
  `<text x="${x.toFixed(1)}" y="${y.toFixed(1)}" style="fill:${color}" ${more}>${escape(text)}</text>`;
const box = (x, y, w, h, color, more = "") =>
  `<rect x="${x.toFixed(2)}" y="${y.toFixed(2)}" width="${Math.max(0, w).toFixed(2)}" height="${Math.max(0, h).toFixed(2)}" style="fill:${color}" ${more}/>`;
const picture = (w, h, body) =>
  `<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 ${w} ${h}" height="${h}" font-size="12" font-family="Inter, 'Segoe UI', system-ui, Arial, sans-serif" aria-hidden="true">${body}</svg>`;

// The tooltip at the pointer.
const tip = {
  show(event, html) {
    const note = byId("tip");
    note.innerHTML = html;
    note.hidden = false;
    const { width, height } = note.getBoundingClientRect();
    const x = Math.min(event.clientX + 14, innerWidth - width - 8);
    const y = event.clientY + 18 + height > innerHeight ? event.clientY - height - 12 : event.clientY + 18;
    note.style.left = `${Math.max(8, x)}px`;
    note.style.top = `${Math.max(8, y)}px`;
  },
  hide() {
    byId("tip").hidden = true;
  },
};
