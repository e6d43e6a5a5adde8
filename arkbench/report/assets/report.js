"use strict";
(() => {
  const root = document.documentElement;
  const button = document.getElementById("theme");
  const dark = () => root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  const name = () => { button.textContent = dark() ? "Light theme" : "Dark theme"; };
  button.addEventListener("click", () => { root.dataset.theme = dark() ? "light" : "dark"; name(); });
  name();

  // A cell that has no figure sorts last, whichever way.
  const compare = (a, b, index, sign) => {
    const [x, y] = [a, b].map((row) => row.cells[index]);
    if (x.classList.contains("figure")) {
      const [m, n] = [x.dataset.value, y.dataset.value];
      if (m === undefined || n === undefined) return (m === undefined) - (n === undefined);
      return sign * (Number(m) - Number(n));
    }
    return sign * x.textContent.localeCompare(y.textContent, "en", { numeric: true });
  };
  for (const table of document.querySelectorAll("table.sortable")) {
    const heads = [...table.tHead.rows[table.tHead.rows.length - 1].cells];
    heads.forEach((head, index) => head.firstElementChild.addEventListener("click", () => {
      const up = head.getAttribute("aria-sort") !== "ascending";
      heads.forEach((other) => other.setAttribute("aria-sort", "none"));
      head.setAttribute("aria-sort", up ? "ascending" : "descending");
      const rows = [...table.tBodies[0].rows].sort((a, b) => compare(a, b, index, up ? 1 : -1));
      table.tBodies[0].append(...rows);
    }));
    for (const row of table.tBodies[0].rows) {
      [...row.cells].forEach((cell, index) => { cell.dataset.label = heads[index].textContent; });
    }
  }
  addEventListener("beforeprint", () => document.querySelectorAll("details").forEach((item) => { item.open = true; }));
})();
