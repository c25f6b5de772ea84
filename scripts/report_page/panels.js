// The plots of a section: controls, panels by group, and the table of constant metrics.

const SMOOTHING = { "off": 0, "3%": 0.03, "10%": 0.1 };

// What the reader has chosen; kept when the page loads itself again. Lists and objects have a key per section.
const state = { axis: "step", smoothing: "3%", hiddenRuns: {}, hiddenPhases: {}, zoom: {}, log: {}, enlarged: {},
                samples: {}, theme: "system", paused: false };

function colourName(line, runs) {
  return `--c${runs > 1 ? line.run % COLOURS : line.phase === "eval" ? 1 : 0}`;
}

function isVisible(index, line) {
  return !(state.hiddenRuns[index] || []).includes(line.run) && !(state.hiddenPhases[index] || []).includes(line.phase);
}

function toggleIn(lists, key, value) {
  const list = lists[key] || [];
  lists[key] = list.includes(value) ? list.filter(other => other !== value) : [...list, value];
}

class Section {
  constructor(container, index, data) {
    Object.assign(this, { container, index, data, charts: [] });
    this.controls = element("div", { class: "bar controls" }, container);
    this.panels = element("div", {}, container);
    if (!data.panels.length) return;
    this.buildControls();
    this.draw();
    new ResizeObserver(() => this.resize()).observe(container);
  }

  buildControls() {
    const { index, data } = this;
    const phases = [...new Set(data.panels.flatMap(panel => panel.lines.map(line => line.phase)))];
    data.runs.forEach((name, run) => {
      if (data.runs.length > 1) this.toggle(name, `--c${run % COLOURS}`, "", state.hiddenRuns, run);
    });
    for (const phase of phases.length > 1 ? ["train", "eval"] : []) {
      const colour = data.runs.length > 1 ? "--dim" : phase === "eval" ? "--c1" : "--c0";
      this.toggle(phase === "eval" ? "evaluation" : "training", colour, phase, state.hiddenPhases, phase);
    }
    this.select("horizontal axis", ["step", "minutes"], state.axis, value => {
      state.axis = value; state.zoom = {}; drawAll();
    });
    this.select("smoothing", Object.keys(SMOOTHING), state.smoothing, value => { state.smoothing = value; drawAll(); });
    const zoom = element("label", {}, this.controls, "from ");
    this.from = element("input", { type: "number", step: "any", "aria-label": "from" }, zoom);
    zoom.append(" to ");
    this.to = element("input", { type: "number", step: "any", "aria-label": "to" }, zoom);
    for (const input of [this.from, this.to]) input.addEventListener("change", () => this.zoomToInputs());
    const all = element("button", { type: "button" }, this.controls, "all");
    all.addEventListener("click", () => this.zoom(null));
    element("span", { class: "hint" }, this.controls, "drag in a plot to zoom, double-click for all · thick: centred mean");
  }

  toggle(text, colour, phase, hidden, value) {
    const pressed = () => String(!(hidden[this.index] || []).includes(value));
    const button = element("button", { type: "button", class: "toggle", "aria-pressed": pressed() }, this.controls);
    element("i", { class: `swatch ${phase}`, style: `border-color: var(${colour})` }, button);
    button.append(text);
    button.addEventListener("click", () => {
      toggleIn(hidden, this.index, value);
      button.setAttribute("aria-pressed", pressed());
      this.updateVisibility();
    });
  }

  select(label, options, value, onChange) {
    const select = element("select", {}, element("label", {}, this.controls, label));
    select.dataset.name = label;
    for (const option of options) element("option", { value: option }, select, option);
    select.value = value;
    select.addEventListener("change", () => onChange(select.value));
  }

  linesOf(panel) {
    const share = panel.smooth ? SMOOTHING[state.smoothing] : 0, runs = this.data.runs.length;
    return panel.lines.map(line => {
      const [xs, ys] = pointsOf(line, this.data.axes[line.run][line.phase], state.axis);
      const half = line.phase === "eval" ? 0 : halfWindow(ys.length, share), name = colourName(line, runs);
      const label = runs > 1 ? `${this.data.runs[line.run]} ${line.phase}` : line.phase;
      return { ...line, xs, ys, mean: half ? smooth(ys, half) : null, label, name, colour: colourOf(name),
               visible: isVisible(this.index, line) };
    }).filter(line => line.xs.length);
  }

  draw() {
    for (const { chart } of this.charts) chart.destroy();
    this.charts = [];
    this.panels.replaceChildren();
    const drawn = this.data.panels.filter(p => !p.flat).map(p => [p, this.linesOf(p)]).filter(([, lines]) => lines.length);
    this.setExtent(drawn.flatMap(([, lines]) => lines));
    for (const group of new Set(drawn.map(([panel]) => panel.group))) {
      element("h3", {}, this.panels, group);
      const grid = element("div", { class: "panels" }, this.panels);
      for (const [panel, lines] of drawn) if (panel.group === group) this.drawPanel(grid, panel, lines);
    }
    drawConstants(this.panels, this.data, !drawn.length);
    this.showZoom();
    this.resize();
  }

  setExtent(lines) {
    let low = Infinity, high = -Infinity;
    for (const { xs } of lines) { low = Math.min(low, xs[0]); high = Math.max(high, xs[xs.length - 1]); }
    this.extent = low < high ? [low, high] : [low - 1, high + 1];
  }

