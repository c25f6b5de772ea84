"use strict";
// One plot: numbers, smoothing, colours, and a uPlot chart of the lines of a panel.

const HEIGHT = 175, ENLARGED = 400, COLOURS = 8;

function element(name, attributes, parent, text) {
  const node = document.createElement(name);
  for (const [key, value] of Object.entries(attributes || {})) node.setAttribute(key, value);
  if (text !== undefined) node.textContent = text;
  if (parent) parent.appendChild(node);
  return node;
}

function formatNumber(value) {
  const size = Math.abs(value);
  if (value === 0) return "0";
  if (size >= 1e5 || size < 1e-3) return value.toExponential(1).replace("e+", "e");
  return String(Number(value.toPrecision(size >= 1000 ? 4 : 3)));
}

// Labels of an axis, with as many decimals as their distance needs.
function tickLabels(splits) {
  const shown = splits.filter(v => v !== null && v !== undefined), gap = Math.abs(shown[1] - shown[0]);
  const plain = shown.every(v => v === 0 || (Math.abs(v) < 1e5 && Math.abs(v) >= 1e-3)) && gap >= 1e-6;
  const isWhole = x => Math.abs(x - Math.round(x)) < 1e-6;
  const decimals = [0, 1, 2, 3, 4, 5, 6, 7].find(d => isWhole(gap * 10 ** d)) ?? 8;
  return splits.map(v => (v === null || v === undefined ? "" : plain ? v.toFixed(decimals) : formatNumber(v)));
}

// The colour of a CSS variable as rgb(): a canvas knows neither variables nor light-dark().
function colourOf(name) {
  const probe = element("span", { style: `color: var(${name})` }, document.body);
  const colour = getComputedStyle(probe).color;
  probe.remove();
  return colour;
}

function translucent(colour, alpha) {
  return colour.replace(/^rgb\((.*)\)$/, `rgba($1, ${alpha})`);
}

// Mean over a window centred on each value. At the ends the window shrinks on both sides, so that straight lines stay
// as they are and nothing lags behind.
function smooth(values, half) {
  const sums = [0], origin = values[0];  // sums of differences from the first value round less than sums of values
  for (const value of values) sums.push(sums[sums.length - 1] + (value - origin));
  return values.map((value, i) => {
    const reach = Math.min(half, i, values.length - 1 - i);
    const mean = origin + (sums[i + reach + 1] - sums[i - reach]) / (2 * reach + 1);
    return Number.isFinite(mean) ? mean : value;
  });
}

// Half the window for a share of the curve; 0 (no smoothing) for short curves.
function halfWindow(count, share) {
  return count < 30 ? 0 : Math.round(count * share / 2);
}

// [xs, ys] of a line, ascending; of several values at one x the last.
function pointsOf(line, axes, axis) {
  const xs = axis === "step" ? axes.step : axes.seconds.map(s => (s === null ? null : s / 60));
  const values = new Map();
  line.values.forEach((y, i) => { if (y !== null && xs[i] !== null) values.set(xs[i], y); });
  const points = [...values].sort((a, b) => a[0] - b[0]);
  return [points.map(p => p[0]), points.map(p => p[1])];
}

function nearest(xs, x) {
  let low = 0, high = xs.length - 1;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (xs[middle] < x) low = middle + 1; else high = middle;
  }
  return low > 0 && x - xs[low - 1] < xs[low] - x ? low - 1 : low;
}

// Vertical limits of a linear axis: the data, and a bound of the healthy range if it is close to them.
function linearLimits(low, high, range) {
  if (low === null || high === null || !Number.isFinite(low) || !Number.isFinite(high)) return [0, 1];
  const width = high - low || Math.abs(high) * 0.2 || 1;
  const bounds = range ? [range.low, range.high].filter(b => b !== null && b > low - width / 2 && b < high + width / 2) : [];
  const ends = [low, high, ...bounds], margin = 0.06 * width;
  const limits = [Math.min(...ends) - margin, Math.max(...ends) + margin];
  return limits.every(Number.isFinite) ? limits : [low, high];
}

