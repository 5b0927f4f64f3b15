"""`World`: everything that a command acts on, such as settings, prices, machine, backends, clock and user.

`Advice` guards what only informs the user, and `StopRequest` notes the user's wish to stop.
"""

import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, date, datetime
from functools import cache, cached_property, partial
from pathlib import Path
from site import getsitepackages, getusersitepackages
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any, Self, cast

from fastlaunch.aws.client import Aws
from fastlaunch.backends.ec2.ec2 import Ec2Backend
from fastlaunch.backends.local import LocalBackend, LocalSettings
from fastlaunch.backends.protocol import Backend, CloudBackend
from fastlaunch.backends.s3_sync import KnownSegments
from fastlaunch.backends.sagemaker.sagemaker import SageMakerBackend
from fastlaunch.core.errors import UserError
from fastlaunch.core.paths import training_package
from fastlaunch.core.settings import Settings, load_settings
from fastlaunch.core.terminal import as_warning, report_line
from fastlaunch.core.units import is_region, utc_day
from fastlaunch.jobs import working_directory
from fastlaunch.jobs.machine import Machine, this_machine
from fastlaunch.jobs.working_directory import ask_git

if TYPE_CHECKING:
    from fastlaunch.catalog.prices import Catalogue
    from fastlaunch.ledger.ledger import Ledger
    from fastlaunch.lifecycle.display import Display

#: File in the home folder for tracebacks of guarded errors.
ERROR_LOG = "errors.log"
#: The subject of warnings where runs are shown.
PROGRESS = "the display of progress"
#: Time-outs to connect to AWS and to wait for an answer, for looks at what is under way.
_SHORT_TIMEOUTS_S = (3.0, 20.0)


@dataclass(kw_only=True)
class Advice:
    """Guards advisory code. Each kind of error is reported once, as a warning."""

    home: Path
    #: Called with a warning.
    warn: Callable[[str], None]
    _warned: set[tuple[str, type[Exception]]] = field(default_factory=set)

    def guard(self, what: str) -> "_Guard":
        """Return a context manager that turns an exception of its block into a warning.

        Interruptions pass through. what: the subject of the warning, such as `the comparison`. Let the block
        return or store its decision in its last statement, so that a block that fails half-way decides
        nothing.
        """
        return _Guard(self, what)

    def _take(self, what: str, error: Exception) -> None:
        if (what, type(error)) in self._warned:
            return
        self._warned.add((what, type(error)))
        if isinstance(error, UserError):
            why = error.message
        else:
            why = f"{type(error).__name__}: {error}".rstrip(": ") + self._logged(what, error)
        self.warn(f"{what} failed, which ends nothing: {why}")

    def _logged(self, what: str, error: Exception) -> str:
        """Append the error's traceback to the log; return where it is, in words."""
        path, lines = self.home / ERROR_LOG, "".join(traceback.format_exception(error))
        with suppress(OSError):
            with path.open("a", encoding="utf-8", errors="backslashreplace") as log:
                log.write(f"{datetime.now(UTC):%Y-%m-%d %H:%M:%S} UTC: {what}\n{lines}\n")
            return f" (a bug in fastlaunch: please report it with its traceback in {path})"
        return ""


@dataclass(frozen=True)
class _Guard:
    """A class, so that type checkers know that code after the block is reached."""

    advice: Advice
    what: str

    def __enter__(self) -> None:
        return

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if not isinstance(error, Exception):
            return False
        self.advice._take(self.what, error)
        return True


@dataclass(kw_only=True)
class StopRequest:
    """Whether the user asked this process to stop: by Ctrl-C, SIGTERM, or closing its terminal.

    It listens as a context manager. The first signal is noted in `by`; every later one raises
    KeyboardInterrupt in the main thread, and in other threads that sleep through `sleeping`.
    """

    by: str | None = None
    _num_interrupts: int = 0
    _before: dict[int, Any] = field(default_factory=dict)

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                # Keep ignored signals ignored, for nohup.
                if signal.getsignal(number) is not signal.SIG_IGN:
                    self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def sleeping(self, sleep: Callable[[float], None]) -> Callable[[float], None]:
        """Return `sleep` for a thread other than the main one, which alone receives signals."""
        num_raised = self._num_interrupts

        def sleep_unless_interrupted(seconds: float) -> None:
            nonlocal num_raised
            sleep(seconds)
            if num_raised < self._num_interrupts:
                num_raised = self._num_interrupts
                raise KeyboardInterrupt

        return sleep_unless_interrupted

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.by is not None:
            self._num_interrupts += 1
            raise KeyboardInterrupt
        self.by = "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name


