"""Callbacks that record the steps of a Trainer of Transformers or Lightning, which fetches its own batches.

What lies between the end of a step and the begin of the next is the wait for data, but for evaluations and
checkpoints, which the Trainers announce. Under Accelerate a script has a loop of its own: it uses `steps`.
"""

import time
from typing import Any

from fastlaunch_train.script.recording import Recording
from fastlaunch_train.script.steps import batch_samples, current


def transformers_callback() -> Any:
    """Return a TrainerCallback for `Trainer(callbacks=[...])`. Raises ImportError without Transformers.

    The Trainer tells no step's loss. After a SIGTERM it saves, if it saves at all, and ends.
    """
    from transformers import TrainerCallback

    recording = current()
    if recording is None:
        return TrainerCallback()

    class StepCallback(TrainerCallback):  # type: ignore[misc, unused-ignore]
        def __init__(self, recording: Recording) -> None:
            self._recording = recording
            self._since = time.perf_counter()
            self._num_batches = 1

        def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            self._recording.start()
            self._since = time.perf_counter()

        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            self._recording.batch_fetched(time.perf_counter() - self._since)

        def on_substep_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            # An epoch's last step may have fewer of them.
            self._num_batches += 1

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            self._recording.step(args.train_batch_size * self._num_batches)
            self._num_batches = 1
            self._since = time.perf_counter()
            if self._recording.stop_requested():
                control.should_training_stop = True
                control.should_save = control.should_save or str(args.save_strategy.value) != "no"

        def on_evaluate(
            self, args: Any, state: Any, control: Any, metrics: dict[str, float] | None = None, **_: Any
        ) -> None:
            found = metrics or {}
            accuracy = found.get("eval_accuracy")
            name = None if accuracy is None else "accuracy"
            if self._recording.is_started:
                self._recording.evaluate(found.get("eval_loss"), name, accuracy, "validation", 0)
            self._since = time.perf_counter()

        def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            self._recording.has_saved()
            self._since = time.perf_counter()

    return StepCallback(recording)


def lightning_callback() -> Any:
    """Return a Callback for `Trainer(callbacks=[...])`. Raises ImportError without Lightning.

    A step is one of the optimizer's; its loss is the sum of what its batches contribute. Of validation it
    records `val_loss` and `val_acc` or `val_accuracy`, as the module logs them. After a SIGTERM the Trainer
    ends, and `fit` returns.
    """
    import lightning.pytorch as lightning

    recording = current()
    if recording is None:
        return lightning.Callback()

    class StepCallback(lightning.Callback):  # type: ignore[misc, name-defined, unused-ignore]
        def __init__(self, recording: Recording) -> None:
            self._recording = recording
            self._since = time.perf_counter()
            self._steps_done, self._num_batches, self._saved = 0, 0, False
            self._loss: Any = None

        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            # Lightning's handler of SIGTERM ends `fit` with an exception between two batches.
            self._recording.interrupts.install()
            self._steps_done = trainer.global_step
            self._recording.start()
            self._since = time.perf_counter()

        def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
            if self._saved:
                self._recording.has_saved()
                self._saved = False
                self._since = time.perf_counter()
            self._recording.batch_fetched(time.perf_counter() - self._since)

        def on_train_batch_end(
            self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
        ) -> None:
            self._num_batches += 1
            loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
            if loss is not None:
                self._loss = loss if self._loss is None else self._loss + loss
            if trainer.global_step > self._steps_done:
                self._steps_done = trainer.global_step
                samples = batch_samples(trainer.train_dataloader)
                self._recording.step(samples and samples * self._num_batches, self._loss)
                self._num_batches, self._loss = 0, None
                if self._recording.stop_requested():
                    trainer.should_stop = True
            self._since = time.perf_counter()

        def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
            if trainer.sanity_checking or not self._recording.is_started:
                return
            metrics = trainer.callback_metrics
            accuracy = metrics.get("val_accuracy", metrics.get("val_acc"))
            name = None if accuracy is None else "accuracy"
            self._recording.evaluate(metrics.get("val_loss"), name, accuracy, "validation", 0)
            self._since = time.perf_counter()

        def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
            # It is written after this.
            self._saved = True

    return StepCallback(recording)
