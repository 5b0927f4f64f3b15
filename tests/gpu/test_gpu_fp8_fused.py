"""The kernels of fused blocks against plain torch, and steps in one CUDA graph, on a GPU."""

import copy
import math
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import Any

import pytest
import torch
from running_here import runnable

from fastlaunch_train.distributed.parallel import Process
from fastlaunch_train.loop.graphed import CapturedStep, is_captured
from fastlaunch_train.loop.train import train_step
from fastlaunch_train.models.conversion import convert_model
from fastlaunch_train.models.fp8_fused import reference
from fastlaunch_train.models.fp8_fused.reference import E4M3, E5M2
from fastlaunch_train.models.precision import setup_precision
from fastlaunch_train.steppers.stepper import Stepper
from fastlaunch_train.steppers.stepping import build_native, build_stepper
from fastlaunch_train.workloads.contract import Batch, DataRequest, load_workload, next_batch

DEVICE = torch.device("cuda", 0)
PROCESS = Process(rank=0, local_rank=0, world_size=1, num_nodes=1, device=DEVICE)
#: Of 16 and of 256 images, the second as ViT-Huge is trained.
SHAPES = [(16 * 197, 768), (16 * 197, 1024), (256 * 197, 1280)]
FP8 = (E4M3, E5M2)

Pass = Callable[[ModuleType, torch.Tensor | None, torch.Tensor | None], Any]


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device=DEVICE).bfloat16()


def passes(rows: int, width: int, *, in_fp8: bool) -> dict[str, Pass]:
    """Each pass on random tensors, by the module that computes it, its scale and its amax."""
    torch.manual_seed(0)
    x, branch, skip, hidden, gradient = (
        normal(rows, size) for size in (width, width, width, 4 * width, 4 * width)
    )
    weight, bias = (torch.randn(width, device=DEVICE) for _ in range(2))
    matrix = 0.02 * torch.randn(3 * width, width, device=DEVICE)
    mean, rstd = torch.randn(rows, device=DEVICE), torch.rand(rows, device=DEVICE) + 0.5
    forward, backward = (E4M3, E5M2) if in_fp8 else (torch.bfloat16, torch.bfloat16)
    return {
        "norm": lambda of, *scaled: of.norm_forward(x, branch, weight, bias, 1e-6, *scaled, forward),
        "first norm": lambda of, *scaled: of.norm_forward(x, None, weight, bias, 1e-6, *scaled, forward),
        "norm's gradient": lambda of, *scaled: of.norm_backward(branch, x, skip, weight, mean, rstd),
        "gelu": lambda of, *scaled: of.gelu_forward(hidden, *scaled, forward),
        "gelu's gradient": lambda of, *scaled: of.gelu_backward(gradient, hidden, *scaled, backward),
        "three parts": lambda of, *scaled: of.cast_transpose((x, branch, skip), *scaled, backward, sums=True),
        "one part": lambda of, *scaled: of.cast_transpose((x,), *scaled, backward, sums=True),
        "a weight": lambda of, *scaled: of.cast_transpose((matrix,), *scaled, forward, sums=False)[:2],
    }


@pytest.mark.parametrize("in_fp8", [True, False])
@pytest.mark.parametrize(("rows", "width"), SHAPES)
def test_a_kernel_computes_what_plain_torch_does(rows: int, width: int, in_fp8: bool) -> None:
    from fastlaunch_train.models.fp8_fused import kernels

    for name, compute in passes(rows, width, in_fp8=in_fp8).items():
        results, largest = [], []
        for module in (kernels, reference):
            # Some values are beyond the format's largest.
            scale, amax = torch.full((1,), 200.0, device=DEVICE), torch.zeros(1, device=DEVICE)
            results.append(compute(module, *((scale, amax) if in_fp8 else (None, None))))
            largest.append(float(amax))
        assert largest[0] == pytest.approx(largest[1], rel=1e-5), name
        for ours, theirs in zip(*results, strict=True):
            assert ours.shape == theirs.shape and ours.dtype == theirs.dtype, name
            if ours.dtype in FP8:
                # A value between two of FP8's may be rounded to either, where an approximate tanh is in it.
                same = (ours.view(torch.uint8) == theirs.view(torch.uint8)).float().mean()
                assert float(same) > 0.999, name
            else:
                # bf16's neighbours are 0.4% apart, and few values are rounded to another.
                error = (ours.float() - theirs.float()).norm() / theirs.float().norm()
                assert float(error) < (1e-4 if in_fp8 else 3e-4), name
        given = [value for value in results[0] if value.dtype in FP8]
        if given:
            out, transposed = given
            assert torch.equal(out.view(torch.uint8).t(), transposed.view(torch.uint8)), name


