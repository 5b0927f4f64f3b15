"""Write runs to MLflow, to offline files of Weights & Biases, and to TensorBoard, each by its own library.

A run that is there already is left as it is; one whose export was cut off is written again.
"""

import logging
import re
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Any

from fastlaunch.core.errors import UserError
from fastlaunch.report.tracked_run import TrackedRun
from fastlaunch_train.recipes.requirements import INSTALL_EXTRA

#: The experiment, or project, that holds the runs.
EXPERIMENT = "fastlaunch"
_RUN_TAG = f"{EXPERIMENT}.run_id"
#: By a run's status; any other is MLflow's FAILED.
_MLFLOW_STATUSES = {"completed": "FINISHED", "interrupted": "KILLED", "killed": "KILLED"}
#: The most that MLflow takes at once.
_MAX_METRICS, _MAX_PARAMS, _MAX_PARAM_LENGTH = 1000, 100, 6000
#: The longest tag that W&B takes.
_MAX_TAG_LENGTH = 64
#: Of a label in the name of a folder.
_MAX_LABEL_LENGTH = 80


def write_mlflow(runs: Iterable[TrackedRun], destination: str) -> int:
    """Write to a tracking server's URI, or to `mlflow.db` in a folder; return how many were not there yet."""
    with _needs("mlflow", "MLflow"):
        from mlflow import MlflowClient
        from mlflow.exceptions import MlflowException
    # It tells of every table that it makes.
    logging.getLogger("mlflow").setLevel(logging.WARNING)
    try:
        client = MlflowClient(tracking_uri=mlflow_uri(destination))
        experiment = client.get_experiment_by_name(EXPERIMENT)
        if experiment is not None:
            experiment_id = experiment.experiment_id
        else:
            is_folder = "://" not in destination
            # Where it keeps files; its own default is the current directory.
            artifacts = (_made(destination) / "artifacts").as_uri() if is_folder else None
            experiment_id = client.create_experiment(EXPERIMENT, artifact_location=artifacts)
        # It prints where to see a run, which is no data of ours.
        with redirect_stdout(sys.stderr):
            return sum(_write_to_mlflow(client, experiment_id, run) for run in runs)
    except MlflowException as error:
        problem = str(error).splitlines()[0]
        raise UserError(
            f"MLflow cannot write to {destination}: {problem}", "check --to, and that the server runs"
        ) from None


def _write_to_mlflow(client: Any, experiment_id: str, run: TrackedRun) -> bool:
    """Write a run, unless it is there; return whether it was written."""
    from mlflow.entities import Metric, Param

    found = client.search_runs([experiment_id], f"tags.`{_RUN_TAG}` = '{run.id}'")
    if any(each.info.status != "RUNNING" for each in found):
        return False
    for each in found:
        client.delete_run(each.info.run_id)
    tags = {f"{EXPERIMENT}.{name}": text for name, text in run.tags.items()}
    start_ms = int(run.started_s * 1000)
    name = client.create_run(experiment_id, start_time=start_ms, tags=tags, run_name=run.name).info.run_id
    params = [Param(_mlflow_key(key), str(value)[:_MAX_PARAM_LENGTH]) for key, value in run.params.items()]
    metrics = [Metric(f"summary/{key}", value, start_ms, 0) for key, value in run.figures.items()]
    for point in run.points:
        at_ms = int(point.at_s * 1000)
        metrics += [
            Metric(_mlflow_key(key), value, at_ms, point.step) for key, value in point.metrics.items()
        ]
    for some in _in_parts(params, _MAX_PARAMS):
        client.log_batch(name, params=some)
    for some in _in_parts(metrics, _MAX_METRICS):
        client.log_batch(name, metrics=some)
    status = _MLFLOW_STATUSES.get(run.status, "FAILED")
    client.set_terminated(name, status, end_time=int(run.ended_s * 1000))
    return True


def mlflow_uri(destination: str) -> str:
    """Return the tracking URI of a folder; a URI stays as it is."""
    return destination if "://" in destination else f"sqlite:///{_made(destination) / 'mlflow.db'}"


