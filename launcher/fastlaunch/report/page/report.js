// The charts of a report, drawn from the data in the page, and drawn again for other prices, runs and recipes.
const packed = Uint8Array.from(atob(document.getElementById("data").textContent), (letter) => letter.charCodeAt(0));
const unpacked = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
const sections = JSON.parse(await new Response(unpacked).text());
const dark = window.matchMedia("(prefers-color-scheme: dark)");
const printing = window.matchMedia("print");
const COLOURS = JSON.parse(document.documentElement.dataset.colours);
const DARK_COLOURS = ["#56b4e9", "#f0883e", "#2fc08f", "#e58ac0", "#d9b945", "#f2f2f2", "#b79ae0", "#b5b5b5"];
const ERRORS = 1; // of Vega's log levels: it warns of every data set that is empty
const OUTLIER = 1.5; // times the median
const BAR_HEIGHT = 24;
// Of a point's label, as shares of the chart.
const LABEL_HEIGHT = 0.08;
const LABEL_WIDTH = 0.5;

const isNarrow = () => window.innerWidth < 600;

function config() {
  const style = getComputedStyle(document.documentElement);
  const [text, quiet, line] = ["--text", "--quiet", "--line"].map((name) => style.getPropertyValue(name).trim());
  const words = { labelColor: text, titleColor: text, labelFontSize: 12, titleFontSize: 12 };
  return {
    background: null,
    font: "system-ui, DejaVu Sans, sans-serif",
    view: { stroke: null },
    axis: { ...words, gridColor: line, domainColor: quiet, tickColor: quiet },
    axisY: { labelLimit: isNarrow() ? 180 : 260 },
    legend: { ...words, symbolOpacity: 1, columns: isNarrow() ? 1 : 4 },
    range: { category: dark.matches && !printing.matches ? DARK_COLOURS : COLOURS },
    text: { color: text },
    rule: { color: text },
  };
}

// Vega keeps groups in plain objects, in which a recipe named `constructor` is there before it comes: an invisible
// character tells it apart.
const grouped = (value) => (value in Object.prototype ? `${value}\u2060` : value);
const groupedRows = (rows) => rows.map((row) => Object.fromEntries(Object.entries(row).map(([key, value]) => [key, grouped(value)])));
const groupedDomains = (spec) => JSON.parse(JSON.stringify(spec), (key, value) => (key === "domain" && Array.isArray(value) ? value.map(grouped) : value));

// One after the other for each place, so that the last one drawn is the last one asked for.
const drawing = new Map();
let numDrawing = 0;
function draw(place, spec, datasets, height = spec.height) {
  numDrawing += 1;
  delete document.documentElement.dataset.drawn;
  const next = (drawing.get(place) ?? Promise.resolve()).then(async () => {
    place.view?.finalize();
    const filled = { ...groupedDomains(spec), height, datasets: {} };
    for (const [name, rows] of Object.entries(datasets)) filled.datasets[name] = groupedRows(rows);
    const result = await window.vegaEmbed(place, filled, {
      actions: false, ast: true, defaultStyle: false, renderer: "svg", config: config(), logLevel: ERRORS,
      tooltip: { disableDefaultStyle: true },
    });
    place.view = result.view;
    // The label says what it is; the tables have what it shows.
    place.querySelector("svg").setAttribute("aria-hidden", "true");
    place.setAttribute("role", "img");
    place.setAttribute("aria-label", spec.description);
    numDrawing -= 1;
    if (!numDrawing) document.documentElement.dataset.drawn = "yes";
  });
  drawing.set(place, next);
}

const median = (values) => [...values].sort((a, b) => a - b)[Math.floor(values.length / 2)] ?? 0;
const money = (usd) => usd.toLocaleString("en", usd < 1 ? { maximumSignificantDigits: 3 } : { minimumFractionDigits: 2, maximumFractionDigits: 2 });

// The first step and the distances of the others, as the page holds them; without distances they are all 1.
function expanded([first, ...distances], number) {
  const steps = [first];
  for (let at = 1; at < number; at++) steps.push(steps[at - 1] + (distances.length ? distances[at - 1] : 1));
  return number ? steps : [];
}

