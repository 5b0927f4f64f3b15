"""Scripts of the libraries that people train with, each with the one line that records its steps."""

import signal
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from scripts import record, run, start
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, SequentialSampler
from tqdm import tqdm

from fastlaunch.measure.summarize import summarize
from fastlaunch_train.data.cpu_torchvision import prepare_torchvision
from fastlaunch_train.script.steps import nominal_batch

pytestmark = pytest.mark.slow

NANOGPT = """
    import math, os, time
    import torch
    from torch import nn
    import fastlaunch_train as fl

    batch_size, block_size, accumulation, max_iters = 4, 8, 2, 40
    data = torch.randint(64, (1000,), generator=torch.Generator().manual_seed(0))

    def get_batch():
        at = torch.randint(len(data) - block_size, (batch_size,))
        x = torch.stack([data[i : i + block_size] for i in at])
        return x, torch.stack([data[i + 1 : i + 1 + block_size] for i in at])

    model = nn.Sequential(nn.Embedding(64, 16), nn.Linear(16, 64))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    iter_num = 0
    while True:
        if iter_num % 20 == 0:
            with torch.no_grad():
                x, y = get_batch()
                val_loss = nn.functional.cross_entropy(model(x).flatten(0, 1), y.flatten())
                time.sleep(0.1)
            fl.evaluate(loss=val_loss)
        for micro_step in range(accumulation):
            x, y = get_batch()
            loss = nn.functional.cross_entropy(model(x).flatten(0, 1), y.flatten()) / accumulation
            loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        fl.step(num_samples=accumulation * batch_size, loss=loss * accumulation)
        iter_num += 1
        if iter_num > max_iters:
            break
    print(loss.item() * accumulation)
"""


def test_a_loop_in_the_style_of_nanogpt(tmp_path: Path) -> None:
    code, output = run(tmp_path, NANOGPT)
    assert code == 0, output
    found = record(tmp_path)
    assert [step.num_samples for step in found.steps] == [8] * 40
    assert found.steps[-1].loss == pytest.approx(float(output))
    assert [line.step for line in found.evals] == [0, 19, 39]
    assert all(line.seconds > 0.1 for line in found.evals[1:])
    assert sum(step.step_time_s for step in found.steps) < 1
    assert found.header["versions"]["torch"]
    assert summarize([found]).problems == ()


DDP = """
    import os, time
    import torch
    import torch.distributed as dist
    import fastlaunch_train as fl

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sampler = torch.utils.data.DistributedSampler(range(160), shuffle=False)
    loader = torch.utils.data.DataLoader(range(160), batch_size=2, sampler=sampler)
    for batch in fl.steps(loader):
        model(batch.float()[:, None].expand(-1, 8)).mean().backward()
        optimizer.step()
        {body}
    dist.destroy_process_group()
"""


def test_ranks_under_torchrun_have_a_record_each_and_meet_at_the_same_steps(tmp_path: Path) -> None:
    code, output = run(tmp_path, DDP.format(body="time.sleep(0.01 * rank)"), "--nproc", "2")
    assert code == 0, output
    first, second = record(tmp_path, 0), record(tmp_path, 1)
    assert [block.last_step for block in first.blocks] == [block.last_step for block in second.blocks]
    assert (first.header["rank"], second.header["rank"], second.header["world_size"]) == (0, 1, 2)
    summary = summarize([first, second])
    assert summary.problems == ()
    assert (summary.setup.num_gpus, summary.timing.samples_per_step) == (2, 4)


def test_a_signal_stops_all_ranks_after_the_same_step(tmp_path: Path) -> None:
    body = """
        print("ready", flush=True)
        time.sleep(0.05)
        if fl.stop_requested():
            break
    """
    process = start(tmp_path, DDP.format(body=body), "--nproc", "2")
    assert process.stdout is not None
    assert any(line == "ready\n" for line in process.stdout)
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 130, output
    first, second = (record(tmp_path, rank).end for rank in (0, 1))
    assert first is not None and second is not None
    assert (first.status, first.num_steps) == (second.status, second.num_steps)
    assert first.status == "interrupted"