function drawRange(u, range, colour) {
  const { left, top, width, height } = u.bbox, context = u.ctx;
  const clamp = y => Math.min(top + height, Math.max(top, y));
  const yOf = bound => u.valToPos(bound, "y", true);
  const positive = u.scales.y.distr !== 3;
  const high = range.high === null || (!positive && range.high <= 0) ? top : clamp(yOf(range.high));
  const low = range.low === null || (!positive && range.low <= 0) ? top + height : clamp(yOf(range.low));
  context.save();
  context.fillStyle = translucent(colour, 0.09);
  context.fillRect(left, high, width, low - high);
  context.strokeStyle = translucent(colour, 0.8);
  context.setLineDash([5, 4]);
  for (const y of [high, low]) {
    if (y <= top || y >= top + height) continue;
    context.beginPath(); context.moveTo(left, y); context.lineTo(left + width, y); context.stroke();
  }
  context.restore();
}

// Two series for each line: the values, and their centred mean, which is empty where there is none.
function seriesOf(line) {
  const eval_ = line.phase === "eval", thin = line.mean !== null;
  const common = { stroke: line.colour, dash: eval_ ? [4, 3] : [], spanGaps: true, show: line.visible };
  const points = { show: eval_ || line.xs.length === 1, size: 5, fill: line.colour };
  return [
    { ...common, width: thin ? 1 : 1.6, alpha: thin ? 0.35 : 1, points },
    { ...common, width: 2, points: { show: false } },
  ];
}

function axisOptions(dim, grid, size, extra) {
  return { stroke: dim, grid: { stroke: grid, width: 1 }, ticks: { show: false }, font: "11px system-ui, sans-serif", size,
           values: (u, splits) => tickLabels(splits), ...extra };
}

// A uPlot chart. lines: {xs, ys, mean, phase, colour, visible}; options: log, range, limits of x, height, and the
// callbacks onZoom([from, to] or null) and onCursor(x or null).
function drawChart(parent, lines, options) {
  const healthy = colourOf("--healthy"), dim = colourOf("--dim"), grid = colourOf("--grid");
  const tables = lines.map(line => [line.xs, line.ys, line.mean || line.xs.map(() => null)]);
  const yScale = options.log
    ? { distr: 3, range: (u, low, high) => (low > 0 && high > 0 ? uPlot.rangeLog(low, high, 10, false) : [1, 10]) }
    : { range: (u, low, high) => linearLimits(low, high, options.range) };
  const labels = splits => splits.map(v => (v === null || v === undefined ? "" : formatNumber(v)));
  const yAxis = options.log ? { space: 20, values: (u, splits) => labels(splits) } : { space: 28 };
  return new uPlot({
    width: Math.max(120, parent.clientWidth), height: options.height, legend: { show: false },
    scales: { x: { time: false, range: () => options.limits() }, y: yScale },
    series: [{}, ...lines.flatMap(seriesOf)],
    axes: [axisOptions(dim, grid, 28, { space: 55 }), axisOptions(dim, grid, 54, yAxis)],
    cursor: {
      y: false, points: { show: false }, drag: { x: true, y: false, setScale: false },
      sync: { key: options.syncKey, filters: { pub: type => type === "mousemove" || type === "mouseleave" } },
      bind: { dblclick: () => () => options.onZoom(null) },
    },
    hooks: {
      drawClear: [u => { if (options.range) drawRange(u, options.range, healthy); }],
      setCursor: [u => options.onCursor(u.cursor.left < 0 ? null : u.posToVal(u.cursor.left, "x"))],
      setSelect: [u => {
        const { left, width } = u.select;
        if (width > 5) options.onZoom([u.posToVal(left, "x"), u.posToVal(left + width, "x")]);
        u.setSelect({ left: 0, top: 0, width: 0, height: 0 }, false);
      }],
    },
  }, uPlot.join(tables), parent);
}
