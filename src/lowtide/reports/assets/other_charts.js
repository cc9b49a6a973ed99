// The trade-off curve, layers by actions, and the peaks side by side.

const LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ";

function curveChart(data) {
  const host = byId("curve");
  const { plans, others, here, floor } = data.curve;
  let points = [];

  function draw() {
    const w = Math.max(280, host.clientWidth), h = w < 520 ? 280 : 340;
    const left = 52, right = 16, top = 20, base = h - 44;
    const peaks = [floor, here[0], data.budget || here[0], ...plans.map((p) => p[0]), ...others.map((o) => o[1])];
    const slow = [here[1], ...plans.map((p) => p[1]), ...others.map((o) => o[2])];
    const span = Math.max(...peaks) - Math.min(...peaks) || Math.max(...peaks) || 1;
    const [low, high] = [Math.max(0, Math.min(...peaks) - 0.05 * span), Math.max(...peaks) + 0.05 * span];
    const most = Math.max(...slow) * 1.12 || 0.01;
    const x = (bytes) => left + ((bytes - low) / (high - low)) * (w - left - right);
    const y = (share) => top + (1 - share / most) * (base - top);
    let out = "";
    for (const tick of ticks(0, 100 * most, 5)) {
      out += line(left, y(tick / 100), w - right, y(tick / 100), "var(--line)");
      out += label(left - 8, y(tick / 100) + 4, `${+tick.toPrecision(3)} %`, "var(--soft)", 'text-anchor="end"');
    }
    for (const [bytes, name] of byteTicks(low, high, w < 520 ? 4 : 7)) {
      out += line(x(bytes), base, x(bytes), base + 4, "var(--faint)");
      out += label(x(bytes), base + 18, name, "var(--soft)", 'text-anchor="middle"');
    }
    out += label(left, 11, "slower", "var(--soft)");
    out += label(w - right, base + 36, "peak memory", "var(--soft)", 'text-anchor="end"');
    if (data.budget) {
      out += line(x(data.budget), top, x(data.budget), base, "var(--ink)", 'stroke-width="1.5" stroke-dasharray="6 4"');
      const before = x(data.budget) > w - 120;
      out += label(x(data.budget) + (before ? -6 : 6), top + 8, "budget", "var(--ink)", `font-weight="600" text-anchor="${before ? "end" : "start"}"`);
    }
    const bounds = plans.filter((p) => p[2]).sort((a, b) => a[2] - b[2]);
    if (bounds.length > 1) {
      const path = bounds.map((p) => `${x(p[2]).toFixed(1)} ${y(p[3]).toFixed(1)}`).join("L");
      out += `<path d="M${path}" style="fill:none;stroke:var(--faint)" stroke-width="1.5" stroke-dasharray="3 3"/>`;
    }
    const path = plans.map((p) => `${x(p[0]).toFixed(1)} ${y(p[1]).toFixed(1)}`).join("L");
    if (plans.length) out += `<path d="M${path}" style="fill:none;stroke:var(--accent)" stroke-width="2" stroke-linejoin="round"/>`;
    points = [];
    for (const p of plans) {
      out += `<circle cx="${x(p[0]).toFixed(1)}" cy="${y(p[1]).toFixed(1)}" r="3" style="fill:var(--accent)"/>`;
      points.push([x(p[0]), y(p[1]), `<b>${size(p[0])} peak, ${percent(p[1])} slower</b>for a budget of ${size(p[2])}; no plan is less than ${percent(p[3])} slower there`]);
    }
    others.forEach(([name, bytes, share], i) => {
      const letter = LETTERS[i % 26];
      out += box(x(bytes) - 8, y(share) - 8, 16, 16, "var(--soft)", 'rx="4"');
      out += label(x(bytes), y(share) + 4, letter, "var(--card)", 'text-anchor="middle" font-weight="600"');
      points.push([x(bytes), y(share), `<b>${escape(name)}</b>${size(bytes)} peak, ${percent(share)} slower`]);
    });
    out += `<circle cx="${x(here[0]).toFixed(1)}" cy="${y(here[1]).toFixed(1)}" r="7.5" style="fill:var(--accent);stroke:var(--card)" stroke-width="2.5"/>`;
    points.push([x(here[0]), y(here[1]), `<b>this plan</b>${size(here[0])} peak, ${percent(here[1])} slower`]);
    host.innerHTML = picture(w, h, out);
  }

  host.addEventListener("pointermove", (event) => {
    const at = host.getBoundingClientRect();
    const away = (p) => Math.hypot(p[0] - event.clientX + at.left, p[1] - event.clientY + at.top);
    const near = points.reduce((best, p) => (away(p) <= away(best) ? p : best), points[0]);
    if (near && away(near) < 36) tip.show(event, near[2]); else tip.hide();
  });
  host.addEventListener("pointerleave", tip.hide);
  return draw;
}

