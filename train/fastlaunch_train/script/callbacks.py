"""Callbacks that record the steps of a Trainer of Transformers or Lightning, which fetches its own batches.

The time between the end of a step and the beginning of the next is the wait for data, except for evaluations
and checkpoints, which the Trainers announce. A script under Accelerate has a loop of its own and uses
`steps`.
"""

import time
from typing import Any

from fastlaunch_train.loop.counting import SampleCounter
from fastlaunch_train.records.records import BATCH_SIZE_PHASE
from fastlaunch_train.script.recording import Recording
from fastlaunch_train.script.steps import current, nominal_batch


def transformers_callback() -> Any:
    """Return a TrainerCallback for `Trainer(callbacks=[...])`. Raises ImportError without Transformers.

    The Trainer gives callbacks neither a step's loss nor its batches: while it trains, batches are counted in
    its `get_batch_samples`, which releases before 4.46 lack. After a SIGTERM the Trainer saves, if it saves
    at all, and ends.
    """
    from transformers import Trainer, TrainerCallback

    recording = current()
    if recording is None:
        return TrainerCallback()
    trainers: Any = Trainer

    class StepCallback(TrainerCallback):  # type: ignore[misc, unused-ignore]
        def __init__(self, recording: Recording) -> None:
            self._recording = recording
            self._since = time.perf_counter()
            self._get_batch_samples: Any = None  # the Trainer's own, while it is replaced

        def on_train_begin(self, args: Any, state: Any, control: Any, **of: Any) -> None:
            nominal = nominal_batch(of.get("train_dataloader"))
            size = nominal and nominal * args.gradient_accumulation_steps
            if self._recording.is_started:
                # This is another training, or another size that `auto_find_batch_size` tries.
                self._recording.drop_batches()
                is_smaller = args.auto_find_batch_size and size != self._recording.batch_size
                self._recording.phase(*((BATCH_SIZE_PHASE, str(size)) if is_smaller else ("between loops",)))
            self._recording.batch_size = size
            self._count(SampleCounter(nominal))
            self._recording.start()
            self._since = time.perf_counter()

        def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            self._stop_counting()

        def _count(self, counter: SampleCounter) -> None:
            """Count the batches that the Trainer fetches for its steps from now on."""
            self._stop_counting()
            fetch = self._get_batch_samples = getattr(trainers, "get_batch_samples", None)
            if fetch is None:
                return

            def get_batch_samples(trainer: Any, *args: Any, **kwargs: Any) -> Any:
                batches, num_items = fetch(trainer, *args, **kwargs)
                for batch in batches:
                    self._recording.batch_fetched(counter.count(batch))
                return batches, num_items

            trainers.get_batch_samples = get_batch_samples

        def _stop_counting(self) -> None:
            if self._get_batch_samples is not None:
                trainers.get_batch_samples = self._get_batch_samples
                self._get_batch_samples = None

        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            self._recording.waited(time.perf_counter() - self._since)

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            self._recording.step()
            self._since = time.perf_counter()
            if self._recording.stop_requested():
                control.should_training_stop = True
                control.should_save = control.should_save or str(args.save_strategy.value) != "no"

        def on_evaluate(
            self, args: Any, state: Any, control: Any, metrics: dict[str, float] | None = None, **_: Any
        ) -> None:
            values = metrics or {}
            accuracy = values.get("eval_accuracy")
            name = None if accuracy is None else "accuracy"
            if self._recording.is_started:
                self._recording.evaluate(values.get("eval_loss"), name, accuracy, "validation", 0)
            self._since = time.perf_counter()

        def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            self._recording.has_saved()
            self._since = time.perf_counter()

    return StepCallback(recording)


def lightning_callback() -> Any:
    """Return a Callback for `Trainer(callbacks=[...])`. Raises ImportError without Lightning.

    A step is an optimizer step; its loss sums up its batches' contributions. The callback records `val_loss`
    and `val_acc` or `val_accuracy` from validation, as the module logs them. After a SIGTERM the Trainer
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
            self._counter = SampleCounter()
            self._steps_done, self._saved = 0, False
            self._loss: Any = None

        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            # Lightning's handler of SIGTERM ends `fit` with an exception between two batches.
            self._recording.interrupts.install()
            self._steps_done = trainer.global_step
            self._loss = None
            self._recording.drop_batches()
            nominal = nominal_batch(trainer.train_dataloader)
            self._recording.batch_size = nominal and nominal * trainer.accumulate_grad_batches
            self._counter = SampleCounter(nominal)
            self._recording.start()
            self._since = time.perf_counter()

        def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
            if self._saved:
                self._recording.has_saved()
                self._saved = False
                self._since = time.perf_counter()
            self._recording.waited(time.perf_counter() - self._since)
            self._recording.batch_fetched(self._counter.count(batch))

        def on_train_batch_end(
            self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
        ) -> None:
            loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
            if loss is not None:
                self._loss = loss if self._loss is None else self._loss + loss
            if trainer.global_step > self._steps_done:
                self._steps_done = trainer.global_step
                self._recording.step(loss=self._loss)
                self._loss = None
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
            # Lightning writes the checkpoint after this call.
            self._saved = True

    return StepCallback(recording)
