"""The kernels of fused blocks, compiled for GPUs that are not here. tests/gpu checks what they compute."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TRITON = ROOT / ".build" / "triton"
SCRIPT = Path(__file__).with_name("compile_kernels.py")
KERNELS = ROOT / "train" / "fastlaunch_train" / "models" / "fp8_fused" / "kernels.py"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not (TRITON / "triton").is_dir(), reason="needs Triton: make triton"),
]


def test_every_kernel_compiles_for_every_generation_and_spills_nothing(tmp_path: Path) -> None:
    paths = {"PYTHONPATH": f"{ROOT / 'train'}:{TRITON}", "TRITON_CACHE_DIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, SCRIPT], env={**os.environ, **paths}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    found = [json.loads(line) for line in done.stdout.splitlines()]
    attention = [found.pop() for _ in range(4)]
    assert [name for name, *_ in attention] == ["attention of 80"] * 2 + ["attention of 64"] * 2
    # It takes all that a thread of 512 can have. Were its products begun too early, 240 bytes would not fit.
    assert [registers for *_, registers, _ in attention] == [128] * 4
    assert all(spilt < 64 for *_, spilt in attention)
    launched = set(re.findall(r"^ +(_\w+)\[\(", KERNELS.read_text(encoding="utf-8"), re.MULTILINE))
    assert {name for name, *_ in found} == launched
    assert {(products, of) for _, products, of, _, _ in found} == {
        *(("bf16", of) for of in (80, 89, 90, 100, 120)),
        *(("fp8", of) for of in (89, 90, 100, 120)),
    }
    assert [each for each in found if each[-1]] == []