class Section {
  constructor(element, data) {
    this.element = element;
    this.data = data;
    this.prices = new Map();
    const places = new Map(data.rows.map((row, at) => [row.name, at]));
    const runs = [...data.runs].sort((a, b) => places.get(a.name) - places.get(b.name));
    this.select("run", runs, (run) => `${run.name}: ${run.id}`, () => this.drawSteps());
    const names = [...new Set([...data.curves, ...data.runs.filter((run) => run.ranks.some((rank) => rank.losses.length))].map((of) => of.name))];
    this.select("candidate", names.map((name) => ({ name })), (of) => of.name, () => this.drawLosses());
    for (const input of element.querySelectorAll("input[data-place]")) {
      input.addEventListener("input", () => setPrice(input));
    }
    element.querySelector("form")?.addEventListener("submit", (event) => event.preventDefault());
    element.querySelector("form")?.addEventListener("reset", (event) => {
      // Its own resetting comes after the event, too late to draw from.
      event.preventDefault();
      for (const input of element.querySelectorAll("input[data-place]")) {
        input.value = input.defaultValue;
        setPrice(input);
      }
    });
  }

  chart(name) { return this.element.querySelector(`[data-chart="${name}"]`); }

  show(name, isShown) {
    const part = this.element.querySelector(`[data-part="${name}"]`);
    if (part) part.hidden = !isShown;
    return isShown && part !== null;
  }

  select(name, items, label, changed) {
    const element = this.element.querySelector(`select[data-${name}]`);
    items.forEach((item, at) => element.add(new Option(label(item), at)));
    const printed = element.nextElementSibling;
    const tell = () => { printed.textContent = element.selectedOptions[0]?.text ?? ""; };
    element.addEventListener("change", () => { tell(); changed(); });
    tell();
    this[name] = () => items[element.value];
  }

  // The measured rows, with what a million samples costs at the prices as they are typed.
  priced() {
    return this.data.rows.map((row, number) => {
      const typed = this.prices.get(row.place);
      const usdPerHour = typed ?? row.usdPerHour;
      const usd = usdPerHour && row.hours ? row.hours.map((hours) => hours && hours * usdPerHour * row.numNodes) : null;
      return { ...row, number, usdPerHour, usd, isTyped: typed !== undefined };
    });
  }

  // The predictions, likewise.
  predicted() {
    return this.data.predicted.map((of) => {
      const typed = of.place && this.prices.get(of.place);
      const usdPerHour = typed ? of.usdPerHour * typed / of.placeUsdPerHour : of.usdPerHour;
      return { ...of, usdPerHour, usd: of.hours.map((hours) => hours && hours * usdPerHour), isTyped: Boolean(typed) };
    });
  }

  drawCosts() {
    const { data } = this;
    const rows = this.priced();
    const order = (row) => [row.ranked ? 0 : 1, row.usd?.[0] ?? Infinity, row.hours?.[0] ?? Infinity];
    // Until a price is typed, they are in the order of the verdicts.
    if (this.prices.size) rows.sort((a, b) => order(a).map((value, at) => value - order(b)[at]).find((difference) => difference) || a.number - b.number);
    if (this.prices.size || this.isTyped) this.fillTable(rows);
    this.isTyped = this.prices.size > 0;
    this.tell(rows);

    const points = rows.filter((row) => row.usd).map((row) =>
      ({ ...point(row.name, row.colour, row.ranked ? "measured" : "unranked", row.hours, row.usd, row.ranked), short: row.short }));
    const predicted = this.predicted().map((of) =>
      ({ ...point(of.name, of.colour, "predicted", of.hours, of.usd, true), short: of.short }));
    const all = [...points, ...predicted];
    const best = front(all);
    // The best row and the ends of the front, where they do not hide each other. A phone has room for the cheapest, in
    // two lines.
    const named = isNarrow() ? [best.at(-1)] : apart(all.length <= data.mostLabels ? [...best, ...all] : [points[0], best.at(-1), best[0]], all);
    const hours = all.map((of) => of.hours);
    const middle = Math.sqrt(Math.min(...hours) * Math.max(...hours));
    for (const of of all) {
      of.label = !named.includes(of) ? null : isNarrow() ? of.short.replace(/ on (?=\S+$)/, "\non ") : of.short;
      of.side = of.hours > middle ? "left" : "right";
    }
    if (this.show("cost", points.length > 0)) {
      this.element.querySelector("[data-predicted]").hidden = !predicted.length;
      this.element.querySelector("[data-front]").hidden = best.length < 2;
      draw(this.chart("cost"), data.specs.cost, { rows: all, front: best });
    }
    for (const legend of this.element.querySelectorAll("[data-unranked]")) legend.hidden = rows.every(({ ranked }) => ranked);
    const inDollars = points.length > 0;
    const bars = rows.map((row) => ({ row, values: inDollars ? row.usd : row.rate })).filter(({ values }) => values)
      .map(({ row, values: [value, low, high] }) => ({ name: row.name, colour: row.colour, value, low: low ?? value, high: high ?? value, ranked: row.ranked }));
    if (this.show("bars", bars.length > 0)) {
      const spec = inDollars ? data.specs.usd : data.specs.rate;
      this.element.querySelector("[data-bars-title]").textContent = spec.description;
      draw(this.chart("bars"), spec, { bars }, BAR_HEIGHT * bars.length);
    }
  }

