"""Read the step series of runs, wherever their record files are."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from fastlaunch.core.errors import UserError
from fastlaunch.ledger.ids import recorded_run_id
from fastlaunch.ledger.ledger import IMPORT, Run
from fastlaunch.lifecycle.importer import ARCHIVE_SUFFIXES, unpacked
from fastlaunch.measure.steptime import RankSeries, read_series
from fastlaunch_train.records.records import SUFFIXES, RecordError, read_header


def series_of(runs: Sequence[Run]) -> dict[str, tuple[RankSeries, ...]]:
    """Return the ranks' series by run id, without the runs whose record files are gone or cannot be read.

    An archive with many of the runs is unpacked once.
    """
    places: dict[Path, list[Run]] = {}
    for run in runs:
        if run.directory is not None:
            places.setdefault(run.directory, []).append(run)
    series: dict[str, tuple[RankSeries, ...]] = {}
    for place, of_place in places.items():
        with suppress(UserError, OSError), _files(place, of_place) as files:
            run_series = {run.id: read_series(files.get(run.recorded_id, ())) for run in of_place}
            series |= {run_id: ranks for run_id, ranks in run_series.items() if ranks}
    return series


@contextmanager
def _files(place: Path, runs: Sequence[Run]) -> Iterator[Mapping[str, Sequence[Path]]]:
    """Give the record files of the runs, by their ids."""
    if place.name.endswith(ARCHIVE_SUFFIXES):
        with unpacked(place) as folder:
            yield _by_run(folder.rglob("*"))
    elif runs[0].backend == IMPORT:
        yield _by_run(place.rglob("*") if place.is_dir() else (place,))
    else:
        # The run's folder.
        yield {run.id: _records(place.iterdir()) for run in runs}


def _records(paths: Iterable[Path]) -> list[Path]:
    return sorted(path for path in paths if path.name.endswith(SUFFIXES) and path.is_file())


def _by_run(paths: Iterable[Path]) -> dict[str, list[Path]]:
    files: dict[str, list[Path]] = {}
    for path in _records(paths):
        with suppress(OSError, RecordError):
            files.setdefault(recorded_run_id(read_header(path)), []).append(path)
    return files
