// Names and keyboard access that the theme leaves out.
document$.subscribe(() => {
  document.querySelector(".md-search")?.setAttribute("aria-label", "Search");
  document.querySelectorAll(".md-typeset__scrollwrap").forEach((table) => { table.tabIndex = 0; });
  document.querySelectorAll("nav.md-nav[aria-labelledby]").forEach((nav, number) => {
    const label = document.getElementById(nav.getAttribute("aria-labelledby"));
    nav.setAttribute("aria-label", `${label ? label.textContent.trim() : "Pages"}, part ${number + 1}`);
    nav.removeAttribute("aria-labelledby");
  });
});
