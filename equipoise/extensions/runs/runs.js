
// Runs are switched on and off, rows sorted, curves shown by step or by time.
// What the reader chose; it outlives the content of a page that is refreshed.
const chosen = { off: new Set(), column: -1, turned: 1, byTime: false };

function arrange() {
  const runs = document.querySelector(".runs");
  const rows = runs ? [...runs.tBodies[0].rows] : [];
  const nameOf = (row) => row.cells[0].dataset.value;
  const linesOf = (row) => document.querySelectorAll(".line.run-" + row.dataset.run);

  function turn(row, on) {
    row.querySelector("input").checked = on;
    row.classList.toggle("off", !on);
    for (const line of linesOf(row)) line.classList.toggle("off", !on);
    if (on) chosen.off.delete(nameOf(row)); else chosen.off.add(nameOf(row));
  }

  for (const row of rows) {
    const box = document.createElement("input");
    box.type = "checkbox";
    box.setAttribute("aria-label", "Show " + nameOf(row));
    box.addEventListener("change", () => turn(row, box.checked));
    row.cells[0].prepend(box);
    turn(row, !chosen.off.has(nameOf(row)));
    for (const [name, on] of [["pointerenter", true], ["pointerleave", false]]) {
      row.addEventListener(name, () => { for (const line of linesOf(row)) line.classList.toggle("strong", on); });
    }
  }

  function choice(before, options) {
    const group = document.createElement("div");
    group.className = "choice";
    for (const [text, act, pressed] of options) {
      const button = document.createElement("button");
      button.type = "button";
      button.textContent = text;
      if (pressed !== undefined) button.setAttribute("aria-pressed", pressed);
      button.addEventListener("click", act);
      group.append(button);
    }
    before.before(group);
  }

  if (rows.length > 1) {
    const all = (on) => () => { for (const row of rows) turn(row, on); };
    choice(runs.parentElement, [["All curves", all(true)], ["No curves", all(false)]]);
  }

  // Numbers stand before words, what is empty is last in both directions.
  const valueOf = (row, column) => row.cells[column].dataset.value ?? row.cells[column].textContent;
  const isNumber = (text) => text !== "" && !isNaN(text);
  function compare(one, other, turned) {
    const empty = (text) => text === "" || text === "nan";
    if (empty(one) || empty(other)) return empty(one) - empty(other);
    const bothNumbers = isNumber(one) && isNumber(other);
    return turned * (bothNumbers ? one - other : one.localeCompare(other, "en", { numeric: true }));
  }
  const heads = runs ? [...runs.tHead.rows[0].cells] : [];
  function sort(column, turned) {
    for (const head of heads) head.removeAttribute("aria-sort");
    heads[column].setAttribute("aria-sort", turned === 1 ? "ascending" : "descending");
    rows.sort((one, other) => compare(valueOf(one, column), valueOf(other, column), turned));
    runs.tBodies[0].append(...rows);
    Object.assign(chosen, { column, turned });
  }
  heads.forEach((head, column) => {
    const button = document.createElement("button");
    button.type = "button";
    button.textContent = head.textContent;
    head.replaceChildren(button);
    button.addEventListener("click", () => sort(column, head.getAttribute("aria-sort") === "ascending" ? -1 : 1));
  });
  if (chosen.column >= 0 && chosen.column < heads.length) sort(chosen.column, chosen.turned);

  const [bySteps, byTime] = document.querySelectorAll(".overlaid");
  if (byTime) {
    const show = (isByTime) => () => {
      byTime.parentElement.hidden = !isByTime;
      bySteps.parentElement.hidden = isByTime;
      chosen.byTime = isByTime;
    };
    for (const charts of [bySteps, byTime]) {
      choice(charts, [["By step", show(false), charts === bySteps], ["By time", show(true), charts === byTime]]);
    }
    show(chosen.byTime)();
  }
}
arrange();
