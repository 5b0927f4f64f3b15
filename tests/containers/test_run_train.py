"""The entrypoint of every container, with a Python that only prints how it was called.

Each test gives it a tree of its own to look for /proc, /dev, CUDA and SageMaker's files in.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from first_process import DEAF_PYTHON, own_processes, send_to_first, wait_until_up

from leftovers import MARK

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "containers" / "run_train.sh"
#: All that it needs of an image besides bash and Python, for these tests too.
TOOLS = ("bash", "cat", "cp", "dirname", "grep", "head", "rm", "sort", "tail", "timeout", "sleep", "touch")
#: Tells how it was called instead of running anything; what is not its business the real Python does.
TELLING_PYTHON = """#!/bin/bash
case $1 in
  -c) exit {has_torch} ;;
  -m) exec {python} -c 'import json, os, sys
print(json.dumps({{"argv": sys.argv[1:], "env": dict(os.environ), "cwd": os.getcwd()}}))' "$@" ;;
  *) exec {python} "$@" ;;
esac
"""
CLOSED_DRIVER = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  {}  Thu Jul 10 01:00:00 UTC 2025\n"
OPEN_DRIVER = (
    "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  {}  Release Build  (root@host)\n"
    "GCC version:  gcc version 11.4.0 (Ubuntu 11.4.0-1ubuntu1~22.04)\n"
)


@dataclass(frozen=True, kw_only=True)
class Call:
    """How torchrun would have been started."""

    argv: list[str]
    env: dict[str, str]
    cwd: str
    err: str


@dataclass
class Container:
    """A container's file system as far as the entrypoint looks at it."""

    folder: Path
    env: dict[str, str] = field(default_factory=dict)

    def write(self, name: str, text: str = "", *, mode: int = 0o644) -> Path:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        path.chmod(mode)
        return path

    def python(self, name: str, *, has_torch: bool = True) -> Path:
        text = TELLING_PYTHON.format(python=sys.executable, has_torch=int(not has_torch))
        return self.write(name, text, mode=0o755)

    def driver(self, text: str, *, gpu: str = "NVIDIA H100 80GB HBM3") -> None:
        self.write("root/proc/driver/nvidia/version", text)
        self.write("root/proc/driver/nvidia/gpus/0000:00:1e.0/information", f"Model: \t\t {gpu}\n")
        self.write("root/dev/nvidia0")

    def compat(self, *versions: str) -> Path:
        for version in versions:
            library = self.write(f"root/usr/local/cuda/compat/libcuda.so.{version}")
            link = library.with_name("libcuda.so.1")
            link.unlink(missing_ok=True)
            link.symlink_to(library.name)
        return self.folder / "root/usr/local/cuda/compat"

    def resource_config(self, **config: object) -> None:
        self.write("root/opt/ml/input/config/resourceconfig.json", json.dumps(config))

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        process = self.start(*arguments)
        out, err = process.communicate(timeout=60)
        return subprocess.CompletedProcess(process.args, process.returncode, out, err)

    def start(self, *arguments: str, as_process_1: bool = False) -> subprocess.Popen[str]:
        """The entrypoint's process. as_process_1: as it is in a container."""
        alone = own_processes() if as_process_1 else []
        return subprocess.Popen(
            [*alone, "/bin/bash", str(self.folder / "code/run_train.sh"), *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={
                "PATH": str(self.folder / "bin"),
                "FASTLAUNCH_SYSTEM_ROOT": str(self.folder / "root"),
                MARK: os.environ[MARK],
                **self.env,
            },
            cwd="/",
        )

    def call(self, *arguments: str) -> Call:
        done = self.run(*arguments)
        assert done.returncode == 0, done.stderr
        return Call(**json.loads(done.stdout), err=done.stderr)

    def refused(self) -> str:
        done = self.run()
        assert (done.returncode, done.stdout) == (2, "")
        return done.stderr


@pytest.fixture
def container(tmp_path: Path) -> Container:
    container = Container(folder=tmp_path)
    for name in ("train", "site", "user"):
        (tmp_path / "code" / name).mkdir(parents=True)
    shutil.copy(SCRIPT, tmp_path / "code")
    container.python("bin/python")
    for tool in TOOLS:
        found = shutil.which(tool)
        assert found is not None
        (tmp_path / "bin" / tool).symlink_to(found)
    return container


def ranks(call: Call) -> str:
    (value,) = [part for part in call.argv if part.startswith("--nproc-per-node=")]
    return value.partition("=")[2]


def test_a_machine_without_gpus_runs_one_rank_with_the_code_beside_the_script(container: Container) -> None:
    call = container.call("--steps", "a b", "$HOME", "")
    assert call.argv == [
        *(
            "-m",
            "fastlaunch_train.process.torchrun",
            "--standalone",
            "--local-addr=localhost",
            "--nproc-per-node=1",
        ),
        *("-m", "fastlaunch_train", "--steps", "a b", "$HOME", ""),
    ]
    code = container.folder / "code"
    assert call.env["PYTHONPATH"] == f"{code}/train:{code}/site"
    assert call.cwd == f"{code}/user"
    assert (call.env["OPT_OUT_TRACKING"], call.env["NCCL_DEBUG"]) == ("true", "WARN")
    assert call.env["GLOO_SOCKET_IFNAME"] == "lo"
    assert not {"FASTLAUNCH_CUDA_COMPAT", "LD_LIBRARY_PATH", "NCCL_SOCKET_IFNAME"} & call.env.keys()
    assert call.err == ""


def test_a_script_runs_by_its_wrapper_in_a_copy_of_its_folder(container: Container) -> None:
    container.write("code/user/src/train.py", "print(1)")
    container.write("code/user/run.sh", mode=0o755)
    container.env = {"FASTLAUNCH_SCRIPT": "train.py", "TMPDIR": str(container.folder)}
    work = container.folder / "fastlaunch-script"
    container.write("fastlaunch-script/left-by-the-run-before")
    call = container.call("--output", "/out", "--nproc", "2", "--", "python", "src/train.py", "{a}")
    words = ["--output", "/out", "--nproc", "2", "--", "python", "src/train.py", "{a}"]
    assert call.argv == ["-m", "fastlaunch_train.script", *words]
    assert call.cwd == str(work)
    files = {str(path.relative_to(work)): path.stat().st_mode & 0o100 for path in work.rglob("*.*")}
    assert files == {"src/train.py": 0, "run.sh": 0o100}
    assert call.env["PATH"].startswith(f"{container.folder}/bin:")
    assert not [name for name in call.env if name.startswith("PET_")]

    container.env |= {"FASTLAUNCH_NUM_NODES": "2", "FASTLAUNCH_NODE_RANK": "1"}
    container.env |= {"FASTLAUNCH_MASTER_ADDR": "10.0.0.1", "FASTLAUNCH_MASTER_PORT": "29501"}
    told = {name: value for name, value in container.call("--").env.items() if name.startswith("PET_")}
    assert told == {
        "PET_NNODES": "2",
        "PET_NODE_RANK": "1",
        "PET_MASTER_ADDR": "10.0.0.1",
        "PET_MASTER_PORT": "29501",
    }


def test_pip_installs_from_wheels_alone_where_there_are_any(container: Container) -> None:
    folder = str(container.folder / "needs")
    install = ["-m", "pip", "install", "--no-cache-dir", "--requirement", f"{folder}/requirements.txt"]
    call = container.call("--install", folder)
    assert call.argv == install and "PIP_NO_INDEX" not in call.env
    container.write("needs/wheels/a.whl")
    call = container.call("--install", folder)
    assert call.argv == install
    assert (call.env["PIP_NO_INDEX"], call.env["PIP_FIND_LINKS"]) == ("1", f"{folder}/wheels")


def test_what_the_environment_sets_stays(container: Container) -> None:
    container.env = {
        "NCCL_DEBUG": "INFO",
        "GLOO_SOCKET_IFNAME": "eth9",
        "PYTHONPATH": "/their/own",
        "OMP_NUM_THREADS": "7",
        "FASTLAUNCH_NPROC": "3",
    }
    call = container.call()
    assert (call.env["NCCL_DEBUG"], call.env["GLOO_SOCKET_IFNAME"]) == ("INFO", "eth9")
    assert call.env["PYTHONPATH"].endswith(":/their/own")
    assert (ranks(call), call.env["OMP_NUM_THREADS"]) == ("3", "7")


def test_there_is_a_rank_for_every_gpu(container: Container) -> None:
    for device in (*(f"nvidia{number}" for number in range(12)), "nvidiactl", "nvidia-uvm", "nvidia-caps"):
        container.write(f"root/dev/{device}")
    assert ranks(container.call()) == "12"
    container.env = {"CUDA_VISIBLE_DEVICES": "0,3"}
    assert ranks(container.call()) == "2"
    container.env = {"CUDA_VISIBLE_DEVICES": ""}
    assert ranks(container.call()) == "1"


@pytest.mark.parametrize(
    ("text", "driver", "compat", "gpu", "used"),
    [
        (CLOSED_DRIVER, "550.163.01", ("550.54.15", "580.65.06"), "NVIDIA L4", "compat 580.65.06"),
        (OPEN_DRIVER, "550.163.01", ("550.54.15", "580.65.06"), "NVIDIA L4", "compat 580.65.06"),
        # Versions are compared as numbers.
        (OPEN_DRIVER, "580.65.06", ("580.126.09",), "NVIDIA L4", "compat 580.126.09"),
        (OPEN_DRIVER, "1000.1", ("580.65.06",), "NVIDIA L4", "driver"),
        (OPEN_DRIVER, "580.65.06", ("580.65.06",), "NVIDIA L4", "driver"),
        (OPEN_DRIVER, "550.163.01", ("580.65.06",), "NVIDIA GeForce RTX 4090", "driver"),
        (OPEN_DRIVER, "550.163.01", (), "NVIDIA L4", "driver"),
    ],
)
def test_the_newer_libcuda_that_the_gpu_can_have_is_used_and_the_other_out_of_the_way(
    text: str, driver: str, compat: tuple[str, ...], gpu: str, used: str, container: Container
) -> None:
    container.driver(text.format(driver), gpu=gpu)
    folder = container.compat(*compat)
    container.env = {"LD_LIBRARY_PATH": f"/a:{folder}:/b"}
    call = container.call()
    assert call.env["FASTLAUNCH_CUDA_COMPAT"] == used
    paths = call.env["LD_LIBRARY_PATH"].split(":")
    assert paths[0] == (str(folder) if used != "driver" else "/a")
    assert [path for path in paths if path != str(folder)] == ["/a", "/b"]
    said = used.replace("compat", "image:")
    assert call.err == f"run_train.sh: driver {driver}, libcuda of the {said}\n"


def test_where_the_kernel_does_not_tell_its_driver_nvidia_smi_does(container: Container) -> None:
    answers = "case $* in *driver_version*) printf '550.90.07\\n550.90.07\\n' ;; *) echo NVIDIA L4 ;; esac"
    container.write("bin/nvidia-smi", f"#!/bin/bash\n{answers}\n", mode=0o755)
    container.compat("580.65.06")
    assert container.call().env["FASTLAUNCH_CUDA_COMPAT"] == "compat 580.65.06"


def two_nodes(container: Container, **more: str) -> Call:
    """What the second of two machines starts; the first one's address is this machine's loopback."""
    container.env = {
        "FASTLAUNCH_NUM_NODES": "2",
        "FASTLAUNCH_NODE_RANK": "1",
        "FASTLAUNCH_MASTER_ADDR": "127.0.0.1",
        **more,
    }
    return container.call()


def port(call: Call) -> int:
    (value,) = [part for part in call.argv if part.startswith("--master-port=")]
    return int(value.partition("=")[2])


def test_several_nodes_meet_at_the_first_by_a_port_of_each_runs_own(container: Container) -> None:
    run = {"FASTLAUNCH_RUN_ID": "20261121-090312-k3f9"}
    call = two_nodes(container, **run, FASTLAUNCH_NPROC="8")
    assert call.argv[2:5] == ["--nnodes=2", "--node-rank=1", "--master-addr=127.0.0.1"]
    assert call.argv[6] == "--nproc-per-node=8"
    assert 29500 <= port(call) < 30500
    assert port(call) == port(two_nodes(container, **run, FASTLAUNCH_NODE_RANK="0"))
    assert port(call) != port(two_nodes(container, FASTLAUNCH_RUN_ID="20261121-090313-ab2c"))
    assert port(two_nodes(container)) == 29500
    assert port(two_nodes(container, **run, FASTLAUNCH_MASTER_PORT="29501")) == 29501


def test_several_nodes_talk_over_the_interface_that_leads_to_the_first(container: Container) -> None:
    call = two_nodes(container)
    assert (call.env["GLOO_SOCKET_IFNAME"], call.env["NCCL_SOCKET_IFNAME"]) == ("lo", "=lo")
    call = two_nodes(container, GLOO_SOCKET_IFNAME="ens5", NCCL_SOCKET_IFNAME="ens6")
    assert (call.env["GLOO_SOCKET_IFNAME"], call.env["NCCL_SOCKET_IFNAME"]) == ("ens5", "ens6")
    # A name that nobody knows here leads nowhere: torch and NCCL choose.
    call = two_nodes(container, FASTLAUNCH_MASTER_ADDR="host.invalid")
    assert not {"GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"} & call.env.keys()


OF_EFA = ("FI_PROVIDER", "FI_EFA_USE_HUGE_PAGE", "FI_EFA_USE_DEVICE_RDMA", "FI_EFA_FORK_SAFE", "NCCL_PROTO")
EFA = {"FI_PROVIDER": "efa", "FI_EFA_USE_HUGE_PAGE": "0"}
RDMA, FORKS = {"FI_EFA_USE_DEVICE_RDMA": "1"}, {"FI_EFA_FORK_SAFE": "1"}
OLD, NEW = "1.17.1amzn2.0", "1.22.0amzn5.0"


@pytest.mark.parametrize(
    ("instance", "libfabric", "kernel", "expected"),
    [
        # What EFA's plugin sets by itself is left to it.
        ("p4d.24xlarge", None, None, EFA),
        ("p5en.48xlarge", None, None, EFA),
        ("p4d.24xlarge", NEW, "5.10.0-31-amd64", EFA),
        ("p5en.48xlarge", NEW, "5.10.0-31-amd64", EFA),
        # An old libfabric is told more.
        ("p4d.24xlarge", OLD, "6.1.0-9-amd64", EFA | RDMA),
        ("p5.48xlarge", OLD, "5.10.0-31-amd64", EFA | RDMA | FORKS),
        # These have EFA without RDMA, and libfabric would end the process.
        ("g5.48xlarge", OLD, "5.15.0", EFA),
        ("g5.48xlarge", OLD, "5.4.0-1103-aws", EFA | FORKS),
    ],
)
def test_efa_is_told_what_it_does_not_know(
    container: Container, instance: str, libfabric: str | None, kernel: str | None, expected: dict[str, str]
) -> None:
    if libfabric:
        text = f"fi_info: {libfabric}\\nlibfabric: {libfabric}\\nlibfabric api: 1.17\\n"
        container.write("root/opt/amazon/efa/bin/fi_info", f"#!/bin/bash\nprintf '{text}'\n", mode=0o755)
        container.write("root/proc/sys/kernel/osrelease", f"{kernel}\n")
    assert of_efa(two_nodes(container, FASTLAUNCH_FABRIC="efa", FASTLAUNCH_INSTANCE=instance)) == expected


def of_efa(call: Call) -> dict[str, str]:
    return {name: call.env[name] for name in OF_EFA if name in call.env}


def test_without_efa_nothing_of_it_is_set(container: Container) -> None:
    assert of_efa(two_nodes(container, FASTLAUNCH_FABRIC="any")) == {}
    assert of_efa(two_nodes(container)) == {}
    container.env = {"FASTLAUNCH_FABRIC": "efa"}
    assert of_efa(container.call()) == {}
    given = {"FI_PROVIDER": "tcp", "FI_EFA_USE_HUGE_PAGE": "1"}
    assert of_efa(two_nodes(container, FASTLAUNCH_FABRIC="efa", **given)) == given


def test_sagemaker_tells_hosts_and_interface(container: Container) -> None:
    container.resource_config(current_host="algo-1", hosts=["algo-1"], network_interface_name="eth0")
    call = container.call()
    assert call.argv[2:4] == ["--standalone", "--local-addr=localhost"]
    assert call.env["GLOO_SOCKET_IFNAME"] == "lo"
    hosts = ["algo-2", "algo-1"]
    container.resource_config(current_host="algo-2", hosts=hosts, network_interface_name="eth0")
    call = container.call()
    assert call.argv[2:6] == [*("--nnodes=2", "--node-rank=1", "--master-addr=algo-1", "--master-port=29500")]
    assert (call.env["GLOO_SOCKET_IFNAME"], call.env["NCCL_SOCKET_IFNAME"]) == ("eth0", "=eth0")


@pytest.mark.parametrize(
    ("env", "words"),
    [
        ({"FASTLAUNCH_NPROC": "many"}, "FASTLAUNCH_NPROC is 'many', not a whole number from 1"),
        ({"FASTLAUNCH_NUM_NODES": "0"}, "FASTLAUNCH_NUM_NODES is '0'"),
        ({"FASTLAUNCH_NUM_NODES": "2"}, "FASTLAUNCH_NODE_RANK is ''"),
        ({"FASTLAUNCH_NUM_NODES": "2", "FASTLAUNCH_NODE_RANK": "2"}, "RANK is 2 of 2 nodes"),
        ({"FASTLAUNCH_NUM_NODES": "2", "FASTLAUNCH_NODE_RANK": "1"}, "FASTLAUNCH_MASTER_ADDR is not set"),
    ],
)
def test_an_environment_that_means_nothing_is_refused(
    container: Container, env: dict[str, str], words: str
) -> None:
    container.env = env
    assert words in container.refused()


def test_the_python_that_has_torch_is_found(container: Container) -> None:
    container.python("bin/python", has_torch=False)
    done = container.run()
    assert done.returncode == 127 and "no Python with torch" in done.stderr
    container.python("root/opt/conda/bin/python")
    assert container.call().argv[1] == "fastlaunch_train.process.torchrun"


LISTENING_PYTHON = """#!/bin/bash
[ $1 != -c ] || exit 0
trap 'echo heard; exit 130' TERM
echo up
while :; do sleep 0.1; done
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize(
    ("python", "code", "says"),
    [(DEAF_PYTHON, 128 + signal.SIGTERM, ""), (LISTENING_PYTHON, 130, "heard\n")],
    ids=["starting", "listening"],
)
def test_a_containers_first_process_hands_a_signal_on_and_is_never_deaf(
    python: str, number: signal.Signals, code: int, says: str, container: Container
) -> None:
    container.write("bin/python", python, mode=0o755)
    process = container.start(as_process_1=True)
    wait_until_up(process)
    send_to_first(process, number)
    out, _ = process.communicate(timeout=30)
    assert (process.returncode, out) == (code, says)


def test_a_containers_first_process_ends_as_training_does(container: Container) -> None:
    container.write("bin/python", '#!/bin/bash\n[ $1 = -c ] || { echo "$@"; exit 78; }\n', mode=0o755)
    process = container.start("--steps", "a b", as_process_1=True)
    out, _ = process.communicate(timeout=30)
    assert process.returncode == 78
    assert out.endswith(" -m fastlaunch_train --steps a b\n")


def test_shellcheck_finds_nothing() -> None:
    shellcheck = shutil.which("shellcheck")
    if shellcheck is None:
        pytest.skip("shellcheck is not installed")
    assert subprocess.run([shellcheck, SCRIPT], check=False).returncode == 0
