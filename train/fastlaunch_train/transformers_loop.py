"""Steps by the Trainer of Transformers: its own code makes them, of our data and into our records."""

from fastlaunch_train.loop import Progress
from fastlaunch_train.recipes import Recipe, RecipeError
from fastlaunch_train.workload import Workload


def check_transformers(workload: Workload, recipe: Recipe) -> None:
    """Returns if the Trainer can train the workload as the recipe says; else RecipeError."""
    raise RecipeError(f"recipe {recipe.label}: not available yet", "add --set loop=ours")


def train_with_transformers(progress: Progress) -> None:
    """Do the steps that are left of `progress`."""
