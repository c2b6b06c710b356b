"use strict";
// A click on a header sorts by its column, a second one the other way round; rows without a value stay last.
for (const table of document.querySelectorAll("table")) {
  const headers = [...table.tHead.rows[0].cells];
  headers.forEach((header, column) => {
    const button = document.createElement("button");
    button.type = "button";
    button.append(...header.childNodes);
    header.append(button);
    button.addEventListener("click", () => {
      const sign = header.getAttribute("aria-sort") === "ascending" ? -1 : 1;
      headers.forEach((other) => other.removeAttribute("aria-sort"));
      header.setAttribute("aria-sort", sign > 0 ? "ascending" : "descending");
      const rows = [...table.tBodies[0].rows];
      rows.sort((one, other) => compare(one.cells[column], other.cells[column], sign));
      table.tBodies[0].append(...rows);
    });
  });
}

function compare(one, other, sign) {
  const kinds = kind(one) - kind(other);
  if (kinds !== 0) return kinds;
  if (kind(one) === 0) return sign * (Number(one.dataset.value) - Number(other.dataset.value));
  return sign * one.textContent.localeCompare(other.textContent, "en", { numeric: true });
}

// Numbers come before words, and words before nothing.
function kind(cell) {
  if (cell.dataset.value !== undefined) return 0;
  return ["", "-"].includes(cell.textContent) ? 2 : 1;
}
