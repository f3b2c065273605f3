"use strict";
(function () {
  const root = document.documentElement;
  const plots = JSON.parse(document.getElementById("plots").textContent);
  const shown = {}; // plot -> index of the variant that is shown
  const dark = window.matchMedia("(prefers-color-scheme: dark)");
  // plotly's own buttons would cover what is drawn: ours stand above each figure.
  const config = { responsive: true, displayModeBar: false };
  const PAPER = 680; // pixels: what A4 and letter have between their margins
  const RESIZED_MS = 250; // after plotly's own answer to another size
  // What the heights of the plots have room for; a narrow window takes more.
  const LEGEND = 72; // pixels
  const NARROW = 640; // pixels: below them names of an axis stand upright
  const BESIDE = 280; // pixels beside the cells of a map: names of its rows, and the scale
  const VALUE = 38; // pixels of a cell that has room for its value
  let printing = false;

  function isDark() {
    if (printing) return false;
    return root.dataset.theme ? root.dataset.theme === "dark" : dark.matches;
  }

  function themed(layout, width) {
    const night = isDark();
    const ink = night ? "#e6e9ed" : "#1b1f24";
    const grid = night ? "#2c343d" : "#e3e7eb";
    const axis = { color: ink, gridcolor: grid, linecolor: grid, tickcolor: grid };
    const result = Object.assign({}, layout, {
      font: { color: ink, family: getComputedStyle(document.body).fontFamily, size: 13 },
      paper_bgcolor: "rgba(0,0,0,0)",
      plot_bgcolor: "rgba(0,0,0,0)",
      hoverlabel: { bgcolor: night ? "#1d232a" : "#ffffff", font: { color: ink }, align: "left" },
    });
    if (printing) result.width = PAPER;
    for (const name of Object.keys(layout)) {
      if (/^[xy]axis\d*$/.test(name)) result[name] = Object.assign({}, axis, layout[name]);
      if (/^xaxis/.test(name) && layout[name].tickangle === 0 && width < NARROW) result[name].tickangle = -90;
    }
    return result;
  }

  // Marks that are neither a phase nor a series are drawn in the colour of the text.
  function inked(data) {
    const ink = isDark() ? "#ffffff" : "#111111";
    return data.map((trace) =>
      trace.meta === "ink"
        ? Object.assign({}, trace, { marker: Object.assign({}, trace.marker, { line: { width: 2.5, color: ink } }) })
        : trace
    );
  }

  function valued(data, width) {
    return data.map((trace) =>
      trace.texttemplate && (width - BESIDE) / trace.x.length < VALUE
        ? Object.assign({}, trace, { texttemplate: "" })
        : trace
    );
  }

  function draw(name) {
    const figure = document.getElementById(name);
    const variant = plots[name][shown[name] || 0];
    const width = printing ? PAPER : figure.clientWidth;
    const data = valued(inked(variant.data), width);
    return Plotly.react(figure, data, themed(variant.layout, width), config).then(() => heightened(name, 3));
  }

  // A legend of more rows than in a wide window would squeeze what is drawn: the plot becomes higher by them. plotly
  // shortens a legend to a share of the height, so that the whole one may be seen only when that has grown.
  function heightened(name, tries) {
    const figure = document.getElementById(name);
    const legend = figure.querySelector(".legend .bg");
    if (!legend || !tries) return figure;
    const rows = Math.max(0, Math.ceil(legend.getBoundingClientRect().height) - LEGEND);
    const height = plots[name][shown[name] || 0].layout.height + rows;
    if (figure.layout.height === height) return figure;
    return Plotly.relayout(figure, { height }).then(() => heightened(name, tries - 1));
  }

  function drawAll() {
    return Promise.all(Object.keys(plots).filter((name) => !isFolded(name)).map(draw));
  }

  function isFolded(name) {
    return document.getElementById(name).closest("details:not([open])") !== null;
  }

  // In a window of another size plotly leaves the room for a legend as it was, and the legend would cover what is drawn.
  function drawAnew(name) {
    const figure = document.getElementById(name);
    return draw(name).then(() => Plotly.redraw(figure)).then(() => heightened(name, 3));
  }

  // One plot after the other, so that the page can be read and scrolled meanwhile. What is folded has no size yet.
  function drawNext(names, how) {
    if (!names.length) {
      root.dataset.drawn = "all";
      return;
    }
    const drawn = isFolded(names[0]) ? Promise.resolve() : how(names[0]);
    drawn.then(() => setTimeout(() => drawNext(names.slice(1), how), 0));
  }

  function toggleLabel() {
    const button = document.getElementById("theme");
    button.textContent = isDark() ? "Light" : "Dark";
    button.setAttribute("aria-pressed", String(isDark()));
    button.setAttribute("aria-label", isDark() ? "Switch to light colours" : "Switch to dark colours");
  }

  function sortBy(table, column, button) {
    const header = table.tHead.rows[0].cells;
    const ascending = header[column].getAttribute("aria-sort") !== "ascending";
    for (const cell of header) cell.removeAttribute("aria-sort");
    header[column].setAttribute("aria-sort", ascending ? "ascending" : "descending");
    const rows = Array.from(table.tBodies[0].rows).map((row) => {
      const cell = row.cells[column];
      return { row, number: cell.dataset.order === undefined ? null : Number(cell.dataset.order), text: cell.textContent };
    });
    rows.sort((a, b) => {
      if (a.number === null && b.number === null) {
        return (ascending ? 1 : -1) * a.text.localeCompare(b.text, undefined, { numeric: true });
      }
      if (a.number === null || b.number === null) return a.number === null ? 1 : -1; // unknown last
      return (ascending ? 1 : -1) * (a.number - b.number);
    });
    table.tBodies[0].append(...rows.map((one) => one.row));
    button.focus();
  }

  for (const table of document.querySelectorAll("table.sortable")) {
    Array.from(table.tHead.rows[0].cells).forEach((cell, column) => {
      const button = cell.querySelector("button");
      button.addEventListener("click", () => sortBy(table, column, button));
    });
  }
  for (const group of document.querySelectorAll(".variants")) {
    group.addEventListener("click", (event) => {
      const button = event.target.closest("button");
      if (!button) return;
      for (const other of group.children) other.setAttribute("aria-pressed", String(other === button));
      shown[group.dataset.plot] = Number(button.dataset.variant);
      draw(group.dataset.plot);
    });
  }
  for (const button of document.querySelectorAll("button.reset")) {
    button.addEventListener("click", () => {
      const name = button.dataset.plot;
      Plotly.purge(document.getElementById(name)); // forgets how far the reader has zoomed
      draw(name);
    });
  }
  for (const button of document.querySelectorAll("button.image")) {
    button.addEventListener("click", () => {
      const figure = document.getElementById(button.dataset.plot);
      const paper = { paper_bgcolor: getComputedStyle(document.body).backgroundColor };
      const size = { width: figure.clientWidth, height: figure.clientHeight, scale: 2 };
      const shown = { data: figure.data, layout: Object.assign({}, figure.layout, paper) };
      Plotly.downloadImage(shown, Object.assign({ format: "png", filename: button.dataset.plot }, size));
    });
  }
  // The entry of the section that is read is marked, and lies in sight where the contents are scrolled.
  const entries = new Map(Array.from(document.querySelectorAll("nav a"), (a) => [a.hash.slice(1), a]));
  const watcher = new IntersectionObserver(
    (changes) => {
      for (const change of changes) if (change.isIntersecting) mark(entries.get(change.target.id));
    },
    { rootMargin: "-15% 0px -80% 0px" }
  );
  function mark(entry) {
    if (!entry) return;
    for (const other of entries.values()) other.removeAttribute("aria-current");
    entry.setAttribute("aria-current", "location");
    const list = entry.closest("ul");
    list.scrollLeft = entry.offsetLeft - list.offsetLeft - list.clientWidth / 2 + entry.clientWidth / 2;
  }
  for (const section of document.querySelectorAll("main > section")) watcher.observe(section);
  document.getElementById("theme").addEventListener("click", () => {
    root.dataset.theme = isDark() ? "light" : "dark";
    toggleLabel();
    drawAll();
  });
  dark.addEventListener("change", () => {
    toggleLabel();
    drawAll();
  });
  let resized = 0;
  window.addEventListener("resize", () => {
    delete root.dataset.drawn;
    clearTimeout(resized);
    resized = setTimeout(() => drawNext(Object.keys(plots), drawAnew), RESIZED_MS);
  });
  window.addEventListener("beforeprint", () => {
    printing = true;
    for (const part of document.querySelectorAll("details")) part.open = true;
    drawAll();
  });
  window.addEventListener("afterprint", () => {
    printing = false;
    drawAll();
  });
  for (const part of document.querySelectorAll("details")) {
    part.addEventListener("toggle", () => {
      if (part.open) for (const one of part.querySelectorAll(".plot")) draw(one.id);
    });
  }
  // What is linked to may lie in a fold, or be a section of folds alone: these open.
  function reveal() {
    const target = location.hash && document.getElementById(location.hash.slice(1));
    if (!target) return;
    for (let part = target.closest("details"); part; part = part.parentElement.closest("details")) part.open = true;
    if (!target.matches("section")) return;
    const whole = target.querySelector("details.whole");
    if (whole) whole.open = true;
    const shown = target.querySelectorAll(".plot");
    if (Array.from(shown).every((one) => isFolded(one.id))) {
      for (const part of target.querySelectorAll("details.small")) part.open = true;
    }
  }
  window.addEventListener("hashchange", reveal);
  toggleLabel();
  reveal();
  drawNext(Object.keys(plots), draw);
})();
