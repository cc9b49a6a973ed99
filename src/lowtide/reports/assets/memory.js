// Memory over the step: stacked kinds, the plain step as a line, the budget, phases and copies below.

const LANES = [["out", "k-in-flight"], ["in", "k-kept"], ["stall", "a-recompute"]];

function lastAtOrBefore(times, t) {
  let low = 0, high = times.length - 1;
  while (low < high) {
    const middle = (low + high + 1) >> 1;
    if (times[middle] <= t) low = middle; else high = middle - 1;
  }
  return low;
}

// Running sums of the kinds: sums[k][i] is the top edge of kind k at point i.
function stacked(planned) {
  const sums = [];
  planned.bytes.forEach((row, k) => sums.push(row.map((bytes, i) => bytes + (k ? sums[k - 1][i] : 0))));
  return sums;
}

function memoryFrame(data, w, h, low, high) {
  const lanes = LANES.filter(([kind]) => (data.copies[kind] || []).length);
  const left = 66, right = 10, top = 22, below = 50 + 16 * lanes.length;
  const most = Math.max(data.budget, data.measuredPeak || 0, ...data.plain.total, ...data.sums[data.sums.length - 1]) * 1.04 || 1;
  const x = (t) => left + ((t - low) / (high - low)) * (w - left - right);
  const y = (bytes) => top + (1 - bytes / most) * (h - top - below);
  const time = (px) => Math.max(low, Math.min(high, low + ((px - left) / (w - left - right)) * (high - low)));
  return { lanes, left, right, top, below, most, x, y, time, base: h - below, end: w - right };
}

// A step function as an SVG path, from the last point before the view to the first after it.
function steps(times, values, end, f, low, high) {
  const first = lastAtOrBefore(times, low);
  let path = `M${f.x(Math.max(low, times[first])).toFixed(1)} ${f.y(values[first]).toFixed(1)}`;
  for (let i = first + 1; i < times.length && times[i] <= high; i++) {
    path += `H${f.x(times[i]).toFixed(1)}V${f.y(values[i]).toFixed(1)}`;
  }
  return `${path}H${f.x(Math.min(high, end)).toFixed(1)}`;
}

function phaseRuns(planned, low, high) {
  const runs = [];
  for (let i = lastAtOrBefore(planned.t, low); i < planned.t.length && planned.t[i] <= high; i++) {
    const until = Math.min(high, i + 1 < planned.t.length ? planned.t[i + 1] : planned.end);
    const last = runs[runs.length - 1];
    if (last && last[0] === planned.phase[i]) last[2] = until;
    else runs.push([planned.phase[i], Math.max(low, planned.t[i]), until]);
  }
  return runs;
}

