"""Regenerate the measured tables of README.md, docs/train.md, judge.md and results/ from the shipped records,
and the picture of README.md.

    python tests/benchmarks/tables.py

Between `<!-- measured:NAME -->` and `<!-- /measured -->` stands a code block with the commands that a reader
would type, `fastlaunch runs import` and last `compare` or `runs list`, and a second block with what that
printed. Each pair of markers has a ledger of its own. To show another table, write the markers and the
commands, and run this. The short tables of README.md stand between `<!-- headline:NAME -->` and
`<!-- /headline -->`. The picture has in it the digest of what it shows: its bytes differ with the fonts.
"""

import hashlib
import io
import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from PIL import Image
from PIL.PngImagePlugin import PngInfo

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / half) for half in ("launcher", "train")]

from fastlaunch.api.report import report  # noqa: E402
from fastlaunch.cli.main import run  # noqa: E402
from fastlaunch.report.page.charts import picture as draw  # noqa: E402
from fastlaunch.report.page.page import cost_chart  # noqa: E402

README = ROOT / "README.md"
GUIDE = (ROOT / "docs" / "train.md", ROOT / "docs" / "judge.md")
PICTURE = ROOT / "docs" / "assets" / "cost-against-time.png"
DIGEST = "fastlaunch-digest"
RESULTS = tuple(sorted((ROOT / "docs" / "results").glob("*.md")))
_MEASURED = re.compile(
    r"(?P<marker><!-- measured:[\w-]+ -->\n)(?P<inside>.*?)<!-- /measured -->\n", re.DOTALL
)
_COMMANDS = re.compile(r"```console\n(?P<commands>.*?)```\n", re.DOTALL)
_ALLOWED = (["fastlaunch", "runs", "import"], ["fastlaunch", "runs", "list"], ["fastlaunch", "compare"])
_HEADLINE = re.compile(r"(?P<marker><!-- headline:(?P<name>\w+) -->\n).*?(?=<!-- /headline -->\n)", re.DOTALL)
_FUSED_OPTIONS = "dgrad_accumulation=fast last_block=class_token weight_cast=optimizer"
#: Each short table's batch, what a sample is counted in, and rows: the folder of records, the GPU, what it is
#: charged as; the recipes and their names.
_HEADLINES: dict[str, tuple[int, str, tuple[tuple[str, str, str, dict[str, str]], ...]]] = {
    "vit": (
        256,
        "images",
        (
            (
                "vit-huge-fused-h100",
                "H100",
                "p5.4xlarge",
                {
                    **{
                        recipe: f"`{recipe}`"
                        for recipe in ("bf16", "compile", "te-bf16", "bf16-fused", "te-fp8", "fp8-fused")
                    },
                    f"fp8-fused {_FUSED_OPTIONS}": "`fp8-fused`, three options",
                },
            ),
            (
                "vit-huge-h200",
                "H200",
                "p5en.48xlarge:1/8",
                {recipe: f"`{recipe}`" for recipe in ("bf16", "compile", "te-bf16", "te-fp8")},
            ),
        ),
    ),
    "lora": (
        1,
        "tokens",
        (
            (
                "llama-3.1-8b-lora-h200",
                "H200",
                "p5en.48xlarge:1/8",
                {recipe: f"`{recipe}`" for recipe in ("bf16", "liger", "compile", "fp8-frozen")},
            ),
        ),
    ),
}
#: Rows in the picture of README.md, with their labels.
_PICTURED = {
    "fp8-fused +d+l+w on H100": "fp8-fused with three options, H100",
    "te-fp8 on H100": "te-fp8, H100",
    "te-fp8 on H200": "te-fp8, H200",
    "compile on H100": "compile, H100",
    "bf16 on H100": "bf16, H100",
    "bf16 on H200": "bf16, H200",
}


def main() -> None:
    for page in (README, *GUIDE, *RESULTS):
        text = page.read_text(encoding="utf-8")
        page.write_text(with_tables(text), encoding="utf-8")
        sys.stdout.write(f"{len(_MEASURED.findall(text)) + len(_HEADLINE.findall(text))} tables in {page}\n")

    with tempfile.TemporaryDirectory(prefix="fastlaunch-tables-") as home:
        os.environ |= {"FASTLAUNCH_HOME": home, "FASTLAUNCH_CONFIG": os.devnull}
        spec, data = picture()
    text = PngInfo()
    text.add_text(DIGEST, digest(spec, data))
    with Image.open(io.BytesIO(draw(spec, data))) as image:
        PICTURE.parent.mkdir(exist_ok=True)
        # It has few colours, and with so few it is a third as large.
        image.convert("RGB").quantize(64).save(PICTURE, pnginfo=text, optimize=True)
    sys.stdout.write(f"{PICTURE}\n")


def picture() -> tuple[dict[str, Any], Any]:
    """Return the chart of cost against time of the shipped ViT-Huge runs on one GPU, and its data.

    They are imported into the ledger of this process's settings.
    """
    folders = [str(ROOT / "train" / "measurements" / folder) for folder, *_ in _HEADLINES["vit"][2]]
    if run(["runs", "import", *folders]):
        raise RuntimeError("the records cannot be imported")
    charged_as = [instance for _, _, instance, _ in _HEADLINES["vit"][2]]
    made = report(price_as=charged_as, prices_as_of="2026-11-21")
    spec, data = cost_chart(made.page_input())
    by_name = {point["name"]: point for point in data["rows"]}
    spec.pop("title")
    # A phone shows it at three quarters of its size, so that its names are still read.
    spec["width"] = 440
    # A few points that each have their name, without predictions, legend and the line of the cheapest.
    for layer in spec["layer"]:
        if "color" in layer.get("encoding", {}):
            layer["encoding"]["color"]["legend"] = None
    rows = [
        {**by_name[name], "label": label, "side": "right" if "fp8" in label else "left"}
        for name, label in _PICTURED.items()
    ]
    return spec, {"rows": rows, "front": []}