@pytest.mark.parametrize("shape", [(3840, 1280), (1280, 1280), (1280, 5120), (768, 3072)])
@pytest.mark.parametrize("momentum", [0.9, 0.0])
def test_the_optimizers_pass_rounds_as_plain_torch_does(shape: tuple[int, int], momentum: float) -> None:
    from fastlaunch_train.models.fp8_fused import kernels

    torch.manual_seed(0)
    weight, gradient, velocity = (torch.randn(*shape, device=DEVICE) for _ in range(3))
    results = []
    for module in (kernels, reference):
        given = weight.clone(), velocity.clone() if momentum else None
        out = torch.empty(shape, device=DEVICE, dtype=E4M3)
        transposed = torch.empty(shape[::-1], device=DEVICE, dtype=E4M3)
        scale, amax = torch.full((1,), 100.0, device=DEVICE), torch.zeros(1, device=DEVICE)
        module.sgd_cast(
            given[0], gradient, given[1], out, transposed, scale, amax, lr=0.1, momentum=momentum, decay=0.01
        )
        results.append((*given, amax, out, transposed))
    for ours, theirs in zip(*results, strict=True):
        if ours is not None and ours.dtype not in FP8:
            assert torch.allclose(ours, theirs, rtol=1e-6, atol=1e-6)
    new, _, _, out, transposed = results[0]
    assert torch.equal(out.float(), (new * 100).clamp(-448, 448).to(E4M3).float())
    assert torch.equal(out.view(torch.uint8).t(), transposed.view(torch.uint8))


on_hopper = pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability() != (9, 0), reason="needs a Hopper GPU"
)


@on_hopper
@pytest.mark.parametrize(
    # One head a program, several, and many; and as many tokens as there may be.
    ("samples", "heads", "tokens", "head_dim"),
    [(2, 12, 197, 64), (24, 16, 197, 80), (256, 16, 197, 80), (16, 12, 208, 80), (64, 12, 145, 64)],
)
def test_attentions_gradients_are_those_of_torchs_attention(
    samples: int, heads: int, tokens: int, head_dim: int
) -> None:
    from fastlaunch_train.models.fp8_fused.attention import attend, has_own_backward, side_by_side

    torch.manual_seed(0)
    packed = normal(samples, tokens, 3, heads, head_dim)
    gradient = normal(samples, tokens, heads, head_dim).transpose(1, 2)
    ours = [part.detach().requires_grad_() for part in packed.permute(2, 0, 3, 1, 4)]
    assert has_own_backward(*ours)
    out = attend(*ours, own_backward=True)
    gradients = torch.autograd.grad(out, ours, gradient)
    assert side_by_side(gradients) is not None
    expected = [part.detach().double().requires_grad_() for part in ours]
    exact = torch.nn.functional.scaled_dot_product_attention(*expected)
    exact.backward(gradient.double())
    for mine, theirs in ((out, exact), *((a, b.grad) for a, b in zip(gradients, expected, strict=True))):
        error = (mine.double() - theirs).norm() / theirs.norm()
        # bf16 alone is 0.17% off.
        assert float(error) < 0.004


@on_hopper
def test_heads_taken_in_turn_have_the_same_gradients() -> None:
    from fastlaunch_train.models.fp8_fused import kernels
    from fastlaunch_train.models.fp8_fused.attention_backward import attention_backward

    torch.manual_seed(0)
    qkv, dout = normal(24, 197, 3 * 1280), normal(24, 197, 1280)
    out, lse = kernels.attention_forward(*qkv.view(24, 197, 3, 16, 80).permute(2, 0, 3, 1, 4))
    given = qkv, out.transpose(1, 2).contiguous().flatten(2), dout, lse.contiguous(), 16
    shared = attention_backward(*given, among_ranks=False)
    assert torch.equal(attention_backward(*given, among_ranks=True), shared)


@on_hopper
def test_scores_that_are_all_far_below_0_have_finite_gradients() -> None:
    from fastlaunch_train.models.fp8_fused.attention import attend

    torch.manual_seed(0)
    packed = normal(2, 197, 3, 16, 80)
    # So that each is about -110, and exp(110) is more than fp32 holds.
    packed[:, :, 0] += 3.5
    packed[:, :, 1] -= 3.5
    ours = [part.detach().requires_grad_() for part in packed.permute(2, 0, 3, 1, 4)]
    gradients = torch.autograd.grad(attend(*ours, own_backward=True).sum(), ours)
    assert all(bool(torch.isfinite(gradient).all()) for gradient in gradients)


