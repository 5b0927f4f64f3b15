"""Break one line at a time in a copy of the tree and see whether the tests notice: `tests/mutations.toml`.

    python tests/mutate.py                    run all mutations
    python tests/mutate.py --only ID ID ...   run some of them

Prints a line per mutation: `caught` by a test, `SURVIVED`, or `BROKEN` where the mutation itself needs
mending: its text is not found exactly once, the result is no Python, or its tests fail without it. The exit
code is 0 only if all are caught. The checkout is never changed.
"""

import argparse
import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MUTATIONS = Path(__file__).with_name("mutations.toml")

AREAS = ("money", "safety")
CAUGHT, SURVIVED, BROKEN = "caught", "SURVIVED", "BROKEN"

#: What a copy can do without: environments, history and caches.
NOT_COPIED = shutil.ignore_patterns(
    *(".git", ".venv*", ".build", "dist", "*.egg-info", "__pycache__"),
    *(".pytest_cache", ".mypy_cache", ".ruff_cache", ".hypothesis"),
)
#: The tests that are run, as pytest's -m takes it.
TIER = "not slow and not gpu"
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

    def __post_init__(self) -> None:
        assert self.area in AREAS, f"{self.id}: the area is one of {', '.join(AREAS)}, not {self.area}"
        assert self.find != self.replace and self.tests, f"{self.id}: it changes nothing, or names no test"


def load() -> list[Mutation]:
    entries = tomllib.loads(MUTATIONS.read_text(encoding="utf-8"))["mutation"]
    mutations = [Mutation(**{**entry, "tests": tuple(entry["tests"])}) for entry in entries]
    twice = [name for name, number in Counter(each.id for each in mutations).items() if number > 1]
    assert not twice, f"two mutations are called {', '.join(twice)}"
    return mutations


@contextlib.contextmanager
def mutated(root: Path, mutation: Mutation) -> Iterator[str]:
    """Apply the mutation below `root` for the time of the context. Yield what is wrong with it, or ""."""
    path = root / mutation.file
    if not path.is_file():
        yield "no such file"
        return
    original = path.read_text(encoding="utf-8")
    number = original.count(mutation.find)
    if number != 1:
        yield f"the text is found {number} times"
        return
    text = original.replace(mutation.find, mutation.replace)
    try:
        if path.suffix == ".py":
            compile(text, mutation.file, "exec")
        with rewritten(path, text):
            yield ""
    except SyntaxError as error:
        yield f"no Python: {error}"


@contextlib.contextmanager
def rewritten(path: Path, text: str) -> Iterator[None]:
    """Let the file have this text for the time of the context."""
    original, before = path.read_bytes(), path.stat()
    try:
        path.write_text(text, encoding="utf-8")
        yield
    finally:
        path.write_bytes(original)
        # Compiled modules stay valid: a mutated file is newer than its own, a restored one has its old time.
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def run_tests(
    root: Path, targets: Iterable[str], *, tier: str, unmutated: bool = False, timeout_s: float = TIMEOUT_S
) -> tuple[int, str]:
    """Run pytest on `targets` below `root`; return its exit code, 1 if it takes too long, and its output.

    tier: which of them, as pytest's -m takes it. unmutated: to the end, keeping compiled modules, instead of
    to the first failure.
    """
    command = [
        *(sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", "--tb=no", "-rfE"),
        *("-m", tier),
        *([] if unmutated else ["-x"]),
        *dict.fromkeys(targets),
    ]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(str(root / name) for name in ("launcher", "train")),
        "PYTHONDONTWRITEBYTECODE": "" if unmutated else "1",
    }
    # A process group of its own: what a broken program leaves behind is ended with it.
    process = subprocess.Popen(
        command,
        cwd=root,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=timeout_s * (10 if unmutated else 1))
        return process.returncode, output
    except subprocess.TimeoutExpired:
        return 1, f"FAILED no-end-within-{timeout_s:.0f}-s"
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def failing_targets(root: Path, mutations: Sequence[Mutation]) -> dict[str, str]:
    """Run all tests that the mutations name, unmutated. Return, by target that does not pass, why."""
    named = {target for mutation in mutations for target in mutation.tests}
    targets = sorted(target for target in named if (root / target.partition("::")[0]).exists())
    failing = dict.fromkeys(named.difference(targets), "no such test file")
    code, output = run_tests(root, targets, tier=TIER, unmutated=True)
    failures = _FAILURE.findall(output)
    for target in targets:
        for test in failures:
            if test == target or test.startswith((f"{target}::", f"{target}/", f"{target}[")):
                failing[target] = f"fails unmutated: {test}"
    if code != 0 and not failures:
        print(output[-2000:], file=sys.stderr)
        failing |= dict.fromkeys(targets, f"pytest ends with {code} unmutated")
    return failing


def try_mutation(root: Path, mutation: Mutation) -> tuple[str, str]:
    """Return what the tests say of the mutation, and the test that failed or what is wrong with it."""
    with mutated(root, mutation) as problem:
        if problem:
            return BROKEN, problem
        code, output = run_tests(root, mutation.tests, tier=TIER)
    if code in FAILED_CODES:
        return CAUGHT, next(iter(_FAILURE.findall(output)), "")
    return (SURVIVED, mutation.why) if code == 0 else (BROKEN, f"pytest ends with {code}")


def main() -> int:
    parser = argparse.ArgumentParser(description="Run the mutations of tests/mutations.toml.")
    parser.add_argument("--only", nargs="+", metavar="ID", help="run these alone")
    only = parser.parse_args().only
    mutations = load()
    if only:
        unknown = set(only) - {mutation.id for mutation in mutations}
        if unknown:
            parser.error(f"there is no mutation {', '.join(sorted(unknown))}")
        mutations = [mutation for mutation in mutations if mutation.id in only]
    results: Counter[str] = Counter()
    with tempfile.TemporaryDirectory(prefix="fastlaunch-mutations-") as folder:
        root = Path(folder, "copy")
        shutil.copytree(ROOT, root, ignore=NOT_COPIED, symlinks=True)
        failing = failing_targets(root, mutations)
        for mutation in mutations:
            started = time.monotonic()
            broken = [failing[target] for target in mutation.tests if target in failing]
            result, detail = (BROKEN, broken[0]) if broken else try_mutation(root, mutation)
            results[result] += 1
            seconds = time.monotonic() - started
            print(f"{mutation.id:<34} {result:<9} {seconds:6.1f}  {detail}".rstrip(), flush=True)
    print(f"\n{results[CAUGHT]} of {len(mutations)} caught, {results[SURVIVED]} survived, ", end="")
    print(f"{results[BROKEN]} broken")
    return 0 if results[CAUGHT] == len(mutations) else 1


if __name__ == "__main__":
    sys.exit(main())
