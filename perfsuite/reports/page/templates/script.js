"use strict";
(() => {
  const byId = (id) => document.getElementById(id);
  const table = byId("cases");
  if (table) {
    const body = table.tBodies[0], folds = byId("folds"), most = body.rows.length;
    const field = byId("filter"), count = byId("count"), more = byId("more");
    const cases = Array.from(document.querySelectorAll("table.cases > tbody > tr"), (row) => ({ row }));
    let ordered = cases, fitting = cases, shown = most;
    byId("filterbar").hidden = false;
    // Show as many rows as at the start, because ten thousand take seconds; the button shows more.
    const list = (wanted) => {
      shown = Math.min(wanted, fitting.length);
      body.replaceChildren(...fitting.slice(0, shown).map((one) => one.row));
      folds.hidden = true;
      const left = fitting.length - shown;
      more.hidden = !left;
      more.textContent = "show " + Math.min(most, left) + " more of " + left;
      count.textContent = field.value.trim() || left
        ? fitting.length + " of " + cases.length + (left ? ", " + shown + " here" : "") : "";
    };
    more.addEventListener("click", () => list(shown + most));
    const read = (one) => {
      if (one.name === undefined) {
        const cells = one.row.cells;
        one.text = cells[0].firstElementChild.textContent.slice(0, 4000).toLowerCase();
        one.name = (one.row.querySelector("code").textContent + " " + one.row.lastElementChild.textContent).toLowerCase();
      }
      return one;
    };
    const apply = () => {
      const words = field.value.toLowerCase().split(/\s+/).filter(Boolean);
      const fits = (one) => words.every((word) => one.name.includes(word) || (word.length > 3 && one.text.includes(word)));
      fitting = words.length ? ordered.filter((one) => fits(read(one))) : ordered;
      list(most);
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
        table.closest(".part").open = true;
        byId("s-cases").scrollIntoView();
      } else if (hash.startsWith("#c-")) {
        const one = cases.find((one) => one.row.id === hash.slice(1));
        if (!one) return;
        table.closest(".part").open = true;
        const fold = one.row.closest("details.fold");
        if (fold && !folds.hidden) fold.open = true;
        else if (!body.contains(one.row)) {
          field.value = "";
          fitting = [one, ...ordered.filter((other) => other !== one)];
          list(most);
        }
        const details = one.row.querySelector("details");
        if (details) details.open = true;
        one.row.scrollIntoView();
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
        const keyed = ordered.map((one) => [value(one.row, at), one]);
        keyed.sort((x, y) => (down ? order(y[0], x[0]) : order(x[0], y[0])));
        ordered = keyed.map((pair) => pair[1]);
        apply();
      });
    });
    follow();
  }
  const tip = byId("tip");
  document.addEventListener("pointerover", (event) => {
    const mark = event.target instanceof Element ? event.target.closest("figure svg [data-tip]") : null;
    if (!mark || mark.tagName === "g") { tip.hidden = true; return; }
    tip.textContent = mark.dataset.tip;
    tip.hidden = false;
    const box = mark.getBoundingClientRect();
    tip.style.left = Math.max(4, Math.min(box.left, innerWidth - tip.offsetWidth - 8)) + "px";
    tip.style.top = (box.top > tip.offsetHeight + 10 ? box.top - tip.offsetHeight - 6 : box.bottom + 6) + "px";
  });
})();