  fillTable(rows) {
    for (const row of rows) {
      const base = rows.find(({ number }) => number === row.base);
      const line = this.element.querySelector(`.rows [data-row="${row.number}"]`);
      fillCells(line, { ...row, usdPerHour: row.usdPerHour && row.usdPerHour * row.numNodes }, base);
      line.parentElement.append(line);
    }
    this.predicted().forEach((of, at) => fillCells(this.element.querySelector(`[data-predicted-row="${at}"]`), of));
  }

  tell(rows) {
    const place = this.element.querySelector(".at-your-prices");
    const [first, second] = rows.filter((row) => row.ranked && row.usd);
    place.hidden = !this.prices.size;
    // It is about the prices in the boxes at first.
    for (const cheaper of document.querySelectorAll(`[data-cheaper="${this.element.dataset.section}"]`)) cheaper.hidden = this.prices.size > 0;
    if (!this.prices.size) return;
    const unit = this.data.unit;
    let text = first ? `At your prices ${first.name} costs the least: $${money(first.usd[0])} for a million ${unit}` : "At your prices nothing that is ranked has a cost";
    if (second) text += `; next is ${second.name}, ${(100 * (second.usd[0] / first.usd[0] - 1)).toFixed(1)}% more`;
    place.textContent = `${text}. The verdicts are those of the prices in the boxes at first.`;
  }

  drawSteps() {
    const run = this.run();
    if (!this.show("steps", Boolean(run))) return;
    const steps = run.ranks.flatMap((rank) =>
      expanded(rank.steps, rank.ms.length).map((step, at) => ({ step, ms: rank.ms[at], rank: `rank ${rank.rank}` })));
    const first = Math.min(...steps.map((of) => of.step));
    const last = first + run.warmup - 1;
    const counted = steps.filter((of) => of.step > last);
    const limit = OUTLIER * median(counted.map((of) => of.ms));
    const spec = structuredClone(this.data.specs.steps);
    const shown = (counted.length ? counted : steps).map((of) => of.ms);
    const [least, most] = [Math.min(...shown), Math.max(...shown)];
    const margin = 0.1 * (most - least) + 0.02 * most;
    for (const layer of spec.layer) {
      if (layer.encoding.y) layer.encoding.y.scale = { domain: [Math.max(0, least - margin), most + margin], nice: true };
    }
    draw(this.chart("steps"), spec, {
      steps,
      warmup: run.warmup ? [{ first, last: last + 0.5 }] : [],
      outliers: counted.filter((of) => of.ms > limit),
    });
  }

  drawLosses() {
    const candidate = this.candidate();
    if (!this.show("losses", Boolean(candidate))) return;
    const references = new Map(Object.entries(this.data.references));
    const names = new Set([candidate.name, references.get(candidate.name)]);
    const training = this.data.runs.filter((run) => names.has(run.name)).flatMap((run) => {
      const [rank] = run.ranks;
      return expanded(rank.lossSteps, rank.losses.length).map((step, at) => ({ step, loss: rank.losses[at], name: run.name, run: run.id }));
    });
    const heldOut = this.data.curves.filter((curve) => names.has(curve.name)).flatMap((curve) =>
      curve.steps.map((step, at) => ({ step, loss: curve.losses[at], name: curve.name, run: curve.id })));
    draw(this.chart("losses"), this.data.specs.losses, { training, held_out: heldOut });
  }

