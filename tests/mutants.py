"""Draw mutants of ten modules of money, statistics and numerics, and print those that no test notices.

    python tests/mutants.py [--seed 0] [--number 6] [MODULE ...]

cosmic-ray makes them: another operator, comparison or number, a condition turned round, another exception.
A seed draws some of each module, which are run against the tests named beside it, in a copy of the tree: the
checkout is never changed. `make mutants` installs cosmic-ray beside the environment. The exit code is 0 if
all are caught.
"""

import argparse
import ast
import difflib
import random
import shutil
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from cosmic_ray.ast import ast_nodes, get_ast
from cosmic_ray.mutating import mutate_code
from cosmic_ray.plugins import get_operator, operator_names

from mutate import NOT_COPIED, ROOT, rewritten, run_tests

#: The fast tests of each module.
MODULES = {
    "launcher/fastlaunch/catalog/prices.py": "prices price_update cost_ceiling cost",
    "launcher/fastlaunch/placement/cost_ceiling.py": "cost_ceiling",
    "launcher/fastlaunch/ledger/attempt_cost.py": "attempt_cost attempt_price",
    "launcher/fastlaunch/analysis/cost.py": "cost estimate",
    "launcher/fastlaunch/analysis/statistics.py": "analysis_statistics differences",
    "launcher/fastlaunch/analysis/differences.py": "differences analysis_compare looks",
    "launcher/fastlaunch/analysis/convergence.py": "convergence guards",
    "launcher/fastlaunch/measure/steptime.py": "steptime metrics",
    "train/fastlaunch_train/steppers/adafactor.py": "optimizers",
    "train/fastlaunch_train/loop/evaluation.py": "evaluation",
}
FAST = "not cloud and not slow and not full and not gpu"
#: A mutant with which the tests take this many times as long, and half a minute, is caught as well.
SLOWER = 5

Place = tuple[int, int]  # line and column


def mutants_of(source: str) -> dict[Place, list[tuple[str, int]]]:
    """Return all mutants by the place that they change: the name of an operator, and its occurrence."""
    spared = list(_spared(source))
    nodes = list(ast_nodes(get_ast(source)))
    found = defaultdict(list)
    for name in operator_names():
        operator = get_operator(name)
        # Those with arguments replace variables of a name.
        if operator.arguments():
            continue
        positions = (position for node in nodes for position in operator().mutation_positions(node))
        for occurrence, (place, _) in enumerate(positions):
            if not any(start <= place < end for start, end in spared):
                found[place].append((name, occurrence))
    return found


def _spared(source: str) -> Iterator[tuple[Place, Place]]:
    """Yield where annotations, decorators and `strict=True` stand: mutants there are trivial, or none."""
    for node in ast.walk(ast.parse(source)):
        parts = [getattr(node, "annotation", None), getattr(node, "returns", None)]
        parts += getattr(node, "decorator_list", [])
        parts += [node] if isinstance(node, ast.keyword) and node.arg == "strict" else []
        for part in filter(None, parts):
            # The sign of a decorator stands before it.
            yield (part.lineno, part.col_offset - 1), (part.end_lineno, part.end_col_offset)


def draw(source: str, number: int, rng: random.Random) -> Iterator[tuple[int, str]]:
    """Yield the line and the text of mutants of the source, each at another place."""
    found = mutants_of(source)
    for place in rng.sample(sorted(found), min(number, len(found))):
        name, occurrence = rng.choice(found[place])
        text = mutate_code(source, get_operator(name)(), occurrence)
        assert text is not None
        yield place[0], text


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "modules", nargs="*", choices=[*MODULES, []], metavar="MODULE", help="without: all ten"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--number", type=int, default=6, help="of mutants of a module, default: 6")
    options = parser.parse_args()
    num_drawn, num_survived = 0, 0
    with tempfile.TemporaryDirectory(prefix="fastlaunch-mutants-") as folder:
        root = Path(folder, "copy")
        shutil.copytree(ROOT, root, ignore=NOT_COPIED, symlinks=True)
        for module in options.modules or MODULES:
            half = module.partition("/")[0]
            targets = [f"tests/{half}/test_{name}.py" for name in MODULES[module].split()]
            started = time.monotonic()
            code, output = run_tests(root, targets, tier=FAST, unmutated=True)
            if code != 0:
                print(output[-2000:], file=sys.stderr)
                return 2
            timeout_s = 30 + SLOWER * (time.monotonic() - started)
            path = root / module
            source = path.read_text(encoding="utf-8")
            for line, text in draw(source, options.number, random.Random(f"{options.seed} {module}")):
                with rewritten(path, text):
                    code, output = run_tests(root, targets, tier=FAST, timeout_s=timeout_s)
                num_drawn += 1
                if code == 0:
                    num_survived += 1
                    print(f"{module}:{line} SURVIVED", flush=True)
                    changed = difflib.unified_diff(source.splitlines(), text.splitlines(), n=0, lineterm="")
                    print(*[f"  {each}" for each in list(changed)[3:]], sep="\n", flush=True)
            print(f"{module}: done after {time.monotonic() - started:.0f} s", file=sys.stderr, flush=True)
    print(f"{num_drawn - num_survived} of {num_drawn} caught, {num_survived} survived (seed {options.seed})")
    return 1 if num_survived else 0


if __name__ == "__main__":
    sys.exit(main())
