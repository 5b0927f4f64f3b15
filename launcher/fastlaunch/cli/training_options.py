"""The options of `submit` that say what to train and how, wherever that is."""

import click

from fastlaunch.cli.options import COUNT, POSITIVE_COUNT, Command, workload_option

_OPTIONS = (
    click.option(
        "--recipe",
        "recipes",
        multiple=True,
        metavar="NAME",
        help="How to train; several with commas, or repeated. `fastlaunch recipes` lists them."
        "  [default: bf16]",
    ),
    click.option(
        "--set",
        "overrides",
        multiple=True,
        metavar="FIELD=VALUE",
        help="Change a field of every recipe, such as compile_mode=max-autotune. May be repeated.",
    ),
    workload_option(),
    click.option(
        "--experiment",
        metavar="NAME",
        help="A published experiment: its workloads, recipes and batch sizes. `fastlaunch experiments` "
        "lists them.",
    ),
    click.option(
        "--batch-size", metavar="N|auto", help="Samples per GPU and step; auto finds the largest that fits."
    ),
    click.option(
        "--steps", type=COUNT, help="Optimizer steps of a run.  [default: 200, or the experiment's]"
    ),
    click.option("--epochs", type=COUNT, help="Instead of --steps: passes over the data."),
    click.option(
        "--repeats", type=COUNT, default=1, show_default=True, help="Runs of each recipe, interleaved."
    ),
    click.option("--seed", type=COUNT, default=0, show_default=True, help="Of weights and data."),
    click.option("--nproc", type=COUNT, help="Processes.  [default: one per GPU, one on a CPU]"),
    click.option(
        "--data",
        metavar="ARM",
        help="synthetic, loader, folder:PATH or file:PATH.  [default: synthetic, or the experiment's]",
    ),
    click.option(
        "--num-workers",
        type=COUNT,
        help="Loader processes per GPU for that data.  [default: its share of the CPU cores, 12 at most]",
    ),
    click.option(
        "--checkpoint-every", type=COUNT, default=0, help="Steps between checkpoints.  [default: none]"
    ),
    click.option(
        "--eval-every",
        type=COUNT,
        help="Steps between evaluations on held-out data; with it there is one at the end.  [default: none]",
    ),
    click.option(
        "--model", metavar="PATH|HUB_ID", help="Of a language workload: a folder, or a name on the hub."
    ),
    click.option("--tokenizer", metavar="PATH|HUB_ID", help="Likewise.  [default: the model's, else bytes]"),
    click.option("--sequence-length", type=POSITIVE_COUNT, metavar="TOKENS", help="Of a language workload."),
)


def training_options(command: Command) -> Command:
    """`command` with the options, as parameters that are the fields of `request.Request`."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command
