
// Runs are switched on and off, rows hidden and sorted, curves shown by step or by time.
// What the reader chose; it outlives the content of a page that is refreshed.
const chosen = { off: new Set(), column: -1, turned: 1, byTime: false, isWide: false, hidesFailed: false, words: "" };

function arrange() {
  const runs = document.querySelector(".runs");
  if (!runs) return;
  const workspace = document.querySelector(".workspace"), rows = [...runs.tBodies[0].rows];
  const nameOf = (row) => row.cells[0].textContent;
  const linesOf = new Map(rows.map((row) => [row, []])), byNumber = new Map(rows.map((row) => [row.dataset.run, row]));
  for (const line of document.querySelectorAll(".line[class*='run-']")) {
    linesOf.get(byNumber.get(line.className.baseVal.match(/run-(\d+)/)[1]))?.push(line);
  }

  // A row that is hidden has no curves either.
  function turn(row, on) {
    row.querySelector("input").checked = on;
    row.classList.toggle("off", !on);
    for (const line of linesOf.get(row)) line.classList.toggle("off", !on || row.hidden);
    if (on) chosen.off.delete(nameOf(row)); else chosen.off.add(nameOf(row));
  }
  const isFailed = (row) => row.dataset.state === "failed" || row.dataset.state === "unknown";
  function select() {
    for (const row of rows) {
      const isFound = row.textContent.toLowerCase().includes(chosen.words.toLowerCase());
      row.hidden = !isFound || (chosen.hidesFailed && isFailed(row));
      turn(row, !chosen.off.has(nameOf(row)));
    }
  }

  for (const row of rows) {
    const box = document.createElement("input");
    box.type = "checkbox";
    box.setAttribute("aria-label", "Show " + nameOf(row));
    box.addEventListener("change", () => turn(row, box.checked));
    row.cells[0].prepend(box);
    for (const [name, on] of [["pointerenter", true], ["pointerleave", false]]) {
      row.addEventListener(name, () => { for (const line of linesOf.get(row)) line.classList.toggle("strong", on); });
    }
  }
  select();

  function choice(before, ...options) {
    const group = document.createElement("div");
    group.className = "choice";
    for (const [text, act, pressed] of options) {
      const button = document.createElement("button");
      button.type = "button";
      button.textContent = text;
      if (pressed !== undefined) button.setAttribute("aria-pressed", pressed);
      button.addEventListener("click", () => act(button));
      group.append(button);
    }
    before.before(group);
    return group;
  }
  // A button that is pressed or not, as one of the choices says.
  const toggled = (key, act) => (button) => {
    chosen[key] = !chosen[key];
    button.setAttribute("aria-pressed", chosen[key]);
    act();
  };

  const scroll = runs.parentElement;
  const arrangeTable = () => workspace.classList.toggle("beside", !chosen.isWide);
  arrangeTable();
  const options = [["All columns", toggled("isWide", arrangeTable), chosen.isWide]];
  if (rows.length > 1) {
    const all = (on) => () => { for (const row of rows) if (!row.hidden) turn(row, on); };
    options.unshift(["All", all(true)], ["None", all(false)]);
  }
  const failed = rows.filter(isFailed).length;
  if (failed) options.splice(-1, 0, ["Hide " + failed + " failed", toggled("hidesFailed", select), chosen.hidesFailed]);
  const group = choice(scroll, ...options);
  if (rows.length > 1) {
    const search = document.createElement("input");
    Object.assign(search, { type: "search", placeholder: "Search", value: chosen.words });
    search.setAttribute("aria-label", "Search runs");
    search.addEventListener("input", () => { chosen.words = search.value; select(); });
    group.append(search);
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
  const heads = [...runs.tHead.rows[0].cells];
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
    button.title = head.textContent;
    button.append(...head.childNodes);
    head.append(button);
    const [first, other] = head.dataset.first ? [-1, 1] : [1, -1], name = first === 1 ? "ascending" : "descending";
    button.addEventListener("click", () => sort(column, head.getAttribute("aria-sort") === name ? other : first));
  });
  if (chosen.column >= 0 && chosen.column < heads.length) sort(chosen.column, chosen.turned);

  const [bySteps, byTime] = document.querySelectorAll(".overlaid");
  if (byTime) {
    const show = (isByTime) => () => {
      byTime.parentElement.hidden = !isByTime;
      bySteps.parentElement.hidden = isByTime;
      chosen.byTime = isByTime;
    };
    for (const [charts, isByTime] of [[bySteps, false], [byTime, true]]) {
      choice(charts, ["By step", show(false), !isByTime], ["By time", show(true), isByTime]);
    }
    show(chosen.byTime)();
  }
}
arrange();
