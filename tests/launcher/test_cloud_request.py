"""A request for AWS: the jobs it makes, and everything that is refused before AWS is asked."""

import hashlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from ec2_builders import IMAGE, catalogue

from fastlaunch.catalog.container_images import shipped_base_images
from fastlaunch.core.errors import UserError
from fastlaunch.jobs.build import Jobs, build_jobs
from fastlaunch.jobs.data_sources import data_file, data_source
from fastlaunch.jobs.job import Inputs, Job, Terms
from fastlaunch.jobs.option_rules import backend_of, check_on_aws, given_inputs
from fastlaunch.jobs.options import Options
from fastlaunch.jobs.variants import check_base
from fastlaunch_train.recipes.recipes import RECIPES

TERMS = Options(backend="ec2", instances=("p5.48xlarge",), regions=("us-east-1",))
PLAN = "arn:aws:sagemaker:us-east-1:123456789012:training-plan/march"
H100 = catalogue().accelerators["H100"]
BASES = [image for image in shipped_base_images().images if image.flavour == "ec2"]
TEXT: dict[str, Any] = {"workload": "gpt2-xsmall"}
REVIEWS: dict[str, Any] = {"workload": "distilbert-imdb"}
OWN: dict[str, Any] = {"image": IMAGE}
#: What makes a request one for a SageMaker job, for spot, or for a capacity block.
TRAINED: dict[str, Any] = {"backend": "sagemaker"}
SPOT: dict[str, Any] = {"purchase": "spot"}
BLOCK: dict[str, Any] = {"purchase": "capacity-block", "reservation": "cr-0a1b2c3d4e5f67890"}
TWO_TYPES = {"instances": ("p5.48xlarge", "p5en.48xlarge")}


def build(terms: dict[str, Any] | None = None, **request: Any) -> Jobs:
    options = replace(TERMS, **(terms or {}), **request)
    check_on_aws(options)
    return build_jobs(options, catalogue=catalogue())


def jobs(request: Jobs, **where: Any) -> tuple[Job, ...]:
    return request.at(request.instances[0], "us-east-1", **where)


def test_defaults_are_those_of_a_gpu() -> None:
    (job,) = jobs(build())
    assert (job.workload, job.batch_size, job.recipe.name, job.steps) == ("vit-huge", 64, "bf16", 200)
    assert (job.backend, job.instance, job.num_gpus, job.num_nodes) == ("ec2", "p5.48xlarge", 8, 1)
    assert (job.region, job.terms) == ("us-east-1", Terms(purchase="on-demand", max_minutes=120))


def test_what_is_given_reaches_the_job() -> None:
    terms = {**SPOT, **OWN, "max_price_usd": 20.0, "max_minutes": 90}
    text = {**TEXT, "model": "/models/gpt2", "tokenizer": "rinna/japanese-gpt2-xsmall", "sequence_length": 64}
    (job,) = jobs(
        build(terms, **text, batch_size="auto", steps=7, seed=5, eval_every=9, checkpoint_every=2),
        image=IMAGE,
    )
    assert (job.batch_size, job.steps, job.epochs, job.seed) == (None, 7, None, 5)
    assert (job.eval_every, job.checkpoint_every) == (9, 2)
    # An absolute path is the image's own.
    assert (job.workload, job.inputs) == (text.pop("workload"), Inputs(**text))
    assert (job.image, job.terms) == (IMAGE, Terms(purchase="spot", max_price_usd=20.0, max_minutes=90))
    (job,) = jobs(build(workload="vit-tiny", batch_size=16, data="loader", num_workers=3))
    assert (job.workload, job.batch_size) == ("vit-tiny", 16)
    assert job.inputs == Inputs(data="loader", num_workers=3)


def test_every_instance_type_gets_the_same_jobs_interleaved() -> None:
    request = build(
        {"instances": ("p5.48xlarge", "p5.4xlarge")},
        recipes=("te-fp8", "bf16"),
        overrides=("ddp_bucket_mb=25",),
        repeats=2,
    )
    on_8, on_1 = (request.at(instance, "us-east-1") for instance in request.instances)
    assert [job.recipe.name for job in on_8] == ["te-fp8", "bf16", "bf16", "te-fp8"]
    assert [replace(job, instance="p5.48xlarge", num_gpus=8) for job in on_1] == list(on_8)
    assert {job.num_gpus for job in on_1} == {1}


