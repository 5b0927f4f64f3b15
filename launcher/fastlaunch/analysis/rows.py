"""`Row`: everything that a comparison says of runs that are repeats of each other."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from fastlaunch.analysis import cost
from fastlaunch.analysis.compiling import first_runs
from fastlaunch.analysis.pooling import SAMPLE, STEP, Candidate, Pool, arm_of, log_time, samples_per_step
from fastlaunch.analysis.pricing import RowPrice, accelerator_of
from fastlaunch.analysis.statistics import Spread, mean_of, uncertainty
from fastlaunch.analysis.validity import Guard
from fastlaunch.analysis.verdicts import BASELINE, Judgement, PricedPool, exp
from fastlaunch.measure.summarize import Interval

if TYPE_CHECKING:
    from fastlaunch.catalog.prices import Catalogue


@dataclass(frozen=True, kw_only=True)
class Row:
    """Runs that are repeats of each other, and how they compare with the baseline of their workload.

    num_runs: those used. num_unsteady: those whose step time did not settle, left out; where there are no
    others they are shown, without intervals. Quantities are None where unknown. percent_of_peak: of the
    recipe's own precision. build_s, compile_s, warmup_s: means over the runs, of what the step time leaves
    out, of the first two also where the step time did not settle; compile_s over those that compiled without
    a cache, where there are any. data_wait_fraction, utilization: means too, of the time in which the host
    fetched batches, and in which a GPU ran kernels. ratio_to_baseline: of samples per dollar,
    speed_ratio_to_baseline: of samples/s; their intervals are at Holm's level, all others at 95%.
    comparable_as: `throughput` where the global batch or the sequence length is another than the baseline's,
    else `training`. guard: of numerics and convergence; is_barred: by what that holds against the row, which
    then has no verdict. runs: those used, and after them those whose step time did not settle. more_runs: of
    the row and of the baseline each, that would settle the verdict.
    """

    workload: str
    sample_unit: str
    instance: str | None
    device_name: str | None
    num_nodes: int
    num_gpus: int
    recipe: str
    precision: str | None
    batch_size_per_gpu: int
    data: str
    sequence_length: int | None
    padding_fraction: float | None
    kind: str
    derived: bool
    service: str
    region: str
    purchase: str
    run_ids: tuple[str, ...]
    num_runs: int
    num_unsteady: int
    num_machines: int
    sources: tuple[str, ...]
    fingerprint: tuple[tuple[str, str], ...]
    price: RowPrice | None
    build_s: float | None
    compile_s: float | None
    warmup_s: float | None
    peak_memory_gib: float | None
    data_wait_fraction: float | None
    utilization: float | None
    ratio_to_baseline: Interval | None
    speed_ratio_to_baseline: Interval | None
    verdict: str
    reasons: tuple[str, ...]
    comparable_as: str
    guard: Guard
    is_barred: bool
    step_time_s: Interval | None = None
    samples_per_s: Interval | None = None
    tokens_per_s: Interval | None = None
    tflops_per_gpu: Interval | None = None
    percent_of_peak: Interval | None = None
    percent_of_bf16_peak: Interval | None = None
    percent_of_fp8_peak: Interval | None = None
    usd_per_million_samples: Interval | None = None
    usd_per_billion_tokens: Interval | None = None
    samples_per_usd: Interval | None = None
    runs: tuple[Candidate, ...] = ()
    more_runs: int | None = None

    @property
    def is_baseline(self) -> bool:
        return self.verdict == BASELINE

    @property
    def global_batch(self) -> int:
        """Samples per optimizer step, over all GPUs."""
        return self.batch_size_per_gpu * self.num_gpus

    @property
    def kernels(self) -> tuple[str, ...]:
        """What one forward pass ran, in words; several if its runs differ in that, empty if none looked."""
        told = (run.summary.kernels for run in self.runs)
        return tuple(dict.fromkeys(text for text in told if text))

    @property
    def place(self) -> str:
        """Where it ran, as short as can be: the instance, else the device."""
        return self.instance or self.device_name or "unknown"


def make_row(item: PricedPool, judgement: Judgement, spread: Spread, catalogue: "Catalogue") -> Row:
    """The row of a pool with its price and the judgement on it."""
    pool, first = item.pool, item.pool.first
    summaries = [candidate.summary for candidate in pool.all_runs]
    started = [candidate.summary for candidate in pool.whole_runs]
    service, region, purchase = pool.all_runs[0].offer
    return Row(
        workload=first.workload,
        sample_unit=first.sample_unit,
        instance=first.instance,
        device_name=first.device_name,
        num_nodes=first.num_nodes,
        num_gpus=first.num_gpus,
        recipe=first.recipe,
        precision=first.precision,
        batch_size_per_gpu=first.batch_size_per_gpu,
        data=first.data,
        sequence_length=first.sequence_length,
        padding_fraction=mean_of([summary.padding_fraction for summary in summaries]),
        kind=first.kind,
        derived=any(summary.derived for summary in summaries),
        service=service,
        region=region,
        purchase=purchase,
        run_ids=tuple(candidate.run_id for candidate in pool.all_runs),
        num_runs=len(pool.candidates),
        num_unsteady=len(pool.unsteady),
        num_machines=len({summary.host_id for summary in summaries if summary.host_id}),
        sources=tuple(dict.fromkeys(summary.source for summary in summaries if summary.source)),
        fingerprint=tuple(sorted(first.fingerprint.items())),
        price=item.price,
        build_s=mean_of([summary.build_s for summary in started]),
        compile_s=mean_of([summary.compile_s for summary in first_runs(started)]),
        warmup_s=mean_of([summary.warmup_s for summary in summaries]),
        peak_memory_gib=max(
            (s.peak_memory_gib for s in summaries if s.peak_memory_gib is not None), default=None
        ),
        data_wait_fraction=mean_of([summary.data_wait_fraction for summary in summaries]),
        utilization=mean_of([summary.utilization for summary in summaries]),
        ratio_to_baseline=judgement.ratio,
        speed_ratio_to_baseline=judgement.speed_ratio,
        verdict=judgement.verdict,
        reasons=judgement.reasons,
        comparable_as=judgement.comparable_as,
        guard=item.guard,
        is_barred=item.is_barred,
        runs=tuple(pool.whole_runs),
        more_runs=judgement.more_runs,
        **_quantities(pool, item.price, spread, catalogue),
    )


def _quantities(
    pool: Pool, price: RowPrice | None, spread: Spread, catalogue: "Catalogue"
) -> dict[str, Interval | None]:
    """The measured quantities that follow from the row's time, by the names that `Row` has for them."""
    time_s = _time_s(pool, spread)
    if time_s is None or pool.measure not in (STEP, SAMPLE):
        return {}
    first = pool.first
    rate = cost.samples_per_s(time_s, samples_per_step(pool) if pool.measure == STEP else 1.0)
    found: dict[str, Interval | None] = {
        "step_time_s": time_s if pool.measure == STEP else None,
        "samples_per_s": rate,
        "tokens_per_s": _tokens_per_s(pool, time_s, rate),
    }
    if first.flops_per_sample:
        tflops = cost.tflops_per_gpu(rate, first.num_gpus, first.flops_per_sample)
        accelerator = accelerator_of(first, catalogue)
        peaks = accelerator.peak_tflops if accelerator else {}
        found["tflops_per_gpu"] = tflops
        for name, precision in (
            ("percent_of_peak", first.precision),
            ("percent_of_bf16_peak", "bf16"),
            ("percent_of_fp8_peak", "fp8" if first.precision == "fp8" else None),
        ):
            if precision is not None and precision in peaks:
                found[name] = cost.percent_of_peak(tflops, peaks[precision])
    if price is not None:
        charged = (price.usd_per_hour, first.num_nodes)
        found["samples_per_usd"] = cost.samples_per_usd(rate, *charged)
        found["usd_per_million_samples"] = cost.usd_per_million(rate, *charged)
        if found["tokens_per_s"] is not None:
            found["usd_per_billion_tokens"] = cost.usd_per_billion(found["tokens_per_s"], *charged)
    return found


def _time_s(pool: Pool, spread: Spread) -> Interval | None:
    """Seconds of a step, or of a sample, as the pool's measure says; the mean of logs over its runs."""
    mean = log_time(pool)
    if mean is None:
        return None
    arm = arm_of(pool)
    if arm is None:
        return Interval(value=exp(mean))
    half_width = uncertainty([arm], spread).half_width()
    return Interval(value=exp(mean), low=exp(mean - half_width), high=exp(mean + half_width))


def _tokens_per_s(pool: Pool, time_s: Interval, rate: Interval) -> Interval | None:
    tokens = mean_of([candidate.summary.tokens_per_step for candidate in pool.all_runs])
    if tokens and pool.measure == STEP:
        return cost.samples_per_s(time_s, tokens)
    return rate if pool.first.sample_unit == "tokens" else None
