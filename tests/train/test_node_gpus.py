"""GPUs that are faulty, by what nvidia-smi and the kernel print."""

from collections.abc import Mapping
from pathlib import Path

import pytest
from fake_nvidia_smi import LOST, links, report, xid

from fastlaunch_train.node.commands import Clock, Done
from fastlaunch_train.node.gpus import Gpus
from fastlaunch_train.node.idle import IdleWatch

SOUND = {"nvidia-smi -q -x": Done(0, report(8)), "nvidia-smi nvlink -s": Done(0, links(8)), "dmesg": Done(0)}


def gpus(count: int = 8, **printed: Done) -> Gpus:
    """Eight GPUs joined by NVSwitch. printed: by `smi`, `nvlink` and `dmesg`, if they are not sound."""
    names = {"smi": "nvidia-smi -q -x", "nvlink": "nvidia-smi nvlink -s", "dmesg": "dmesg"}
    answers = {**SOUND, **{names[name]: done for name, done in printed.items()}}

    def run(*command: str, limit_s: float, is_quiet: bool) -> Done:
        return answers[" ".join(command)]

    return Gpus(count, has_nvswitch=True, run=run)


def test_sound_gpus_have_no_fault() -> None:
    # Correctable errors, what was remapped before and what was counted before this boot are none.
    assert gpus().fault() is None
    # Nor is what nvidia-smi adds of a damaged infoROM, with an exit code of its own.
    assert (
        gpus(smi=Done(14, f"{report(8)}\nWARNING: infoROM is corrupted at gpu 0000:00:1E.0\n")).fault()
        is None
    )


@pytest.mark.parametrize(
    ("fault", "told"),
    [
        ({"remapped_row_pending": "Yes"}, "GPU 3: a row remap is pending"),
        ({"remapped_row_failure": "Yes"}, "GPU 3: a row could not be remapped"),
        ({"remapped_row_pending": "GPU is lost", "dram_uncorrectable": "GPU is lost"}, "GPU 3 is lost"),
        ({"dram_uncorrectable": "2"}, "GPU 3: 2 uncorrectable ECC errors since boot"),
        ({"sram_uncorrectable_parity": "1"}, "GPU 3: 1 uncorrectable ECC errors since boot"),
    ],
)
def test_a_fault_that_the_driver_tells_is_found(fault: Mapping[str, str], told: str) -> None:
    assert gpus(smi=Done(0, report(8, {3: fault}))).fault() == told


@pytest.mark.parametrize(
    "counters",
    [
        # Drivers before 535, and before 450.
        "<sram_correctable>0</sram_correctable><sram_uncorrectable>1</sram_uncorrectable>",
        "<single_bit><total>4</total></single_bit><double_bit><device_memory>1</device_memory>"
        "<total>1</total></double_bit>",
    ],
)
def test_older_drivers_count_otherwise(counters: str) -> None:
    errors = f"<ecc_errors><volatile>{counters}</volatile></ecc_errors>"
    text = f"<nvidia_smi_log><gpu>{errors}</gpu></nvidia_smi_log>"
    one = Gpus(1, run=lambda *command, **_: Done(0, text if "-q" in command else ""))
    assert one.fault() == "GPU 0: 1 uncorrectable ECC errors since boot"


def test_a_gpu_that_counts_no_errors_has_none() -> None:
    na = {"sram_uncorrectable_parity": "N/A", "dram_uncorrectable": "N/A"}
    assert gpus(smi=Done(0, report(8, dict.fromkeys(range(8), na)))).fault() is None


def test_missing_gpus_and_links_are_faults() -> None:
    assert gpus(smi=Done(0, report(7))).fault() == "7 of 8 GPUs are there"
    assert gpus(nvlink=Done(0, links(8, inactive=5))).fault() == "GPU 5: inactive NVLinks (1)"
    all_off = "GPU 0: NVIDIA H100\nNVML: Unable to retrieve NVLink information as all links are inActive\n"
    assert gpus(nvlink=Done(0, all_off)).fault() == "GPU 0: inactive NVLinks (1)"
    for printed in (Done(15, LOST), Done(124)):
        assert "nvidia-smi cannot say how its GPUs are" in str(gpus(smi=printed).fault())


