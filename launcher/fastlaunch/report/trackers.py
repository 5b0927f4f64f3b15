"""Write runs to MLflow, to offline files of Weights & Biases, and to TensorBoard, each by its own library.

A run that is there as it is now is left. One that has changed since is replaced, and so
is one whose export was cut off.
"""

import logging
import re
import sqlite3
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, redirect_stdout
from pathlib import Path
from typing import Any

from fastlaunch.core.errors import UserError
from fastlaunch.report.tracked_run import TrackedRun
from fastlaunch_train.recipes.requirements import INSTALL_EXTRA

#: The experiment, or project, that holds the runs.
EXPERIMENT = "fastlaunch"
_RUN_TAG, _FINGERPRINT_TAG = f"{EXPERIMENT}.run_id", f"{EXPERIMENT}.fingerprint"
#: In the folder of a run of W&B or TensorBoard, which do not read it.
_FINGERPRINT_FILE = "fastlaunch-fingerprint"
#: By a run's status; any other is MLflow's FAILED.
_MLFLOW_STATUSES = {"completed": "FINISHED", "interrupted": "KILLED", "killed": "KILLED"}
#: The most that MLflow takes at once.
_MAX_METRICS, _MAX_PARAMS, _MAX_PARAM_LENGTH = 1000, 100, 6000
#: The longest tag that W&B takes.
_MAX_TAG_LENGTH = 64
#: The length of a label in the name of a folder.
_MAX_LABEL_LENGTH = 80
_DATABASE = "mlflow.db"


def write_mlflow(runs: Iterable[TrackedRun], destination: str) -> int:
    """Write to a tracking server's URI, or to `mlflow.db` in a folder; return how many were written."""
    with _needs("mlflow", "MLflow"):
        from mlflow import MlflowClient
        from mlflow.exceptions import MlflowException
        from sqlalchemy.exc import SQLAlchemyError
    _check_database(Path(destination, _DATABASE))
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
    except (MlflowException, SQLAlchemyError) as error:
        problem = str(error).splitlines()[0]
        raise UserError(
            f"MLflow cannot write to {destination}: {problem}", "check --to, and that the server runs"
        ) from None


def _write_to_mlflow(client: Any, experiment_id: str, run: TrackedRun) -> bool:
    """Write a run, unless it is there as it is now; return whether it was written."""
    fingerprint, current = run.fingerprint, None
    found = client.search_runs([experiment_id], f"tags.`{_RUN_TAG}` = '{run.id}'")
    for each in found:
        if each.info.status != "RUNNING" and each.data.tags.get(_FINGERPRINT_TAG) == fingerprint:
            current = each
    outdated = [each for each in found if each is not current]
    if current is None:
        _add_to_mlflow(client, experiment_id, run, fingerprint)
    for each in outdated:
        client.delete_run(each.info.run_id)
    return current is None


def _add_to_mlflow(client: Any, experiment_id: str, run: TrackedRun, fingerprint: str) -> None:
    from mlflow.entities import Metric, Param

    tags = {f"{EXPERIMENT}.{name}": text for name, text in run.tags.items()} | {_FINGERPRINT_TAG: fingerprint}
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


def _check_database(path: Path) -> None:
    """Raise UserError for a damaged database, which MLflow would try to open for minutes."""
    if not path.exists():
        return
    try:
        with closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)) as database:
            (problem,) = database.execute("PRAGMA quick_check(1)").fetchone()
    except sqlite3.DatabaseError as error:
        problem = str(error)
    if problem != "ok":
        raise UserError(f"{path} is damaged: {problem}", "move it away, or give another --to")


def mlflow_uri(destination: str) -> str:
    """Return the tracking URI of a folder; a URI stays as it is."""
    return destination if "://" in destination else f"sqlite:///{_made(destination) / _DATABASE}"


def write_wandb(runs: Iterable[TrackedRun], destination: str) -> int:
    """Write a folder for each run under `wandb` in a folder, for `wandb sync`; return how many it wrote."""
    with _needs("wandb", "Weights & Biases"):
        import wandb
    folder = _made(destination) / "wandb"
    folder.mkdir(exist_ok=True)
    num_new = 0
    for run in runs:
        there = list(folder.glob(f"offline-run-????????_??????-{run.id}"))
        if _is_current(there, run):
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
            _put(made, folder / made.name, run, instead_of=there)
        num_new += 1
    wandb.teardown()
    return num_new


def write_tensorboard(runs: Iterable[TrackedRun], destination: str) -> int:
    """Write a folder for each run into a folder; return how many were written."""
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
        there = [place] if place.exists() else []
        if _is_current(there, run):
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
            _put(Path(temporary, "run"), place, run, instead_of=there)
        num_new += 1
    return num_new


def _is_current(there: Sequence[Path], run: TrackedRun) -> bool:
    """Return whether the folders are one, and it holds the run as it is now."""
    try:
        return [Path(place, _FINGERPRINT_FILE).read_text() for place in there] == [run.fingerprint]
    except FileNotFoundError:
        return False


def _put(made: Path, place: Path, run: TrackedRun, *, instead_of: Sequence[Path]) -> None:
    """Move a run's complete folder to its place; what was there goes to the temporary one it was made in."""
    Path(made, _FINGERPRINT_FILE).write_text(run.fingerprint)
    for number, outdated in enumerate(instead_of):
        outdated.rename(made.with_name(f"outdated-{number}"))
    made.rename(place)


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
