"""Predicting throughput: the model, the classes of evidence, what is refused, the command."""

import csv
import io
import math
from dataclasses import replace
from pathlib import Path
from statistics import median

import numpy as np
import pytest

from fastlaunch.analysis.anchors import Refusal, read, read_anchors, read_unit
from fastlaunch.analysis.predict import Fit, Prediction, Predictor, features_of, pcie_share
from fastlaunch.catalog import hardware
from fastlaunch.catalog.hardware import identify, image_flops
from fastlaunch.catalog.load import load_catalogue
from fastlaunch.cli.main import run
from fastlaunch.cli.predict import ADDED
from fastlaunch.measure.published import shipped_runs

#: Throughput of a model is its own constant times the GPU's: what a matrix of rank 1 is.
MODELS = {f"net{i}": 100.0 * 1.7**i for i in range(6)}
GPUS = {"V100-SXM-16GB": 1.0, "V100-SXM-32GB": 1.1, "A100-SXM-40GB": 2.5, "A100-SXM-80GB": 3.0, "H100": 6.0}


def row(model: str, gpu: str, **changes: object) -> dict[str, str]:
    cells = {
        "model": model,
        "precision": "amp",
        "gpu": gpu,
        "num_gpus": 1,
        "unit": "images/s",
        "params": "25e6",
    }
    return {name: str(value) for name, value in (cells | changes).items()}


def matrix(without: tuple[str, ...] = (), factor: float = 1.0) -> list[dict[str, str]]:
    """Measurements of net0 on every GPU, and of the other models; net0 not on the GPUs `without`."""
    return [
        row(model, gpu, throughput=own * speed * factor)
        for model, own in MODELS.items()
        for gpu, speed in GPUS.items()
        if not (model == "net0" and gpu in without)
    ]


def predicted(anchors: list[dict[str, str]], query: dict[str, str]) -> Prediction:
    answer = Predictor(read_anchors(anchors)[0]).predict([read(query)[0]])[0]
    assert isinstance(answer, Prediction)
    return answer


@pytest.mark.parametrize(
    ("without", "query", "evidence", "error"),
    [
        (("A100-SXM-80GB",), row("net0", "A100-SXM-80GB"), "A", 0.05),
        (("A100-SXM-40GB", "A100-SXM-80GB"), row("net0", "NVIDIA_A100-SXM4-80GB"), "B", 0.08),
        (tuple(GPUS), row("net0", "H100"), "B0", None),
        ((), row("net0", "B200"), "C", None),
    ],
)
def test_rank_one_is_recovered_and_the_range_holds_it(
    without: tuple[str, ...], query: dict[str, str], evidence: str, error: float | None
) -> None:
    answer = predicted(matrix(without), query)
    assert answer.evidence == evidence
    assert answer.low < answer.predicted < answer.high
    true = MODELS["net0"] * GPUS.get(query["gpu"], 3.0)
    if error is not None:
        assert abs(answer.predicted / true - 1) < error
    if evidence in "AB":
        assert answer.low < true < answer.high


@pytest.mark.parametrize("missing", ["params", "seq_or_image", "task"])
def test_what_a_query_does_not_say_of_its_model_is_as_its_anchors_say(missing: str) -> None:
    of_model = {"params": "6e8", "seq_or_image": "448", "task": "vision"}
    anchors = [{**each, **of_model} for each in matrix(("A100-SXM-80GB",))]
    query = row("net0", "A100-SXM-80GB", **of_model)
    assert predicted(anchors, {**query, missing: ""}) == predicted(anchors, query)


def test_the_range_is_as_wide_as_runs_of_its_source_are_off() -> None:
    noise = np.random.default_rng(0)
    anchors = [
        row(
            f"{source}{model}", gpu, source_repo=source, throughput=speed * 50 * noise.lognormal(0, deviation)
        )
        for source, deviation in (("calm", 0.02), ("wild", 0.6))
        for model in range(12)
        for gpu, speed in GPUS.items()
    ]
    hidden = {(model, "A100-SXM-80GB") for model in ("calm0", "wild0")}
    known = [anchor for anchor in anchors if (anchor["model"], anchor["gpu"]) not in hidden]

    def width(model: str, source: str) -> float:
        found = predicted(known, row(model, "A100-SXM-80GB", source_repo=source))
        return found.high / found.low

    assert width("calm0", "calm") < width("calm0", "") < width("wild0", "wild")


