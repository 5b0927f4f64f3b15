"""Write runs to MLflow, to offline files of Weights & Biases, and to TensorBoard, through their libraries.

`TrackedRun` is the common form of a run: parameters, tags, figures and metrics by step. Writing a run
replaces an earlier copy with the same id, so that the copy agrees with the ledger.
"""

import logging
import math
import re
import shlex
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from datetime import datetime
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np

from fastlaunch.analysis.pricing import reciprocal, samples_per_usd
from fastlaunch.catalog.prices import Price
from fastlaunch.core.errors import UserError
from fastlaunch.measure.record_files import RankRecord
from fastlaunch.measure.steptime import wall_times_s
from fastlaunch.measure.summary import Interval, RunSummary
from fastlaunch_train.recipes.requirements import INSTALL_EXTRA

#: The experiment or project of the runs.
EXPERIMENT = "fastlaunch"
#: MLflow's status by a run's status; FAILED for any other.
_MLFLOW_STATUSES = {"completed": "FINISHED", "interrupted": "KILLED", "killed": "KILLED"}
#: The most entries per call of MLflow.
_MAX_METRICS, _MAX_PARAMS, _MAX_PARAM_LENGTH = 1000, 100, 6000
#: The longest tag of W&B.
_MAX_TAG_LENGTH = 64
#: The most characters of a label in a folder's name.
_MAX_LABEL_LENGTH = 80


@dataclass(frozen=True, kw_only=True)
class Point:
    """The metrics of a step, or of held-out data after it."""

    step: int
    at_s: float  # when it ended, in seconds since 1970, as if an attempt did nothing but its steps
    metrics: Mapping[str, float]


@dataclass(frozen=True, kw_only=True)
class TrackedRun:
    """A run for a tracker. Times are seconds since 1970; unknown values have no key."""

    id: str
    name: str  # the recipe's label, or the script's variant
    workload: str
    status: str  # as in RunSummary
    started_s: float
    ended_s: float
    params: Mapping[str, str | int | float]
    tags: Mapping[str, str]
    figures: Mapping[str, float]  # of the whole run
    points: Sequence[Point]  # by step


def tracked_run(
    row: Mapping[str, Any], summary: RunSummary, records: Sequence[RankRecord], price: Price | None
) -> TrackedRun:
    """Return the run for a tracker.

    row: the run's `run_to_dict`. records: of all its ranks and attempts; none if the files are gone.
    price: of one node; None if unknown.
    """
    records = sorted(records, key=lambda record: (record.header["attempt"], record.header["rank"]))
    header = records[0].header if records else {}
    started_s = _timestamp(header.get("started_at", row["created_at"]))
    points = _points(records, summary, started_s)
    tags = {name: row[name] for name in ("submission", "backend", "state")}
    return TrackedRun(
        id=row["id"],
        name=summary.setup.recipe,
        workload=summary.setup.workload,
        status=summary.status,
        started_s=started_s,
        ended_s=points[-1].at_s if points else started_s + (summary.figures.total_time_s or 0.0),
        params=_params(summary, header),
        tags=_as_text({"run_id": row["id"], **tags, "round": summary.environment.round}),
        figures=_figures(summary, price),
        points=points,
    )


def _as_text(values: Mapping[str, Any]) -> dict[str, str]:
    return {name: str(value) for name, value in values.items() if value is not None}


def _params(summary: RunSummary, header: Mapping[str, Any]) -> dict[str, str | int | float]:
    """Return what was trained and how; a mapping's keys follow its name: `fingerprint.torch`."""
    script = header.get("script")
    values = {
        **vars(summary.setup),
        "global_batch": summary.setup.global_batch,
        "seed": summary.seed,
        "commit": summary.environment.commit,
        "command": shlex.join(map(str, script["command"])) if script else None,
    }
    nested = {name: values.pop(name) for name in ("variant", "fingerprint")}
    nested["recipe"] = header.get("recipe", {}).get("overrides") or {}
    values |= {f"{name}.{key}": value for name, items in nested.items() for key, value in items.items()}
    numbers = {name: value for name, value in values.items() if isinstance(value, int | float)}
    return {**_as_text(values), **numbers}


def _figures(summary: RunSummary, price: Price | None) -> dict[str, float]:
    """Return every number of the summary's topics, the speed and the cost."""
    timing, profile, num_nodes = summary.timing, summary.profile, summary.setup.num_nodes
    step, samples = timing.step_time_s, timing.samples_per_step
    rate = reciprocal(step, samples) if step and samples else None
    topics = (summary.startup, summary.quality, summary.figures, timing)
    values: dict[str, object] = {name: value for topic in topics for name, value in vars(topic).items()}
    values |= {"peak_memory_gib": summary.peak_memory_gib, "num_steps": summary.num_steps or None}
    values["samples_per_s"] = rate
    if price:
        values["usd_per_hour"] = price.usd_per_hour * num_nodes
    if price and rate:
        values["usd_per_million_samples"] = reciprocal(samples_per_usd(rate, price, num_nodes), 1e6)
    if profile:
        values |= {f"profile/{name}": value for name, value in vars(profile).items()}
        values |= {f"profile/{name}_s": value for name, value in profile.parts_s.items()}
    numbers = {name: value.value if isinstance(value, Interval) else value for name, value in values.items()}
    return {
        name: float(number)
        for name, number in numbers.items()
        if isinstance(number, int | float) and not isinstance(number, bool) and math.isfinite(number)
    }


