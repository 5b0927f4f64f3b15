"""The page of a report in a real browser, headless: of 1, 30 and 300 runs."""

import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from axe_playwright_python.sync_playwright import Axe
from fake_records import write_run
from playwright.sync_api import Browser, Page, sync_playwright

from fastlaunch.cli.main import run
from fastlaunch_train.recipes.recipes import resolve_recipe
from fastlaunch_train.records.records import Eval, Profile

CHROMIUM = shutil.which("chromium")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="needs chromium: apt-get install chromium"),
]
RECIPES = ("bf16", "te-fp8", "compile", "te-bf16", "fp16", "tf32")
#: Names that each object in JavaScript has, and others that a script may take for something else.
HOSTILE = ("bf16", "constructor", "__proto__", "toString", "hasOwnProperty", "a.b[0]", "</script>", "'+x+'")
LOOKS: tuple[dict[str, Any], ...] = (
    {"color_scheme": "light"},
    {"color_scheme": "dark"},
    {"viewport": {"width": 390, "height": 844}, "has_touch": True},
)
MEASUREMENTS = Path(__file__).parents[2] / "train" / "measurements"
INSTANCES = (("p5.4xlarge", 1, "NVIDIA H100 80GB HBM3"), ("p4d.24xlarge", 8, "NVIDIA A100-SXM4-40GB"))


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        # Root, as CI is, has no sandbox.
        opened = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield opened
        opened.close()


def make_page(folder: Path, num_runs: int, labels: tuple[str, ...] = RECIPES, **header: Any) -> Path:
    """The page of so many runs on two instance types, with evaluations and a profile."""
    for number in range(num_runs):
        at = number // 2 % len(labels)
        instance, num_gpus, device_name = INSTANCES[number % 2]
        turn = number // (2 * len(labels))
        name = f"{at}-{instance}-{turn}".replace(".", "-")
        seconds = (0.2 - 0.02 * at) * (1 + turn % 5 / 1000)
        names = {} if labels[at] in RECIPES else {"name": labels[at], "label": labels[at]}
        recipe = labels[at] if labels[at] in RECIPES else "bf16"
        steps = 60
        write_run(
            folder / "runs" / name,
            recipe=recipe,
            run_id=name,
            steps=steps,
            step_time_s=lambda rank, step, mean_s=seconds: mean_s * (2.0 if step == 50 else 1.0),
            world_size=num_gpus if num_runs < 100 else 1,
            batch_size=256 // (num_gpus if num_runs < 100 else 1),
            instance=instance,
            device_name=device_name,
            seed=turn,
            evals=[Eval(step=steps, split="validation", loss=2.0, num_samples=64, seconds=1.0)],
            profile=Profile(
                step=steps, num_steps=3, step_time_s=0.1, data_s=0.01, forward_s=0.03, backward_s=0.06
            ),
            header={
                **{"session": "one", "round": turn + 1},
                "recipe": {**resolve_recipe(recipe).to_record(), **names},
                **header,
            },
        )
    assert run(["runs", "import", str(folder / "runs")]) == 0
    path = folder / "report.html"
    assert run(["report", "-o", str(path)]) == 0
    return path


def opened(browser: Browser, path: Path, problems: list[str], **context: Any) -> Page:
    """The page, drawn; what its console says and what it asks the network for are added to `problems`."""
    page = browser.new_context(**context).new_page()
    page.on("console", lambda message: problems.append(f"{message.type}: {message.text}"))
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("request", lambda request: problems.append(request.url) if request.url != path.as_uri() else None)
    page.goto(path.as_uri())
    page.wait_for_selector("html[data-drawn]")
    return page


def violations(page: Page) -> list[str]:
    return [
        f"{found['id']}: {node['html'][:200]}"
        for found in Axe().run(page).response["violations"]
        for node in found["nodes"]
    ]


def names(page: Page) -> list[str]:
    """The rows of the table, from above."""
    return [text.strip() for text in page.locator("table.rows tbody th").all_inner_texts()]