def test_newer_software_is_faster_by_what_other_models_gained() -> None:
    models = [f"net{number}" for number in range(8)]
    anchors = [
        row(model, "A100-SXM-80GB", num_gpus=8, throughput=800 * (1 + number) * gain, date=date)
        for number, model in enumerate(models)
        for date, gain in (("2022-01", 1.0), ("2025-01", 1.5))
        if (model, date) != ("net3", "2025-01")
    ]
    query = row("net3", "A100-SXM-80GB", num_gpus=8, date="2022-01")
    before, after = (predicted(anchors, {**query, "date": date}) for date in ("2022-01", "2025-01"))
    # How much of it a model of its own gains is uncertain.
    assert after.predicted > 1.02 * before.predicted
    assert after.high / after.low > before.high / before.low


def test_what_a_gpu_cannot_do_is_not_in_the_range() -> None:
    """The range lies below the ceiling, and is as without one far below it."""
    (query, _), anchors = read(row("net0", "A100-SXM-80GB")), read_anchors(matrix(("A100-SXM-80GB",)))[0]
    predictor = Predictor(anchors)

    def answer(ceiling: float) -> Prediction:
        (found,) = predictor.predict([query], [math.log(ceiling)])
        assert isinstance(found, Prediction)
        return found

    free = answer(1e9)
    assert free == predictor.predict([query])[0]
    for ceiling in (free.predicted, 0.5 * free.predicted, 0.01 * free.predicted):
        found = answer(ceiling)
        assert found.low < found.predicted < found.high <= ceiling


@pytest.mark.parametrize("gpu", ["H100", "T4", "K80"])
@pytest.mark.parametrize("model", ["resnet50", "ssd300", "vit_large_patch16_224", "RetinaNet"])
@pytest.mark.parametrize("precision", ["amp", "fp32"])
def test_no_range_of_a_named_image_model_passes_the_peak(gpu: str, model: str, precision: str) -> None:
    # The anchors' throughput is beyond what any GPU does with these models.
    query = row(model, gpu, precision=precision, params="")
    answer = predicted(matrix(factor=200.0), query)
    (config, _) = read(query)
    assert config.gpu is not None and config.image_flops is not None
    peak_tflops = max(peak for name, peak in config.gpu.peak_tflops.items() if name not in ("fp8", "fp4"))
    assert answer.predicted < answer.high <= 0.75 * peak_tflops * 1e12 / config.image_flops * 1.001


@pytest.mark.parametrize(
    ("model", "pixels", "gmacs"),
    [
        # ResNet-50 has 4.1e9 multiply-adds at 224 pixels, ViT-B/16 17.6e9 and as many a pixel.
        ("ResNet-50", 224, 4.1),
        ("resnet50.a1_in1k", None, 4.1),
        ("Classification/ConvNets/resnet50v1.5 (PyTorch)", None, 4.1),
        ("resnet50", 448, 16.4),
        ("vit_base_patch16_224", 224, 17.6),
        ("ssd300", 300, 20.2),
    ],
)
def test_the_flops_of_named_image_models(model: str, pixels: float | None, gmacs: float) -> None:
    assert image_flops(model, pixels) == pytest.approx(6e9 * gmacs, rel=0.06)
    assert image_flops("of nobody", pixels) is None


@pytest.mark.parametrize(
    ("model", "params", "active"),
    [("Llama3-8B", 8e9, 8e9), ("Qwen3_235B_a22B", 235e9, 22e9), ("DeepSeekV3 (w/ MTP)", 671e9, 37e9)],
)
def test_a_mixture_of_experts_uses_a_part_of_its_weights(model: str, params: float, active: float) -> None:
    (config, _) = read(row(model, "H100", unit="tokens/s", params=params))
    assert config.active_params == active