def test_the_nominal_batch_is_known_of_the_loaders_that_say_so_and_through_others() -> None:
    prepare_torchvision()
    from timm.data.loader import PrefetchLoader

    class Stream(IterableDataset[int]):
        def __iter__(self) -> Iterator[int]:
            return iter(data)

    data = list(range(8))
    of_batches = DataLoader(data, batch_sampler=BatchSampler(SequentialSampler(data), 4, drop_last=False))
    loader = DataLoader(data, batch_size=4)
    prefetching = PrefetchLoader(loader, device=torch.device("cpu"))
    batched = DataLoader(data, batch_size=None)
    shown = tqdm(SimpleNamespace(base_dataloader=loader), disable=True)
    endless = SimpleNamespace()
    endless.loader = endless
    loaders = [loader, prefetching, DataLoader(Stream(), batch_size=4), of_batches, shown, batched, endless]
    assert [nominal_batch(each) for each in loaders] == [4, 4, 4, 4, 4, None, None]


@pytest.mark.parametrize("options", ["split_batches=True", "dispatch_batches=True"])
def test_accelerates_loaders_are_counted_as_the_guide_writes_it(tmp_path: Path, options: str) -> None:
    body = f"""
    import os
    import torch
    from accelerate import Accelerator, DataLoaderConfiguration
    import fastlaunch_train as fl

    accelerator = Accelerator(
        cpu=True, gradient_accumulation_steps=2, dataloader_config=DataLoaderConfiguration({options})
    )
    model = torch.nn.Linear(1, 1)
    loader = torch.utils.data.DataLoader(torch.zeros(27, 1), batch_size=8)
    model, optimizer, batches = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.1), loader)
    came = 0
    for epoch in range(2):
        for batch in fl.steps(batches, accumulate=accelerator.gradient_accumulation_steps):
            with accelerator.accumulate(model):
                accelerator.backward(model(batch).mean())
                optimizer.step()
                optimizer.zero_grad()
            came += len(batch)
    os.write(1, b"came %d\\n" % came)
    """
    code, output = run(tmp_path, body, "--nproc", "2")
    assert code == 0, output
    came = sorted(int(line.split()[1]) for line in output.splitlines() if line.startswith("came "))
    found = [record(tmp_path, rank) for rank in (0, 1)]
    assert sorted(sum(step.num_samples or 0 for step in each.steps) for each in found) == came
    nominal = 8 if "split" in options else 16
    assert [each.header["batch_size_per_gpu"] for each in found] == [nominal, nominal]


MODEL = """
    import torch
    from torch import nn
    import fastlaunch_train as fl
    from fastlaunch_train.data.cpu_torchvision import prepare_torchvision

    prepare_torchvision()  # as these tests' own environment needs it

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(8, 1)
        def forward(self, x, labels=None):
            return {"loss": (self.linear(x) - labels).pow(2).mean()}

    class Data(torch.utils.data.Dataset):
        def __len__(self): return 95
        def __getitem__(self, at):
            return {"x": torch.full((8,), at / 96), "labels": torch.ones(1)}
"""


def test_the_callback_for_transformers(tmp_path: Path) -> None:
    body = f"""{MODEL}
    from transformers import Trainer, TrainingArguments
    arguments = TrainingArguments(
        "checkpoints", per_device_train_batch_size=2, gradient_accumulation_steps=5, max_steps=20,
        eval_strategy="steps", eval_steps=10, save_steps=10,
        use_cpu=True, report_to="none", disable_tqdm=True,
    )
    Trainer(
        Model(), arguments, train_dataset=Data(), eval_dataset=Data(),
        callbacks=[fl.transformers_callback()],
    ).train()
    """
    code, output = run(tmp_path, body)
    assert code == 0, output
    found = record(tmp_path)
    # The last step of an epoch of 48 batches has three, and the last of those one sample.
    assert [step.num_samples for step in found.steps] == [*[10] * 9, 5] * 2
    assert found.header["batch_size_per_gpu"] == 10
    assert [line.step for line in found.evals] == [10, 20]
    assert all(line.loss is not None and line.seconds > 0 for line in found.evals)
    assert [phase.step for phase in found.phases if phase.name == "checkpoint"] == [10, 20]
    assert summarize([found]).problems == ()