def digest(*drawn: Any) -> str:
    """Return the digest of a chart and its data."""
    return hashlib.sha256(json.dumps(drawn, sort_keys=True).encode()).hexdigest()


def with_tables(text: str) -> str:
    """Return `text` with every table as the records give it today."""
    text = _HEADLINE.sub(lambda match: match["marker"] + _headline(match["name"]), text)
    return _MEASURED.sub(lambda match: match["marker"] + _section(match["inside"]), text)


def _headline(table: str) -> str:
    batch, unit, groups = _HEADLINES[table]
    header = ["GPU", "recipe", "runs", "step time", f"{unit}/s", "of bf16 peak", f"$ per M {unit}"]
    header += [f"{unit} per $ vs bf16", *(["to the same loss"] if unit == "images" else [])]
    lines = [f"| {' | '.join(header)} |", f"|---|---|{'--:|' * (len(header) - 2)}"]
    for folder, gpu, charged_as, recipes in groups:
        with tempfile.TemporaryDirectory(prefix="fastlaunch-tables-") as home:
            _run(["fastlaunch", "runs", "import", f"train/measurements/{folder}"], home)
            compare = ["fastlaunch", "compare", "--price-as", charged_as, "--prices-as-of", "2026-11-21"]
            rows = json.loads(_run([*compare, "--output", "json"], home))["rows"]
        of = {row["recipe"]: row for row in rows if row["batch_size_per_gpu"] == batch}
        lines += [_headline_row(gpu, name, of[recipe], unit) for recipe, name in recipes.items()]
    return "\n".join(lines) + "\n"


def _headline_row(gpu: str, name: str, row: dict[str, Any], unit: str) -> str:
    step_time = row["step_time_s"]
    counted, places, ratios = (
        ("samples", 2, ("ratio_to_baseline", "ratio_to_same_loss"))
        if unit == "images"
        else ("tokens", 3, ("ratio_to_baseline",))
    )
    cells = (
        gpu,
        name,
        row["num_runs"],
        f"{1000 * step_time['value']:.0f} ms {_margin(step_time)}",
        f"{row[f'{counted}_per_s']['value']:,.0f}",
        f"{row['percent_of_bf16_peak']['value']:.1f}%",
        f"{row[f'usd_per_million_{counted}']['value']:.{places}f}",
        *(
            "baseline" if row["verdict"] == "baseline" else f"{ratio['value']:.3f}x {_margin(ratio)}"
            for ratio in map(row.__getitem__, ratios)
        ),
    )
    return f"| {' | '.join(map(str, cells))} |"


def _margin(quantity: dict[str, float]) -> str:
    """Half the interval's width as a percentage of the value."""
    return f"±{50 * (quantity['high'] - quantity['low']) / quantity['value']:.1f}%"


def commands_of(text: str) -> list[list[list[str]]]:
    """The words of the commands of each table. Raises ValueError for others than imports and compare."""
    return [_commands(match["inside"])[1] for match in _MEASURED.finditer(text)]


def _commands(inside: str) -> tuple[str, list[list[str]]]:
    """The block with the commands, as it stands, and their words."""
    found = _COMMANDS.search(inside)
    lines = found["commands"].replace("\\\n", " ").splitlines() if found else []
    if found is None or not lines:
        raise ValueError(f"no commands in {inside[:200]!r}")
    commands = [shlex.split(line.removeprefix("$ ")) for line in lines]
    for command in commands:
        if not any(command[: len(words)] == words for words in _ALLOWED):
            raise ValueError(f"{shlex.join(command)}: only records are imported here, listed and compared")
    return found[0], commands


def _section(inside: str) -> str:
    shown, commands = _commands(inside)
    printed = ""
    with tempfile.TemporaryDirectory(prefix="fastlaunch-tables-") as home:
        for command in commands:
            printed = _run(command, home)
    return f"{shown}\n```text\n{printed.strip()}\n```\n<!-- /measured -->\n"


def _run(command: list[str], home: str) -> str:
    """What `command` prints on stdout, with a ledger in `home` and without the user's own settings."""
    config = Path(home, "config.yaml")
    config.touch()
    # COLUMNS would make the tables as wide as the terminal is.
    left_out = ("FASTLAUNCH_", "AWS_", "COLUMNS")
    others = {name: of for name, of in os.environ.items() if not name.startswith(left_out)}
    environment = {
        **others,
        "FASTLAUNCH_HOME": home,
        "FASTLAUNCH_CONFIG": str(config),
        "PYTHONPATH": os.pathsep.join(str(ROOT / half) for half in ("launcher", "train")),
    }
    done = subprocess.run(
        [sys.executable, "-m", *command],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"{shlex.join(command)} exited {done.returncode}:\n{done.stderr}")
    return done.stdout


if __name__ == "__main__":
    main()
