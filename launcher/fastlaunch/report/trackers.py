"""Write runs to MLflow, to offline files of Weights & Biases, and to TensorBoard, by their libraries.

A run that is there already, by its id, is replaced: it is then as the ledger has it now.
"""

import logging
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Any

from fastlaunch.core.errors import UserError
from fastlaunch.report.tracked_run import Point, TrackedRun
from fastlaunch_train.recipes.requirements import INSTALL_EXTRA

#: The experiment or project of the runs.
EXPERIMENT = "fastlaunch"
#: By a run's status; any other is MLflow's FAILED.
_MLFLOW_STATUSES = {"completed": "FINISHED", "interrupted": "KILLED", "killed": "KILLED"}
#: The most entries per call of MLflow.
_MAX_METRICS, _MAX_PARAMS, _MAX_PARAM_LENGTH = 1000, 100, 6000
#: The longest tag of W&B.
_MAX_TAG_LENGTH = 64
#: The most characters of a label in a folder's name.
_MAX_LABEL_LENGTH = 80


def write_mlflow(runs: Iterable[TrackedRun], destination: str) -> None:
    """Write to a tracking server's URI, or to `mlflow.db` in a folder."""
    with _needs("mlflow", "MLflow"):
        from mlflow import MlflowClient
        from mlflow.exceptions import MlflowException
        from sqlalchemy.exc import SQLAlchemyError
    # It tells of every table that it makes.
    logging.getLogger("mlflow").setLevel(logging.WARNING)
    try:
        client = MlflowClient(tracking_uri=mlflow_uri(destination))
        experiment = client.get_experiment_by_name(EXPERIMENT)
        if experiment is not None:
            experiment_id = experiment.experiment_id
        else:
            is_folder = "://" not in destination
            # Set the folder for files; MLflow's default is the current directory.
            artifacts = (_made(destination) / "artifacts").as_uri() if is_folder else None
            experiment_id = client.create_experiment(EXPERIMENT, artifact_location=artifacts)
        # MLflow prints where to see a run, which is not our output.
        with redirect_stdout(sys.stderr):
            for run in runs:
                replaced = client.search_runs([experiment_id], f"tags.`{EXPERIMENT}.run_id` = '{run.id}'")
                _add_to_mlflow(client, experiment_id, run)
                for stored in replaced:
                    client.delete_run(stored.info.run_id)
    except (MlflowException, SQLAlchemyError) as error:
        problem = str(error).splitlines()[0]
        raise UserError(
            f"MLflow cannot write to {destination}: {problem}", "check --to, and that the server runs"
        ) from None


def _add_to_mlflow(client: Any, experiment_id: str, run: TrackedRun) -> None:
    from mlflow.entities import Metric, Param

    def key(name: str) -> str:
        """Return the name in MLflow's alphabet: letters, digits and _-. :/."""
        return re.sub(r"[^\w\-. :/]", "_", name)[:250]

    tags = {f"{EXPERIMENT}.{name}": text for name, text in run.tags.items()}
    start_ms = int(run.started_s * 1000)
    name = client.create_run(experiment_id, start_time=start_ms, tags=tags, run_name=run.name).info.run_id
    params = [Param(key(param), str(value)[:_MAX_PARAM_LENGTH]) for param, value in run.params.items()]
    metrics = [Metric(f"summary/{figure}", value, start_ms, 0) for figure, value in run.figures.items()]
    metrics += [
        Metric(key(metric), value, int(point.at_s * 1000), point.step)
        for point in run.points
        for metric, value in point.metrics.items()
    ]
    for start in range(0, len(params), _MAX_PARAMS):
        client.log_batch(name, params=params[start : start + _MAX_PARAMS])
    for start in range(0, len(metrics), _MAX_METRICS):
        client.log_batch(name, metrics=metrics[start : start + _MAX_METRICS])
    status = _MLFLOW_STATUSES.get(run.status, "FAILED")
    client.set_terminated(name, status, end_time=int(run.ended_s * 1000))


def mlflow_uri(destination: str) -> str:
    """Return the tracking URI of a folder; a URI stays as it is."""
    return destination if "://" in destination else f"sqlite:///{_made(destination) / 'mlflow.db'}"


