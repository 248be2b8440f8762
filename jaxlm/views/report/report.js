// Charts of a report, their settings, the filter of the runs and their groups.
(() => {
  const data = JSON.parse(document.getElementById("payload").textContent);
  const form = document.getElementById("settings");
  const notice = document.getElementById("notice");
  const spoken = document.getElementById("spoken");
  const search = document.getElementById("filter");
  const AXES = { step: "steps", tokens: "tokens", hours: "hours of training" };
  const SHOWN = 12; // lines of a box of values
  const PAN = 0.02; // of the shown range, for an arrow key
  const drawn = new Map(); // number of a chart -> { plot, place }

  const bytes = (text) => Uint8Array.from(atob(text), (c) => c.charCodeAt(0)).buffer;
  const int32 = (text) => Array.from(new Int32Array(bytes(text)));
  const float32 = (text) => Array.from(new Float32Array(bytes(text)));
  const float64 = (text) => Array.from(new Float64Array(bytes(text)));
  const clocks = data.entries.map(({ clock }) =>
    clock && { steps: int32(clock.steps), tokens: float64(clock.tokens), hours: float64(clock.hours) });

  function cssColor(name) {
    return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  }

  // The color and the dashes of an entry are those of its line in the legend.
  function styleOf(entry) {
    const line = document.querySelector(`.swatch.color${entry % 8}.dash${entry % 5} line`);
    const style = getComputedStyle(line);
    const dash = style.strokeDasharray === "none" ? [] : style.strokeDasharray.split(/[ ,]+/).map(parseFloat);
    return { stroke: style.stroke, dash };
  }

  function short(value) {
    if (value === null || value === undefined) return "–";
    const size = Math.abs(value);
    if (size !== 0 && (size < 1e-3 || size >= 1e6)) return Number(value.toPrecision(3)).toExponential().replace("e+", "e");
    return Number(value.toPrecision(size >= 1e4 ? 6 : 5)).toLocaleString("en", { maximumSignificantDigits: 6 });
  }

  // --- settings and points ---------------------------------------------------------------------------------------

  function settings() {
    const field = form.elements;
    const checked = (name) => [...document.querySelectorAll(`input[name=${name}]:checked`)].map((one) => +one.value);
    return {
      axis: field.axis.value, logx: field.logx.checked, logy: field.logy.checked, marks: field.marks.checked,
      smoothing: Number(field.smoothing.value), seeds: field.seeds ? field.seeds.value : "mean",
      group: data.groups[field.group ? field.group.value : ""],
      entries: new Set(checked("entry").filter((entry) => matches(data.entries[entry].label))), charts: new Set(checked("chart")),
    };
  }

  function last(xs, x) { // the index of the last of increasing numbers that is at most x, or -1
    let low = -1, high = xs.length;
    while (high - low > 1) {
      const middle = (low + high) >> 1;
      if (xs[middle] <= x) low = middle; else high = middle;
    }
    return low;
  }

  // Steps as tokens or hours, between the logged steps of the run; null where the run has none.
  function onAxis(entry, axis, steps) {
    if (axis === "step") return steps;
    const clock = clocks[entry];
    if (!clock) return null;
    const to = clock[axis], end = clock.steps.length - 1;
    return steps.map((step) => {
      const k = Math.max(0, Math.min(last(clock.steps, step), end - 1));
      const width = clock.steps[k + 1] - clock.steps[k];
      return step >= clock.steps[end] && axis === "hours" ? to[end]
        : to[k] + ((to[k + 1] - to[k]) * (step - clock.steps[k])) / width;
    });
  }

  function words() {
    return search ? search.elements.words.value.toLowerCase().split(/\s+/).filter(Boolean) : [];
  }

  function matches(label) { // whether a name has all words of the filter
    const name = label.toLowerCase();
    return words().every((word) => name.includes(word));
  }

  // An exponential moving average, without the bias of its first values.
  function smoothed(values, weight) {
    let sum = 0, total = 0;
    return values.map((value) => {
      sum = weight * sum + (1 - weight) * value;
      total = weight * total + (1 - weight);
      return sum / total;
    });
  }

  function points(entry, x, y, wanted, ...more) { // more: further values of each point
    const xs = onAxis(entry, wanted.axis, int32(x));
    if (!xs) return null;
    const kept = xs.map((_, k) => k).filter((k) => (!wanted.logx || xs[k] > 0) && (!wanted.logy || y[k] > 0));
    return kept.length ? [xs, y, ...more].map((values) => kept.map((k) => values[k])) : null;
  }

  function chosen(chart, wanted) {
    return chart.lines.filter(({ entry, kind }) => wanted.entries.has(entry) && (kind === "single" || kind === wanted.seeds));
  }

  // Values at increasing steps, between the points of a curve; null outside of it.
  function between(xs, ys, steps) {
    return steps.map((step) => {
      const k = last(xs, step), end = xs.length - 1;
      if (k < 0 || step > xs[end]) return null;
      return k === end ? ys[end] : ys[k] + ((ys[k + 1] - ys[k]) * (step - xs[k])) / (xs[k + 1] - xs[k]);
    });
  }

  const mean = (values) => values.reduce((sum, value) => sum + value, 0) / values.length;

  // For each value of the field the mean of its runs' curves over the steps, with the lowest and highest as a band.
  function groupLines(chart, wanted) {
    return wanted.group.values.flatMap((value, number) => {
      const members = chosen(chart, wanted).filter(({ entry }) => wanted.group.of[entry] === number).map((line) => {
        const [x, y] = wanted.smoothing && line.mx ? [line.mx, line.my] : [line.x, line.y], xs = int32(x);
        return { xs, at: onAxis(line.entry, wanted.axis, xs), ys: wanted.smoothing ? smoothed(float32(y), wanted.smoothing) : float32(y) };
      }).filter(({ at }) => at);
      const steps = [...new Set(members.flatMap(({ xs }) => xs))].sort((one, other) => one - other);
      const curves = members.map(({ xs, ys }) => between(xs, ys, steps)), places = members.map(({ xs, at }) => between(xs, at, steps));
      const points = steps.map((_, k) => {
        const own = curves.map((values) => values[k]).filter((y) => y !== null);
        return [mean(places.map((values) => values[k]).filter((x) => x !== null)), mean(own), Math.min(...own), Math.max(...own)];
      }).filter(([x, y, low]) => (!wanted.logx || x > 0) && (!wanted.logy || low > 0)).sort((one, other) => one[0] - other[0]);
      const [xs, ys, low, high] = [0, 1, 2, 3].map((k) => points.map((point) => point[k]));
      const label = `${value} (${members.length})`;
      return points.length ? [{ ...styleOf(number), label, points: [xs, ys], band: [low, high], width: 1.8 }] : [];
    });
  }

  function linesOf(chart, wanted) {
    if (wanted.group) return groupLines(chart, wanted);
    const found = [];
    for (const line of chosen(chart, wanted)) {
      const whole = points(line.entry, line.x, float32(line.y), wanted, ...(line.e ? [float32(line.e)] : []));
      if (!whole) continue;
      const [raw, errors] = [whole.slice(0, 2), whole[2]];
      const style = { ...styleOf(line.entry), entry: line.entry, errors };
      if (!wanted.smoothing) {
        found.push({ ...style, label: line.label, points: raw, width: line.kind === "trial" ? 1 : 1.8 });
        continue;
      }
      found.push({ ...style, label: null, points: raw, width: 1, alpha: 0.25 });
      const [x, y] = line.mx ? [line.mx, line.my] : [line.x, line.y];
      const smooth = points(line.entry, x, smoothed(float32(y), wanted.smoothing), wanted);
      if (smooth) found.push({ ...style, errors: undefined, label: line.label, points: smooth, width: 1.8 });
    }
    return found;
  }

  // --- charts ----------------------------------------------------------------------------------------------------

  function axis(label, more) {
    return { ...(label ? { label, labelSize: 22, labelFont: "12px system-ui" } : {}), font: "12px system-ui", stroke: cssColor("--quiet"),
      grid: { stroke: cssColor("--grid"), width: 1 }, ticks: { stroke: cssColor("--rule"), width: 1 },
      values: (_, found) => found.map((value) => (value === null ? "" : short(value))), ...more };
  }

  function logRange(_, low, high) {
    if (low === null) return [1, 10];
    const margin = Math.max((high / low) ** 0.04, 1.02);
    return [low / margin, high * margin];
  }

  function sizeOf(place) {
    return { width: Math.max(place.clientWidth, 200), height: Math.max(place.clientHeight, 150) };
  }

  function logSplits(_, __, low, high) { // round numbers, fewer over several decades
    const digits = high / low > 1000 ? [1] : high / low > 30 ? [1, 3] : high / low > 8 ? [1, 2, 5] : [1, 1.5, 2, 3, 4, 5, 6, 7, 8, 9];
    const found = [];
    for (let power = Math.floor(Math.log10(low)); power <= Math.log10(high); power += 1)
      for (const digit of digits) found.push(Number(`${digit}e${power}`));
    return found.filter((value) => value >= low && value <= high);
  }

  function draw(place, lines, options) {
    const aligned = lines.length ? uPlot.join(lines.map((line) => line.points)) : [[], []];
    const series = lines.map(({ stroke, dash, width, alpha, points: [xs] }) =>
      ({ stroke, dash, width, alpha: alpha || 1, spanGaps: true, points: { show: xs.length < 60, size: 4, stroke, fill: stroke } }));
    const { scales } = options;
    const logTicks = (scale) => (scale.distr === 3 ? { splits: logSplits, filter: (_, values) => values } : {});
    const plot = new uPlot({
      ...sizeOf(place),
      legend: { show: false }, series: [{}, ...(series.length ? series : [{}])],
      axes: [axis(options.xlabel, { space: 70, size: 34, ...logTicks(scales.x) }), axis(options.ylabel, { size: 62, ...logTicks(scales.y) })],
      scales,
      cursor: { ...(options.linked ? { sync: { key: "x" } } : {}), drag: { x: options.linked, y: false }, points: { show: false } },
      hooks: { draw: options.marks, setCursor: [(u) => showValues(u, lines)] },
    }, aligned, place);
    const box = element("div", { className: "values", hidden: true });
    place.append(box);
    plot.box = box;
    plot.over.addEventListener("mouseenter", () => { plot.entered = true; });
    plot.over.addEventListener("mouseleave", () => { plot.entered = false; box.hidden = true; });
    place.observer?.disconnect();
    place.observer = new ResizeObserver(() => plot.setSize(sizeOf(place)));
    place.observer.observe(place);
    place.onkeydown = (event) => onKey(event, plot, lines);
    place.onblur = () => { plot.entered = false; box.hidden = true; };
    return plot;
  }

  function valuesAt(plot, lines, x) { // the nearest points of the lines that reach x
    const margin = (plot.scales.x.max - plot.scales.x.min) / 100;
    const reach = ({ label, points: [xs] }) => label !== null && x >= xs[0] - margin && x <= xs[xs.length - 1] + margin;
    return lines.filter(reach).map((line) => {
      const [xs, ys] = line.points;
      let k = Math.max(last(xs, x), 0);
      if (k + 1 < xs.length && xs[k + 1] - x < x - xs[k]) k += 1;
      return { line, x: xs[k], y: ys[k] };
    }).sort((one, other) => other.y - one.y);
  }

  function showValues(plot, lines) {
    const { box } = plot;
    if (!box) return;
    const left = plot.cursor.left;
    box.hidden = !plot.entered || left < 0;
    if (box.hidden) return;
    const found = valuesAt(plot, lines, plot.posToVal(left, "x"));
    box.hidden = !found.length;
    if (box.hidden) return;
    box.replaceChildren(element("p", {}, element("span", { textContent: `${plot.axes[0].label.replace(/^steps$/, "step")} ${short(found[0].x)}` })));
    for (const { line, y } of found.slice(0, SHOWN)) {
      const label = element("span", { textContent: line.label });
      label.style.color = line.stroke;
      box.append(element("p", {}, label, element("b", { textContent: short(y) })));
    }
    if (found.length > SHOWN) box.append(element("p", { textContent: `and ${found.length - SHOWN} more` }));
    const right = left > plot.over.clientWidth / 2;
    const at = plot.over.offsetLeft + left + (right ? -box.offsetWidth - 12 : 12);
    box.style.left = `${Math.max(0, at)}px`;
    box.style.top = "8px";
  }

  function zoom(low, high) { // of all charts over steps; undefined: everything
    for (const { plot } of drawn.values()) {
      if (low === undefined) plot.setData(plot.data, true);
      else plot.setScale("x", { min: low, max: high });
    }
  }

  function onKey(event, plot, lines) {
    const { min, max } = plot.scales.x, width = plot.over.clientWidth;
    const at = plot.cursor.left >= 0 ? plot.cursor.left : width / 2;
    if (event.key === "ArrowLeft" || event.key === "ArrowRight") {
      const left = Math.min(Math.max(at + (event.key === "ArrowLeft" ? -PAN : PAN) * width, 0), width);
      plot.entered = true;
      plot.setCursor({ left, top: plot.over.clientHeight / 2 });
      const found = valuesAt(plot, lines, plot.posToVal(left, "x"));
      const said = found.slice(0, SHOWN).map(({ line, y }) => `${line.label} ${short(y)}`).join("; ");
      if (found.length) spoken.textContent = `${plot.axes[0].label.replace(/^steps$/, "step")} ${short(found[0].x)}: ${said}`;
    } else if (event.key === "+" || event.key === "-") {
      const center = plot.posToVal(at, "x"), factor = event.key === "+" ? 0.5 : 2;
      zoom(center - (center - min) * factor, center + (max - center) * factor);
    } else if (event.key === "0") zoom();
    else if (event.key === "Escape") plot.box.hidden = true;
    else return;
    event.preventDefault();
  }

  function drawMarks(wanted, entries) {
    return (plot) => {
      if (!wanted.marks) return;
      const { ctx, bbox } = plot;
      for (const entry of entries) {
        const { stroke } = styleOf(entry);
        for (const x of onAxis(entry, wanted.axis, data.entries[entry].marks) || []) {
          if (x < plot.scales.x.min || x > plot.scales.x.max) continue;
          const left = Math.round(plot.valToPos(x, "x", true));
          ctx.save();
          ctx.strokeStyle = ctx.fillStyle = stroke;
          ctx.setLineDash([2, 4]);
          ctx.beginPath();
          ctx.moveTo(left, bbox.top);
          ctx.lineTo(left, bbox.top + bbox.height);
          ctx.stroke();
          ctx.beginPath();
          ctx.moveTo(left - 5, bbox.top);
          ctx.lineTo(left + 5, bbox.top);
          ctx.lineTo(left, bbox.top + 8);
          ctx.fill();
          ctx.restore();
        }
      }
    };
  }

  function drawErrors(lines) { // one standard error to either side
    return (plot) => {
      const { ctx, bbox } = plot, cap = 3 * devicePixelRatio;
      ctx.save();
      ctx.beginPath();
      ctx.rect(bbox.left, bbox.top, bbox.width, bbox.height);
      ctx.clip();
      for (const { stroke, points: [xs, ys], errors } of lines.filter((line) => line.errors)) {
        ctx.strokeStyle = stroke;
        ctx.beginPath();
        xs.forEach((x, k) => {
          const left = Math.round(plot.valToPos(x, "x", true));
          const ends = [ys[k] - errors[k], ys[k] + errors[k]].map((y) =>
            plot.scales.y.distr === 3 && y <= 0 ? bbox.top + bbox.height : plot.valToPos(y, "y", true));
          ctx.moveTo(left, ends[0]);
          ctx.lineTo(left, ends[1]);
          for (const end of ends) {
            ctx.moveTo(left - cap, end);
            ctx.lineTo(left + cap, end);
          }
        });
        ctx.stroke();
      }
      ctx.restore();
    };
  }

  const extreme = (values, of) => values.reduce((one, other) => of(one, other));

  function drawBands(lines) { // from the lowest to the highest curve of a group
    return (plot) => {
      const { ctx, bbox } = plot;
      ctx.save();
      ctx.beginPath();
      ctx.rect(bbox.left, bbox.top, bbox.width, bbox.height);
      ctx.clip();
      ctx.globalAlpha = 0.18;
      for (const { stroke, points: [xs], band: [low, high] } of lines.filter((line) => line.band)) {
        ctx.fillStyle = stroke;
        ctx.beginPath();
        const edge = [...xs.map((x, k) => [x, high[k]]), ...xs.map((x, k) => [x, low[k]]).reverse()];
        for (const [x, y] of edge) ctx.lineTo(plot.valToPos(x, "x", true), plot.valToPos(y, "y", true));
        ctx.fill();
      }
      ctx.restore();
    };
  }

  function errorRange(lines) { // of a linear y axis; undefined without errors and bands
    const low = lines.flatMap(({ band }) => (band ? band[0] : [])), high = lines.flatMap(({ band }) => (band ? band[1] : []));
    for (const { points: [, ys], errors } of lines.filter((line) => line.errors)) {
      low.push(...ys.map((y, k) => y - errors[k]));
      high.push(...ys.map((y, k) => y + errors[k]));
    }
    return low.length ? { range: uPlot.rangeNum(extreme(low, Math.min), extreme(high, Math.max), 0.1, true) } : {};
  }

  function redraw() {
    const wanted = settings();
    for (const label of document.querySelectorAll("label:has(input[name=entry])")) label.hidden = !matches(label.textContent);
    for (const table of document.querySelectorAll("table")) filterRows(table, matches);
    form.elements.amount.value = wanted.smoothing ? wanted.smoothing.toFixed(2) : "off";
    for (const { plot, place } of drawn.values()) {
      place.observer.disconnect();
      plot.destroy();
    }
    drawn.clear();
    for (const figure of document.querySelectorAll("figure[data-chart]")) {
      const number = Number(figure.dataset.chart), place = figure.querySelector(".plot");
      figure.hidden = !wanted.charts.has(number);
      place.replaceChildren();
      if (figure.hidden) continue;
      const lines = linesOf(data.charts[number], wanted), entries = new Set(wanted.group ? [] : lines.map((line) => line.entry));
      const x = wanted.logx ? { time: false, distr: 3, range: logRange } : { time: false };
      const y = wanted.logy ? { distr: 3, range: logRange } : errorRange(lines);
      const marks = [drawBands(lines), drawMarks(wanted, entries), drawErrors(lines)];
      const ylabel = data.charts[number].axis;
      const plot = draw(place, lines, { xlabel: AXES[wanted.axis], ylabel, scales: { x, y }, linked: true, marks });
      drawn.set(number, { plot, place });
    }
    showGroups(wanted);
    const left = [...wanted.entries].filter((entry) => wanted.axis !== "step" && !clocks[entry]);
    notice.textContent = left.length
      ? `Without ${AXES[wanted.axis]}: ${left.map((entry) => data.entries[entry].label).join("; ")}` : "";
  }

  // The legend of the groups, and the tables beside the charts with a row for each group.
  function showGroups(wanted) {
    const place = document.getElementById("groups"), fields = document.querySelector("fieldset.entries");
    fields.classList.toggle("grouped", Boolean(wanted.group));
    const rows = (wanted.group ? wanted.group.values : []).map((value, number) => {
      const own = [...wanted.entries].filter((entry) => wanted.group.of[entry] === number);
      return { number, own, label: `${value} (${own.length})` };
    }).filter(({ own }) => own.length);
    place.replaceChildren(...(rows.length ? [element("span", { textContent: `${form.elements.group.value}:` })] : []),
      ...rows.map(({ number, label }) => element("span", {}, swatch(number), label)));
    for (const table of document.querySelectorAll("figure[data-chart] table"))
      groupRows(table, wanted.group && rows.map(({ number, own, label }) =>
        ({ head: [swatch(number), label], names: new Set(own.map((entry) => data.entries[entry].label)) })));
  }

  function swatch(number) {
    const made = document.querySelector(".swatch").cloneNode(true);
    made.setAttribute("class", `swatch color${number % 8} dash${number % 5}`);
    return made;
  }

  function drawCalibration() {
    for (const figure of document.querySelectorAll("figure[data-split]")) {
      const place = figure.querySelector(".plot");
      const found = data.calibration[figure.dataset.split].map((one) =>
        ({ ...styleOf(one.entry), label: one.label, points: [one.x, one.y], width: 1.8 }));
      const diagonal = { stroke: cssColor("--quiet"), dash: [2, 4], label: null, points: [[0, 1], [0, 1]], width: 1 };
      place.replaceChildren();
      draw(place, [...found, diagonal], { xlabel: "probability", ylabel: "accuracy", linked: false, marks: [],
        scales: { x: { time: false, range: [0, 1] }, y: { range: [0, 1] } } });
    }
  }

  // --- start -----------------------------------------------------------------------------------------------------

  document.querySelectorAll("table[data-sortable]").forEach(sortable);
  document.querySelectorAll("table[data-name]").forEach(tools);
  const all = () => { if (form) redraw(); drawCalibration(); };
  if (form) {
    document.getElementById("curves").addEventListener("input", redraw);
    search?.addEventListener("input", redraw);
    document.getElementById("reset").onclick = () => zoom();
    for (const button of document.querySelectorAll("button[data-all]")) {
      button.onclick = () => {
        for (const box of button.closest("fieldset").querySelectorAll("label:not([hidden]) input")) box.checked = Boolean(button.dataset.all);
        redraw();
      };
    }
  }
  if (search && !form) search.hidden = true;
  search?.addEventListener("submit", (event) => event.preventDefault());
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", all);
  all();
})();