def test_fp8_on_a_generation_where_nobody_ran_it_is_the_widest_class() -> None:
    in_fp8 = [row(model, "H100", precision="fp8", throughput=9 * own) for model, own in MODELS.items()]
    on_ada = [row(model, "L40S", throughput=2 * own) for model, own in MODELS.items()]
    anchors = [*matrix(), *in_fp8, *on_ada]
    queries = [read(row("net0", "L40S", **changes))[0] for changes in ({}, {"precision": "fp8"})]
    predictor = Predictor(read_anchors(anchors)[0])
    assert [predictor.evidence(query) for query in queries] == ["A", "C"]
    features, likeness = features_of([*predictor.configs, *queries], len(predictor.configs))
    rows = features.rows(slice(len(predictor.configs)))
    fit = Fit(rows, predictor.log_throughput, predictor.num_runs, likeness)
    _, (known, unknown) = fit.predict(features.rows(slice(len(predictor.configs), None)))
    # FP8 may be worth more or less there than elsewhere.
    assert math.sqrt(unknown**2 - known**2) > 0.35


@pytest.mark.parametrize(
    ("params", "num_gpus", "share"),
    [
        # 0.1 s a step, of which 0.067 s are the backward pass. A ring of eight sends 7 bytes a
        # weight at 32 GB/s: 0.022 s, or 0.22 s.
        (1e8, 8, 1.0),
        (1e9, 8, 0.1 / (0.1 + 7e9 / 32e9 - 2 / 3 * 0.1)),
        (1e9, 1, 1.0),
    ],
)
def test_gpus_without_nvlink_wait_for_the_gradients_that_outlast_the_backward_pass(
    params: float, num_gpus: int, share: float
) -> None:
    query = row("net0", "RTX PRO 6000", params=params, num_gpus=num_gpus, batch_per_gpu=10)
    (config, _) = read(query)
    assert pcie_share(config, 100.0) == pytest.approx(share)
    anchors = [{**each, "params": str(params)} for each in matrix()]
    alone, together = (predicted(anchors, {**query, "num_gpus": str(number)}) for number in (1, num_gpus))
    assert together.evidence == ("D" if num_gpus > 1 else "C")
    assert together.predicted <= num_gpus * alone.predicted


def test_gpus_exchange_the_gradients_of_adapters_alone() -> None:
    query = row("llama", "RTX PRO 6000", params=7e9, num_gpus=8, batch_per_gpu=1, task="LoRA")
    (config, _) = read(query)
    assert pcie_share(config, 1.0) == 1.0
    assert pcie_share(read({**query, "task": ""})[0], 1.0) < 0.6
    assert pcie_share(replace(config, trained_params=7e9), 1.0) < 0.6


@pytest.mark.parametrize(("model", "flops"), [("hf-lora:x", 4), ("hf-sft:x", 6)])
def test_activation_checkpointing_repeats_a_forward_pass(model: str, flops: int) -> None:
    (plain, _), (repeated, _) = (
        read(row(f"{model} bf16{override}", "H100", unit="tokens/s", params=7e9))
        for override in ("", " activation_checkpointing=block")
    )
    assert (plain.flops_per_weight, repeated.flops_per_weight) == (flops, flops + 2)


@pytest.mark.parametrize("params", [2e7, 1.2e8])  # without waiting for gradients, and with
def test_a_measured_host_without_nvlink_is_predicted_as_it_was_measured(params: float) -> None:
    cells = {"num_gpus": 8, "batch_per_gpu": 10, "params": params}
    anchors = [{**each, "params": str(params)} for each in matrix()]
    anchors += [row(model, "RTX PRO 6000", throughput=24 * own, **cells) for model, own in MODELS.items()]
    assert predicted(anchors, row("net0", "RTX PRO 6000", **cells)).predicted == pytest.approx(2400, rel=0.1)


def test_a_run_far_off_the_others_loses_weight() -> None:
    anchors = matrix(without=("H100",))
    fault = [
        anchor | {"throughput": str(10 * float(anchor["throughput"]))}
        if (anchor["model"], anchor["gpu"]) == ("net3", "H100")
        else anchor
        for anchor in anchors
    ]
    query = row("net0", "H100")
    assert predicted(fault, query).predicted == pytest.approx(predicted(anchors, query).predicted, rel=0.1)


