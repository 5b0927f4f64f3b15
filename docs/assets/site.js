const phone = window.matchMedia("(max-width: 44rem)");
// Of a name on a phone, in characters.
const NAME_WIDTH = 26;
// The line under a table's headings, and the beginning of a note, of a fact or of a command.
const RULE = /^-+( +-+)+ *$/;
const BEGINS = /^(\* |[a-z]+: |\w+ {2,}\S|    fastlaunch )/;

// An element of a screen: `text` wraps, `row` does not.
function part(kind, text) {
  const element = document.createElement("span");
  element.className = kind;
  element.textContent = `${text}\n`;
  return element;
}

// The lines of a name that is too long for a phone.
function wrapped(name) {
  const lines = [""];
  for (const word of name.split(/(?<=\S) /)) {
    const joined = lines.at(-1) ? `${lines.at(-1)} ${word}` : word;
    if (lines.at(-1) && joined.length > NAME_WIDTH) lines.push(`  ${word}`);
    else lines[lines.length - 1] = joined;
  }
  return lines;
}

// A table of a screen, with the verdict and the ratio beside the name, and titles between its rows as text.
function* reordered(lines) {
  const columns = [...lines[1].matchAll(/-+/g)].map(({ index, 0: { length } }, number, all) =>
    ({ from: index, to: number + 1 < all.length ? index + length : undefined, width: length }));
  const isRow = (line) => columns.every(({ to }) => to === undefined || !line.slice(to, to + 2).trim());
  const place = ({ from, to }) => {
    const heading = lines[0].slice(from, to).trim();
    return from === 0 ? 0 : /^(verdict|convergence)$/.test(heading) ? 1 : heading.startsWith("x ") ? 2 : 3;
  };
  const [first, ...others] = columns.sort((a, b) => place(a) - place(b));
  const names = lines.map((line) => (isRow(line) ? wrapped(line.slice(0, first.to).trimEnd()) : []));
  const width = Math.max(...names.flat().filter((name) => !/^-+$/.test(name)).map((name) => name.length));
  for (const [number, line] of lines.entries()) {
    if (!isRow(line)) yield part("text", line);
    else {
      const cells = others.map(({ from, to, width }) => line.slice(from, to).padEnd(width));
      const [name, ...more] = names[number];
      const shown = [[name.slice(0, width).padEnd(width), ...cells].join("  "), ...more];
      yield part("row", shown.map((text) => text.trimEnd()).join("\n"));
    }
  }
}

// The parts of a screen: paragraphs and notes, which wrap, and tables.
function* parts(lines) {
  for (let at = 0; at < lines.length; at++) {
    const end = lines.indexOf("", at) < 0 ? lines.length : lines.indexOf("", at);
    if (RULE.test(lines[at + 1])) {
      yield* reordered(lines.slice(at, end));
      at = end - 1;
    } else if (lines[at] === "") yield "\n";
    else {
      let text = lines[at];
      const goesOn = (number) => number < end && !BEGINS.test(lines[number]) && !lines[number - 1].endsWith("\\")
        && !RULE.test(lines[number + 1]);
      while (goesOn(at + 1)) text += ` ${lines[++at].trim()}`;
      yield part("text", text.replace(/^(\w+) {2,}/, "$1: "));
    }
  }
}

// Names and keyboard access that the theme leaves out.
document$.subscribe(() => {
  document.querySelector(".md-search")?.setAttribute("aria-label", "Search");
  document.querySelectorAll(".md-typeset__scrollwrap").forEach((table) => { table.tabIndex = 0; });
  // A screen with a table or a plan is laid out anew for a phone.
  document.querySelectorAll(".highlight pre > code").forEach((screen) => {
    const text = screen.textContent;
    if (screen.children.length || !/^---|^plan  /m.test(text)) return;
    const show = () => screen.replaceChildren(...(phone.matches ? parts(text.trimEnd().split("\n")) : [text]));
    phone.addEventListener("change", show);
    show();
  });
  // Short names and options do not break at their hyphens.
  document.querySelectorAll(".md-typeset :not(pre) > code").forEach((name) => {
    if (name.textContent.length <= (name.closest("td:not(:first-child)") ? 20 : 36)) name.classList.add("whole");
  });
  // Nor do numbers with their ranges.
  document.querySelectorAll(".md-typeset td").forEach((cell) => {
    if (/^([^a-z]*( to | \/ | of | ± )[^a-z]*|[\d-]+)$/.test(cell.textContent)) cell.classList.add("whole");
  });
  const screens = ".highlight:is(.language-console, .language-sh, .language-bash) pre > code, .highlight pre > code .text";
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