@np.errstate(all="ignore")  # values that are not finite are left out
def _points(records: Sequence[RankRecord], summary: RunSummary, started_s: float) -> tuple[Point, ...]:
    """Return the metrics by step over all ranks; if attempts repeat a step, the last one counts."""
    ends_s: dict[int, float] = {}
    metrics: dict[int, dict[str, float]] = {}
    for _, attempt in groupby(records, key=lambda record: record.header["attempt"]):
        ranks = list(attempt)
        walls_s = [wall_times_s(rank) for rank in ranks]
        num_steps = min(map(len, walls_s))
        data_waits_s, losses, samples = (
            np.array([rank.steps.column(name)[:num_steps] for rank in ranks], dtype=float)
            for name in ("data_wait_s", "loss", "num_samples")
        )
        slowest_s = np.max([wall_s[:num_steps] for wall_s in walls_s], axis=0)
        samples[samples < 0] = math.nan
        by_name = {
            "step_time_s": slowest_s,
            "data_wait_s": data_waits_s.max(axis=0),
            "loss": losses.mean(axis=0),
            "samples_per_s": samples.sum(axis=0) / slowest_s,
        }
        steps = ranks[0].steps.column("step")[:num_steps]
        ends_s |= zip(steps, _timestamp(ranks[0].header["started_at"]) + slowest_s.cumsum(), strict=True)
        for index, step in enumerate(steps):
            metrics[step] = {name: float(values[index]) for name, values in by_name.items()}
    for line in summary.quality.evals:
        place = line.split if line.weights == "current" else f"{line.split}-{line.weights}"
        scores = {"loss": line.loss, line.metric or "": line.metric_value}
        known = {f"{place}/{name}": value for name, value in scores.items() if value is not None}
        metrics.setdefault(line.step, {}).update(known)
    last_s, points = started_s, []
    for step, values in sorted(metrics.items()):
        last_s = float(ends_s.get(step, last_s))
        finite = {name: value for name, value in values.items() if math.isfinite(value)}
        points.append(Point(step=step, at_s=last_s, metrics=finite))
    return tuple(points)


def _timestamp(text: str) -> float:
    return datetime.fromisoformat(text).timestamp()


def write_runs(runs: Iterable[TrackedRun], tracker: str, destination: str) -> None:
    """Write the runs for a tracker of `TRACKERS`. Raises UserError, also if its package is missing."""
    try:
        TRACKERS[tracker](runs, destination)
    except ImportError as error:
        raise UserError(
            f"--format {tracker} needs the package {tracker}: {error}", INSTALL_EXTRA.format("export")
        ) from None


def _write_mlflow(runs: Iterable[TrackedRun], destination: str) -> None:
    """Write to a tracking server's URI, or to `mlflow.db` in a folder."""
    from mlflow import MlflowClient
    from mlflow.entities import Metric, Param
    from mlflow.exceptions import MlflowException
    from sqlalchemy.exc import SQLAlchemyError

    def key(name: str) -> str:
        """Return the name in MLflow's alphabet: letters, digits and _-. :/."""
        return re.sub(r"[^\w\-. :/]", "_", name)[:250]

    def add(run: TrackedRun) -> None:
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

    # MLflow logs every table that it creates.
    logging.getLogger("mlflow").setLevel(logging.WARNING)
    try:
        client: Any = MlflowClient(tracking_uri=mlflow_uri(destination))
        experiment = client.get_experiment_by_name(EXPERIMENT)
        if experiment is not None:
            experiment_id = experiment.experiment_id
        else:
            # Set the folder for files; MLflow's default is the current directory.
            artifacts = None if "://" in destination else (_made(destination) / "artifacts").as_uri()
            experiment_id = client.create_experiment(EXPERIMENT, artifact_location=artifacts)
        # MLflow prints a link to each run, but stdout is for data.
        with redirect_stdout(sys.stderr):
            for run in runs:
                replaced = client.search_runs([experiment_id], f"tags.`{EXPERIMENT}.run_id` = '{run.id}'")
                add(run)
                for stored in replaced:
                    client.delete_run(stored.info.run_id)
    except (MlflowException, SQLAlchemyError) as error:
        problem = str(error).splitlines()[0]
        raise UserError(
            f"MLflow cannot write to {destination}: {problem}", "check --to, and that the server runs"
        ) from None


def mlflow_uri(destination: str) -> str:
    """Return the tracking URI of a folder; a URI stays as it is."""
    return destination if "://" in destination else f"sqlite:///{_made(destination) / 'mlflow.db'}"


def _write_wandb(runs: Iterable[TrackedRun], destination: str) -> None:
    """Write a folder for each run under `wandb` in a folder, for `wandb sync`."""
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


def _write_tensorboard(runs: Iterable[TrackedRun], destination: str) -> None:
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
    """Write each run into `folder`, whole or not at all, replacing its earlier files.

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


#: The function that writes runs, by the name of the tracker, which is also its package's.
TRACKERS: Mapping[str, Callable[[Iterable[TrackedRun], str], None]] = {
    "mlflow": _write_mlflow,
    "wandb": _write_wandb,
    "tensorboard": _write_tensorboard,
}


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