def test_eight_gpus_are_about_eight_times_one_and_the_unit_scales() -> None:
    query = row("net0", "A100-SXM-80GB")
    answer = predicted(matrix(), query)
    assert 6 < predicted(matrix(), query | {"num_gpus": "8"}).predicted / answer.predicted < 8.5
    thousand = predicted(matrix(factor=1000), query)
    for name in ("predicted", "low", "high"):
        assert getattr(thousand, name) == pytest.approx(1000 * getattr(answer, name), rel=1e-6)
    assert read(query | {"unit": "img per minute"}) == (read(query)[0], 60.0)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"unit": ""}, "unit is missing"),
        ({"unit": "s/step"}, "not a throughput"),
        ({"unit": "ms"}, "not a throughput"),
        ({"unit": "USD/hour"}, "not a throughput"),
        ({"precision": "FP8"}, "does not support FP8"),
        ({"gpu": "H100", "precision": "NVFP4"}, "does not support FP4"),
        ({"gpu": "Wonder 9"}, "no table of hardware"),
        ({"num_gpus": "0"}, "not above 0"),
        ({"num_gpus": "-8"}, "not above 0"),
        ({"num_gpus": "many"}, "not a number"),
        ({"num_gpus": ""}, "num_gpus is missing"),
        ({"batch_per_gpu": "-1"}, "not above 0"),
        ({"params": "nan"}, "not above 0"),
        ({"model": ""}, "model is missing"),
        ({"model": "other", "params": ""}, "size is unknown"),
        ({"params": "70e9"}, "does not fit in memory"),
    ],
)
def test_what_is_refused(changes: dict[str, str], reason: str) -> None:
    try:
        config, _ = read(row("net0", "A100-SXM-80GB") | changes)
    except Refusal as refusal:
        answer: object = str(refusal)
    else:
        (answer,) = Predictor(read_anchors(matrix())[0]).predict([config])
    assert isinstance(answer, str)
    assert reason in answer


def test_a_gpu_without_figures_is_predicted_from_anchors() -> None:
    anchors = [
        *matrix(),
        *(row(m, "Wonder 9", throughput=own * 5) for m, own in MODELS.items() if m != "net0"),
    ]
    answer = predicted(anchors, row("net0", "Wonder 9"))
    assert answer.evidence == "B"
    assert answer.low < MODELS["net0"] * 5 < answer.high


@pytest.mark.parametrize(
    ("text", "unit"),
    [
        ("images/s", ("images", 1.0)),
        ("img/sec", ("images", 1.0)),
        ("tokens per second", ("tokens", 1.0)),
        ("samples/min", ("samples", 60.0)),
        ("mels/s", ("mels", 1.0)),
    ],
)
def test_units(text: str, unit: tuple[str, float]) -> None:
    assert read_unit(text) == unit


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("NVIDIA_H100_80GB_HBM3", "H100"),
        ("NVIDIA A100-SXM4-80GB (400W)", "A100 80GB"),
        ("A100 80GB PCIe", "A100 PCIe 80GB"),
        ("NVIDIA H100 PCIe", "H100 PCIe"),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None),
        ("Tesla V100-SXM2-16GB", "V100 16GB"),
        ("Tesla P100-PCIE-16GB", "P100 PCIe"),
        ("A10-24GB", "A10"),
        ("Tesla_V100-PCIE-32GB", "V100 PCIe 32GB"),
        ("NVIDIA RTX A6000", "A6000"),
        ("A40", "A40"),
        ("A4000", "A4000"),
        ("NVIDIA GH200 480GB", "GH200 96GB"),
        ("Intel(R) Gaudi(R) 2 AI Accelerator", "Gaudi2"),
        ("Xeon", None),
    ],
)
def test_gpus_are_known_however_they_are_spelt(text: str, name: str | None) -> None:
    gpu = identify(text)
    assert (gpu.name if gpu else None) == name


def answered(
    folder: Path, anchors: list[dict[str, str]], queries: list[dict[str, str]], columns: list[str]
) -> int:
    """Run `fastlaunch predict` over files of these rows, as CSV; return the exit status."""
    for name, rows in (("anchors", anchors), ("queries", queries)):
        with (folder / f"{name}.csv").open("w", newline="") as file:
            writer = csv.DictWriter(file, columns, restval="")
            writer.writeheader()
            writer.writerows(rows)
    files = ["--anchors", str(folder / "anchors.csv"), "--queries", str(folder / "queries.csv")]
    return run(["predict", *files, "--output", "csv"])


