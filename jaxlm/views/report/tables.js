// Tables of a report: sorting, filtering by words, merging rows into groups, and copies.
"use strict";

function element(tag, properties, ...children) {
  const made = Object.assign(document.createElement(tag), properties);
  made.append(...children);
  return made;
}

function sortable(table) {
  table.querySelectorAll("thead th").forEach((head, column) => {
    const button = element("button", { type: "button", textContent: head.textContent });
    head.replaceChildren(button);
    button.onclick = () => {
      const down = head.getAttribute("aria-sort") === "ascending";
      table.querySelectorAll("th[aria-sort]").forEach((one) => one.removeAttribute("aria-sort"));
      head.setAttribute("aria-sort", down ? "descending" : "ascending");
      const rows = [...table.tBodies[0].rows].sort((one, other) => compare(one.cells[column], other.cells[column], down));
      table.tBodies[0].append(...rows);
    };
  });
}

function compare(one, other, down) { // absent values come last
  const absent = [one, other].map((cell) => cell.textContent === "–");
  if (absent[0] || absent[1]) return absent[0] - absent[1];
  const [a, b] = [one, other].map((cell) => cell.dataset.value);
  const order = a !== undefined && b !== undefined ? a - b : one.textContent.localeCompare(other.textContent, "en", { numeric: true });
  return down ? -order : order;
}

// Hide the rows of a table of runs whose name does not match.
function filterRows(table, matches) {
  if (headsOf(table)[0] !== "run") return;
  for (const row of table.tBodies[0].rows) row.hidden = !matches(row.cells[0].textContent);
}

// Show a row for each group: the mean of its rows' numbers, with the deviation of several. Without groups, all rows.
function groupRows(table, groups) {
  const body = table.tBodies[0];
  table.ungrouped ??= [...body.rows];
  if (!groups) return body.replaceChildren(...table.ungrouped);
  const columns = headsOf(table);
  body.replaceChildren(...groups.flatMap(({ head, names }) => {
    const own = table.ungrouped.filter((row) => names.has(row.cells[0].textContent));
    if (!own.length) return [];
    const cells = columns.slice(1).map((_, k) => merged(own.map((row) => row.cells[k + 1])));
    const first = element("th", { scope: "row", className: "brief" }, ...head.map((part) => part.cloneNode?.(true) ?? part));
    return [element("tr", {}, first, ...cells)];
  }));
}

function merged(cells) { // a cell with the mean of cells of numbers, those that have one
  const values = cells.map((cell) => cell.dataset.value).filter((value) => value !== undefined).map(Number);
  if (!values.length) return element("td", { textContent: "–" });
  const center = values.reduce((sum, value) => sum + value, 0) / values.length;
  const whole = values.every(Number.isInteger), fixed = whole ? rounded : decimals;
  const cell = element("td", { className: "number", textContent: fixed(center) });
  cell.dataset.value = center;
  const std = Math.sqrt(values.reduce((sum, value) => sum + (value - center) ** 2, 0) / (values.length - 1));
  if (values.length > 1 && std > 0) {
    cell.dataset.std = std;
    cell.textContent += ` ± ${fixed(std)}`;
  }
  return cell;
}

function rounded(value) { // of steps and counts
  return value.toLocaleString("en", { maximumFractionDigits: 1 });
}

function decimals(value) { // as the tables of the page
  const size = Math.abs(value);
  return value === 0 || (size >= 1e-3 && size < 1e4) ? value.toFixed(4) : value.toPrecision(4);
}

function headsOf(table) {
  return [...table.tHead.rows[0].cells].map((cell) => (cell.querySelector("button") || cell).textContent);
}

function shownRows(table) {
  return [...table.tBodies[0].rows].filter((row) => !row.hidden);
}

// Numbers at full precision; a mean with a deviation takes two columns.
function csvOf(table) {
  const rows = shownRows(table).map((row) => [...row.cells]);
  const wide = headsOf(table).map((_, k) => rows.some((row) => row[k].dataset.std !== undefined));
  const quoted = (text) => (/[",\n\r]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text);
  const lines = [headsOf(table).flatMap((name, k) => (wide[k] ? [name, `${name} std`] : [name]))];
  for (const row of rows) {
    lines.push(row.flatMap((cell, k) => {
      const value = cell.textContent === "–" ? "" : cell.dataset.value ?? cell.textContent;
      return wide[k] ? [value, cell.dataset.std ?? ""] : [value];
    }));
  }
  return lines.map((line) => line.map(quoted).join(",")).join("\n") + "\n";
}

function latexOf(table) {
  const signs = { "\\": "\\textbackslash{}", "~": "\\textasciitilde{}", "^": "\\textasciicircum{}", "±": "$\\pm$", "×": "$\\times$", "…": "\\ldots{}", "–": "--" };
  const safe = (text) => text.replace(/[\\~^±×…–]|[&%$#_{}]/g, (sign) => signs[sign] ?? `\\${sign}`);
  const columns = [...table.tHead.rows[0].cells].map((cell) => (cell.classList.contains("number") ? "r" : "l")).join("");
  const lines = shownRows(table).map((row) => [...row.cells].map((cell) => safe(cell.textContent)).join(" & ") + " \\\\");
  return `\\begin{tabular}{${columns}}\n\\hline\n${headsOf(table).map(safe).join(" & ")} \\\\\n\\hline\n${lines.join("\n")}\n\\hline\n\\end{tabular}\n`;
}

function tools(table) {
  const said = element("span", { role: "status" });
  said.setAttribute("aria-live", "polite");
  const place = element("div", { className: "tools" });
  const copy = async (text, name) => {
    place.querySelector("textarea")?.remove();
    try {
      await navigator.clipboard.writeText(text);
      said.textContent = `${name} copied`;
    } catch { // without access to the clipboard, the text is shown to be copied by hand
      const area = element("textarea", { readOnly: true, value: text });
      area.setAttribute("aria-label", name);
      place.append(area);
      area.select();
      said.textContent = `${name}:`;
    }
  };
  const save = () => {
    const link = element("a", { download: `${table.dataset.name.replace(/[^\w.-]+/g, "-")}.csv` });
    link.href = URL.createObjectURL(new Blob([csvOf(table)], { type: "text/csv" }));
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 1000);
  };
  const button = (text, onclick) => element("button", { type: "button", textContent: text, onclick });
  place.append(button("copy CSV", () => copy(csvOf(table), "CSV")), button("copy LaTeX", () => copy(latexOf(table), "LaTeX")),
    button("save CSV", save), said);
  table.parentElement.after(place);
}
