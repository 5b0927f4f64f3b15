"""Break one line at a time in a copy of the tree and see whether the tests notice: `tests/mutations.toml`.

    python tests/mutate.py                    run all mutations
    python tests/mutate.py --only ID ID ...   run some of them
    python tests/mutate.py --list             print what each one breaks, and run nothing

Prints a line per mutation: `caught` by a test, `SURVIVED`, or `BROKEN` where the mutation itself needs
mending: its text is not found exactly once, the result is no Python, or its tests fail without it. The exit
code is 0 only if all are caught. The checkout is never changed.
"""

import argparse
import contextlib
import os
import queue
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MUTATIONS = Path(__file__).with_name("mutations.toml")

AREAS = ("money", "safety", "arithmetic", "records", "training", "cli")
CAUGHT, SURVIVED, BROKEN = "caught", "SURVIVED", "BROKEN"

#: What a copy can do without: environments, history and caches.
NOT_COPIED = shutil.ignore_patterns(
    *(".git", ".venv*", ".build", "dist", "*.egg-info", "__pycache__"),
    *(".pytest_cache", ".mypy_cache", ".ruff_cache", ".hypothesis"),
)
#: A mutation that makes the tests hang is caught as well.
TIMEOUT_S = 600
#: pytest's exit codes: a test failed; collecting them failed.
FAILED_CODES = (1, 2)
_FAILURE = re.compile(r"^(?:FAILED|ERROR) (\S+)", re.MULTILINE)


@dataclass(frozen=True, kw_only=True)
class Mutation:
    """Replace `find`, which occurs once in `file`, by `replace`: one of `tests` should fail then."""

    id: str
    area: str
    file: str
    find: str
    replace: str
    tests: tuple[str, ...]  # pytest targets, relative to the root
    why: str  # what a user would lose
    slow: bool = False  # whether tests marked slow are run too


@dataclass(frozen=True, kw_only=True)
class Outcome:
    mutation: Mutation
    result: str
    seconds: float
    detail: str = ""  # the test that failed, or what is wrong with the mutation


@dataclass(frozen=True, kw_only=True)
class TestRun:
    code: int | None  # None if it ran out of time
    failed: tuple[str, ...]  # ids of the tests that failed
    output: str


def load(path: Path = MUTATIONS) -> list[Mutation]:
    """Read the mutations. Raise ValueError if one is not well-formed."""
    entries = tomllib.loads(path.read_text(encoding="utf-8"))["mutation"]
    mutations = [Mutation(**{**entry, "tests": tuple(entry["tests"])}) for entry in entries]
    twice = [name for name, number in Counter(mutation.id for mutation in mutations).items() if number > 1]
    if twice:
        raise ValueError(f"two mutations are called {', '.join(twice)}")
    for mutation in mutations:
        if mutation.area not in AREAS:
            raise ValueError(f"{mutation.id}: the area is one of {', '.join(AREAS)}, not {mutation.area}")
        if mutation.find == mutation.replace or not mutation.tests:
            raise ValueError(f"{mutation.id}: it changes nothing, or names no test")
    return mutations


