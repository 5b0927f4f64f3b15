"""The GPU memory of a batch, from the peaks of runs."""

from collections.abc import Iterable, Mapping

#: The share of the GPU's memory that a step may take.
USABLE_MEMORY = 0.92
#: Weights, gradients and an optimizer's momentum in fp32.
_BYTES_PER_WEIGHT = 12
_GIB = 2**30


def peaks_by_batch(runs: Iterable[tuple[int | None, float | None]]) -> dict[int, float]:
    """Return the largest peak in GiB by batch size per GPU, where a run has both."""
    peaks: dict[int, float] = {}
    for batch, peak_gib in runs:
        if batch and peak_gib is not None:
            peaks[batch] = max(peak_gib, peaks.get(batch, 0.0))
    return peaks


def memory_line(peaks_gib: Mapping[int, float], num_parameters: float | None) -> tuple[float, float]:
    """Return the fixed GiB, and the GiB per sample of a GPU's batch.

    peaks_gib: by batch size per GPU. Two batches give a line. With one, the fixed part is the memory of
    parameters, gradients and momentum; num_parameters: None if unknown.
    """
    least, most = min(peaks_gib), max(peaks_gib)
    if most > least and peaks_gib[most] > peaks_gib[least]:
        slope = (peaks_gib[most] - peaks_gib[least]) / (most - least)
        return max(0.0, peaks_gib[least] - slope * least), slope
    fixed_gib = min(_BYTES_PER_WEIGHT * (num_parameters or 0.0) / _GIB, 0.9 * peaks_gib[most])
    return fixed_gib, (peaks_gib[most] - fixed_gib) / most