def write_wandb(runs: Iterable[TrackedRun], destination: str) -> int:
    """Write a folder for each run under `wandb` in a folder, for `wandb sync`; return how many are new."""
    with _needs("wandb", "Weights & Biases"):
        import wandb
    folder = _made(destination) / "wandb"
    folder.mkdir(exist_ok=True)
    num_new = 0
    for run in runs:
        if any(folder.glob(f"offline-run-????????_??????-{run.id}")):
            continue
        with tempfile.TemporaryDirectory(dir=folder, prefix=".export-") as temporary:
            # What it says of this machine and this process is not the run's.
            settings = wandb.Settings(
                console="off",
                silent=True,
                disable_git=True,
                save_code=False,
                x_disable_machine_info=True,
                x_disable_meta=True,
                x_disable_stats=True,
                x_save_requirements=False,
            )
            written = wandb.init(
                mode="offline",
                dir=temporary,
                project=EXPERIMENT,
                id=run.id,
                name=run.name,
                group=run.workload,
                tags=[
                    f"{name}:{text}"[:_MAX_TAG_LENGTH] for name, text in run.tags.items() if name != "run_id"
                ],
                config=dict(run.params),
                settings=settings,
            )
            for point in run.points:
                written.log({**point.metrics, "_timestamp": point.at_s}, step=point.step)
            written.summary.update({f"summary/{name}": value for name, value in run.figures.items()})
            written.finish(exit_code=0 if run.status == "completed" else 1)
            (made,) = Path(temporary, "wandb").glob(f"offline-run-*-{run.id}")
            made.rename(folder / made.name)
        num_new += 1
    wandb.teardown()
    return num_new


def write_tensorboard(runs: Iterable[TrackedRun], destination: str) -> int:
    """Write a folder for each run into a folder; return how many were not there yet."""
    with _needs("tensorboard", "TensorBoard"):
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.plugins.hparams.summary_v2 import hparams_pb
        from tensorboard.summary.writer.event_file_writer import EventFileWriter
    folder = _made(destination)
    num_new = 0
    for run in runs:
        label = re.sub(r"[^\w.=-]+", "_", f"{run.workload} {run.name}")[:_MAX_LABEL_LENGTH]
        place = folder / f"{label}-{run.id}"
        if place.exists():
            continue
        with tempfile.TemporaryDirectory(dir=folder, prefix=".export-") as temporary:
            writer = EventFileWriter(str(Path(temporary, "run")))
            about = hparams_pb({**run.params, **run.tags}, trial_id=run.id, start_time_secs=run.started_s)
            writer.add_event(Event(wall_time=run.started_s, summary=about))
            figures = {f"summary/{name}": value for name, value in run.figures.items()}
            for at_s, step, metrics in (
                *((point.at_s, point.step, point.metrics) for point in run.points),
                (run.ended_s, 0, figures),
            ):
                values = [Summary.Value(tag=name, simple_value=value) for name, value in metrics.items()]
                writer.add_event(Event(wall_time=at_s, step=step, summary=Summary(value=values)))
            writer.close()
            Path(temporary, "run").rename(place)
        num_new += 1
    return num_new


#: How runs are written, by the tracker's name.
TRACKERS: Mapping[str, Callable[[Iterable[TrackedRun], str], int]] = {
    "mlflow": write_mlflow,
    "wandb": write_wandb,
    "tensorboard": write_tensorboard,
}


@contextmanager
def _needs(package: str, name: str) -> Iterator[None]:
    """Enter a context in which what is imported may be missing. Raises UserError."""
    try:
        yield
    except ImportError as error:
        raise UserError(
            f"an export to {name} needs the package {package}: {error}", INSTALL_EXTRA.format("export")
        ) from None


def _made(folder: str) -> Path:
    """Return the absolute path of a folder, made if need be. Raises UserError for one that cannot be."""
    if "://" in folder:
        raise UserError(f"{folder} is no folder", "give one with --to; only MLflow takes a server's URI")
    path = Path(folder).absolute()
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{folder} cannot be written: {error.strerror}", "give another --to") from None
    return path


def _mlflow_key(name: str) -> str:
    """Return the name as MLflow takes it: letters, digits and _-. :/ alone."""
    return re.sub(r"[^\w\-. :/]", "_", name)[:250]


def _in_parts(items: Sequence[Any], size: int) -> Iterator[Sequence[Any]]:
    return (items[start : start + size] for start in range(0, len(items), size))