class Copy:
    """A copy of the tree in which one file at a time is mutated.

    Compiled modules stay valid throughout: a mutated file is newer than them, and a restored one has its
    old time again.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        shutil.copytree(ROOT, root, ignore=NOT_COPIED, symlinks=True)

    @contextlib.contextmanager
    def mutated(self, mutation: Mutation) -> Iterator[str]:
        """Apply the mutation for the time of the context. Yield what is wrong with it, or ""."""
        path = self.root / mutation.file
        if not path.is_file():
            yield "no such file"
            return
        original, before = path.read_text(encoding="utf-8"), path.stat()
        number = original.count(mutation.find)
        if number != 1:
            yield f"the text is found {number} times"
            return
        text = original.replace(mutation.find, mutation.replace)
        try:
            if path.suffix == ".py":
                compile(text, mutation.file, "exec")
            path.write_text(text, encoding="utf-8")
            yield ""
        except SyntaxError as error:
            yield f"no Python: {error}"
        finally:
            path.write_text(original, encoding="utf-8")
            os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))

    def test(self, targets: Iterable[str], *, slow: bool, stop_at_first: bool, compiles: bool) -> TestRun:
        """Run pytest on `targets`. compiles: whether compiled modules are kept."""
        command = [
            *(sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", "--tb=no", "-rfE"),
            *("-m", "not gpu" if slow else "not slow and not gpu"),
            *(["-x"] if stop_at_first else []),
            *dict.fromkeys(targets),
        ]
        code_path = os.pathsep.join(str(self.root / name) for name in ("launcher", "train"))
        environment = {**os.environ, "PYTHONPATH": code_path, "PYTHONDONTWRITEBYTECODE": "1"}
        if compiles:
            del environment["PYTHONDONTWRITEBYTECODE"]
        # A process group of its own: what a broken program leaves behind is ended with it.
        process = subprocess.Popen(
            command,
            cwd=self.root,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        code: int | None = None
        try:
            output, _ = process.communicate(timeout=TIMEOUT_S * (1 if stop_at_first else 10))
            code = process.returncode
        except subprocess.TimeoutExpired as error:
            output = str(error.stdout or "")
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        return TestRun(code=code, failed=tuple(_FAILURE.findall(output)), output=output)


def failing_targets(copy: Copy, mutations: Sequence[Mutation]) -> dict[str, str]:
    """Run all tests that the mutations name, unmutated. Return, by target that does not pass, why."""
    failing: dict[str, str] = {}
    for slow in (False, True):
        named = [target for mutation in mutations if mutation.slow == slow for target in mutation.tests]
        targets = [target for target in named if (copy.root / target.partition("::")[0]).exists()]
        failing |= {target: "no such test file" for target in named if target not in targets}
        if not targets:
            continue
        run = copy.test(targets, slow=slow, stop_at_first=False, compiles=True)
        for test in run.failed:
            for target in targets:
                if test == target or test.startswith((f"{target}::", f"{target}/", f"{target}[")):
                    failing[target] = f"fails unmutated: {test}"
        if run.code != 0 and not run.failed:
            print(run.output[-2000:], file=sys.stderr)
            failing |= dict.fromkeys(targets, f"pytest ends with {run.code} unmutated")
    return failing


def try_mutation(copy: Copy, mutation: Mutation, failing: Mapping[str, str]) -> Outcome:
    """Apply the mutation, run its tests and take it back."""
    started = time.monotonic()
    result, detail = _result(copy, mutation, failing)
    return Outcome(mutation=mutation, result=result, seconds=time.monotonic() - started, detail=detail)


def _result(copy: Copy, mutation: Mutation, failing: Mapping[str, str]) -> tuple[str, str]:
    for target in mutation.tests:
        if target in failing:
            return BROKEN, failing[target]
    with copy.mutated(mutation) as problem:
        if problem:
            return BROKEN, problem
        run = copy.test(mutation.tests, slow=mutation.slow, stop_at_first=True, compiles=False)
    if run.code is None:
        return CAUGHT, f"no end within {TIMEOUT_S} s"
    if run.code in FAILED_CODES:
        return CAUGHT, next(iter(run.failed), "")
    return (SURVIVED, mutation.why) if run.code == 0 else (BROKEN, f"pytest ends with {run.code}")


def row(outcome: Outcome) -> str:
    return f"{outcome.mutation.id:<34} {outcome.result:<9} {outcome.seconds:6.1f}  {outcome.detail}".rstrip()


def run_all(mutations: Sequence[Mutation], *, jobs: int) -> list[Outcome]:
    """Run the mutations, as many at a time as `jobs`, each job in a copy of its own."""
    with tempfile.TemporaryDirectory(prefix="fastlaunch-mutations-") as folder:
        copies: queue.Queue[Copy] = queue.Queue()
        for number in range(max(1, min(jobs, len(mutations)))):
            copies.put(Copy(Path(folder, str(number))))
        copy = copies.get()
        started = time.monotonic()
        failing = failing_targets(copy, mutations)
        copies.put(copy)
        print(f"{'(unmutated)':<34} {'':<9} {time.monotonic() - started:6.1f}", flush=True)

        def run_next(mutation: Mutation) -> Outcome:
            copy = copies.get()
            try:
                outcome = try_mutation(copy, mutation, failing)
            finally:
                copies.put(copy)
            print(row(outcome), flush=True)
            return outcome

        with ThreadPoolExecutor(copies.qsize()) as pool:
            return list(pool.map(run_next, mutations))


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code: 0 if every mutation was caught, 1 if not, 2 for a request that makes no sense."""
    parser = argparse.ArgumentParser(description="Run the mutations of tests/mutations.toml.")
    parser.add_argument("--only", nargs="+", metavar="ID", help="run these alone")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="how many at a time (default 1)")
    parser.add_argument("--list", action="store_true", help="print what each breaks, and run nothing")
    options = parser.parse_args(argv)
    mutations = load()
    if options.only:
        unknown = set(options.only) - {mutation.id for mutation in mutations}
        if unknown:
            parser.error(f"there is no mutation {', '.join(sorted(unknown))}; --list prints them")
        mutations = [mutation for mutation in mutations if mutation.id in options.only]
    if options.list:
        for mutation in mutations:
            print(f"{mutation.area:<10} {mutation.id:<34} {mutation.why}")
        return 0
    started = time.monotonic()
    outcomes = run_all(mutations, jobs=options.jobs)
    results = Counter(outcome.result for outcome in outcomes)
    areas = Counter(outcome.mutation.area for outcome in outcomes)
    print(
        f"\n{results[CAUGHT]} of {len(outcomes)} caught, {results[SURVIVED]} survived, "
        f"{results[BROKEN]} broken, in {time.monotonic() - started:.0f} s\n"
        + ", ".join(f"{areas[area]} {area}" for area in AREAS)
    )
    return 0 if results[CAUGHT] == len(outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
