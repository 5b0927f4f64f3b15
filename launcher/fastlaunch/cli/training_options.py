"""The options of `submit` that say what to train and how, wherever that is."""

import click

from fastlaunch.cli.options import COUNT, POSITIVE_COUNT, Command, workload_option

_OPTIONS = (
    click.option(
        "--recipe",
        "recipes",
        multiple=True,
        metavar="NAME",
        help="Train with this recipe; several with commas, or repeated. `fastlaunch recipes` lists them."
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
        help="Repeat a published experiment: its workloads, recipes and batch sizes. "
        "`fastlaunch experiments` lists them.",
    ),
    click.option(
        "--batch-size",
        metavar="N|auto",
        help="Train on this many samples per GPU and step; auto finds the most that fit.",
    ),
    click.option(
        "--steps",
        type=COUNT,
        help="Take this many optimizer steps per run.  [default: 200, or the experiment's]",
    ),
    click.option("--epochs", type=COUNT, help="Train for this many passes over the data instead of --steps."),
    click.option(
        "--repeats", type=COUNT, default=1, show_default=True, help="Run each recipe this often, interleaved."
    ),
    click.option(
        "--seed", type=COUNT, default=0, show_default=True, help="Seed the weights and the order of the data."
    ),
    click.option(
        "--nproc", type=COUNT, help="Start this many processes.  [default: one per GPU, one on a CPU]"
    ),
    click.option(
        "--data",
        metavar="SOURCE",
        help="Read synthetic, loader, folder:PATH or file:PATH.  [default: synthetic, or the experiment's]",
    ),
    click.option(
        "--num-workers",
        type=COUNT,
        help="Load that data with this many processes per GPU.  [default: a share of the cores, at most 12]",
    ),
    click.option(
        "--checkpoint-every",
        type=COUNT,
        default=0,
        help="Save a checkpoint every so many steps.  [default: none]",
    ),
    click.option(
        "--eval-every",
        type=COUNT,
        help="Evaluate on held-out data every so many steps, and at the end.  [default: never]",
    ),
    click.option(
        "--model", metavar="PATH|HUB_ID", help="Train this language model: a folder, or a name on the hub."
    ),
    click.option(
        "--tokenizer",
        metavar="PATH|HUB_ID",
        help="Split text with this tokenizer.  [default: the model's, else bytes]",
    ),
    click.option(
        "--sequence-length",
        type=POSITIVE_COUNT,
        metavar="TOKENS",
        help="Cut text into samples of this many tokens.",
    ),
)


def training_options(command: Command) -> Command:
    """`command` with the options, as parameters that are fields of `SubmitOptions`."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command