SECRET = "HUB=arn:aws:secretsmanager:us-east-1:123456789012:secret:team/hub-x1y2z3"


@pytest.mark.parametrize(
    ("terms", "request_", "message", "hint"),
    [
        ({"instances": ("p5.48xlarg",)}, {}, "unknown instance", "p5.48xlarge"),
        ({"instances": ("p5",)}, {}, "unknown instance 'p5'", "its sizes are p5.4xlarge and p5.48xlarge"),
        ({"instances": ("ml.p5.48xlarge",)}, {}, "unknown instance 'ml.p5.48xlarge'", "p5.48xlarge"),
        ({"instances": ()}, {}, "no instance type is named", "at least one"),
        ({"instances": ("p5.48xlarge",) * 2}, {}, "instance type p5.48xlarge is given twice", "once"),
        ({**TRAINED, "instances": ("ml.p5.48xlarge", "p5.48xlarge")}, {}, "is given twice", "once"),
        ({"regions": ("us-east-1a",)}, {}, "'us-east-1a' is not the name of a region", "us-east-1"),
        ({"purchase": "reserved"}, {}, "unknown purchase option", "spot"),
        ({"backend": "batch"}, {}, "unknown backend", "sagemaker"),
        ({"num_nodes": 0}, {}, "--num-nodes is 0", "1 or more"),
        ({"num_nodes": 2, "instances": ("g5.xlarge",)}, {}, "g5.xlarge has no EFA", "--allow-tcp"),
        ({"max_minutes": 14}, {}, "--max-hours is 14 min", "15min"),
        ({"max_minutes": 43_201}, {}, "--max-hours is 43201 min", "30d"),
        ({**TRAINED, "max_minutes": 40_321}, {}, "ends every job after 28 days", "28d"),
        # How it is bought.
        ({"purchase": "capacity-block"}, {}, "no capacity block is named", "--reservation cr-"),
        ({**BLOCK, "reservation": "r-1"}, {}, "'r-1' is not the id of a reservation", "cr-0a1b2c3d"),
        ({**BLOCK, **SPOT}, {"checkpoint_every": 1}, "--reservation is for EC2", "capacity-block"),
        ({**BLOCK, **TWO_TYPES}, {}, "has one instance type", "name one"),
        ({**BLOCK, "instances": ("g5.xlarge",)}, {}, "has no capacity-block price", "--purchase on-demand"),
        ({**BLOCK, "max_price_usd": 20.0}, {}, "--max-price is the most that is paid for spot", "spot"),
        ({"instances": ("p5e.48xlarge",)}, {}, "p5e.48xlarge has no on-demand price", "--max-price USD"),
        ({**SPOT, "max_price_usd": 0.0001}, {"checkpoint_every": 1}, "0.0001", "$0.001"),
        (SPOT, {}, "spot without checkpoints", "--checkpoint-every 50"),
        (SPOT, {"steps": 3}, "spot without checkpoints", "--checkpoint-every 1,"),
        ({**SPOT, "instances": ("p5e.48xlarge",)}, {"checkpoint_every": 9}, "would bound", "--max-price USD"),
        ({**TRAINED, **BLOCK}, {}, "SageMaker does not take EC2's capacity blocks", "--training-plan ARN"),
        ({**TRAINED, "reservation": "cr-0a1b2c3d"}, {}, "--reservation is for", "leave it out"),
        ({**TRAINED, "max_price_usd": 9.0}, {}, "--max-price is for EC2", "--max-cost"),
        ({"max_minutes": 120, "idle_timeout_s": 7200.0}, {}, "ends everything after 120 min", "shorter"),
        ({**TRAINED, "training_plan": "march"}, {}, "'march' is not an ARN", "list-training-plans"),
        ({**TRAINED, "training_plan": PLAN, **SPOT}, {"checkpoint_every": 1}, "spot does not use", "one of"),
        ({**TRAINED, "training_plan": PLAN, **TWO_TYPES}, {}, "has one instance type", "name one"),
        ({**TRAINED, "training_plan": PLAN, "regions": ("us-east-2",)}, {}, "in us-east-1", "--region us-"),
        ({"training_plan": PLAN}, {}, "--training-plan is for SageMaker", "--reservation cr-"),
        # What it is called.
        ({"tags": ("team",)}, {}, "--tag 'team' is not KEY=VALUE", "team=vision"),
        ({"tags": ("=vision",)}, {}, "--tag '' is not KEY=VALUE", "team=vision"),
        ({"tags": ("team=a", "team=b")}, {}, "--tag team is given twice", "once"),
        ({"tags": ("team=a", "Team=b")}, {}, "differ only in upper and lower case", "keep one"),
        ({"tags": ("aws:team=a",)}, {}, "begins with aws:", "another name"),
        ({"tags": ("FastLaunch:run=a",)}, {}, "begins with FastLaunch:", "another name"),
        ({"tags": ("k" * 129 + "=a",)}, {}, "has 129 characters", "1 to 128"),
        ({"tags": ("k=" + "v" * 257,)}, {}, "its value 257", "up to 256"),
        ({"tags": ("k=a,b",)}, {}, "a character that AWS does not take", "letters, digits"),
        # What it may know.
        ({"secrets": ("HUB",)}, {}, "--secret 'HUB' is not NAME=ARN", "HF_TOKEN=arn:aws:secretsmanager"),
        ({"secrets": ("hf_0123",)}, {}, "--secret ... is not NAME=ARN", "HF_TOKEN=arn:aws:secretsmanager"),
        (
            {"variables": ("WANDB_API_KEY=5e1c",)},
            {},
            "--env WANDB_API_KEY looks",
            "--secret WANDB_API_KEY=ARN",
        ),
        ({"variables": ("PGPASSWORD=5e1c",)}, {}, "--env PGPASSWORD looks like", "--secret PGPASSWORD=ARN"),
        ({"variables": ("DB=psql://me:5e1c@db/x",)}, {}, "--env DB looks like", "--secret DB=ARN"),
        ({"variables": ("A=-----BEGIN RSA PRIVATE KEY-----",)}, {}, "--env A looks like", "--secret A=ARN"),
        ({"variables": (f"A=eyJhbGciOi.eyJ{'5e1c' * 4}",)}, {}, "--env A looks like", "--secret A=ARN"),
        ({}, {"workload_arguments": (f"hub=hf_{'5e1c' * 8}",)}, "--set-workload looks", "--secret NAME=ARN"),
        ({}, {"command": ("python", "t.py", f"--hub=hf_{'5e1c' * 8}")}, "looks like a secret", "--secret"),
        ({"secrets": (SECRET, SECRET)}, {}, "--secret HUB is given twice", "once"),
        ({"secrets": (f"FASTLAUNCH_{SECRET}",)}, {}, "'FASTLAUNCH_HUB' cannot be a variable", "HF_TOKEN"),
        ({"secrets": (SECRET.replace("HUB", "PATH"),)}, {}, "'PATH' cannot be a variable", "HF_TOKEN"),
        ({"secrets": (SECRET.replace("HUB", "a-b"),)}, {}, "'a-b' cannot be a variable", "letters, digits"),
        ({"secrets": ("HUB=hf_0123",)}, {}, "--secret HUB=... names neither a secret nor", ":secret:NAME"),
        ({"secrets": (SECRET.replace(":secret:", ":secrets:"),)}, {}, "names neither", ":secret:NAME"),
        # What it needs.
        ({"inputs": ("d=s3:/b",)}, {}, "--input d=s3:/b is no folder in S3", "d=s3://BUCKET/PREFIX"),
        ({"inputs": ("d=s3://b-1/*",)}, {}, "--input d=s3://b-1/* has one of", "all that lies below it"),
        ({"inputs": ("d=s3://b-1/<p>",)}, {}, "is no folder in S3", "s3://"),
        ({"inputs": ("Runs=s3://b-1",)}, {}, "'Runs' cannot be the name", "are taken"),
        ({"inputs": ("../d=s3://b-1",)}, {}, "'../d' cannot be the name", "letters, digits"),
        ({"inputs": ("a-b=s3://b-1", "A_b=s3://b-1")}, {}, "a-b, A_b make the same variable", "differently"),
        ({"requirements_from_index": True}, {}, "is for --requirements", "--requirements FILE"),
        ({**OWN, "requirements": "r.txt"}, {}, "that of yours is not known", "--requirements-from-index"),
        (
            {**OWN, "requirements": "r.txt", "requirements_from_index": True},
            {},
            "with an --image of yours is for a script",
            "fastlaunch build",
        ),
        (
            {"inputs": ("d=s3://b-1",)},
            {"data": "folder:/opt/ml/input/data/e"},
            "folders do not travel",
            "--input",
        ),
        # The image.
        ({**OWN, "base_image": "2.9"}, {}, "name two images", "one of the two"),
        ({"image": "acme/train:1"}, {}, "is not an image by its digest", "@sha256:"),
        ({"image": "acme/train@sha256:" + "0" * 64}, {}, "is not an image by its digest", "REGISTRY/"),
        ({}, TEXT, "gpt2-xsmall needs transformers, which AWS's images lack", "--with transformers"),
        ({}, {**TEXT, "recipes": ("bf16", "lightning")}, "needs transformers", "--with lightning --push"),
        ({}, {"recipes": ("ao-fp8",)}, "recipe ao-fp8 needs torchao, which AWS's", "--with torchao"),
        ({}, {"recipes": ("ort",)}, "recipe ort needs torch_ort", "fastlaunch build --ort"),
        # The GPU.
        ({"instances": ("trn1.32xlarge",)}, {}, "Trainium1", "NVIDIA GPUs: p4d, p4de, p5"),
        ({}, {"recipes": ("te-mxfp8",)}, "MXFP8 needs compute capability 10.0", "p6-b300; or"),
        ({"instances": ("g6e.12xlarge",)}, {"recipes": ("te-fp8-block",)}, "L40S has 8.9", "recipe te-fp8"),
        (
            {"instances": ("p5.48xlarge", "g5.xlarge")},
            {"recipes": ("bf16", "te-fp8")},
            "cannot run on g5.xlarge: FP8 needs",
            "it runs on p5, p5e, p5en, p6-b200, p6-b300, g6, gr6, g6e, g7, g7e; or give recipe te-bf16",
        ),
        # What is trained.
        ({}, {"repeats": 0}, "--repeats is 0", "1 to 1000"),
        ({}, {"nproc": 2}, "--nproc is for training on this machine", "one process per GPU"),
        ({}, {"workload": "gelu", "recipes": ("te-fp8",)}, "te-fp8 does not fit workload gelu", "blocks="),
        ({}, {"recipes": ("library",)}, "vit-huge, which writes out no pointwise", "--workload gelu"),
        (OWN, {**TEXT, "recipes": ("zero1",)}, "DeepSpeed cannot shard adafactor", "--set optimizer=adamw"),
        ({}, {"steps": 19}, "--steps 19 gives no step time", "--eval-every"),
        ({}, {"epochs": 2}, "synthetic data have no end", "give --steps"),
        ({}, {"workload": "gelu", "data": "loader"}, "workload 'gelu' takes none", "--data synthetic"),
        (
            {},
            {"workload": f"{__file__}:test_defaults_are_those_of_a_gpu"},
            "is not below this folder",
            "./my.py:build",
        ),
        ({}, {"workload": "hf-lora:llama-tiny", "data": "tests/a.jsonl"}, "line 1: it has none", "messages"),
        # Data and models that are not where the job is.
        ({}, {"data": "folder:/tmp"}, "folder:/tmp is on this machine", "--data folder:/opt/data/tmp"),
        ({}, {**TEXT, "data": "folder:/t"}, "gpt2-xsmall' reads one file of text", "--data file:PATH"),
        (OWN, {"workload": "gelu", "data": "folder:/t"}, "gelu' makes its own data", "--data synthetic"),
        (OWN, {**REVIEWS, "data": r"folder:C:\d\acl"}, "it begins with /", "folder:/opt/data/acl"),
        (OWN, {**REVIEWS, "data": "folder:/opt/ml/input"}, "get /opt/ml from outside", "/opt/data"),
        (OWN, {**REVIEWS, "data": "file://out/a"}, "containers get /out from outside", "/opt/data"),
        (OWN, {**REVIEWS, "data": "folder:/a/../out"}, "is no path in an image", "without .."),
        (OWN, {**REVIEWS, "data": "folder:/<bucket>"}, "has < or >", "rename it"),
        (OWN, {**TEXT, "model": "/proc/model"}, "--model /proc/model cannot be read", "/opt/data"),
        (OWN, {**TEXT, "model": "./gpt2"}, "--model './gpt2' is a folder on this machine", "/opt/models"),
        ({}, {**TEXT, "model": "tests"}, "--model 'tests' is a folder", "Hugging Face hub"),
        ({}, {**TEXT, "tokenizer": "/models/t"}, "--tokenizer '/models/t' is a folder", "--image"),
        ({}, {"workload": "hf-clm:/models/gpt2"}, "hf-clm:'/models/gpt2' is a folder", "hub"),
    ],
)
def test_what_cannot_be_is_refused(
    terms: dict[str, Any],
    request_: dict[str, Any],
    message: str,
    hint: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests/a.jsonl").write_text('{"body": "a"}')
    with pytest.raises(UserError) as caught:
        build(terms, **request_)
    assert message in caught.value.message
    assert hint in str(caught.value.hint)
    # What may be the value of a secret is not repeated.
    assert "5e1c" not in caught.value.message + str(caught.value.hint)


def test_a_variable_that_only_sounds_like_a_secret_is_given() -> None:
    names = ("EOS_TOKEN", "TOKENIZERS_PARALLELISM", "MAX_TOKENS", "MONKEYS", "HF_TOKEN_PATH", "DB_SECRET_ARN")
    build({"variables": (*(f"{name}=1" for name in names), "HF_TOKEN=", "URL=https://a.b:80/c@d")})


def test_data_and_models_may_be_inputs() -> None:
    terms = {"inputs": ("d=s3://acme-data/acl", "m=s3://acme-models/gpt2/")}
    assert given_inputs(Options(**terms)) == {"d": "s3://acme-data/acl/", "m": "s3://acme-models/gpt2/"}
    at = {"data": "folder:/opt/ml/input/data/d/train"}
    assert [job.inputs.data for job in jobs(build(terms, **at))] == [at["data"]]
    build({**OWN, **terms}, **{**REVIEWS, **at, "model": "/opt/ml/input/data/m"})


def test_the_instance_types_say_which_service() -> None:
    assert backend_of(("p5.48xlarge",), None) == "ec2"
    assert backend_of(("ml.p5.48xlarge", "ml.p4d.24xlarge"), None) == "sagemaker"
    assert backend_of(("p5.48xlarge", "ml.p4d.24xlarge"), "sagemaker") == "sagemaker"
    with pytest.raises(UserError, match=r"ml.p5.48xlarge is SageMaker's name of a type, and g5.xlarge EC2's"):
        backend_of(("g5.xlarge", "ml.p5.48xlarge"), None)
    with pytest.raises(UserError, match="and the backend is ec2") as caught:
        backend_of(("ml.p5.48xlarge",), "ec2")
    assert "--instance p5.48xlarge" in str(caught.value.hint)


def test_several_nodes_have_a_rank_for_each_gpu_of_all() -> None:
    request = build({"num_nodes": 4, "allow_tcp": True, "instances": ("p5.48xlarge", "g5.xlarge")})
    large, small = (request.at(one, "us-east-1")[0] for one in request.instances)
    assert (large.num_nodes, large.num_gpus, large.allow_tcp) == (4, 32, True)
    assert (small.num_nodes, small.num_gpus) == (4, 4)
    # One node has nobody to talk to, over whatever.
    alone = build({"allow_tcp": True})
    assert not alone.at(alone.instances[0], "us-east-1")[0].allow_tcp


def test_a_job_knows_its_block_or_training_plan() -> None:
    request = build({**BLOCK, "block_fee_usd": 944.0})
    (job,) = jobs(request)
    assert (job.terms.purchase, job.terms.reservation) == ("capacity-block", BLOCK["reservation"])
    assert request.options.block_fee_usd == 944.0
    (job,) = jobs(build({**TRAINED, "instances": ("ml.p5.48xlarge",), "training_plan": PLAN}))
    # EC2's name: the hardware is the same, and so are prices' names.
    assert (job.backend, job.instance, job.terms.training_plan) == ("sagemaker", "p5.48xlarge", PLAN)
    # What EC2 sells only as spot SageMaker may have: its own price decides.
    assert build({**TRAINED, "instances": ("p5e.48xlarge",)}).instances[0].name == "p5e.48xlarge"


def test_jobs_are_checked_as_such() -> None:
    with pytest.raises(UserError, match="steps is 0"):
        jobs(build(steps=0))


def test_the_users_own_workload_travels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "mine.py").write_text("def build(): ...\n")
    monkeypatch.chdir(tmp_path)
    assert build(workload="models/mine.py:build").user_file == Path("models/mine.py")
    assert build(workload="vit-tiny").user_file is None
    with pytest.raises(UserError, match="which --image does without"):
        build({"image": IMAGE}, workload="models/mine.py:build")
    monkeypatch.chdir(tmp_path / "models")
    with pytest.raises(UserError, match="is not below this folder"):
        build(workload="../models/mine.py:build")