@dataclass(kw_only=True)
class Steps:
    """A training's stepper, what does a step of it, and the losses so far."""

    stepper: Stepper
    step: Callable[[Batch], torch.Tensor]
    batch: Batch  #: of the last step
    losses: list[float]


def steps(
    label: str, workload_name: str, batch_size: int, number: int, state: dict[str, Any] | None = None
) -> Steps:
    """Do so many steps, from a checkpoint's `state` on, if there is one."""
    recipe, workload = runnable(label), load_workload(workload_name)
    precision = setup_precision(recipe, DEVICE)
    model = build_native(workload, 0, PROCESS)
    convert_model(model, workload, recipe)
    stepper = build_stepper(workload, recipe, precision, PROCESS, model)
    if state is not None:
        stepper.load_state(state)
    step: Callable[[Batch], torch.Tensor] = partial(train_step, stepper)
    if is_captured(workload, recipe, PROCESS):
        step = CapturedStep(stepper, train_step)
    request = DataRequest(
        source="synthetic",
        batch_size=batch_size,
        seed=0,
        rank=0,
        world_size=1,
        device=DEVICE,
        num_workers=0,
        first_step=1,
        dtype=torch.bfloat16,
    )
    batches = workload.batches(request)
    done = Steps(stepper=stepper, step=step, batch=None, losses=[])
    for _ in range(number):
        done.batch = next_batch(workload, batches)
        done.losses.append(float(step(done.batch)))
    return done


@pytest.mark.parametrize(
    ("workload", "batch_size"), [("vit-tiny", 64), ("gpt2-xsmall", 2), ("distilbert-imdb", 4)]
)
def test_captured_steps_train_as_others_do(workload: str, batch_size: int) -> None:
    captured = steps("graph", workload, batch_size, 8)
    expected = steps("bf16", workload, batch_size, 8)
    assert isinstance(captured.step, CapturedStep)
    # Dropout draws others in a graph.
    tolerance = 0.2 if workload == "distilbert-imdb" else 0.02
    assert captured.losses == pytest.approx(expected.losses, rel=tolerance)


def test_a_step_is_captured_while_another_thread_allocates() -> None:
    """As a loader's thread does, which pins the memory of the batches that follow."""
    is_done = threading.Event()

    def pin() -> None:
        while not is_done.is_set():
            torch.empty(2**20, pin_memory=True)

    thread = threading.Thread(target=pin)
    thread.start()
    try:
        assert all(map(math.isfinite, steps("graph", "vit-tiny", 64, 3).losses))
    finally:
        is_done.set()
        thread.join()


@pytest.mark.parametrize(
    ("label", "workload", "batch_size"),
    [("graph", "gpt2-xsmall", 2), ("fp8-fused weight_cast=optimizer", "vit-huge", 16)],
)
def test_a_captured_step_goes_on_from_a_checkpoint(label: str, workload: str, batch_size: int) -> None:
    whole = steps(label, workload, batch_size, 5)
    state = copy.deepcopy(whole.stepper.state())
    further = [float(whole.step(whole.batch)) for _ in range(3)]
    resumed = steps(label, workload, batch_size, 0, state)
    assert [float(resumed.step(whole.batch)) for _ in range(3)] == pytest.approx(further, rel=0.01)


def test_no_replay_rounds_a_weight_that_the_optimizer_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    from fastlaunch_train.models.fp8_fused import kernels

    cast, rounded = kernels.cast_transpose, []

    def watched(parts: Any, *arguments: Any, **options: Any) -> Any:
        rounded.append((isinstance(parts[0], torch.nn.Parameter), torch.cuda.is_current_stream_capturing()))
        return cast(parts, *arguments, **options)

    monkeypatch.setattr(kernels, "cast_transpose", watched)
    label = "fp8-fused weight_cast=optimizer"
    first = steps(label, "vit-huge", 16, 2)
    steps(label, "vit-huge", 16, 1, copy.deepcopy(first.stepper.state()))
    assert (True, False) in rounded and (False, True) in rounded and (True, True) not in rounded


@pytest.mark.parametrize("label", ["fp8-fused", "fp8-fused weight_cast=optimizer", "bf16-fused"])
def test_fused_blocks_learn_as_the_models_own_do(label: str) -> None:
    fused = steps(label, "vit-huge", 32, 12).losses
    expected = steps("bf16", "vit-huge", 32, 12).losses
    assert fused[-1] < fused[0] and fused == pytest.approx(expected, rel=0.05)
