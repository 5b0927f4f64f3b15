"""torch.compile as recipes ask for it, with a backend that compiles nothing."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from fastlaunch_train.models.prepare import compile_model, num_compiles
from fastlaunch_train.recipes.recipe import Recipe, RecipeError
from fastlaunch_train.recipes.recipes import resolve_recipe

# The compiler warns of its own doings, and takes a warning that was made an error for a failure of its own.
pytestmark = pytest.mark.filterwarnings("ignore")


class Scaled(nn.Module):
    """A block that shares its compiled graph with those of the same name only."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + len(self.name) * self.linear(x)


class Whole(nn.Module):
    """A model with code of its own around its blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(Scaled("s" * i) for i in range(3)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.blocks(x).sum(0)


def recipe(scope: str = "block") -> Recipe:
    return resolve_recipe("compile", ["compile_backend=eager", f"compile_scope={scope}"])


def compiled(model: nn.Module, blocks: nn.Sequential, scope: str) -> int:
    """How many graphs a forward and backward pass of `model` takes."""
    torch.compiler.reset()
    before = num_compiles()
    assert compile_model(model, blocks, recipe(scope)) is model
    model(torch.ones(2, 4, requires_grad=True)).sum().backward()
    return num_compiles() - before


def test_equal_blocks_share_a_graph_and_names_stay() -> None:
    model = nn.Sequential(*(Scaled("s") for _ in range(3)))
    names = list(model.state_dict())
    expected = model(torch.ones(2, 4))
    assert compiled(model, model, "block") == 1
    assert list(model.state_dict()) == names
    torch.testing.assert_close(model(torch.ones(2, 4)), expected)


def test_a_whole_model_is_one_graph() -> None:
    model = Whole()
    assert compiled(model, model.blocks, "model") == 1


def test_many_different_blocks_are_all_compiled() -> None:
    # Torch's default is to compile 8 of a kind and to run the rest eagerly.
    model = nn.Sequential(*(Scaled("s" * i) for i in range(9)))
    assert compiled(model, model, "block") == 9


def test_a_model_without_blocks_is_told_what_to_do() -> None:
    with pytest.raises(RecipeError, match="the model has none"):
        compile_model(nn.Linear(2, 2), None, recipe())
    compile_model(nn.Linear(2, 2), None, recipe("model"))


@pytest.mark.full
def test_what_a_process_before_has_compiled_is_counted_as_cached(tmp_path: Path) -> None:
    program = (
        "import torch; from torch import nn\n"
        "from fastlaunch_train.models.prepare import compile_model, num_cached\n"
        "from fastlaunch_train.recipes.recipes import resolve_recipe\n"
        "class Twice(nn.Linear):\n"
        "    def forward(self, x): return 2 * super().forward(x)\n"
        "model = nn.Sequential(Twice(4, 4))\n"
        "compile_model(model, model, resolve_recipe('compile'))\n"
        "model(torch.ones(2, 4)).sum().backward(); print(num_cached())\n"
    )
    # The compiler reads the source of what it compiles.
    path = tmp_path / "program.py"
    path.write_text(program)
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    counts = [
        subprocess.run(
            [sys.executable, "-W", "ignore", str(path)],
            env=environment,
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
        for _ in range(2)
    ]
    assert counts[0] == "0" and int(counts[1]) > 0
