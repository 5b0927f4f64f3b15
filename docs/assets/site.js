// Names and keyboard access that the theme leaves out.
document$.subscribe(() => {
  document.querySelector(".md-search")?.setAttribute("aria-label", "Search");
  document.querySelectorAll(".md-typeset__scrollwrap").forEach((table) => { table.tabIndex = 0; });
  // What stands above the first blank line of a screen with a table is its answer.
  document.querySelectorAll(".highlight pre > code").forEach((screen) => {
    if (screen.children.length) return;
    const [answer, ...others] = screen.textContent.split("\n\n");
    if (!others.join("\n").includes("\n---") || answer.includes("---")) return;
    const first = document.createElement("span");
    first.className = "answer";
    first.textContent = `${answer}\n`;
    screen.replaceChildren(first, `\n${others.join("\n\n")}`);
  });
  document.querySelectorAll("nav.md-nav[aria-labelledby]").forEach((nav, number) => {
    const label = document.getElementById(nav.getAttribute("aria-labelledby"));
    nav.setAttribute("aria-label", `${label ? label.textContent.trim() : "Pages"}, part ${number + 1}`);
    nav.removeAttribute("aria-labelledby");
  });
});
