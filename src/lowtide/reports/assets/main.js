// Start: read the data, draw, draw again when the width changes; downloads.

const data = JSON.parse(byId("data").textContent);
data.sums = stacked(data.planned);

function legend() {
  const kinds = data.kinds.filter((_, k) => data.planned.bytes[k].some(Boolean));
  const items = kinds.map((kind) => `<li><i class="swatch" style="background:var(--k-${slug(kind)})"></i>${escape(kind)}</li>`);
  items.push('<li><i class="swatch rule" style="border-color:var(--ink)"></i>without a plan</li>');
  if (data.planned.phase.includes(data.phases.indexOf("replay"))) {
    items.push('<li><i class="swatch" style="background:var(--p-replay)"></i>replay</li>');
  }
  byId("legend").innerHTML = items.join("");
}

// Files are stored compressed in the page; a click downloads them decompressed.
async function unpacked(link) {
  const packed = Uint8Array.from(atob(link.href.split(",")[1]), (character) => character.charCodeAt(0));
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
  return new Blob([await new Response(stream).arrayBuffer()], { type: "application/octet-stream" });
}

function save(blob, name) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(blob);
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 60000);
}

for (const link of document.querySelectorAll("a[data-name]")) {
  link.textContent = link.dataset.name;
  link.addEventListener("click", async (event) => {
    event.preventDefault();
    save(await unpacked(link), link.dataset.name);
  });
}

// The memory chart on white paper, with the verdict above it.
function cardSvg() {
  const w = 1200, h = 640, words = document.querySelector("h1").textContent.split(" ");
  const lines = [""];
  for (const word of words) {
    if (lines[lines.length - 1].length + word.length > 104) lines.push("");
    lines[lines.length - 1] += `${word} `;
  }
  let out = box(0, 0, w, h, onPaper("card"));
  lines.slice(0, 3).forEach((text, i) => { out += label(40, 56 + 30 * i, text, onPaper("ink"), 'font-size="22" font-weight="600"'); });
  let x = 40;
  const y = 150;
  data.kinds.filter((_, k) => data.planned.bytes[k].some(Boolean)).forEach((kind) => {
    out += box(x, y - 10, 12, 12, onPaper(`k-${slug(kind)}`), 'rx="3"') + label(x + 18, y, kind, onPaper("soft"), 'font-size="14"');
    x += 40 + 8.5 * kind.length;
  });
  out += line(x, y - 4, x + 14, y - 4, onPaper("ink"), 'stroke-width="1.5"') + label(x + 20, y, "without a plan", onPaper("soft"), 'font-size="14"');
  const chart = memorySvg(data, w - 80, 430, 0, Math.max(data.planned.end, data.plain.end), onPaper);
  out += `<g transform="translate(40 168)">${chart.replace(/^<svg[^>]*>|<\/svg>$/g, "")}</g>`;
  const source = data.measuredPeak ? "lowtide: the curve is predicted, the dotted line measured" : "lowtide: all numbers predicted";
  out += label(w - 40, h - 14, source, onPaper("soft"), 'text-anchor="end" font-size="13"');
  return picture(w, h, out).replace("<svg ", `<svg width="${w}" `);
}

function cardPng() {
  return new Promise((resolve, reject) => {
    const image = new Image();
    image.onload = () => {
      const canvas = document.createElement("canvas");
      [canvas.width, canvas.height] = [2 * image.width, 2 * image.height];
      canvas.getContext("2d").drawImage(image, 0, 0, canvas.width, canvas.height);
      canvas.toBlob(resolve, "image/png");
    };
    image.onerror = reject;
    image.src = `data:image/svg+xml;charset=utf-8,${encodeURIComponent(cardSvg())}`;
  });
}

byId("png").disabled = false;
byId("png").addEventListener("click", async () => save(await cardPng(), "report.png"));

legend();
const draws = [memoryChart(data), curveChart(data), layersChart(data), barsChart(data)];
let width = 0;
function redraw() {
  if (document.body.clientWidth === width) return;
  width = document.body.clientWidth;
  draws.forEach((draw) => draw());
}
addEventListener("resize", redraw);
redraw();
document.body.dataset.ready = "true";
