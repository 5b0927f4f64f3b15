"""Steps by the Trainer of Lightning: its own code makes them, of our data and into our records."""

from fastlaunch_train.loop import Progress
from fastlaunch_train.recipes import Recipe, RecipeError
from fastlaunch_train.workload import Workload


def check_lightning(workload: Workload, recipe: Recipe) -> None:
    """Returns if the Trainer can train the workload as the recipe says; else RecipeError."""
    raise RecipeError(f"recipe {recipe.label}: not available yet", "add --set loop=ours")


def train_with_lightning(progress: Progress) -> None:
    """Do the steps that are left of `progress`."""
