"""Language workloads on a GPU: fused attention, steps that do not wait, and compiled models."""

import itertools

import pytest
import torch

from fastlaunch_train.distributed.parallel import Process
from fastlaunch_train.loop.batch_size import probe_request
from fastlaunch_train.models.attention import attention_backend
from fastlaunch_train.models.precision import setup_precision
from fastlaunch_train.recipes.recipes import resolve_recipe
from fastlaunch_train.workloads.contract import DataRequest, Workload, load_workload

GPU = torch.device("cuda")
NAMES = ("gpt2-xsmall", "distilbert-imdb")


def request(device: torch.device = GPU) -> DataRequest:
    process = Process(rank=0, local_rank=0, world_size=1, num_nodes=1, device=device)
    return probe_request(process, seed=0, batch_size=4)


@pytest.fixture(scope="module", params=NAMES)
def workload(request: pytest.FixtureRequest) -> Workload:
    return load_workload(request.param)


def test_attention_is_fused(workload: Workload) -> None:
    precision = setup_precision(resolve_recipe("bf16"), GPU)
    model = workload.build_model().to(GPU).train()
    found = attention_backend(model, next(workload.batches(request())), precision, workload.loss)
    assert found != "math"
    if workload.name == "gpt2-xsmall":
        # Without a mask: the kernels that take none.
        assert found in ("flash", "cudnn")


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype feature")
def test_steps_do_not_wait_for_the_device(workload: Workload) -> None:
    model = workload.build_model().to(GPU).train()
    batches = workload.batches(request())

    def step() -> None:
        with torch.autocast("cuda", torch.bfloat16):
            loss = workload.loss(model, next(batches))
        loss.backward()

    step()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_batches_are_the_cpus(workload: Workload) -> None:
    on_gpu = next(workload.batches(request()))
    on_cpu = next(workload.batches(request(torch.device("cpu"))))
    assert on_gpu.keys() == on_cpu.keys()
    for name, tensor in on_gpu.items():
        assert tensor.device.type == "cuda"
        assert torch.equal(tensor.cpu(), on_cpu[name])


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("scope", ["block", "model"])
def test_compiled_models_compute_the_same(workload: Workload, scope: str) -> None:
    torch.manual_seed(0)
    model = workload.build_model().to(GPU).eval()
    batches = list(itertools.islice(workload.batches(request()), 2))

    def losses() -> list[float]:
        with torch.autocast("cuda", torch.bfloat16):
            return [float(workload.loss(model, batch).detach()) for batch in batches]

    eager = losses()
    if scope == "model":
        model.compile()
    else:
        assert workload.blocks is not None
        for block in workload.blocks(model):
            block.compile()
    assert losses() == pytest.approx(eager, rel=5e-3)