@pytest.mark.parametrize("num_runs", [1, 30, 300])
def test_the_page_is_small_silent_and_for_everybody(browser: Browser, tmp_path: Path, num_runs: int) -> None:
    path = make_page(tmp_path, num_runs)
    assert path.stat().st_size < 2e6
    for context in LOOKS:
        problems: list[str] = []
        page = opened(browser, path, problems, **context)
        for select in page.locator("select").all():
            select.select_option(index=select.locator("option").count() - 1)
        for details in page.locator("summary").all()[:40]:
            details.evaluate("summary => { summary.parentElement.open = true; }")
        page.emulate_media(media="print")
        page.emulate_media(media="screen")
        assert violations(page) == []
        page.wait_for_selector("html[data-drawn]")
        assert not page.evaluate("document.documentElement.scrollWidth > window.innerWidth")
        drawn = page.locator("[data-part]:not([hidden]) .chart svg").count()
        assert drawn == page.locator("[data-part]:not([hidden])").count() >= 5
        assert problems == []
        page.context.close()


def test_a_phone_shows_the_whole_label_of_the_cheapest(browser: Browser, tmp_path: Path) -> None:
    assert run(["runs", "import", str(MEASUREMENTS / "vit-huge-h100")]) == 0
    path = tmp_path / "report.html"
    assert run(["report", "--price-as", "p5.4xlarge", "-o", str(path)]) == 0
    page = opened(browser, path, [], **LOOKS[-1])
    svg = page.locator("[data-part=cost] svg").first
    assert "p5.4xlarge" in (svg.text_content() or "")
    cut = """svg => [...svg.querySelectorAll("text")].filter(text =>
        text.getBoundingClientRect().right > svg.getBoundingClientRect().right + 1
    ).map(text => text.textContent)"""
    assert svg.evaluate(cut) == []


def test_a_name_is_neither_code_nor_anything_that_javascript_knows(browser: Browser, tmp_path: Path) -> None:
    # A workload may have the name of an element of the page.
    workload = {"name": "data", "sample_unit": "images", "flops_per_sample": 1, "num_parameters": 1}
    path = make_page(tmp_path, 2 * len(HOSTILE), HOSTILE, workload=workload)
    for context in LOOKS:
        problems: list[str] = []
        page = opened(browser, path, problems, **context)
        bars = page.locator('[data-chart="bars"] path[aria-roledescription="bar"]')
        assert bars.count() == 2 * len(HOSTILE)
        for chart in ("bars", "parts"):
            drawn = page.locator(f'[data-chart="{chart}"] text').all_text_contents()
            assert all(any(name in text for text in drawn) for name in HOSTILE)
        bars.first.hover()
        page.locator("#vg-tooltip-element.visible").wait_for()
        # A name that is wider than the page.
        page.locator("h2").evaluate("heading => { heading.textContent = 'x'.repeat(200); }")
        assert not page.evaluate("document.documentElement.scrollWidth > window.innerWidth")
        assert problems == []
        # Not by luck: what is put into the page runs nowhere and looks like nothing.
        evaluated = page.evaluate(
            """() => {
                const script = document.createElement("script");
                script.textContent = "document.title = 'ran'";
                document.head.append(script);
                document.body.insertAdjacentHTML("beforeend",
                    `<img src="data:," onerror="document.title = 'ran'" style="position: fixed">`);
                // Later, since the browser lets whoever steers it evaluate.
                return new Promise((resolve) => setTimeout(() => {
                    try { resolve(eval("'evaluated'")); } catch { resolve("refused"); }
                }));
            }"""
        )
        assert page.title() != "ran" and evaluated == "refused"
        assert page.locator("img").evaluate("image => getComputedStyle(image).position") == "static"
        page.context.close()