@dataclass(frozen=True, kw_only=True)
class World:
    """Everything that a command or an API call acts on. Tests pass a fake one."""

    settings: Settings
    #: By name. Those for AWS only look, and give up soon.
    backends: Mapping[str, Backend]
    #: The command line as typed, or its equivalent, without the program's name.
    argv: tuple[str, ...] = ()
    #: Shows the user a line; asks a question, or None if nobody can be asked.
    report: Callable[[str], None] = report_line
    ask: Callable[[str], bool] | None = None
    #: Shows the line on the region; by default `report`.
    report_region: Callable[[str], None] | None = None
    #: Query the machine, git and AWS once, on first use.
    find_machine: Callable[[], Machine] = this_machine
    #: Returns the commit of the training code; None outside a checkout.
    find_commit: Callable[[], str | None] | None = None
    connect: Callable[[], Aws] = Aws
    #: For following a job.
    monotonic_s: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep
    #: With a time zone.
    now: Callable[[], datetime] = lambda: datetime.now(UTC)
    #: Lines reported so far, of those that are reported once.
    reported: set[str] = field(default_factory=set)
    #: What looks at runs on AWS brought from the bucket.
    known_segments: KnownSegments = field(default_factory=dict)

    @property
    def today(self) -> date:
        """The day by UTC."""
        return utc_day(self.now())

    @cached_property
    def machine(self) -> Machine:
        return self.find_machine()

    @cached_property
    def catalogue(self) -> "Catalogue":
        """Instance types and prices: those that ship, and the user's own."""
        from fastlaunch.catalog.load import load_catalogue

        return load_catalogue(*self.settings.price_files())

    @cached_property
    def aws(self) -> Aws:
        return self.connect()

    @cached_property
    def commit(self) -> str | None:
        """The commit of the training code; None if it is not known."""
        return self.find_commit() if self.find_commit else None

    def own_region(self, *, of_prices: bool = False) -> str:
        """Return the default region; report it once, unless the config file names it.

        of_prices: for commands about prices, which do not report the built-in default region. Raises
        UserError if the environment names an invalid region.
        """
        region, source = self.settings.region, self.settings.region_from
        if source and not is_region(region):
            raise UserError(
                f"{region!r}, of {source}, is not the name of a region",
                "set one such as us-east-1; or `region` in the config file, which counts first",
            )
        default = "the default; no config file, AWS_REGION or profile names one"
        why = f"{source} names it" if source else default
        line = f"region {region}: {why}"
        if (source or (source == "" and not of_prices)) and line not in self.reported:
            self.reported.add(line)
            (self.report_region or self.report)(line)
        return region

    def check_can_ask(self, *, yes: bool) -> None:
        """Raise UserError if there is a question and nobody to ask. yes: the answer, if it is known."""
        if not yes and self.ask is None:
            raise UserError(
                "there is no terminal to ask on",
                "add --yes (yes=True in Python) to go ahead without being asked",
            )

    def confirm(self, question: str, *, yes: bool) -> None:
        """Return if the user agrees. Raises UserError if not, and if there is nobody to ask."""
        self.check_can_ask(yes=yes)
        if not yes and not (self.ask and self.ask(question)):
            raise UserError("nothing was done")

    @cached_property
    def advice(self) -> Advice:
        """The guard of verdicts, predictions and displays."""
        return Advice(home=self.settings.home.absolute(), warn=lambda line: self.report(as_warning(line)))

    @property
    def cloud_backends(self) -> dict[str, CloudBackend]:
        """The backends whose plans cost money, by name, with this command's AWS and clock.

        They serve actions that must happen, such as starting and ending machines.
        """
        home, known = self.settings.home.absolute(), self.known_segments
        return {
            name: make(aws=self.aws, home=home, sleep=self.sleep, now=self.now, known_segments=known)
            for name, make in CLOUD.items()
        }


