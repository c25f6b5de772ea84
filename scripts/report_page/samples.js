// The list of samples of a section: a run's samples over time, with filters by step, phase, score and text.

const SAMPLES_PER_PAGE = 12;

class SampleList {
  constructor(container, index, data) {
    Object.assign(this, { container, index, data });
    if (!data.samples.some(samples => samples.length)) return;
    this.filter = state.samples[index] ||= {
      run: data.samples.findIndex(samples => samples.length), phase: "", step: "", low: "", high: "", text: "", prompt: null,
      order: "step", shown: SAMPLES_PER_PAGE,
    };
    element("h3", {}, container, "Samples over time");
    this.controls = element("div", { class: "bar" }, container);
    this.count = element("div", { class: "hint" }, container);
    this.list = element("ul", { class: "cards" }, container);
    this.more = element("button", { type: "button" }, container, "more");
    this.more.addEventListener("click", () => { this.filter.shown += SAMPLES_PER_PAGE; this.show(); });
    this.buildControls();
    this.show();
  }

  buildControls() {
    const { data, filter } = this;
    this.controls.replaceChildren();
    const runs = data.runs.map((name, run) => [run, name]).filter(([run]) => data.samples[run].length);
    if (runs.length > 1) this.control("select", "run", { options: runs });
    const samples = data.samples[filter.run];
    const phases = [...new Set(samples.map(sample => sample.phase))];
    if (phases.length > 1)
      this.control("select", "phase", { options: [["", "all"], ["eval", "evaluation"], ["train", "training"]] });
    const steps = [...new Set(samples.map(sample => sample.step))].sort((a, b) => a - b);
    this.control("select", "step", { options: [["", "all"], ...steps.map(step => [step, step])] });
    this.control("input", "low", { label: "score from", attributes: { type: "number", step: "any" } });
    this.control("input", "high", { label: "to", attributes: { type: "number", step: "any" } });
    this.control("input", "text", { label: "text", attributes: { type: "search" } });
    const orders = [["step", "first step first"], ["newest", "last step first"], ["best", "best first"], ["worst", "worst first"]];
    this.control("select", "order", { label: "order", options: orders });
    const reset = element("button", { type: "button" }, this.controls, "reset");
    reset.addEventListener("click", () => {
      Object.assign(filter, { phase: "", step: "", low: "", high: "", text: "", prompt: null, order: "step" });
      this.changed();
    });
  }

  control(kind, key, { label, options, attributes }) {
    const input = element(kind, { "data-key": key, ...attributes }, element("label", {}, this.controls, label || key));
    for (const [value, text] of options || []) element("option", { value }, input, text);
    input.value = this.filter[key];
    if (kind === "select" && input.selectedIndex < 0) { input.selectedIndex = 0; this.filter[key] = input.value; }
    input.addEventListener(kind === "select" ? "change" : "input", () => {
      this.filter[key] = key === "run" ? Number(input.value) : input.value;
      this.filter.shown = SAMPLES_PER_PAGE;
      if (key === "run") { this.filter.step = ""; this.filter.prompt = null; this.buildControls(); }
      this.show();
    });
  }

  changed() {
    this.filter.shown = SAMPLES_PER_PAGE;
    this.buildControls();
    this.show();
  }

  matching() {
    const { phase, step, low, high, text, prompt, order } = this.filter, words = text.toLowerCase();
    const inRange = score => (low === "" || score >= Number(low)) && (high === "" || score <= Number(high));
    const matches = this.data.samples[this.filter.run].filter(sample =>
      (!phase || sample.phase === phase) && (step === "" || sample.step === Number(step)) &&
      ((low === "" && high === "") || (sample.scores.score !== undefined && inRange(sample.scores.score))) &&
      (prompt === null || sample.prompt === prompt) &&
      (!words || sample.prompt.toLowerCase().includes(words) || sample.response.toLowerCase().includes(words)));
    const score = sample => sample.scores.score ?? (order === "best" ? -Infinity : Infinity);
    const compare = { step: (a, b) => a.step - b.step, newest: (a, b) => b.step - a.step,
                      best: (a, b) => score(b) - score(a) || 0, worst: (a, b) => score(a) - score(b) || 0 };
    return matches.sort(compare[order]);
  }

  show() {
    const matches = this.matching(), { filter } = this;
    this.count.textContent = `${matches.length} of ${this.data.samples[filter.run].length} samples on this page` +
      (filter.prompt === null ? "" : " · one prompt over time");
    this.list.replaceChildren();
    for (const sample of matches.slice(0, filter.shown)) this.item(sample);
    this.more.hidden = matches.length <= filter.shown;
  }

  item(sample) {
    const item = element("li", {}, this.list), { filter } = this;
    element("div", { class: "text prompt" }, item, sample.prompt);
    element("div", { class: "text" }, item, sample.response);
    const scores = Object.entries(sample.scores).map(([name, value]) => `${name} ${formatNumber(value)}`);
    const phase = sample.phase === "eval" ? "evaluation" : "training";
    const parts = [`step ${sample.step}`, phase, ...scores, ...(sample.ended ? [] : ["cut at the limit"])];
    const numbers = element("div", { class: "numbers" }, item, parts.join(" · ") + " ");
    const follow = element("button", { type: "button" }, numbers, filter.prompt === null ? "this prompt over time" : "all prompts");
    follow.addEventListener("click", () => {
      Object.assign(filter, filter.prompt === null ? { prompt: sample.prompt, step: "" } : { prompt: null });
      this.changed();
    });
  }
}