def write_wandb(runs: Iterable[TrackedRun], destination: str) -> None:
    """Write a folder for each run under `wandb` in a folder, for `wandb sync`."""
    with _needs("wandb", "Weights & Biases"):
        import wandb

    def write(run: TrackedRun, temporary: Path) -> tuple[Path, str]:
        # Do not record this machine and process, which are not the run's.
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
        texts = (f"{name}:{text}" for name, text in run.tags.items() if name != "run_id")
        written = wandb.init(
            mode="offline",
            dir=temporary,
            project=EXPERIMENT,
            id=run.id,
            name=run.name,
            group=run.workload,
            tags=[text[:_MAX_TAG_LENGTH] for text in texts],
            config=dict(run.params),
            settings=settings,
        )
        for point in run.points:
            written.log({**point.metrics, "_timestamp": point.at_s}, step=point.step)
        written.summary.update({f"summary/{name}": value for name, value in run.figures.items()})
        written.finish(exit_code=0 if run.status == "completed" else 1)
        (made,) = Path(temporary, "wandb").glob(f"offline-run-*-{run.id}")
        return made, made.name

    _write_folders(runs, _made(destination) / "wandb", "offline-run-????????_??????-{}", write)
    wandb.teardown()


def write_tensorboard(runs: Iterable[TrackedRun], destination: str) -> None:
    """Write a folder for each run into a folder."""
    with _needs("tensorboard", "TensorBoard"):
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.plugins.hparams.summary_v2 import hparams_pb
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

    def write(run: TrackedRun, temporary: Path) -> tuple[Path, str]:
        writer = EventFileWriter(str(temporary / "run"))
        setup = hparams_pb({**run.params, **run.tags}, trial_id=run.id, start_time_secs=run.started_s)
        writer.add_event(Event(wall_time=run.started_s, summary=setup))
        figures = {f"summary/{name}": value for name, value in run.figures.items()}
        last = Point(step=0, at_s=run.ended_s, metrics=figures)
        for point in (*run.points, last):
            values = [Summary.Value(tag=name, simple_value=value) for name, value in point.metrics.items()]
            writer.add_event(Event(wall_time=point.at_s, step=point.step, summary=Summary(value=values)))
        writer.close()
        label = re.sub(r"[^\w.=-]+", "_", f"{run.workload} {run.name}")[:_MAX_LABEL_LENGTH]
        return temporary / "run", f"{label}-{run.id}"

    _write_folders(runs, _made(destination), "*-{}", write)


def _write_folders(
    runs: Iterable[TrackedRun],
    folder: Path,
    pattern: str,
    write: Callable[[TrackedRun, Path], tuple[Path, str]],
) -> None:
    """Write each run into `folder`, whole or not at all, in place of what is there of it.

    pattern: a glob for a run's folder, by its id. write: writes into a temporary folder, and returns the path
    to keep and its final name.
    """
    folder.mkdir(exist_ok=True)
    for run in runs:
        with tempfile.TemporaryDirectory(dir=folder, prefix=".export-") as temporary:
            written, name = write(run, Path(temporary))
            for outdated in folder.glob(pattern.format(run.id)):
                shutil.rmtree(outdated)
            written.rename(folder / name)


#: How runs are written, by the tracker's name.
TRACKERS: Mapping[str, Callable[[Iterable[TrackedRun], str], None]] = {
    "mlflow": write_mlflow,
    "wandb": write_wandb,
    "tensorboard": write_tensorboard,
}


@contextmanager
def _needs(package: str, name: str) -> Iterator[None]:
    """Turn a failed import within the context into a UserError."""
    try:
        yield
    except ImportError as error:
        raise UserError(
            f"an export to {name} needs the package {package}: {error}", INSTALL_EXTRA.format("export")
        ) from None


def _made(folder: str) -> Path:
    """Return the absolute path of a folder, creating it if needed. Raises UserError if that fails."""
    if "://" in folder:
        raise UserError(f"{folder} is not a folder", "give one with --to; only MLflow takes a server's URI")
    path = Path(folder).absolute()
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{folder} cannot be written: {error.strerror}", "give another --to") from None
    return path