function memorySvg(data, w, h, low, high, color) {
  const f = memoryFrame(data, w, h, low, high);
  const narrow = w < 520;
  let out = "";
  for (const [bytes, name] of byteTicks(0, f.most, 5)) {
    out += line(f.left, f.y(bytes), f.end, f.y(bytes), color("line"));
    out += label(f.left - 8, f.y(bytes) + 4, name, color("soft"), 'text-anchor="end"');
  }
  const { planned, plain } = data;
  for (let k = data.kinds.length - 1; k >= 0; k--) {
    if (!planned.bytes[k].some(Boolean)) continue;
    // Each kind is drawn down to the ground; those below are drawn over it.
    const path = `${steps(planned.t, data.sums[k], planned.end, f, low, high)}V${f.base}H${f.x(Math.max(low, planned.t[0])).toFixed(1)}Z`;
    out += `<path d="${path}" style="fill:${color(`k-${slug(data.kinds[k])}`)}"/>`;
  }
  if (plain.end > low) {
    const path = steps(plain.t, plain.total, plain.end, f, low, high);
    out += `<path d="${path}" style="fill:none;stroke:${color("ink")}" stroke-width="1" stroke-linejoin="round" opacity=".7"/>`;
  }
  const rules = [[data.budget, "budget", "6 4"], [data.measuredPeak, "measured peak", "2 3"]].filter(([bytes]) => bytes);
  rules.sort((a, b) => b[0] - a[0]);
  rules.forEach(([bytes, name, dashes], i) => {
    out += line(f.left, f.y(bytes), f.end, f.y(bytes), color("ink"), `stroke-width="1.5" stroke-dasharray="${dashes}"`);
    const anchor = i ? `text-anchor="start"` : `text-anchor="end"`;
    const close = i && f.y(bytes) - f.y(rules[0][0]) < 18;
    const text = label(i ? f.left + 6 : f.end - 2, f.y(bytes) + (close ? 15 : -5), `${name} ${size(bytes)}`, color("ink"), `${anchor} font-weight="600" paint-order="stroke" stroke-width="3" stroke-linejoin="round"`);
    out += text.replace('style="', `style="stroke:${color("card")};`);
  });
  if (planned.peak >= 0 && planned.t[planned.peak] >= low && planned.t[planned.peak] <= high) {
    const peak = data.sums[data.sums.length - 1][planned.peak];
    out += `<circle cx="${f.x(planned.t[planned.peak]).toFixed(1)}" cy="${f.y(peak).toFixed(1)}" r="4" style="fill:${color("card")};stroke:${color("ink")}" stroke-width="1.5"/>`;
  }
  let under = f.base + 12;
  for (const [phase, start, until] of phaseRuns(planned, low, high)) {
    out += box(f.x(start), under, f.x(until) - f.x(start), 8, color(`p-${data.phases[phase]}`));
  }
  out += label(f.left - 8, under + 8, "phase", color("soft"), 'text-anchor="end"');
  for (const [kind, name] of f.lanes) {
    under += 16;
    for (const [start, until] of data.copies[kind]) {
      if (until < low || start > high) continue;
      const x = f.x(Math.max(low, start));
      out += box(x, under - 1, Math.max(0.6, f.x(Math.min(high, until)) - x - 0.3), 10, color(name));
    }
    out += label(f.left - 8, under + 8, kind === "stall" ? "stalls" : `copies ${kind}`, color("soft"), 'text-anchor="end"');
  }
  for (const [t, name] of timeTicks(low, high, narrow ? 3 : 7)) {
    out += label(f.x(t), under + 28, name, color("soft"), `text-anchor="${f.x(t) > f.end - 24 ? "end" : "middle"}"`);
  }
  return picture(w, h, out);
}