@pytest.mark.parametrize("number", [48, 64, 74, 79, 92, 94, 95, 119, 120])
def test_an_xid_of_the_hardware_is_a_fault(number: int) -> None:
    one = gpus(dmesg=Done(0, xid(31) + xid(number)))
    fault = one.fault()
    assert fault is not None and f"Xid {number} at 0000:53:00" in fault
    assert one.notes == ["Xid 31 at 0000:53:00"]


def test_other_xids_are_noted_once_and_no_more() -> None:
    # 13 and 31 are the program's own most of the time; 63 says that a row was remapped.
    one = gpus(dmesg=Done(0, xid(13) + xid(31) + xid(63) + xid(31)))
    assert one.fault() is None and one.fault() is None
    assert one.notes == [f"Xid {number} at 0000:53:00" for number in (13, 31, 63)]
    old = "NVRM: Xid (0000:01:00): 79, GPU has fallen off the bus."
    assert gpus(dmesg=Done(0, old)).fault() == "Xid 79 at 0000:01:00 (fallen off the bus)"


def test_without_gpus_nothing_is_asked_and_a_log_that_is_closed_says_nothing() -> None:
    assert gpus(count=0, smi=Done(127)).fault() is None
    assert gpus(dmesg=Done(1)).fault() is None


def test_where_nvidia_smi_never_was_nothing_is_known_and_where_it_was_it_is_missed() -> None:
    image_without = Gpus(1, run=lambda *command, **_: Done(127))
    assert image_without.fault() is None
    answers = iter([Done(0, report(1)), Done(1), Done(9), Done(1)])
    one = Gpus(1, run=lambda *command, **_: next(answers))
    assert one.fault() is None
    assert one.fault() == "nvidia-smi cannot say how its GPUs are: no answer"


@pytest.mark.parametrize(("code", "has_driver"), [(0, True), (6, True), (15, True), (9, False), (127, False)])
def test_no_driver_is_no_fault_of_a_gpu(code: int, has_driver: bool) -> None:
    assert Gpus(8, run=lambda *command, **_: Done(code)).has_driver() is has_driver


def test_how_busy_gpus_are_is_no_longer_asked_once_nvidia_smi_hangs() -> None:
    answers = iter([Done(9), Done(0, "100\n50\n"), Done(0, "[N/A]\n50\n"), Done(124)])
    two = Gpus(2, run=lambda *command, **_: next(answers))
    assert [two.use() for _ in range(6)] == [None, 0.75, None, None, None, None]
    assert Gpus(0, run=lambda *command, **_: Done(0, "50\n")).use() is None


class Hours(Clock):
    """Passes as it is told to."""

    now_s = 0.0

    def uptime_s(self) -> float:
        return self.now_s


def test_a_run_idles_once_its_gpus_and_its_records_stand_still_for_long_enough(tmp_path: Path) -> None:
    clock, gpus = Hours(), Gpus(8, run=lambda *_, **__: Done(0, used))
    watch = IdleWatch(100.0, gpus=gpus, records=tmp_path, clock=clock)

    def idles_at(now_s: float, answer: str) -> bool:
        nonlocal used
        clock.now_s, used = now_s, answer
        gpus.use()
        return watch.is_over()

    used, idle, busy = "", "0\n" * 8, "0\n" * 7 + "16\n"
    assert not idles_at(90, busy)
    assert not idles_at(180, idle)
    (tmp_path / "rank-00000-attempt-1.jsonl").write_text("a step")
    assert not idles_at(200, idle)
    assert not idles_at(299, idle)
    # Nothing is known of them.
    assert not idles_at(310, "[N/A]\n" * 8)
    assert not idles_at(405, idle)
    assert idles_at(411, idle)
    assert not IdleWatch(None, gpus=gpus, records=tmp_path, clock=clock).is_over()