def test_an_accelerator_of_the_config_file_has_its_figures(
    isolated: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (isolated.parent / "prices.yaml").write_text(
        "accelerators: {Wonder 9: {memory_gib: 96, bandwidth_tb_per_s: 4, peak_tflops: {fp16: 800}, "
        "formats: [fp16], source: ours}}\n"
    )
    (isolated.parent / "config.yaml").write_text("prices: prices.yaml\n")
    assert answered(tmp_path, matrix(), [row("net0", "Wonder 9")], list(matrix()[0])) == 0
    captured = capsys.readouterr()
    assert next(csv.DictReader(io.StringIO(captured.out)))["evidence"] == "C"
    assert "Two minutes of net0 on one Wonder 9" in captured.err


def test_our_measurements_are_anchors_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    queries = tmp_path / "queries.csv"
    queries.write_text("model,precision,gpu,num_gpus,unit\nvit-huge bf16,bf16,H200,1,images/s\n")
    assert run(["predict", "--shipped-anchors", "--queries", str(queries), "--output", "csv"]) == 0
    (answer,) = csv.DictReader(io.StringIO(capsys.readouterr().out))
    assert answer["evidence"] == "A"
    measured = [
        summary.timing.samples_per_step / summary.step_time_s
        for summary in shipped_runs("vit-huge").values()
        if (summary.setup.recipe, summary.setup.num_gpus) == ("bf16", 1)
        and summary.timing.samples_per_step
        and summary.step_time_s
        and "H200" in (summary.setup.device_name or "")
    ]
    assert float(answer["low"]) < median(measured) < float(answer["high"])
    # Without them the ledger alone knows nothing.
    assert run(["predict", "--own-anchors", "--queries", str(queries), "--output", "csv"]) == 0
    assert next(csv.DictReader(io.StringIO(capsys.readouterr().out)))["refused"]


def test_figures_of_gpus_that_ec2_sells_are_those_of_the_price_file() -> None:
    for accelerator in load_catalogue().accelerators.values():
        # One name on every screen, whether it comes from the price file or from what torch calls the device.
        assert {known.name for name in accelerator.device_names if (known := identify(name))} <= {
            accelerator.name
        }
        gpu = identify(accelerator.name)
        assert gpu is not None and gpu.name == accelerator.name
        assert gpu.bandwidth_gb_per_s == pytest.approx(1000 * accelerator.bandwidth_tb_per_s), gpu.name
        assert gpu.peak_tflops.items() >= accelerator.peak_tflops.items(), gpu.name


def test_the_command_keeps_order_and_columns(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    queries = [
        row("net0", "H100", note="a, b"),
        row("net1", "A100", precision="fp8", note=""),
        row("net0", "A100-SXM-80GB", note="c"),
    ]
    columns = [*queries[0], "throughput"]
    assert answered(tmp_path, matrix(), queries, columns) == 0
    reader = csv.DictReader(io.StringIO(capsys.readouterr().out))
    answers = list(reader)
    assert reader.fieldnames == [*columns, *ADDED]
    assert [{name: answer[name] for name in queries[0]} for answer in answers] == queries
    assert [bool(answer["refused"]) for answer in answers] == [False, True, False]
    assert [answers[1][name] for name in ("predicted", "low", "high")] == ["", "", ""]
    assert math.isfinite(float(answers[0]["predicted"]))


@pytest.mark.parametrize(
    ("gpu", "precision", "task", "peak_tflops", "flops"),
    [
        ("H100", "bf16", "causal-LM pretrain", 989.4, 6),
        ("L4", "fp8", "causal-LM pretrain", 242, 6),
        ("H100", "bf16", "causal-LM LoRA finetune", 989.4, 4),  # frozen weights have no gradient
    ],
)
def test_a_language_model_reaches_three_quarters_of_the_peak_at_most(
    gpu: str, precision: str, task: str, peak_tflops: float, flops: int
) -> None:
    text = row("gpt2-xl", gpu, precision=precision, task=task, unit="tokens/s", params="1.5e9")
    (config, _) = read(text)
    assert math.exp(config.log_ceiling) == pytest.approx(0.75 * peak_tflops * 1e12 / (flops * 1.5e9))


def test_every_gpu_of_the_table_names_the_document_of_its_figures() -> None:
    path = Path(hardware.__file__).with_name("gpus.csv")
    with path.open(encoding="utf-8", newline="") as lines:
        assert [row["name"] for row in csv.DictReader(lines) if not row["source"]] == []