function memoryChart(data) {
  const host = byId("memory");
  const whole = [0, Math.max(data.planned.end, data.plain.end)];
  let [low, high] = whole, cursor = null, grabbed = null, overlay, frame, height;

  function draw() {
    const w = Math.max(280, host.clientWidth);
    height = (w < 520 ? 280 : 340) + 16 * LANES.filter(([kind]) => (data.copies[kind] || []).length).length;
    frame = memoryFrame(data, w, height, low, high);
    host.innerHTML = memorySvg(data, w, height, low, high, themed);
    overlay = document.createElementNS("http://www.w3.org/2000/svg", "g");
    host.firstChild.append(overlay);
    byId("zoom-all").disabled = byId("zoom-out").disabled = low === whole[0] && high === whole[1];
    mark();
  }

  function mark(from = null, to = null) {
    let out = "";
    if (from !== null) out += box(Math.min(from, to), frame.top, Math.abs(to - from), frame.base - frame.top, "var(--ink)", 'opacity=".12"');
    if (cursor !== null && cursor >= low && cursor <= high) {
      out += line(frame.x(cursor), frame.top, frame.x(cursor), height - 26, "var(--ink)", 'stroke-width="1"');
    }
    overlay.innerHTML = out;
    readout(data, cursor);
  }

  function zoom(from, to) {
    const least = whole[1] / 20000;
    if (to - from < least) [from, to] = [(from + to - least) / 2, (from + to + least) / 2];
    low = Math.max(whole[0], from);
    high = Math.min(whole[1], to);
    draw();
  }
  function scaled(factor, around = cursor ?? (low + high) / 2) {
    zoom(around - (around - low) * factor, around + (high - around) * factor);
  }
  const px = (event) => event.clientX - host.getBoundingClientRect().left;

  host.addEventListener("pointerdown", (event) => {
    grabbed = px(event);
    if (event.pointerType === "touch") { cursor = frame.time(grabbed); mark(); }
    else host.setPointerCapture(event.pointerId);
  });
  host.addEventListener("pointermove", (event) => {
    cursor = frame.time(px(event));
    const dragging = grabbed !== null && event.pointerType !== "touch" && Math.abs(px(event) - grabbed) > 5;
    if (dragging) mark(grabbed, px(event)); else mark();
  });
  host.addEventListener("pointerup", (event) => {
    if (grabbed !== null && event.pointerType !== "touch") {
      const [from, to] = [frame.time(Math.min(grabbed, px(event))), frame.time(Math.max(grabbed, px(event)))];
      if (Math.abs(px(event) - grabbed) > 5) zoom(from, to); else scaled(1 / 3, from);
    }
    grabbed = null;
  });
  host.addEventListener("pointercancel", () => { grabbed = null; });
  host.addEventListener("pointerleave", (event) => {
    if (event.pointerType !== "touch" && grabbed === null) { cursor = null; mark(); }
  });
  host.addEventListener("dblclick", () => zoom(...whole));
  host.addEventListener("keydown", (event) => {
    const { t, peak } = data.planned;
    const at = cursor === null ? peak : lastAtOrBefore(t, cursor);
    const leap = event.shiftKey ? 20 : 1;
    const next = (step) => {  // ops that take no time start together with others
      let i = at;
      for (let n = 0; n < leap; n++) do i += step; while (i > 0 && i < t.length - 1 && t[i] === t[i - step]);
      cursor = t[Math.max(0, Math.min(t.length - 1, i))];
      if (cursor < low || cursor > high) zoom(cursor - (high - low) / 2, cursor + (high - low) / 2);
    };
    const keys = {
      ArrowLeft: () => next(-1), ArrowRight: () => next(1), Home: () => { cursor = t[peak]; },
      "+": () => scaled(0.5), "=": () => scaled(0.5), "-": () => scaled(2), Escape: () => { cursor = null; zoom(...whole); },
    };
    if (keys[event.key]) { keys[event.key](); mark(); event.preventDefault(); }
  });
  byId("zoom-in").addEventListener("click", () => scaled(0.5, cursor ?? data.planned.t[data.planned.peak]));
  byId("zoom-out").addEventListener("click", () => scaled(2));
  byId("zoom-all").addEventListener("click", () => zoom(...whole));
  return draw;
}

// The live values at the pointer, or at the peak without one.
function readout(data, t) {
  const { planned, names } = data;
  if (planned.peak < 0) return;
  const i = t === null ? planned.peak : lastAtOrBefore(planned.t, t);
  const total = data.sums[data.sums.length - 1][i];
  const where = names[planned.path[i]];
  let out = `<h3>${t === null ? "At the peak" : `At ${duration(planned.t[i])}`}</h3>`;
  out += `<p>${escape(data.phases[planned.phase[i]])}${where ? ` of <b>${escape(where)}</b>` : ""}, ${escape(names[planned.op[i]])}</p><table>`;
  data.kinds.forEach((kind, k) => {
    if (planned.bytes[k].some(Boolean)) {
      out += `<tr><td><i class="swatch" style="background:var(--k-${slug(kind)})"></i>${escape(kind)}</td><td class="n">${size(planned.bytes[k][i])}</td></tr>`;
    }
  });
  out += `<tr class="total"><td>live</td><td class="n">${size(total)}</td></tr>`;
  if (t !== null && t <= data.plain.end) {
    out += `<tr><td>then, without a plan</td><td class="n">${size(data.plain.total[lastAtOrBefore(data.plain.t, t)])}</td></tr>`;
  }
  out += "</table>";
  for (const [kind] of t === null ? [] : LANES) {
    const copy = (data.copies[kind] || []).find(([start, until]) => start <= t && t <= until);
    if (copy) out += `<p>${kind === "stall" ? "waits for" : `copies ${kind}`} <b>${escape(names[copy[2]])}</b>, ${size(copy[3])}</p>`;
  }
  const list = planned.lists[planned.live[i]];
  if (list.length) {
    out += "<p>Largest live values</p><ol>";
    for (let k = 0; k < list.length; k += 2) {
      const share = (100 * list[k + 1]) / list[1];
      out += `<li><i style="width:${share.toFixed(1)}%"></i><span>${escape(names[list[k]])}</span><span>${size(list[k + 1])}</span></li>`;
    }
    out += "</ol>";
  }
  byId("readout").innerHTML = out;
}