@dataclass(frozen=True, kw_only=True)
class LaunchContext:
    """What a launcher and its parts act on while they carry out runs."""

    #: By name. The backends for AWS have a clock and a sleep of their own.
    backends: Mapping[str, Backend | CloudBackend]
    ledger: "Ledger"
    settings: Settings
    display: "Display"
    stop: StopRequest
    #: Between two looks at a job on this machine.
    sleep: Callable[[float], None] = time.sleep
    #: Called with a line for the user.
    report: Callable[[str], None] = report_line

    @property
    def home(self) -> Path:
        return self.settings.home.absolute()

    @cached_property
    def advice(self) -> Advice:
        """The guard of verdicts, predictions and displays."""
        return Advice(home=self.home, warn=lambda line: self.report(as_warning(line)))

    @property
    def cloud_backends(self) -> dict[str, CloudBackend]:
        """The backends whose plans cost money, by name."""
        return {
            name: cast(CloudBackend, backend) for name, backend in self.backends.items() if name != "local"
        }


def default_context(argv: tuple[str, ...] = (), *, config_may_lack: bool = False) -> World:
    """Return the world of this user on this machine. argv: see `World`."""
    settings, package = load_settings(config_may_lack=config_may_lack), training_package()
    is_checkout = any((folder / ".git").exists() for folder in package.parents)
    return World(
        settings=settings,
        backends=make_backends(settings, cache(this_machine)),
        argv=argv,
        ask=_ask if sys.stdin.isatty() else None,
        find_commit=partial(commit_of, package) if is_checkout else None,
    )


def _ask(question: str) -> bool:
    report_line(f"{question} [y/N]")
    return input().strip().lower() in ("y", "yes")


def make_backends(settings: Settings, find_machine: Callable[[], Machine]) -> Mapping[str, Backend]:
    """Return every backend by name, made on first use. Those for AWS only look."""
    home = settings.home.absolute()
    makers: dict[str, Callable[[], Backend]] = {
        "local": lambda: LocalBackend(local_settings(home, find_machine(), os.environ))
    }
    for name, make in CLOUD.items():
        # Without a network, a look must give up soon. Actions that must happen, such as ending a machine, are
        # tried again.
        makers[name] = partial(make, aws=Aws(attempts=2, timeouts_s=_SHORT_TIMEOUTS_S), home=home)
    return _Backends(makers)


class _Backends(Mapping[str, Backend]):
    def __init__(self, makers: Mapping[str, Callable[[], Backend]]) -> None:
        self._makers = {name: cache(make) for name, make in makers.items()}

    def __getitem__(self, name: str) -> Backend:
        return self._makers[name]()

    def __iter__(self) -> Iterator[str]:
        return iter(self._makers)

    def __len__(self) -> int:
        return len(self._makers)


#: The backends whose plans cost money.
CLOUD: Mapping[str, Callable[..., Any]] = {"ec2": Ec2Backend, "sagemaker": SageMakerBackend}


def local_settings(home: Path, machine: Machine, environ: Mapping[str, str]) -> LocalSettings:
    """Return the settings of the local backend, from the environment and the installed training package."""
    package = training_package()
    return LocalSettings(
        home=home.absolute(),
        working_directory=Path.cwd(),
        pythonpath=pythonpath_of(package.parent, environ),
        # On a GPU torchrun's default number of threads is fine, and the user's choice takes precedence.
        num_cores=None if machine.devices or "OMP_NUM_THREADS" in environ else machine.num_cores,
        commit=commit_of(package),
    )


def pythonpath_of(folder: Path, environ: Mapping[str, str]) -> str | None:
    """Return the PYTHONPATH with which processes import from `folder`; None if they do anyway."""
    inherited = environ.get("PYTHONPATH", "").split(os.pathsep)
    # Site packages are importable anyway, and must not come before the standard library.
    if str(folder) in (*inherited, *getsitepackages(), getusersitepackages()):
        return None
    return os.pathsep.join([str(folder), *filter(None, inherited)])


@cache
def commit_of(package: Path) -> str | None:
    """Return the commit of the training package's checkout, with `-dirty` if files have changed."""
    try:
        ask_git(package, "ls-files", "--error-unmatch", "__init__.py")
    except UserError:
        return None
    return working_directory.commit_of(package)
