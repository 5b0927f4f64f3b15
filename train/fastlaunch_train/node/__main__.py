"""`python -m fastlaunch_train.node RUN_TRAIN`: the program of a training job's container."""

import os
import signal
import sys
import threading
from pathlib import Path

from fastlaunch_train.node.protocol import write_failure
from fastlaunch_train.node.request import BadRequest, read_request
from fastlaunch_train.node.sagemaker import Job
from fastlaunch_train.node.training import adopt_orphans


def main(entrypoint: Path) -> int:
    """Exit code of the container: 0 every run completed, 1 one failed, 2 a configuration, 143 stopped."""
    stopped = threading.Event()
    # At once: to process 1 of a container a signal would be lost.
    signal.signal(signal.SIGTERM, lambda *_: stopped.set())
    root = Path(os.environ.get("FASTLAUNCH_SYSTEM_ROOT") or "/")
    opt_ml = root / "opt" / "ml"
    adopt_orphans()
    try:
        request = read_request(opt_ml, os.environ)
    except BadRequest as error:
        sys.stderr.write(f"error: {error}\n")
        write_failure(opt_ml / "output" / "failure", f"the job's request cannot be read: {error}\n")
        return 2
    try:
        job = Job(
            request,
            entrypoint=entrypoint,
            opt_ml=opt_ml,
            scratch=root / "tmp",
            environment=os.environ,
            stopped=stopped,
        )
    except OSError as error:
        sys.stderr.write(f"error: {error}\n")
        write_failure(opt_ml / "output" / "failure", f"{request.checkpoints} cannot be written: {error}\n")
        return 2
    return job.work()


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
