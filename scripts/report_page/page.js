// The whole page: theme, navigation, refreshing, and what the reader has chosen, which survives a refresh.

const DATA = JSON.parse(document.getElementById("data").textContent);
const KEEP = `report ${location.pathname}`;

function restoreState() {
  // Storage may be forbidden, or hold what another version of the page has written.
  try {
    const kept = JSON.parse(sessionStorage.getItem(KEEP));
    if (kept) Object.assign(state, kept.state);
    return kept;
  } catch { return null; }
}

function keepState() {
  const open = [...document.querySelectorAll("details")].map(details => details.open);
  try { sessionStorage.setItem(KEEP, JSON.stringify({ state, open, scroll: scrollY })); } catch { /* not kept */ }
}

function applyTheme() {
  const button = document.getElementById("theme");
  if (state.theme === "system") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = state.theme;
  button.textContent = `theme: ${state.theme}`;
}

const sections = [];

function drawAll() {
  for (const section of sections) {
    for (const select of section.controls.querySelectorAll("select"))
      select.value = select.dataset.name === "smoothing" ? state.smoothing : state.axis;
    if (section.charts.length) section.draw();
  }
}

function isBusy() {
  const active = document.activeElement;
  return state.paused || document.hidden || (active && ["INPUT", "SELECT"].includes(active.tagName) && active.type !== "checkbox");
}

function startRefreshing(seconds) {
  const label = element("label", {}, document.getElementById("refresh"));
  const box = element("input", { type: "checkbox" }, label);
  box.checked = !state.paused;
  label.append(`refresh every ${seconds} s`);
  box.addEventListener("change", () => { state.paused = !box.checked; });
  let dragging = false;
  addEventListener("mousedown", () => { dragging = true; });
  addEventListener("mouseup", () => { dragging = false; });
  setInterval(() => { if (!isBusy() && !dragging) location.reload(); }, seconds * 1000);
}

function start() {
  const kept = restoreState();
  applyTheme();
  const nav = document.querySelector("nav");
  for (const section of document.querySelectorAll("section"))
    element("a", { href: "#" + section.id }, nav, section.querySelector("h2").textContent);
  for (const container of document.querySelectorAll(".plots")) {
    const index = Number(container.dataset.section);
    sections.push(new Section(container, index, DATA.sections[index]));
  }
  for (const container of document.querySelectorAll(".sample-list"))
    new SampleList(container, Number(container.dataset.section), DATA.sections[container.dataset.section]);
  document.getElementById("theme").addEventListener("click", () => {
    const themes = ["system", "light", "dark"];
    state.theme = themes[(themes.indexOf(state.theme) + 1) % themes.length];
    applyTheme(); drawAll();
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawAll);
  addEventListener("pagehide", keepState);
  if (DATA.refresh) startRefreshing(DATA.refresh);
  if (!kept) return;
  document.querySelectorAll("details").forEach((details, i) => { if (i in kept.open) details.open = kept.open[i]; });
  history.scrollRestoration = "manual";
  scrollTo(0, kept.scroll);
}

start();
