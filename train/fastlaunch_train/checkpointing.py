"""When a run saves and resumes: all ranks' state in one checkpoint of rank 0's."""

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fastlaunch_train.checks.finiteness import not_finite, told, told_of
from fastlaunch_train.distributed.parallel import Process, agree, broadcast
from fastlaunch_train.loop.checkpoint import (
    Identity,
    checkpoint_path,
    latest_checkpoint,
    random_state,
    read_checkpoint,
    restore_random_state,
    step_of,
    write_checkpoint,
)
from fastlaunch_train.loop.evaluation import Evaluations
from fastlaunch_train.phases import PhaseClock
from fastlaunch_train.process.failures import NanLossError
from fastlaunch_train.recipes.recipes import RecipeError
from fastlaunch_train.steppers.stepping import Stepper

log = logging.getLogger("fastlaunch_train")

#: A checkpoint that takes longer is in danger where EC2 gives two minutes to end.
LONG_CHECKPOINT_S = 60.0
#: Of what is in a checkpoint beside a Stepper's state: each rank's Evaluations.state().
EVALUATIONS = "evaluations"
#: Under which a Stepper's state holds each rank's share, where DeepSpeed has made them.
SHARES = "deepspeed"


@dataclass(frozen=True, kw_only=True)
class Checkpointing:
    """Checkpoints of `stepper` and, where there are any, of `evaluations` with the best weights so far.

    sharded: each rank has its own share of the weights, so each one's best are saved.
    """

    directory: Path
    identity: Identity
    process: Process
    stepper: Stepper
    evaluations: Evaluations | None
    sharded: bool
    phase: PhaseClock

    def save(self, step: int) -> None:
        """Save the checkpoint of `step`. Every rank calls this.

        Raises NanLossError, on every rank, where it would hold what is not finite: nobody can go on from it,
        and it would take the place of one from which they can.
        """
        seconds = self.phase("checkpoint", lambda: self._save(step), step=step)
        if seconds > LONG_CHECKPOINT_S:
            log.warning(
                "warning: the checkpoint took %.0f s: a spot instance is gone two minutes after its notice, "
                "and the checkpoint has to be uploaded in them too",
                seconds,
            )

    def _save(self, step: int) -> str | None:
        random_states = self._gather(random_state(self.process.device))
        state = self.stepper.state()
        if self.evaluations is not None:
            own = self.evaluations.state()
            state[EVALUATIONS] = self._gather(own) if self.sharded else [own]
        bad = not_finite(_whole(state), self.stepper.model) if self.process.rank == 0 else []
        if agree(self.process, [float(len(bad))])[0]:
            kept = latest_checkpoint(self.directory)
            raise NanLossError(
                f"{told_of(step, bad)}: it is not saved, "
                + (f"{kept.name} is the last checkpoint" if kept else "and there is no checkpoint before it")
            )
        if self.process.rank != 0:
            return None
        path = write_checkpoint(
            self.directory, step=step, identity=self.identity, state=state, random_states=random_states
        )
        return path.name

    def resume(self, *, last_step: int) -> int:
        """The step of the newest checkpoint that rank 0 sees, once it is loaded; 0 if there is none.

        Raises RecipeError if it is of another job or of a later step than `last_step`, or holds what is not
        finite.
        """
        newest = latest_checkpoint(self.directory)
        seen = step_of(newest) if newest else 0
        step = round(broadcast(self.process, [float(seen)])[0])
        if step == 0:
            return 0
        path = checkpoint_path(self.directory, step)
        saved = read_checkpoint(path, identity=self.identity)
        # One killed after its last checkpoint has nothing left to do, and completes.
        if step > last_step:
            raise RecipeError(f"{path} is after step {step}, and --steps is {last_step}", "give more --steps")
        bad = not_finite(_whole(saved.state), self.stepper.model)
        if bad:
            raise RecipeError(
                f"{path} holds what is not finite: {told(bad)}", "remove it, so that the one before is taken"
            )
        evaluations = saved.state.pop(EVALUATIONS, None)
        if self.evaluations is not None and evaluations is not None:
            self.evaluations.load_state(evaluations[self.process.rank if self.sharded else 0])
        self.stepper.load_state(saved.state)
        restore_random_state(saved.random_states[self.process.rank], self.process.device)
        return step

    def _gather(self, value: Any) -> list[Any]:
        """Every rank's value on rank 0; this rank's elsewhere."""
        if self.process.world_size == 1:
            return [value]
        gathered: list[Any] | None = [None] * self.process.world_size if self.process.rank == 0 else None
        torch.distributed.gather_object(value, gathered)
        return gathered or [value]


def _whole(state: dict[str, Any]) -> dict[str, Any]:
    """What has to be finite: DeepSpeed's shares are padded with what the memory happened to hold before.

    (In 0.19.8 `partition_parameters` leaves the end of a parameter's last share as `torch.empty` made it. The
    model that was gathered from the shares has none of it.)
    """
    return {"model": state["model"]} if SHARES in state and "model" in state else state
