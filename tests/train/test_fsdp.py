"""Parameters sharded by fully_shard over two ranks: the same training, and the same after a resume."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import toy
from torch import nn
from toy import ALONE

from fastlaunch_train.distributed import fsdp
from fastlaunch_train.distributed.parallel import stop_process
from fastlaunch_train.recipes.recipes import resolve_recipe

STEPS = 6
#: Against plain fp64, of losses and weights; None where the optimizer is another than the reference's.
RECIPES: dict[str, float | None] = {
    "fsdp2,precision=fp32": 1e-6,
    "fsdp2,precision=fp32,grad_accumulation=2,activation_checkpointing=block": 1e-6,
    "fsdp2,precision=fp16": 1e-3,
    "fsdp2": 5e-3,
    "fsdp2,wire_dtype=bf16": 5e-3,
    "fsdp2,parameter_dtype=bf16": 5e-2,
    "fsdp2,parameter_dtype=bf16-master": 1e-2,
    "fsdp2,precision=fp32,pretraining": 1e-6,
    "fsdp2,parameter_dtype=bf16-master,pretraining": 1e-2,
    "fsdp2,precision=fp32,optimizer=adafactor,learning_rate=0.01": None,
    "fsdp2,optimizer=adamw,optimizer_impl=fused,learning_rate=0.01": None,
}


@pytest.fixture(autouse=True)
def without_a_group() -> Iterator[None]:
    yield
    stop_process()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_two_ranks_train_as_one_without_shards(tmp_path: Path) -> None:
    found = toy.run_ranks_and_resume(tmp_path, RECIPES, model_class="FSDPToy", steps=STEPS)
    # Its moments are of rows and columns, which the shards of a matrix do not have for themselves.
    adafactor = resolve_recipe("fp32", ["optimizer=adafactor", "learning_rate=0.01"])
    whole = toy.train(adafactor, ALONE, steps=STEPS)
    recipe = "fsdp2,precision=fp32,optimizer=adafactor,learning_rate=0.01"
    assert toy.distance(found[recipe], whole["losses"], whole["weights"]) < 1e-5


def test_a_state_is_gathered_where_it_is_kept() -> None:
    model = toy.Toy()
    fsdp.shard(model, model.blocks, resolve_recipe("fsdp2"), ALONE)
    shards = {name: fsdp.local_shard(value).detach().clone() for name, value in model.named_parameters()}
    whole = fsdp.whole(model.state_dict(), keep=True)
    assert whole.keys() == shards.keys() and all(torch.equal(whole[name], shards[name]) for name in shards)
    assert fsdp.whole(model.state_dict(), keep=False) == dict.fromkeys(shards)


def test_blocks_are_sharded_one_by_one_in_the_dtypes_of_the_recipe() -> None:
    model = toy.Toy()
    recipe = resolve_recipe("fsdp2", ["wire_dtype=bf16"])
    fsdp.shard(model, model.blocks, recipe, ALONE)
    for module in (model, *model.blocks):
        assert isinstance(module, torch.distributed.fsdp.FSDPModule)
        policy = module._get_fsdp_state()._mp_policy
        assert (policy.param_dtype, policy.reduce_dtype) == (torch.bfloat16, torch.bfloat16)
    assert not isinstance(model.blocks[0].up, torch.distributed.fsdp.FSDPModule)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}


def test_after_an_evaluation_shards_are_read_and_not_what_was_gathered() -> None:
    model: nn.Module = toy.Toy()
    fsdp.shard(model, None, resolve_recipe("fsdp2", ["precision=fp32"]), ALONE)
    with torch.no_grad():
        model(torch.ones(1, 6))
    assert not any(hasattr(parameter, "to_local") for parameter in model.parameters())
    fsdp.reshard(model)
    assert all(hasattr(parameter, "to_local") for parameter in model.parameters())