function layersChart(data) {
  const host = byId("layers");
  const { layers, actions, names } = data;
  const most = Math.max(1, ...layers.map((row) => Math.max(...row.slice(1))));
  let column = () => 0;

  function draw() {
    if (!layers.length) { host.innerHTML = ""; return; }
    const w = Math.max(280, host.clientWidth), row = 30, left = 84;
    const wide = (w - left) / layers.length, gap = wide > 6 ? 2 : wide > 3 ? 1 : 0;
    let out = "";
    actions.forEach((action, a) => {
      out += label(0, a * row + 19, action, "var(--soft)");
      layers.forEach((layer, i) => {
        out += box(left + i * wide, a * row, wide - gap, row - 3, "var(--wash)", gap ? 'rx="2"' : "");
        if (layer[a + 1]) {
          const full = (0.18 + (0.82 * layer[a + 1]) / most).toFixed(3);
          out += box(left + i * wide, a * row, wide - gap, row - 3, `var(--a-${slug(action)}, var(--a-compress))`, `${gap ? 'rx="2" ' : ""}opacity="${full}"`);
        }
      });
    });
    const h = actions.length * row + 20;
    const last = layers.length - 1;
    if (layers.every((layer) => names[layer[0]].length * 7 + 4 < wide)) {
      layers.forEach((layer, i) => { out += label(left + (i + 0.5) * wide, h - 4, names[layer[0]], "var(--soft)", 'text-anchor="middle"'); });
    } else {
      const room = Math.floor((w - left) / 15);
      const short = (name) => (name.length > room ? `${name.slice(0, room - 1)}…` : name);
      out += label(left, h - 4, short(names[layers[0][0]]), "var(--soft)");
      if (last) out += label(w, h - 4, short(names[layers[last][0]]), "var(--soft)", 'text-anchor="end"');
    }
    host.innerHTML = picture(w, h, out);
    column = (x) => Math.floor((x - left) / wide);
  }

  host.addEventListener("pointermove", (event) => {
    const layer = layers[column(event.clientX - host.getBoundingClientRect().left)];
    if (!layer) { tip.hide(); return; }
    const lines = actions.map((action, a) => `${escape(action)}: ${size(layer[a + 1])}`);
    tip.show(event, `<b>${escape(names[layer[0]])}</b>${lines.join("<br>")}`);
  });
  host.addEventListener("pointerleave", tip.hide);
  return draw;
}

function barsChart(data) {
  const host = byId("bars");
  const { planned, plain } = data;
  return function draw() {
    if (planned.peak < 0) return;
    const w = Math.max(280, host.clientWidth), left = w < 520 ? 0 : 120, row = w < 520 ? 46 : 34;
    const here = planned.bytes.map((kind) => kind[planned.peak]);
    const sum = (sizes) => sizes.reduce((a, b) => a + b, 0);
    const most = Math.max(sum(here), sum(plain.byKind), data.budget) || 1;
    const x = (bytes) => left + (bytes / most) * (w - left - 4);
    let out = "";
    [["with the plan", here], ["without a plan", plain.byKind]].forEach(([name, sizes], i) => {
      const y = i * row + (left ? 0 : 16);
      out += label(0, left ? y + 16 : y - 4, `${name}${left ? "" : `: ${size(sum(sizes))}`}`, "var(--soft)");
      let from = 0;
      sizes.forEach((bytes, k) => {
        if (!bytes) return;
        const wide = x(from + bytes) - x(from);
        out += box(x(from), y, wide - 1, 24, `var(--k-${slug(data.kinds[k])})`, 'rx="2"');
        from += bytes;
      });
    });
    const h = 2 * row + 4;
    if (data.budget) out += line(x(data.budget), 0, x(data.budget), h - 6, "var(--ink)", 'stroke-width="1.5" stroke-dasharray="6 4"');
    host.innerHTML = picture(w, h, out);
  };
}