  drawPanel(grid, panel, lines) {
    const { index } = this, key = `${index} ${panel.metric}`;
    const card = element("div", { class: "panel", "data-metric": panel.metric }, grid);
    panelHeader(card, panel, lines);
    const box = element("div", { class: "box" }, card), footer = element("footer", {}, card);
    const values = element("div", { class: "values" }, footer), buttons = element("span", {}, footer);
    const positive = lines.every(line => line.ys.every(y => y > 0)), entry = { box, lines, key, card };
    const log = positive && (state.log[key] ?? panel.log);
    const showAt = x => showValues(values, lines.filter(line => isVisible(index, line)), x);
    entry.chart = drawChart(box, lines, {
      log, range: panel.range, height: state.enlarged[key] ? ENLARGED : HEIGHT, syncKey: `section-${index}`,
      limits: () => state.zoom[index] || this.extent, onZoom: zoom => this.zoom(zoom), onCursor: showAt,
    });
    entry.showAt = showAt;
    this.charts.push(entry);
    if (positive) {
      const button = element("button", { type: "button", title: "axis" }, buttons, log ? "log" : "linear");
      button.addEventListener("click", () => { state.log[key] = !log; this.draw(); });
    }
    const enlarge = element("button", { type: "button" }, buttons, state.enlarged[key] ? "shrink" : "enlarge");
    enlarge.addEventListener("click", () => { state.enlarged[key] = !state.enlarged[key]; this.draw(); });
    panelRange(card, panel, lines);
    showAt(null);
  }

  zoom(limits) {
    if (limits && !(limits[0] < limits[1])) limits = null;
    if (limits) state.zoom[this.index] = limits; else delete state.zoom[this.index];
    const [min, max] = limits || this.extent;
    for (const { chart } of this.charts) chart.setScale("x", { min, max });
    this.showZoom();
  }

  zoomToInputs() {
    const [low, high] = this.extent, number = (input, otherwise) => (input.value === "" ? otherwise : Number(input.value));
    this.zoom([number(this.from, low), number(this.to, high)]);
  }

  showZoom() {
    const zoom = state.zoom[this.index];
    [this.from.value, this.to.value] = zoom ? zoom.map(x => String(Number(x.toPrecision(4)))) : ["", ""];
    [this.from.placeholder, this.to.placeholder] = this.extent.map(formatNumber);
  }

  updateVisibility() {
    for (const { chart, lines, showAt } of this.charts) {
      chart.batch(() => lines.forEach((line, i) => {
        for (const series of [2 * i + 1, 2 * i + 2]) chart.setSeries(series, { show: isVisible(this.index, line) });
      }));
      showAt(null);
    }
  }

  resize() {
    for (const { chart, box, key, card } of this.charts) {
      card.style.gridColumn = state.enlarged[key] ? "1 / -1" : "";
      const width = box.clientWidth, height = state.enlarged[key] ? ENLARGED : HEIGHT;
      if (width && (width !== chart.width || height !== chart.height)) chart.setSize({ width, height });
    }
  }
}

function panelHeader(card, panel, lines) {
  const header = element("header", {}, card), title = element("div", {}, header);
  element("b", { title: panel.metric }, title, panel.title);
  element("span", { class: "unit" }, title, panel.unit);
  if (lines.some(line => line.run !== lines[0].run)) return;  // the values of several runs are under the plot
  const { ys } = lines.find(line => line.phase === "eval") || lines[0];
  const span = formatNumber(ys[0]) + (ys.length > 1 ? " → " + formatNumber(ys[ys.length - 1]) : "");
  element("span", { class: "span" }, header, span);
}

// The healthy range under a plot: how many values are outside, and what to do if the newest are.
function panelRange(card, panel, lines) {
  const { range } = panel;
  if (!range) return;
  const isOutside = y => (range.low !== null && y < range.low) || (range.high !== null && y > range.high);
  let outside = 0, total = 0, last = -Infinity;
  for (const { xs, ys } of lines)
    ys.forEach((y, i) => { total += 1; if (isOutside(y)) { outside += 1; last = Math.max(last, xs[i]); } });
  const where = outside ? ` · ${outside} of ${total} values outside, last at ${formatNumber(last)}` : "";
  element("div", { class: "range" }, card, `usual: ${range.text}${where}`);
  for (const advice of range.advice) element("div", { class: "outside" }, card, `Outside: ${advice}`);
}

function showValues(parent, lines, x) {
  parent.replaceChildren();
  if (x !== null) element("span", {}, parent, `${state.axis} ${formatNumber(x)}:`);
  for (const line of lines) {
    const entry = element("span", { title: line.label }, parent), y = line.mean || line.ys;
    element("i", { class: `swatch ${line.phase}`, style: `border-color: var(${line.name})` }, entry);
    entry.append(formatNumber(y[x === null ? y.length - 1 : nearest(line.xs, x)]));
  }
}

function drawConstants(parent, data, open) {
  const flat = data.panels.filter(panel => panel.flat);
  if (!flat.length) return;
  const details = element("details", { class: "constants" }, parent);
  details.open = open;
  element("summary", {}, details, `Constant metrics · ${flat.map(panel => panel.title).join(", ")}`);
  const table = element("table", {}, element("div", { class: "scroll" }, details));
  for (const panel of flat) {
    const row = element("tr", {}, table);
    element("th", { title: panel.metric }, row, panel.unit ? `${panel.title}, ${panel.unit}` : panel.title);
    const cells = panel.lines.map(line => {
      const value = formatNumber(line.values.find(v => v !== null));
      return data.runs.length > 1 ? `${data.runs[line.run]} ${line.phase} ${value}` : `${line.phase} ${value}`;
    });
    element("td", {}, row, cells.join(" · "));
  }
}
