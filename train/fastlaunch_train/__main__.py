"""`python -m fastlaunch_train`: train one workload with one recipe, under torchrun or alone."""

import logging
import os
import sys
from pathlib import Path

from fastlaunch_train.process.interrupts import Interrupts
from fastlaunch_train.process.launch import read_launch_settings
from fastlaunch_train.recipes.recipe import RecipeError
from fastlaunch_train.run.options import parse_options
from fastlaunch_train.workloads.registry import WorkloadError


def main(argv: list[str]) -> int:
    """Train as `argv` says; return the exit code.

    0 completed, 130 interrupted, 12 out of memory, 33 NaN loss, 28 disk full, 2 bad request, 1 otherwise.
    """
    # One rank per machine reports progress; every rank reports errors.
    is_first = os.environ.get("LOCAL_RANK", "0") == "0"
    level = logging.INFO if is_first else logging.WARNING
    logging.basicConfig(level=level, format="%(message)s", stream=sys.stderr)
    # Hugging Face's hub is asked by one of these, a dozen times for a model.
    for name in ("httpx", "httpx2"):
        logging.getLogger(name).setLevel(logging.WARNING)
    # Runs of one machine share what they fetch from the hub, unless the image brings a cache of its own.
    shared, usual = os.environ.get("FASTLAUNCH_HUB"), Path("~/.cache/huggingface").expanduser()
    if shared and not usual.exists():
        os.environ.setdefault("HF_HOME", shared)
    try:
        options = parse_options(argv)
        launch = read_launch_settings(os.environ)
    except (RecipeError, WorkloadError) as error:
        # All ranks have the same request.
        if is_first:
            logging.error("error: %s%s", error.message, f"\n  {error.hint}" if error.hint else "")
        return 2
    interrupts = Interrupts(grace_s=launch.stop_grace_s)
    interrupts.install()
    # Importing torch takes a second: refuse a bad request before it, and notice signals meanwhile.
    from fastlaunch_train.run.run import run

    return run(options, interrupts, launch)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