def test_every_recipe_runs_on_the_newest_gpu_that_takes_it_with_an_image_of_ones_own() -> None:
    for name in RECIPES:
        instance = "p6-b200.48xlarge" if name == "te-mxfp8" else "p5.48xlarge"
        workload = None if RECIPES[name].pointwise == "written" else "gelu"
        if RECIPES[name].frozen_weights != "native" or RECIPES[name].kernels != "torch":
            workload = "hf-lora:llama-3.1-8b"
        assert build({**OWN, "instances": (instance,)}, recipes=(name,), workload=workload).variants


def test_other_workloads_and_images_pass() -> None:
    for name in ("gelu", "gelu:64x64", "timm:vit_base_patch16_224"):
        assert jobs(build(workload=name))[0].workload == name
    for host in ("localhost:5000/fastlaunch", "151742754352.dkr.ecr.eu-west-1.amazonaws.com/a/b:1.2-x"):
        request = build({"image": f"{host}@sha256:" + "0" * 64}, workload="hf-clm:EleutherAI/gpt-neo-2.7B")
        assert request.variants[0].workload.batch_size == 4


@pytest.mark.parametrize(
    ("recipe", "gpu", "base", "problem"),
    [
        ("te-fp8-current", "H100", "2.6", "transformer_engine 2.2"),
        ("te-bf16", "H100", "2.1", "torch 2.4"),
        ("zero2", "H100", "2.10", "needs deepspeed"),
        ("te-fp8-block", "H100", "2.7", "CUDA 12.9"),
        ("te-fp8-block", "H100", "2.8", None),
        ("te-fp8-block", "B200", "2.8", "Blackwell needs transformer_engine 2.9, and 2.5"),
        ("te-fp8-block", "B200", "2.9", None),
        ("te-fp8-block", "H100", "2.13", None),
        ("zero2", "H100", "2.13", None),
    ],
)
def test_a_base_image_holds_what_the_recipes_need_on_the_gpus_or_is_refused(
    recipe: str, gpu: str, base: str, problem: str | None
) -> None:
    old = next(image for image in BASES if image.torch.startswith(f"{base}."))
    variants = build(OWN, recipes=("bf16", recipe)).variants
    accelerators = [H100, catalogue().accelerators[gpu]]
    if problem is None:
        check_base(variants, old, BASES, accelerators)
        return
    with pytest.raises(UserError, match=f"recipe {recipe} cannot run in .*{problem}") as caught:
        check_base(variants, old, BASES, accelerators)
    assert str(caught.value.hint).startswith("give --base-image 2.13.0 or 2.12.1")