def test_a_price_ranks_anew_and_goes_back(browser: Browser, tmp_path: Path) -> None:
    path = make_page(tmp_path, 24)
    problems: list[str] = []
    page = opened(browser, path, problems)
    before = names(page)
    page.get_by_text("Prices: type yours").click()
    box = page.locator("input[data-place^=p4d]")
    line = page.locator("tr", has_text="tf32 on p4d.24xlarge")
    cell = line.locator('[data-cell="usd_per_hour"]')
    printed = cell.inner_text()
    ratio = page.locator("tr", has_text="tf32 on p5.4xlarge").locator('[data-cell="ratio"]')
    printed_ratio = ratio.inner_text()
    # As the cell of a column that depends on the price, and has no formula on the page.
    unknown = line.locator("td.number:not([data-cell])").first
    unknown.evaluate("cell => { cell.dataset.unknown = ''; cell.dataset.cell = 'unknown'; }")
    unknown = line.locator("[data-unknown]")
    printed_unknown = unknown.inner_text()

    box.fill("0.01")
    assert unknown.inner_text() == "n/a" != printed_unknown
    # The cost of its baseline, on a p4d, over its own.
    assert float(ratio.inner_text()) < 0.1 < float(printed_ratio.split()[0])
    assert "p4d.24xlarge" in names(page)[0] and names(page) != before
    assert "p4d.24xlarge costs the least" in page.get_by_role("status").inner_text()
    assert cell.inner_text() == "0.01"

    for nonsense in ("0", "-3", ""):
        box.fill(nonsense)
        assert names(page) == before and cell.inner_text() == printed
    box.fill("0.01")
    page.get_by_role("button", name="Back to these prices").click()
    assert names(page) == before and cell.inner_text() == printed
    assert (ratio.inner_text(), unknown.inner_text()) == (printed_ratio, printed_unknown)
    assert page.get_by_role("status").count() == 0
    assert problems == []


def test_the_keyboard_reaches_everything(browser: Browser, tmp_path: Path) -> None:
    page = opened(browser, make_page(tmp_path, 4), [])
    wanted = page.locator("a, button, input, select, summary, [tabindex='0']")
    # Within details that are closed there is nothing to reach.
    expected = sum(element.is_visible() for element in wanted.all())
    reached = set()
    for _ in range(expected + 5):
        page.keyboard.press("Tab")
        reached.add(page.evaluate("[...document.querySelectorAll('*')].indexOf(document.activeElement)"))
    reached -= {page.evaluate("[...document.querySelectorAll('*')].indexOf(document.body)"), -1}
    assert len(reached) == expected


def test_a_command_is_copied(browser: Browser, tmp_path: Path) -> None:
    page = opened(browser, make_page(tmp_path, 2), [], permissions=["clipboard-read", "clipboard-write"])
    page.locator("details.detail summary").first.focus()
    page.keyboard.press("Enter")
    command = page.locator("details.detail code").first.inner_text()
    page.get_by_role("button", name="Copy").first.press("Enter")
    page.get_by_role("button", name="Copied").wait_for()
    assert command.startswith("fastlaunch submit --instance")
    assert page.evaluate("navigator.clipboard.readText()") == command


def test_a_screen_of_the_site_has_the_verdict_beside_the_name_on_a_phone(browser: Browser) -> None:
    docs = Path(__file__).parents[2] / "docs"
    (screen, *_) = re.findall(r"```text\n(.*?)```", (docs / "results" / "vit-huge.md").read_text(), re.DOTALL)
    page = browser.new_context(**LOOKS[-1]).new_page()
    page.set_content('<div class="highlight"><pre><code></code></pre></div>')
    code = page.locator("code")
    code.evaluate("(code, screen) => { code.textContent = screen; }", screen)
    page.add_script_tag(content="const document$ = { subscribe: (made) => made() };")
    page.add_script_tag(path=docs / "assets" / "site.js")
    rows = code.locator(".row").all_text_contents()
    assert rows[0].split()[:4] == ["recipe", "verdict", "x", "per"]
    assert max(row.index("verdict") for row in rows if "verdict" in row) < 40
    assert sorted((code.text_content() or "").replace("-", "").split()) == sorted(
        screen.replace("-", "").split()
    )
    page.set_viewport_size({"width": 1280, "height": 800})
    assert code.text_content() == screen
    page.context.close()