  draw() {
    const { data } = this;
    this.drawCosts();
    this.drawSteps();
    this.drawLosses();
    if (this.show("parts", data.parts.length > 0)) {
      const numBars = new Set(data.parts.map(({ name }) => name)).size;
      draw(this.chart("parts"), data.specs.parts, { parts: data.parts }, BAR_HEIGHT * numBars);
    }
    if (this.show("prices", data.prices.length > 0)) draw(this.chart("prices"), data.specs.prices, { prices: data.prices });
  }
}

// What a cell shows at typed prices, by the name that its column has for it (`at_price` of report/columns.py).
const AT_PRICE = {
  usd_per_hour: ({ usdPerHour }) => (usdPerHour ? money(usdPerHour) : null),
  // Its range is in percent, and stays.
  usd: ({ usd }, base, printed) => (usd?.[0] ? money(usd[0]) + (printed.match(/ ±.*/)?.[0] ?? "") : null),
  // The range of the ratio is that of the verdict, which has its own prices.
  ratio: ({ usd }, base) => (usd && base?.usd ? (base.usd[0] / usd[0]).toFixed(3) : null),
};
const OF_THE_ROW = ["usd_per_hour", "usd"];

// Cells are as they were printed until a price that they depend on is typed.
function fillCells(line, row, base) {
  for (const cell of line.querySelectorAll("[data-cell]")) {
    const name = cell.dataset.cell;
    const printed = (cell.dataset.printed ??= cell.textContent);
    const isTyped = row.isTyped || (base?.isTyped && !OF_THE_ROW.includes(name));
    cell.textContent = isTyped ? AT_PRICE[name]?.(row, base, printed) ?? "n/a" : printed;
  }
}

function point(name, colour, kind, [hours, hoursLow, hoursHigh], [usd, usdLow, usdHigh], ranked) {
  return {
    name, colour, kind, ranked, hours, usd,
    hours_low: hoursLow ?? hours, hours_high: hoursHigh ?? hours, usd_low: usdLow ?? usd, usd_high: usdHigh ?? usd,
  };
}

// Of the ranked points those that no other beats in both, from the fastest on.
function front(points) {
  const kept = [];
  for (const of of points.filter(({ ranked }) => ranked).sort((a, b) => a.hours - b.hours || a.usd - b.usd)) {
    if (!kept.length || of.usd < kept.at(-1).usd) kept.push(of);
  }
  return kept;
}

// Those of `named` whose labels do not hide a label before them.
function apart(named, all) {
  const distance = (name, share) => {
    const ends = all.flatMap((of) => [of[`${name}_low`] ?? of[name], of[`${name}_high`] ?? of[name]]).map(Math.log);
    const least = share * (Math.max(...ends) - Math.min(...ends));
    return (of, other) => Math.abs(Math.log(of[name] / other[name])) < least;
  };
  const [isLevel, isBeside] = [distance("usd", LABEL_HEIGHT), distance("hours", LABEL_WIDTH)];
  const kept = [];
  for (const of of named) {
    if (of && !kept.some((other) => isLevel(of, other) && isBeside(of, other))) kept.push(of);
  }
  return kept;
}

// A price holds in every section that has the instance.
function setPrice(input) {
  const usd = Number(input.value);
  const isPrice = input.value !== "" && usd > 0;
  input.setCustomValidity(isPrice || input.value === input.defaultValue ? "" : "give a price above 0");
  input.reportValidity();
  for (const section of drawn) {
    for (const box of section.element.querySelectorAll("input[data-place]")) {
      if (box.dataset.place !== input.dataset.place) continue;
      if (box !== input) box.value = input.value;
      if (isPrice && usd !== Number(box.defaultValue)) section.prices.set(box.dataset.place, usd);
      else section.prices.delete(box.dataset.place);
      section.drawCosts();
    }
  }
}

for (const button of document.querySelectorAll("[data-copy]")) {
  button.addEventListener("click", async () => {
    const code = button.parentElement.querySelector("code");
    try {
      await navigator.clipboard.writeText(code.textContent);
    } catch {
      // A page from a file may not write there: then it is marked, to be copied by hand.
      getSelection().selectAllChildren(code);
      document.execCommand("copy");
    }
    button.textContent = "Copied";
    setTimeout(() => { button.textContent = "Copy"; }, 2000);
  });
}

const drawn = sections.map((data, at) => new Section(document.querySelector(`[data-section="${at}"]`), data));
const drawAll = () => drawn.forEach((section) => section.draw());
for (const medium of [dark, printing]) medium.addEventListener("change", drawAll);
drawAll();