def test_transformers_samples_are_those_of_the_size_it_finds_and_of_an_epoch_that_goes_on(
    tmp_path: Path,
) -> None:
    body = f"""{MODEL}
    from transformers import Trainer, TrainingArguments

    class Limited(Model):
        seen = 0
        def forward(self, x, labels=None):
            if len(x) > 4 and Limited.seen:
                raise RuntimeError("CUDA out of memory. Tried to allocate 2 GiB")
            Limited.seen += len(x)
            return super().forward(x, labels)

    def train(**options):
        arguments = TrainingArguments(
            "checkpoints", per_device_train_batch_size=8, auto_find_batch_size=True, save_steps=10,
            use_cpu=True, report_to="none", disable_tqdm=True, max_steps=options.pop("max_steps"),
        )
        model = Limited()
        callbacks = [fl.transformers_callback()]
        Trainer(model, arguments, train_dataset=Data(), callbacks=callbacks).train(**options)

    train(max_steps=10)
    train(max_steps=40, resume_from_checkpoint=True)
    print("seen", Limited.seen)
    """
    code, output = run(tmp_path, body)
    assert code == 0, output
    found = record(tmp_path)
    samples = [step.num_samples or 0 for step in found.steps]
    assert len(samples) == 41 and samples[0] == 8 and samples[1] in (3, 4)
    assert summarize([found]).setup.batch_size_per_gpu == samples[1]
    assert f"seen {sum(samples)}" in output.splitlines()


def test_the_callback_for_lightning(tmp_path: Path) -> None:
    body = f"""{MODEL}
    import lightning.pytorch as L

    class Module(L.LightningModule):
        def __init__(self):
            super().__init__()
            self.model = Model()
        def training_step(self, batch, _):
            loss = self.model(**batch)["loss"]
            if self.global_step == 0: print("loss", loss.item())
            return loss
        def validation_step(self, batch, _):
            self.log("val_loss", self.model(**batch)["loss"])
            self.log("val_acc", 0.5)
        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.01)

    loader = torch.utils.data.DataLoader(Data(), batch_size=2)
    trainer = L.Trainer(
        accelerator="cpu", max_epochs=1, accumulate_grad_batches=2, val_check_interval=24, logger=False,
        enable_progress_bar=False, enable_model_summary=False, callbacks=[fl.lightning_callback()],
    )
    trainer.fit(Module(), loader, loader)
    """
    code, output = run(tmp_path, body)
    assert code == 0, output
    found = record(tmp_path)
    assert [step.num_samples for step in found.steps] == [*[4] * 23, 3]
    assert found.header["batch_size_per_gpu"] == 4
    first = [float(line.split()[1]) for line in output.splitlines() if line.startswith("loss ")]
    assert found.steps[0].loss == pytest.approx(sum(first) / 2, rel=1e-5)
    assert [(line.step, line.metric_value) for line in found.evals] == [(12, 0.5), (24, 0.5)]
    assert summarize([found]).problems == ()


def test_a_signal_ends_the_trainer_of_lightning_so_that_the_script_can_save(tmp_path: Path) -> None:
    body = f"""{MODEL}
    import time
    import lightning.pytorch as L

    class Module(L.LightningModule):
        def __init__(self):
            super().__init__()
            self.model = Model()
        def training_step(self, batch, _):
            if self.global_step == 12: print("ready")
            time.sleep(0.02)
            return self.model(**batch)["loss"]
        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.01)

    trainer = L.Trainer(
        accelerator="cpu", max_epochs=1000, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, callbacks=[fl.lightning_callback()],
    )
    trainer.fit(Module(), torch.utils.data.DataLoader(Data(), batch_size=2))
    print("saved")
    """
    process = start(tmp_path, body)
    assert process.stdout is not None
    assert any(line == "ready\n" for line in process.stdout)
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=60)
    assert (process.returncode, output.splitlines()[-1]) == (130, "saved"), output
