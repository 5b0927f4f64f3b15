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
  // Short names and options do not break at their hyphens.
  document.querySelectorAll(".md-typeset :not(pre) > code").forEach((name) => {
    if (name.textContent.length <= 36) name.classList.add("whole");
  });
  const screens = ".highlight:is(.language-console, .language-sh, .language-bash) pre > code, .highlight pre > code .answer";
  document.querySelectorAll(screens).forEach((screen) => {
    const walker = document.createTreeWalker(screen, NodeFilter.SHOW_TEXT);
    const texts = [];
    while (walker.nextNode()) texts.push(walker.currentNode);
    texts.filter((text) => !text.parentElement.closest(".whole")).forEach((text) => {
      text.replaceWith(...text.textContent.split(/(\S*-\S+)/).map((part, number) => {
        if (number % 2 === 0 || part.length > 44) return part;
        const name = document.createElement("span");
        name.className = "whole";
        name.textContent = part;
        return name;
      }));
    });
  });
  document.querySelectorAll("nav.md-nav[aria-labelledby]").forEach((nav, number) => {
    const label = document.getElementById(nav.getAttribute("aria-labelledby"));
    nav.setAttribute("aria-label", `${label ? label.textContent.trim() : "Pages"}, part ${number + 1}`);
    nav.removeAttribute("aria-labelledby");
  });
});
