
// Asks the server for the page again, and shows what has changed.
{
  const word = document.createElement("p");
  word.setAttribute("role", "status");
  document.querySelector("header").append(word);
  let version = null;
  // Whether a pointer is down, such as on a slider.
  let isHeld = false;
  addEventListener("pointerdown", () => { isHeld = true; });
  for (const end of ["pointerup", "pointercancel"]) addEventListener(end, () => { isHeld = false; });

  function update(text) {
    const next = new DOMParser().parseFromString(text, "text/html");
    const within = () => [...document.querySelectorAll("main a, main button, main input")];
    const focused = within().indexOf(document.activeElement);
    const scrolled = [...document.querySelectorAll(".scroll")].map((wide) => [wide.scrollLeft, wide.scrollTop]);
    document.title = next.title;
    document.querySelector("h1").replaceWith(next.querySelector("h1"));
    document.querySelector("main").replaceWith(next.querySelector("main"));
    prepare(document);
    arrange();
    document.querySelectorAll(".scroll").forEach((wide, index) => wide.scrollTo(...(scrolled[index] ?? [0, 0])));
    if (focused >= 0) within()[focused]?.focus({ preventScroll: true });
  }

  async function ask() {
    const begun = performance.now();
    let pause = 1000;
    try {
      const answer = await fetch("/", { cache: "no-store", headers: version ? { "If-None-Match": version } : {} });
      // A chart that is being read stays until the pointer leaves it.
      const zoomed = [...document.querySelectorAll(".zoomed")].some((plot) => plot.getClientRects().length);
      const isRead = isHeld || !tip.hidden || zoomed || document.querySelector(":popover-open") !== null;
      word.textContent = isRead ? "Paused while a chart or an error is read." : "";
      if (answer.status === 200 && !isRead) {
        update(await answer.text());
        version = answer.headers.get("ETag");
      }
      // A large page must not keep the server busy.
      pause = Math.max(pause, 5 * (performance.now() - begun));
    } catch {
      word.textContent = "The server has ended. These are the last values.";
      pause = 5000;
    }
    setTimeout(ask, pause);
  }
  setTimeout(ask, 1000);
}
