"""A request for AWS: the jobs it makes, and everything that is refused before AWS is asked."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from ec2_builders import IMAGE, catalogue

from fastlaunch.catalog.container_images import shipped_base_images
from fastlaunch.core.errors import UserError
from fastlaunch.jobs.build import CloudRequest, build_cloud_request, jobs_at
from fastlaunch.jobs.options import CloudOptions, SubmitOptions, backend_of
from fastlaunch.jobs.variants import check_base
from fastlaunch_train.recipes.recipes import RECIPES

TERMS = CloudOptions(instances=("p5.48xlarge",), regions=("us-east-1",))
PLAN = "arn:aws:sagemaker:us-east-1:123456789012:training-plan/march"
H100 = catalogue().accelerators["H100"]
TEXT: dict[str, Any] = {"workload": "gpt2-xsmall"}
REVIEWS: dict[str, Any] = {"workload": "distilbert-imdb"}
OWN: dict[str, Any] = {"image": IMAGE}
#: What makes a request one for a SageMaker job, or for a capacity block.
TRAINED: dict[str, Any] = {"backend": "sagemaker"}
BLOCK: dict[str, Any] = {"purchase": "capacity-block", "reservation": "cr-0a1b2c3d4e5f67890"}


def build(terms: dict[str, Any] | None = None, **request: Any) -> CloudRequest:
    return build_cloud_request(
        SubmitOptions(**request), replace(TERMS, **(terms or {})), catalogue=catalogue()
    )


def test_defaults_are_those_of_a_gpu() -> None:
    request = build()
    (job,) = jobs_at(request, request.instances[0], "us-east-1")
    assert (job.workload, job.batch_size, job.recipe.name, job.steps) == ("vit-huge", 64, "bf16", 200)
    assert (job.backend, job.instance, job.num_gpus, job.num_nodes) == ("ec2", "p5.48xlarge", 8, 1)
    assert (job.purchase, job.region, job.max_minutes, job.max_price_usd) == (
        *("on-demand", "us-east-1", 120, None),
    )


def test_what_is_given_counts() -> None:
    terms = {"purchase": "spot", "max_price_usd": 20.0, "max_minutes": 90}
    request = build(
        terms, workload="vit-tiny", batch_size=16, steps=7, seed=5, data="loader", num_workers=3,
        checkpoint_every=2,
    )  # fmt: skip
    (job,) = jobs_at(request, request.instances[0], "us-east-2", image=IMAGE)
    assert (job.workload, job.batch_size, job.steps, job.seed) == ("vit-tiny", 16, 7, 5)
    assert (job.data, job.num_workers, job.checkpoint_every) == ("loader", 3, 2)
    assert (job.purchase, job.max_price_usd, job.max_minutes) == ("spot", 20.0, 90)
    assert (job.region, job.image) == ("us-east-2", IMAGE)
    request = build(batch_size="auto")
    (job,) = jobs_at(request, request.instances[0], "us-east-1")
    assert job.batch_size is None


def test_every_instance_type_gets_the_same_jobs_interleaved() -> None:
    request = build(
        {"instances": ("p5.48xlarge", "p5.4xlarge")},
        recipes=("te-fp8", "bf16"),
        overrides=("ddp_bucket_mb=25",),
        repeats=2,
    )
    on_8, on_1 = (jobs_at(request, instance, "us-east-1") for instance in request.instances)
    assert [job.recipe.name for job in on_8] == ["te-fp8", "bf16", "bf16", "te-fp8"]
    assert [replace(job, instance="p5.48xlarge", num_gpus=8) for job in on_1] == list(on_8)
    assert {job.num_gpus for job in on_1} == {1}


@pytest.mark.parametrize(
    ("terms", "request_", "message", "hint"),
    [
        ({"instances": ("p5.48xlarg",)}, {}, "unknown instance", "p5.48xlarge"),
        ({"instances": ("p5",)}, {}, "unknown instance 'p5'", "its sizes are p5.4xlarge and p5.48xlarge"),
        ({"instances": ()}, {}, "no instance type is named", "at least one"),
        ({"regions": ()}, {}, "no region is named", "at least one"),
        ({"instances": ("p5.48xlarge",) * 2}, {}, "instance type p5.48xlarge is given twice", "once"),
        ({"regions": ("us-east-1",) * 2}, {}, "region us-east-1 is given twice", "once"),
        ({"regions": ("us-east-1a",)}, {}, "'us-east-1a' is not the name of a region", "us-east-1"),
        ({"instances": ("trn1.32xlarge",)}, {}, "Trainium1", "NVIDIA GPUs: p4d, p4de, p5"),
        ({"purchase": "reserved"}, {}, "unknown purchase option", "spot"),
        ({"backend": "batch"}, {}, "unknown backend", "sagemaker"),
        ({"num_nodes": 0}, {}, "--num-nodes is 0", "1 or more"),
        ({"num_nodes": 2, "instances": ("g5.xlarge",)}, {}, "g5.xlarge has no EFA", "--allow-tcp"),
        ({**TRAINED, "num_nodes": 2, "instances": ("ml.g5.xlarge",)}, {}, "g5.xlarge has no EFA", "p4d.24x"),
        # Capacity blocks.
        ({"purchase": "capacity-block"}, {}, "does not say which capacity block", "--reservation cr-"),
        ({**BLOCK, "reservation": "r-1"}, {}, "'r-1' is not the id of a reservation", "cr-0a1b2c3d"),
        ({**BLOCK, "purchase": "spot"}, {"checkpoint_every": 1}, "--reservation is for a", "capacity-block"),
        ({"block_fee_usd": 9.0}, {}, "--block-fee is for a capacity block", "--purchase capacity-block"),
        ({**BLOCK, "instances": ("p5.48xlarge", "p5en.48xlarge")}, {}, "of one instance type", "name one"),
        ({**BLOCK, "regions": ("us-east-1", "us-east-2")}, {}, "of one region", "name one"),
        (
            {**BLOCK, "instances": ("g5.xlarge",)},
            {},
            "has no capacity-block price",
            "--purchase on-demand, or",
        ),
        ({**BLOCK, "max_price_usd": 20.0}, {}, "--max-price is the most that is paid for spot", "spot"),
        # SageMaker.
        ({**TRAINED, **BLOCK}, {}, "SageMaker does not take EC2's capacity blocks", "--training-plan ARN"),
        ({**TRAINED, "reservation": "cr-0a1b2c3d"}, {}, "--reservation is for", "leave it out"),
        ({**TRAINED, "max_price_usd": 9.0}, {}, "--max-price is for EC2", "--max-cost"),
        ({**TRAINED, "max_minutes": 40_321}, {}, "ends every job after 28 days", "28d"),
        ({**TRAINED, "training_plan": "march"}, {}, "'march' is not an ARN", "list-training-plans"),
        (
            {**TRAINED, "training_plan": PLAN, "purchase": "spot"},
            {"checkpoint_every": 1},
            "which spot does not use",
            "one of both",
        ),
        (
            {**TRAINED, "training_plan": PLAN, "instances": ("p5.48xlarge", "p4d.24xlarge")},
            {},
            "a training plan is of one instance type",
            "name one",
        ),
        (
            {**TRAINED, "training_plan": PLAN, "regions": ("us-east-2",)},
            {},
            "is of us-east-1",
            "--region us-",
        ),
        ({"training_plan": PLAN}, {}, "--training-plan is for SageMaker", "--reservation cr-"),
        ({"instances": ("ml.p5.48xlarge",)}, {}, "unknown instance 'ml.p5.48xlarge'", "p5.48xlarge"),
        (
            {**TRAINED, "instances": ("ml.p5.48xlarge", "p5.48xlarge")},
            {},
            "p5.48xlarge is given twice",
            "once",
        ),
        ({"max_price_usd": 20.0}, {}, "--max-price is the most that is paid for spot", "--purchase spot"),
        ({"purchase": "spot", "max_price_usd": 0.0001}, {"checkpoint_every": 1}, "0.0001", "$0.001"),
        ({"purchase": "spot"}, {}, "spot without checkpoints", "--checkpoint-every 50"),
        ({"purchase": "spot"}, {"steps": 3}, "spot without checkpoints", "--checkpoint-every 1,"),
        ({"purchase": "spot"}, {"steps": 90_000}, "spot without checkpoints", "--checkpoint-every 500"),
        ({"instances": ("p5e.48xlarge",)}, {}, "p5e.48xlarge has no on-demand price", "--max-price USD"),
        (
            {"instances": ("p5.48xlarge", "p5e.48xlarge"), "purchase": "spot"},
            {"checkpoint_every": 9},
            "no on-demand price that would bound",
            "--max-price USD",
        ),
        ({"max_minutes": 14}, {}, "--max-hours is 14 min", "15min"),
        ({"max_minutes": 43_201}, {}, "--max-hours is 43201 min", "30d"),
        ({"image": IMAGE, "base_image": "2.9"}, {}, "name two images", "one of the two"),
        ({"image": "acme/train:1"}, {}, "is not an image by its digest", "@sha256:"),
        ({"image": "acme/train@sha256:" + "0" * 64}, {}, "is not an image by its digest", "REGISTRY/"),
        ({}, {"recipes": ("bf17",)}, "unknown recipe", "bf16"),
        ({}, {"workload": "vit-hug"}, "unknown workload", "vit-huge"),
        ({}, {"repeats": 0}, "repeats is 0", "1 to 1000"),
        ({}, {"nproc": 2}, "--nproc is for training on this machine", "one process per GPU"),
        ({}, {"data": "folder:/tmp"}, "folder:/tmp is on this machine", "or loader for images"),
        ({}, {**TEXT, "data": "file:t.txt"}, "file:t.txt is on this machine", "--data synthetic"),
        (
            {},
            {**REVIEWS, "data": "folder:aclImdb"},
            "and data do not travel",
            "--image REGISTRY/NAME@sha256:... --data folder:/opt/data/aclImdb",
        ),
        ({}, {"data": "file:/t.txt"}, "workload 'vit-huge' reads no text", "--data folder:PATH"),
        ({}, {**TEXT, "data": "folder:/t"}, "gpt2-xsmall' reads one file of text", "--data file:PATH"),
        (
            OWN,
            {**REVIEWS, "data": r"folder:C:\d\acl"},
            "in an image it begins with /",
            "folder:/opt/data/acl",
        ),
        (OWN, {"workload": "gelu", "data": "folder:/t"}, "gelu' makes its own data", "--data synthetic"),
        (OWN, {**REVIEWS, "data": "folder:aclImdb"}, "in an image it begins with /", "folder:/opt/data/acl"),
        (
            OWN,
            {**REVIEWS, "data": "folder:~/aclImdb"},
            "in an image it begins with /",
            "folder:/opt/data/acl",
        ),
        (
            OWN,
            {**REVIEWS, "data": "folder:/opt/ml/input"},
            "containers get /opt/ml from outside",
            "/opt/data",
        ),
        (OWN, {**REVIEWS, "data": "file://out/a"}, "containers get /out from outside", "/opt/data"),
        (OWN, {**REVIEWS, "data": "folder:/a/../out"}, "is no path in an image", "without .."),
        (OWN, {**REVIEWS, "data": "folder:/"}, "is no path in an image", "the whole path"),
        (OWN, {**REVIEWS, "data": "folder:/a\nb"}, "cannot be printed", "rename it"),
        (OWN, {**REVIEWS, "data": "folder:/<bucket>"}, "has < or >", "rename it"),
        (OWN, {**TEXT, "model": "/proc/model"}, "--model: /proc/model cannot be read", "/opt/data"),
        (OWN, {**TEXT, "tokenizer": "/a\x7f"}, "--tokenizer: '/a\\x7f' has", "rename it"),
        (OWN, {**TEXT, "model": "./gpt2"}, "--model './gpt2' is a folder on this machine", "/opt/models"),
        ({}, {"model": "gpt2"}, "workload 'vit-huge' takes no --model", "leave out --model"),
        ({}, {"steps": 9, "epochs": 3}, "--steps and --epochs both", "one of them"),
        ({}, {**TEXT, "model": "./gpt2"}, "--model './gpt2' is a folder on this machine", "Hugging Face hub"),
        ({}, {**TEXT, "model": "launcher"}, "--model 'launcher' is a folder", "Hugging Face hub"),
        ({}, {**TEXT, "tokenizer": "/models/t"}, "--tokenizer '/models/t' is a folder", "--image"),
        ({}, {"workload": "hf-clm:/models/gpt2"}, "hf-clm: '/models/gpt2' is a folder", "hub"),
        ({}, TEXT, "gpt2-xsmall needs transformers, which AWS's images lack", "--with transformers"),
        ({}, {"recipes": ("ao-fp8",)}, "recipe ao-fp8 needs torchao, which AWS's", "--with torchao"),
        ({}, {"recipes": ("ort",)}, "recipe ort needs torch_ort", "fastlaunch build --ort"),
        (
            {},
            {**TEXT, "recipes": ("bf16", "lightning")},
            "gpt2-xsmall needs transformers, which AWS's",
            "fastlaunch build --with transformers --with lightning --push",
        ),
        ({}, {"recipes": ("te-mxfp8",)}, "MXFP8 needs compute capability 10.0", "p6-b300; or"),
        ({}, {"recipes": ("te-mxfp8",)}, "H100 has 9.0", "or give recipe te-fp8-block"),
        (
            {"instances": ("g6e.12xlarge",)},
            {"recipes": ("te-fp8-block",)},
            "L40S has 8.9",
            "or give recipe te-fp8",
        ),
        ({}, {"data": "real"}, "unknown data source", "loader"),
        (
            {},
            {"workload": "gelu", "recipes": ("te-fp8",)},
            "te-fp8 does not fit workload gelu",
            "blocks=native",
        ),
        ({}, {"recipes": ("library",)}, "vit-huge, which writes out no pointwise", "--workload gelu"),
        (
            {"image": IMAGE},
            {**TEXT, "recipes": ("zero1",)},
            "recipe zero1 does not fit workload gpt2-xsmall: DeepSpeed cannot shard adafactor",
            "--set optimizer=adamw",
        ),
        ({}, {"epochs": 2}, "synthetic data have no end", "give --steps"),
        ({}, {"workload": "gelu", "data": "loader"}, "workload 'gelu' takes none", "--data synthetic"),
        ({}, {"workload": "./none.py:build"}, "there is no file ./none.py here", "./my.py:build"),
        ({}, {"workload": f"{__file__}:build"}, "is not below this folder", "./my.py:build"),
    ],
)
def test_what_cannot_be_is_refused(
    terms: dict[str, Any], request_: dict[str, Any], message: str, hint: str
) -> None:
    with pytest.raises(UserError) as caught:
        build(terms, **request_)
    assert message in caught.value.message
    assert hint in str(caught.value.hint)


@pytest.mark.parametrize(
    ("instances", "named", "backend"),
    [
        (("p5.48xlarge",), None, "ec2"),
        (("ml.p5.48xlarge", "ml.p4d.24xlarge"), None, "sagemaker"),
        (("p5.48xlarge", "ml.p4d.24xlarge"), "sagemaker", "sagemaker"),
        (("p5.48xlarge",), "sagemaker", "sagemaker"),
        (("p5.48xlarge",), "ec2", "ec2"),
    ],
)
def test_the_instance_types_say_which_service(
    instances: tuple[str, ...], named: str | None, backend: str
) -> None:
    assert backend_of(instances, named) == backend


def test_names_of_both_services_are_refused_together() -> None:
    with pytest.raises(UserError, match=r"ml.p5.48xlarge is SageMaker's name of a type, and g5.xlarge EC2's"):
        backend_of(("g5.xlarge", "ml.p5.48xlarge"), None)
    with pytest.raises(UserError, match="and the backend is ec2") as caught:
        backend_of(("ml.p5.48xlarge",), "ec2")
    assert "--instance p5.48xlarge" in str(caught.value.hint)


def test_several_nodes_have_a_rank_for_each_gpu_of_all() -> None:
    request = build({"num_nodes": 4, "allow_tcp": True, "instances": ("p5.48xlarge", "g5.xlarge")})
    large, small = (jobs_at(request, one, "us-east-1")[0] for one in request.instances)
    assert (large.num_nodes, large.num_gpus, large.allow_tcp) == (4, 32, True)
    assert (small.num_nodes, small.num_gpus) == (4, 4)
    # One node has nobody to talk to, over whatever.
    alone = build({"allow_tcp": True})
    assert not jobs_at(alone, alone.instances[0], "us-east-1")[0].allow_tcp


def test_a_job_knows_its_block() -> None:
    request = build({**BLOCK, "block_fee_usd": 944.0})
    (job,) = jobs_at(request, request.instances[0], "us-east-1")
    assert (job.purchase, job.reservation, job.backend) == ("capacity-block", BLOCK["reservation"], "ec2")
    assert request.cloud.block_fee_usd == 944.0


def test_a_training_job_knows_its_plan() -> None:
    terms = {**TRAINED, "instances": ("ml.p5.48xlarge",), "training_plan": PLAN}
    request = build(terms)
    (job,) = jobs_at(request, request.instances[0], "us-east-1")
    # EC2's name: the hardware is the same, and so are prices' names.
    assert (job.backend, job.instance, job.num_gpus) == ("sagemaker", "p5.48xlarge", 8)
    assert job.training_plan == PLAN
    # What EC2 sells only as spot SageMaker may have: its own price decides.
    assert build({**TRAINED, "instances": ("p5e.48xlarge",)}).instances[0].name == "p5e.48xlarge"


@pytest.mark.parametrize("instance", ["p4d.24xlarge", "g5.xlarge"])
def test_fp8_on_a_gpu_without_it_names_those_that_have_it(instance: str) -> None:
    with pytest.raises(UserError, match=f"cannot run on {instance}: FP8 needs") as caught:
        build({"instances": ("p5.48xlarge", instance)}, recipes=("bf16", "te-fp8"))
    assert caught.value.hint == (
        "it runs on p5, p5e, p5en, p6-b200, p6-b300, g6, g6e, g7e; or give recipe te-bf16"
    )
    assert build({"instances": (instance,)}, recipes=("te-bf16",)).instances[0].name == instance


def test_jobs_are_checked_as_such() -> None:
    request = build(steps=0)
    with pytest.raises(UserError, match="steps is 0"):
        jobs_at(request, request.instances[0], "us-east-1")


def test_the_users_own_workload_travels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "mine.py").touch()
    monkeypatch.chdir(tmp_path)
    assert build(workload="models/mine.py:build").user_file == Path("models/mine.py")
    assert build(workload="vit-tiny").user_file is None
    with pytest.raises(UserError, match="which --image does without"):
        build({"image": IMAGE}, workload="models/mine.py:build")
    monkeypatch.chdir(tmp_path / "models")
    with pytest.raises(UserError, match="is not below this folder"):
        build(workload="../models/mine.py:build")


@pytest.mark.parametrize(
    "image",
    [
        IMAGE,
        "localhost:5000/fastlaunch@sha256:" + "0" * 64,
        "151742754352.dkr.ecr.eu-west-1.amazonaws.com/a/b:1.2-x@sha256:" + "0" * 64,
    ],
)
def test_an_image_by_its_digest_is_taken(image: str) -> None:
    assert build({"image": image}).cloud.image == image


def test_text_reaches_the_job_with_an_image_of_ones_own() -> None:
    text = {**TEXT, "model": "/models/gpt2", "tokenizer": "rinna/japanese-gpt2-xsmall"}
    request = build({"image": IMAGE}, **text, steps=5, eval_every=9, sequence_length=64)
    (job,) = jobs_at(request, request.instances[0], "us-east-1", image=IMAGE)
    assert (job.workload, job.batch_size, job.steps, job.epochs, job.eval_every) == (
        *("gpt2-xsmall", 4, 5, None, 9),
    )
    # An absolute path is the image's own.
    assert (job.model, job.tokenizer, job.sequence_length) == (
        *("/models/gpt2", "rinna/japanese-gpt2-xsmall", 64),
    )


def test_every_recipe_runs_on_the_newest_gpu_that_takes_it_with_an_image_of_ones_own() -> None:
    for name in RECIPES:
        instance = "p6-b200.48xlarge" if name == "te-mxfp8" else "p5.48xlarge"
        workload = None if RECIPES[name].pointwise == "written" else "gelu"
        terms = {"image": IMAGE, "instances": (instance,)}
        assert len(build(terms, recipes=(name,), workload=workload).variants) == 1


def test_other_workloads_pass() -> None:
    for name in ("gelu", "gelu:64x64", "timm:vit_base_patch16_224"):
        request = build(workload=name)
        assert jobs_at(request, request.instances[0], "us-east-1")[0].workload == name
    hub = build({"image": IMAGE}, workload="hf-clm:EleutherAI/gpt-neo-2.7B")
    assert hub.variants[0].workload.batch_size == 4


@pytest.mark.parametrize(
    ("recipe", "base", "problem", "hint"),
    [
        (
            "te-fp8-current",
            "2.6",
            "transformer_engine 2.2",
            "--base-image 2.13.0 or",
        ),
        ("te-bf16", "2.1", "torch 2.4", "--base-image 2.13.0 or"),
        (
            "zero2",
            "2.10",
            "needs deepspeed",
            "--base-image 2.13.0 or 2.12.1 or 2.11.0",
        ),
    ],
)
def test_a_base_image_without_what_a_recipe_needs_is_refused(
    recipe: str, base: str, problem: str, hint: str
) -> None:
    images = [one for one in shipped_base_images().images if one.flavour == "ec2"]
    old = next(one for one in images if one.torch.startswith(f"{base}."))
    with pytest.raises(UserError, match=f"recipe {recipe} cannot run in .*{problem}") as caught:
        check_base(build({"image": IMAGE}, recipes=("bf16", recipe)).variants, old, images, [H100])
    assert hint in str(caught.value.hint)


@pytest.mark.parametrize(
    ("gpu", "base", "problem"),
    [
        ("H100", "2.9", None),
        ("H100", "2.8", None),
        ("H100", "2.7", "CUDA 12.9"),
        ("B200", "2.9", None),
        (
            *("B200", "2.8"),
            "Blackwell needs transformer_engine 2.9, and 2.5",
        ),
        ("RTX PRO 6000", "2.7", "CUDA 12.9"),
    ],
)
def test_what_fp8_in_blocks_needs_of_an_image_depends_on_the_gpu(
    gpu: str, base: str, problem: str | None
) -> None:
    images = [one for one in shipped_base_images().images if one.flavour == "ec2"]
    old = next(one for one in images if one.torch.startswith(f"{base}."))
    variants = build({"image": IMAGE}, recipes=("te-fp8-block",)).variants
    asked = variants, old, images, [H100, catalogue().accelerators[gpu]]
    if problem is None:
        check_base(*asked)
        return
    with pytest.raises(UserError, match=f"recipe te-fp8-block cannot run in .*{problem}") as caught:
        check_base(*asked)
    assert caught.value.hint == "give --base-image 2.13.0 or 2.12.1 or 2.11.0"


def test_the_newest_base_image_holds_what_every_recipe_needs_of_it() -> None:
    images = [one for one in shipped_base_images().images if one.flavour == "ec2"]
    newest = next(one for one in images if one.uncertain is None)
    check_base(
        build({"image": IMAGE}, recipes=("te-fp8", "te-fp8-block", "zero3")).variants, newest, images, [H100]
    )
