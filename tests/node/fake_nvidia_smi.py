"""`nvidia-smi` and `dmesg` of a machine, as public samples of their output look, with drivers from 535.

The two programs print what lies in the folder `/sim` of a simulated machine.
"""

from collections.abc import Mapping

_GPU = """	<gpu id="00000000:{bus:02X}:00.0">
		<product_name>NVIDIA A10G</product_name>
		<minor_number>{number}</minor_number>
		<clocks_event_reasons>
			<clocks_event_reason_gpu_idle>{gpu_idle}</clocks_event_reason_gpu_idle>
			<clocks_event_reason_sw_power_cap>{sw_power_cap}</clocks_event_reason_sw_power_cap>
			<clocks_event_reason_hw_slowdown>{hw_slowdown}</clocks_event_reason_hw_slowdown>
			<clocks_event_reason_hw_thermal_slowdown>{hw_thermal_slowdown}</clocks_event_reason_hw_thermal_slowdown>
		</clocks_event_reasons>
		<ecc_errors>
			<volatile>
				<sram_correctable>7</sram_correctable>
				<sram_uncorrectable_parity>{sram_uncorrectable_parity}</sram_uncorrectable_parity>
				<sram_uncorrectable_secded>0</sram_uncorrectable_secded>
				<dram_correctable>N/A</dram_correctable>
				<dram_uncorrectable>{dram_uncorrectable}</dram_uncorrectable>
			</volatile>
			<aggregate>
				<dram_uncorrectable>3</dram_uncorrectable>
			</aggregate>
		</ecc_errors>
		<remapped_rows>
			<remapped_row_corr>1</remapped_row_corr>
			<remapped_row_unc>2</remapped_row_unc>
			<remapped_row_pending>{remapped_row_pending}</remapped_row_pending>
			<remapped_row_failure>{remapped_row_failure}</remapped_row_failure>
		</remapped_rows>
	</gpu>
"""
_SOUND = {
    **dict.fromkeys(("gpu_idle", "sw_power_cap", "hw_slowdown", "hw_thermal_slowdown"), "Not Active"),
    **dict.fromkeys(("sram_uncorrectable_parity", "dram_uncorrectable"), "0"),
    **dict.fromkeys(("remapped_row_pending", "remapped_row_failure"), "No"),
}
#: A GPU that is off the bus: no XML, and a code of its own.
LOST = "Unable to determine the device handle for GPU0000:53:00.0: Unknown Error\n"
LINKS = "\t Link 0: 26.562 GB/s\n\t Link 1: {second}\n"

NVIDIA_SMI = """#!/bin/bash
case "$1 $2" in
  "-q -x") cat /sim/gpus.xml ;;
  --query-gpu=utilization.gpu*)
    for gpu in $(seq 0 {last_gpu}); do cat /sim/gpu-use 2>/dev/null || echo 93; done ;;
  "-L "*) for gpu in $(seq 0 {last_gpu}); do echo "GPU $gpu: NVIDIA A10G (UUID: GPU-$gpu)"; done ;;
esac
"""
DMESG = """#!/bin/bash
[ ! -e /sim/dmesg ] || cat /sim/dmesg
"""


def report(num_gpus: int = 1, faults: Mapping[int, Mapping[str, str]] | None = None) -> str:
    """What `nvidia-smi -q -x` prints. faults: by GPU, what it says instead of what a sound one does."""
    gpus = (
        _GPU.format(number=number, bus=0x53 + number, **{**_SOUND, **(faults or {}).get(number, {})})
        for number in range(num_gpus)
    )
    head = (
        '<?xml version="1.0" ?>\n<!DOCTYPE nvidia_smi_log SYSTEM "nvsmi_device_v12.dtd">\n<nvidia_smi_log>\n'
    )
    return f"{head}\t<attached_gpus>{num_gpus}</attached_gpus>\n{''.join(gpus)}</nvidia_smi_log>\n"


def links(num_gpus: int, *, inactive: int | None = None) -> str:
    """What `nvidia-smi nvlink -s` prints. inactive: the GPU of which a link is."""
    return "".join(
        f"GPU {number}: NVIDIA H100 80GB HBM3 (UUID: GPU-{number})\n"
        + LINKS.format(second="<inactive>" if number == inactive else "26.562 GB/s")
        for number in range(num_gpus)
    )


def xid(number: int, rest: str = "pid=1234, name=python") -> str:
    """A line of the kernel's log."""
    return f"[  123.456789] NVRM: Xid (PCI:0000:53:00): {number}, {rest}\n"
