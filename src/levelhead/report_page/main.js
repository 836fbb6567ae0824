// Put everything in its place.

const DRAW = { heads: drawHeads, depth: drawDepth, lines: drawLines, intervals: drawIntervals, table: drawTable, numbers: drawNumbers };

function numbersOf(metric) {
  metric.values = metric.values.map((row) => row.map(toNumber));
  metric.whole = metric.whole?.map(toNumber) ?? null;
}

function isDark() {
  const chosen = document.documentElement.dataset.theme;
  return chosen ? chosen === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
}

function startTheme() {
  const button = document.getElementById("theme");
  const remember = (theme) => {
    try {
      if (theme) localStorage.setItem("levelhead-theme", theme);
      return localStorage.getItem("levelhead-theme");
    } catch {
      return theme; // a file opened from disk may have no storage
    }
  };
  const apply = (theme) => {
    if (theme === "dark" || theme === "light") document.documentElement.dataset.theme = theme;
    button.setAttribute("aria-pressed", String(isDark()));
  };
  apply(remember());
  button.addEventListener("click", () => {
    const theme = isDark() ? "light" : "dark";
    remember(theme);
    apply(theme);
  });
}

function startFindings() {
  document.getElementById("all-findings")?.addEventListener("click", (event) => {
    document.querySelector(".findings").classList.add("all");
    event.currentTarget.remove();
  });
  for (const button of document.querySelectorAll(".go")) {
    button.addEventListener("click", () => {
      const { layer, head, metric } = button.dataset;
      if (metricNamed(metric)?.values.length) heads.metric = metric;
      if (Number(head) >= 0) chooseHead(Number(layer), Number(head));
      else chooseLayer(Number(layer));
      document.getElementById("heads").scrollIntoView();
    });
  }
}

PAGE.heads?.metrics.forEach(numbersOf);
startTheme();
for (const figure of PAGE.figures) DRAW[figure.kind](document.querySelector(`#${CSS.escape(figure.id)} .plot`), figure);
document.querySelectorAll("[data-equation]").forEach(prettify);
startFindings();
document.addEventListener("keydown", (event) => event.key === "Escape" && hideTip());
