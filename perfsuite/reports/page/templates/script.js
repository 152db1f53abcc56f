"use strict";
(() => {
  const byId = (id) => document.getElementById(id);
  const table = byId("cases");
  if (table) {
    const body = table.tBodies[0], rows = Array.from(body.rows);
    const texts = rows.map((row) => row.cells[0].firstElementChild.textContent.slice(0, 4000).toLowerCase());
    const names = rows.map((row) => row.querySelector("code").textContent.toLowerCase() + " " + row.lastElementChild.textContent.toLowerCase());
    const field = byId("filter"), count = byId("count");
    byId("filterbar").hidden = false;
    const apply = () => {
      const words = field.value.toLowerCase().split(/\s+/).filter(Boolean);
      let shown = 0;
      rows.forEach((row, at) => {
        const fits = words.every((word) => names[at].includes(word) || (word.length > 3 && texts[at].includes(word)));
        if (row.hidden === fits) row.hidden = !fits;
        shown += fits;
      });
      count.textContent = words.length ? shown + " of " + rows.length : "";
    };
    field.addEventListener("input", () => {
      apply();
      history.replaceState(null, "", field.value ? "#filter=" + encodeURIComponent(field.value) : "#s-cases");
    });
    const follow = () => {
      const hash = location.hash;
      if (hash.startsWith("#filter=")) {
        try { field.value = decodeURIComponent(hash.slice(8)); } catch { return; }
        apply();
        byId("s-cases").scrollIntoView();
      } else if (hash.startsWith("#c-")) {
        const row = byId(hash.slice(1));
        if (!row) return;
        if (row.hidden) { field.value = ""; apply(); }
        const more = row.querySelector("details");
        if (more) more.open = true;
        row.scrollIntoView();
      }
    };
    window.addEventListener("hashchange", follow);
    const value = (row, at) => {
      const cell = row.cells[at];
      return cell.dataset.v !== undefined ? Number(cell.dataset.v) : cell.textContent;
    };
    const order = (a, b) => (typeof a === typeof b ? (a < b ? -1 : a > b ? 1 : 0) : typeof a === "number" ? -1 : 1);
    Array.from(table.tHead.rows[0].cells).forEach((head, at) => {
      const button = document.createElement("button");
      button.type = "button";
      button.textContent = head.textContent;
      head.replaceChildren(button);
      button.addEventListener("click", () => {
        const down = head.getAttribute("aria-sort") === "ascending";
        for (const other of table.tHead.rows[0].cells) other.removeAttribute("aria-sort");
        head.setAttribute("aria-sort", down ? "descending" : "ascending");
        const keyed = Array.from(body.rows, (row) => [value(row, at), row]);
        keyed.sort((x, y) => (down ? order(y[0], x[0]) : order(x[0], y[0])));
        body.append(...keyed.map((pair) => pair[1]));
      });
    });
    follow();
  }
  const tip = byId("tip");
  document.addEventListener("pointerover", (event) => {
    const mark = event.target instanceof Element ? event.target.closest("figure svg [data-told]") : null;
    if (!mark || mark.tagName === "g") { tip.hidden = true; return; }
    tip.textContent = mark.dataset.told;
    tip.hidden = false;
    const box = mark.getBoundingClientRect();
    tip.style.left = Math.max(4, Math.min(box.left, innerWidth - tip.offsetWidth - 8)) + "px";
    tip.style.top = (box.top > tip.offsetHeight + 10 ? box.top - tip.offsetHeight - 6 : box.bottom + 6) + "px";
  });
})();