def test_a_file_of_data_here_travels_as_an_input(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("my data.jsonl").write_bytes(b'{"text": "abc"}\n')
    data = data_file("file:my data.jsonl", Options())
    assert data is not None
    digest = hashlib.sha256(b'{"text": "abc"}\n').hexdigest()
    assert data.source == "file:/opt/ml/input/data/local-data/my_data.jsonl"
    assert data.stored("fastlaunch").key == f"fastlaunch/code/{digest}/my_data.jsonl"
    Path("my data.jsonl").write_bytes(b"other")
    with pytest.raises(UserError, match="changed meanwhile"):
        assert data.data
    assert data_file("file:/opt/ml/input/data/d/a.txt", Options()) is None
    assert data_file("synthetic", Options()) is None
    monkeypatch.setattr("fastlaunch.jobs.data_sources._MAX_FILE_BYTES", 4)
    with pytest.raises(UserError, match="at most 1 GiB") as caught:
        data_file("file:my data.jsonl", Options())
    assert "--input data=s3://BUCKET/PREFIX" in (caught.value.hint or "")


def test_a_path_alone_is_that_of_a_file_or_a_folder(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b"x")
    assert data_source(f"{tmp_path}/a.jsonl") == f"file:{tmp_path}/a.jsonl"
    assert data_source(str(tmp_path)) == f"folder:{tmp_path}"
    assert [data_source(text) for text in ("synthetic", "loader", "file:x")] == [
        "synthetic",
        "loader",
        "file:x",
    ]
