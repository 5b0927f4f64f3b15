"""`fastlaunch predict`: predict the throughput of unmeasured runs from published ones."""

import csv
import functools
import io
import lzma
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from fastlaunch.catalog.hardware import identify, training_throughput
from fastlaunch.cli.context import app_context
from fastlaunch.cli.options import examples, output_option
from fastlaunch.cli.render import print_rows
from fastlaunch.core.errors import UserError
from fastlaunch.core.paths import decoded
from fastlaunch.core.terminal import printable
from fastlaunch.core.units import counted

_NEEDED = ("model", "precision", "gpu", "num_gpus", "unit")
#: The columns that a prediction adds to its row.
ADDED = ("predicted", "low", "high", "evidence", "refused")


@click.command(
    epilog=examples(
        (
            "from the published runs that come with fastlaunch",
            "fastlaunch predict --shipped-anchors --queries queries.csv",
        ),
        (
            "from your own too",
            "fastlaunch predict --shipped-anchors --anchors mine.csv --queries queries.csv --output csv",
        ),
    )
)
@click.option(
    "--anchors", type=click.Path(path_type=Path), metavar="CSV", help="Predict from these measured runs."
)
@click.option(
    "--shipped-anchors",
    is_flag=True,
    help="Predict from the published and measured runs that ship with fastlaunch.",
)
@click.option("--own-anchors", is_flag=True, help="Predict from the measured runs of your ledger.")
@click.option(
    "--queries", type=click.Path(path_type=Path), required=True, metavar="CSV", help="Predict these runs."
)
@output_option
def predict(
    anchors: Path | None, shipped_anchors: bool, own_anchors: bool, queries: Path, output: str
) -> None:
    """Predict the throughput of runs that nobody made, from published runs.

    Both files are CSV, plain or .xz, with the columns model, params, task, precision, gpu, num_gpus,
    batch_per_gpu, seq_or_image, unit, date and source_repo. Measured runs also have throughput, summed over
    the GPUs. The model of your own runs and ours is their workload and recipe, such as vit-huge bf16. To each
    query, predict adds predicted, with the limits low and high that hold nine runs in ten, or the reason why
    it is refused; and the class of evidence: A (measured on this generation of GPU), B (on another one), B0
    (only the model's size is known), C (nothing is measured on this generation, or nothing in FP8: there a
    run of two minutes on one GPU, added to --anchors, tells most), D (several GPUs without NVLink).
    """
    from fastlaunch.analysis.anchors import Refusal, read, read_anchors
    from fastlaunch.analysis.predict import Predictor
    from fastlaunch.lifecycle.evidence import measured_anchors

    measured = _rows(anchors)[0] if anchors else []
    if shipped_anchors:
        measured += training_throughput()
    if not (anchors or shipped_anchors or own_anchors):
        raise UserError("no measured runs", "add --anchors FILE, --shipped-anchors, or --own-anchors")
    rows, columns = _rows(queries)
    context = app_context()
    find_gpu = functools.partial(identify, accelerators=context.catalogue.accelerators)
    usable, skipped = read_anchors(measured, find_gpu)
    if skipped:
        num = f"{len(skipped)} of {len(measured)}"
        click.echo(f"{num} anchors cannot be used; the first: {printable(skipped[0])}", err=True)
    usable += measured_anchors(context, context.catalogue, shipped=shipped_anchors, from_ledger=own_anchors)
    answers: list[dict[str, Any]] = [{**row, **dict.fromkeys(ADDED)} for row in rows]
    configs = {}
    for number, row in enumerate(rows):
        try:
            configs[number] = read(row, find_gpu)
        except Refusal as refusal:
            answers[number]["refused"] = str(refusal)
    predictions = Predictor(usable).predict([config for config, _ in configs.values()])
    for (number, (_, per_s)), answer in zip(configs.items(), predictions, strict=True):
        if isinstance(answer, str):
            answers[number]["refused"] = answer
        else:
            for name in ("predicted", "low", "high"):
                answers[number][name] = float(f"{getattr(answer, name) * per_s:.6g}")
            answers[number]["evidence"] = answer.evidence
    headers = {name: name for name in (*_NEEDED, *ADDED)}
    print_rows(answers, output=output, headers=headers, columns=dict.fromkeys((*columns, *ADDED)))
    unseen = Counter((row["model"], row["gpu"]) for row in answers if row["evidence"] == "C")
    if unseen:
        model, gpu = unseen.most_common(1)[0][0]
        click.echo(
            f"{counted(unseen.total(), 'row')} of a generation of GPU, or in FP8 on one, that no anchor has."
            f" Two minutes of {model} on one {gpu}, added to --anchors, tell more.",
            err=True,
        )


def _rows(path: Path) -> tuple[list[Mapping[str, str]], list[str]]:
    """Return rows and columns of a CSV file, packed by xz or not; raise UserError if it lacks columns."""
    try:
        data = path.read_bytes()
        text = decoded(path, lzma.decompress(data) if path.suffix == ".xz" else data)
        reader = csv.DictReader(io.StringIO(text), strict=True, restval="")
        rows: list[Mapping[str, str]] = list(reader)
    except (OSError, lzma.LZMAError, csv.Error) as error:
        raise UserError(f"{path} cannot be read: {error}", "give a CSV file with a header line") from error
    columns = list(reader.fieldnames or ())
    missing = [name for name in _NEEDED if name not in columns]
    if missing:
        raise UserError(f"{path} has no column {', '.join(missing)}", "see fastlaunch predict --help")
    if long := next((number for number, row in enumerate(rows, start=2) if None in row), None):
        raise UserError(f"{path}, row {long}, has more cells than the header", "quote cells that hold commas")
    return rows, columns
