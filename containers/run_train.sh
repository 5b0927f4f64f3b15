#!/bin/bash
# The entrypoint of every container: turns the environment into torchrun's arguments and becomes it.
#
#     run_train.sh ARGUMENTS OF fastlaunch_train...
#     run_train.sh ARGUMENTS OF fastlaunch_train.script... -- COMMAND...
#     run_train.sh --install FOLDER
#
# The second where FASTLAUNCH_SCRIPT names a script of the user's own. It runs in a copy of user/, which it may
# write to; torchrun's own variables, PET_*, tell it of several machines. The third has pip install FOLDER's
# requirements.txt into that Python: from FOLDER/wheels where there is such a folder, and then from no index.
#
# Read, if set:
#   FASTLAUNCH_NPROC         ranks on this machine; else one per GPU, one on a machine without
#   FASTLAUNCH_NUM_NODES     machines, with FASTLAUNCH_NODE_RANK, FASTLAUNCH_MASTER_ADDR and perhaps
#                            FASTLAUNCH_MASTER_PORT (else the run's own, by FASTLAUNCH_RUN_ID, else 29500);
#                            else SageMaker's resourceconfig.json; else one
#   FASTLAUNCH_FABRIC        of several machines: efa if nothing else will do; the training checks that it is
#   FASTLAUNCH_SYSTEM_ROOT   where /proc, /dev, /usr/local/cuda, /opt/venv and /opt/ml are looked for (tests)
# Everything else of FASTLAUNCH_* is for the training itself.
#
# The code lies beside this file: train/, site/ (wheels that the image lacks) and user/ (the user's own files).
# Exit codes: 2 the environment means nothing, 127 the image has no Python with torch, else torchrun's.
set -u -o pipefail
# Process 1 of a container is deaf to a signal that it has no handler for, and Python has none for its first tenth
# of a second. So process 1 stays this shell, and a child does the work, which a signal before that ends. It is
# always SIGTERM: bash starts a child that it does not wait for deaf to SIGINT.
if [ $$ = 1 ]; then
  trap 'kill -s TERM "${!-}" 2>/dev/null || exit 143' TERM INT
  "$BASH" "$0" "$@" &
  while kill -0 $! 2>/dev/null; do wait $!; done # a signal ends the wait, not the child
  wait $!
  exit
fi

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
system=${FASTLAUNCH_SYSTEM_ROOT:-}
compat=$system/usr/local/cuda/compat

say() { echo "run_train.sh: $*" >&2; }
refuse() {
  say "error: $1"
  exit "${2:-2}"
}
whole() { # NAME LEAST: refuses what is no whole number of at least LEAST
  [[ ${!1:-} =~ ^(0|[1-9][0-9]{0,5})$ && ${!1} -ge $2 ]] || refuse "$1 is '${!1:-}', not a whole number from $2"
}

find_python() { # the first that has torch: what the image's PATH names, then where AWS's images have it
  local candidate
  for candidate in python "$system/opt/venv/bin/python" "$system/opt/conda/bin/python" python3; do
    candidate=$(type -P "$candidate") &&
      "$candidate" -c 'import importlib.util as u, sys; sys.exit(u.find_spec("torch") is None)' 2>/dev/null &&
      echo "$candidate" && return
  done
  return 1
}

# CUDA. The image may be newer than the machine's driver; then it brings a newer libcuda, which works with that
# driver on data-centre GPUs. Used where it is not newer, or on a GeForce, it fails. The images' own entrypoints
# do this, and are not run here.
smi() { type -P nvidia-smi >/dev/null && timeout 30 nvidia-smi --query-gpu="$1" --format=csv,noheader 2>/dev/null; }
driver_version() {
  grep -s '^NVRM version:' "$system/proc/driver/nvidia/version" | grep -oE '[0-9]{3,}\.[0-9]+(\.[0-9]+)?' |
    head -n 1 | grep . || smi driver_version | head -n 1
}
gpu_names() { cat "$system"/proc/driver/nvidia/gpus/*/information 2>/dev/null | grep Model: || smi name; }
compat_version() { # of the newest libcuda in the compat folder
  local file
  [ -e "$compat/libcuda.so.1" ] || return
  for file in "$compat"/libcuda.so.*.*; do
    [ -e "$file" ] && echo "${file##*/libcuda.so.}"
  done | sort -V | tail -n 1
}
newer() { [ "$1" != "$2" ] && [ "$(printf '%s\n' "$1" "$2" | sort -V | tail -n 1)" = "$1" ]; }
choose_libcuda() {
  local driver version paths=":${LD_LIBRARY_PATH:-}:"
  driver=$(driver_version)
  [ -n "$driver" ] || return
  version=$(compat_version)
  paths=${paths//:"$compat":/:}
  paths=${paths#:} paths=${paths%:}
  FASTLAUNCH_CUDA_COMPAT=driver
  if [ -n "$version" ] && newer "$version" "$driver" && ! gpu_names | grep -qE 'GeForce|TITAN'; then
    FASTLAUNCH_CUDA_COMPAT="compat $version"
    paths=$compat${paths:+:$paths}
  fi
  export FASTLAUNCH_CUDA_COMPAT LD_LIBRARY_PATH=$paths
  say "driver $driver, libcuda of the ${FASTLAUNCH_CUDA_COMPAT/#compat/image:}"
}

count_gpus() {
  local device count=0
  if [ -n "${CUDA_VISIBLE_DEVICES+set}" ]; then
    IFS=, read -ra device <<<"$CUDA_VISIBLE_DEVICES"
    echo "${#device[@]}"
    return
  fi
  for device in "$system"/dev/nvidia[0-9] "$system"/dev/nvidia[0-9][0-9]; do
    [ -e "$device" ] && count=$((count + 1))
  done
  echo "$count"
}

# How many machines, which of them this one is, and where the first one is
read_resource_config() { # SageMaker's
  "$python" - "$1" <<'END'
import json, sys
config = json.load(open(sys.argv[1]))
hosts = sorted(config["hosts"])
print(len(hosts), hosts.index(config["current_host"]), hosts[0], config.get("network_interface_name") or "")
END
}
interface_to() { # ADDRESS: of this machine, from which packets to it leave; nothing if that cannot be told
  "$python" - "$1" 2>/dev/null <<'END'
import fcntl, os, socket, struct, sys
probe = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
probe.connect((sys.argv[1], 9))  # sends nothing
own = probe.getsockname()[0]
for name in os.listdir("/sys/class/net"):
    try:  # 0x8915 is SIOCGIFADDR
        found = fcntl.ioctl(probe, 0x8915, struct.pack("256s", name[:15].encode()))[20:24]
    except OSError:
        continue
    if socket.inet_ntoa(found) == own:
        print(name)
        break
END
}
own_port() { # RUN-ID: the next run on the same machines does not need the port that this one leaves behind
  "$python" - "$1" <<<'import sys, zlib; print(29500 + zlib.crc32(sys.argv[1].encode()) % 1000)'
}
find_nodes() {
  local config=$system/opt/ml/input/config/resourceconfig.json told interface=''
  if [ -z "${FASTLAUNCH_NUM_NODES:-}" ] && [ -e "$config" ]; then
    told=$(read_resource_config "$config") || refuse "$config does not say which of which hosts this is"
    read -r FASTLAUNCH_NUM_NODES FASTLAUNCH_NODE_RANK FASTLAUNCH_MASTER_ADDR interface <<<"$told"
  fi
  FASTLAUNCH_NUM_NODES=${FASTLAUNCH_NUM_NODES:-1}
  whole FASTLAUNCH_NUM_NODES 1
  if [ "$FASTLAUNCH_NUM_NODES" = 1 ]; then
    # A container may not know its own name, and the ranks of one machine need no network.
    export GLOO_SOCKET_IFNAME=${GLOO_SOCKET_IFNAME:-lo}
    return
  fi
  [ -z "${FASTLAUNCH_RUN_ID:-}" ] || : "${FASTLAUNCH_MASTER_PORT:=$(own_port "$FASTLAUNCH_RUN_ID")}"
  FASTLAUNCH_MASTER_PORT=${FASTLAUNCH_MASTER_PORT:-29500}
  whole FASTLAUNCH_NODE_RANK 0
  whole FASTLAUNCH_MASTER_PORT 1
  [ "$FASTLAUNCH_NODE_RANK" -lt "$FASTLAUNCH_NUM_NODES" ] ||
    refuse "FASTLAUNCH_NODE_RANK is $FASTLAUNCH_NODE_RANK of $FASTLAUNCH_NUM_NODES nodes, counted from 0"
  [ -n "${FASTLAUNCH_MASTER_ADDR:-}" ] ||
    refuse "FASTLAUNCH_MASTER_ADDR is not set, and there are $FASTLAUNCH_NUM_NODES nodes"
  # Gloo takes the address that the machine's name stands for, which may be 127.0.0.1, and with the host's
  # network there are docker's bridges too. "=": the name whole, where NCCL takes any that begins so.
  [ -n "$interface" ] || interface=$(interface_to "$FASTLAUNCH_MASTER_ADDR")
  [ -z "$interface" ] || export GLOO_SOCKET_IFNAME=${GLOO_SOCKET_IFNAME:-$interface} \
    NCCL_SOCKET_IFNAME=${NCCL_SOCKET_IFNAME:-=$interface}
}

# EFA. What it needs beyond this its plugin sets by itself, by the machine's type: buffer and chunk sizes,
# topology, FI_EFA_FORK_SAFE, tuner, and NCCL_PROTO only where the order of bytes asks for it (platform_init and
# its table of p4d, p5, p5en, p6 in src/platform-aws.cpp of github.com/aws/aws-ofi-nccl). To force the simple
# protocol here would slow down p5en and newer.
#   FI_PROVIDER=efa           as the plugin chooses on AWS; older than 1.6 it may go over TCP without
#   FI_EFA_USE_HUGE_PAGE=0    else the data loaders' fork fails where huge pages run out
# and with libfabric before 1.18 alone:
#   FI_EFA_USE_DEVICE_RDMA=1  on the types that have it; on others it ends the process
#   FI_EFA_FORK_SAFE=1        before Linux 5.15
# By AWS's table in github.com/aws-samples/awsome-distributed-training, 1.architectures/efa-cheatsheet.md. Both
# read 2026-11-21.
older() { [ "$1" != "$2" ] && [ "$(printf '%s\n' "$1" "$2" | sort -V | head -n 1)" = "$1" ]; }
libfabric_version() { # 1.22 of `libfabric: 1.22.0amzn5.0`
  local tool
  tool=$(type -P "$system/opt/amazon/efa/bin/fi_info" fi_info | head -n 1)
  [[ -n $tool && $(timeout 30 "$tool" --version 2>/dev/null) =~ libfabric:\ *([0-9]+\.[0-9]+) ]] &&
    echo "${BASH_REMATCH[1]}"
}
set_up_efa() {
  local version kernel=''
  export FI_PROVIDER=${FI_PROVIDER:-efa} FI_EFA_USE_HUGE_PAGE=${FI_EFA_USE_HUGE_PAGE:-0}
  version=$(libfabric_version) && older "$version" 1.18 || return
  case ${FASTLAUNCH_INSTANCE:-} in
    p4d.* | p4de.* | p5*) export FI_EFA_USE_DEVICE_RDMA=${FI_EFA_USE_DEVICE_RDMA:-1} ;;
  esac
  [ ! -r "$system/proc/sys/kernel/osrelease" ] || read -r kernel <"$system/proc/sys/kernel/osrelease"
  [ -z "$kernel" ] || ! older "${kernel%%-*}" 5.15 || export FI_EFA_FORK_SAFE=${FI_EFA_FORK_SAFE:-1}
}

python=$(find_python) || refuse "no Python with torch in this image" 127
if [ "${1:-}" = --install ]; then
  # What the image holds stays where the requirements allow it. A system's Python is as good as any in a container.
  export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_INPUT=1 PIP_ROOT_USER_ACTION=ignore PIP_BREAK_SYSTEM_PACKAGES=1
  [ ! -d "$2/wheels" ] || export PIP_NO_INDEX=1 PIP_FIND_LINKS=$2/wheels
  exec "$python" -m pip install --no-cache-dir --requirement "$2/requirements.txt" 2>&1
fi
FASTLAUNCH_NPROC=${FASTLAUNCH_NPROC:-$(count_gpus)}
[ "$FASTLAUNCH_NPROC" != 0 ] || FASTLAUNCH_NPROC=1
whole FASTLAUNCH_NPROC 1
find_nodes
[ "$FASTLAUNCH_NUM_NODES" = 1 ] || [ "${FASTLAUNCH_FABRIC:-}" != efa ] || set_up_efa
choose_libcuda

if [ "$FASTLAUNCH_NUM_NODES" = 1 ]; then
  nodes=(--standalone --local-addr=localhost)
else
  nodes=(--nnodes="$FASTLAUNCH_NUM_NODES" --node-rank="$FASTLAUNCH_NODE_RANK"
    --master-addr="$FASTLAUNCH_MASTER_ADDR" --master-port="$FASTLAUNCH_MASTER_PORT")
fi
# AWS's telemetry calls out in the background; /etc/nccl.conf of its images makes NCCL tell everything.
export OPT_OUT_TRACKING=${OPT_OUT_TRACKING:-true} NCCL_DEBUG=${NCCL_DEBUG:-WARN}
export PYTHONPATH=$here/train:$here/site${PYTHONPATH:+:$PYTHONPATH}
# What is printed is seen at once; the code may lie where nothing can be written.
export PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
if [ -n "${FASTLAUNCH_SCRIPT:-}" ]; then
  # One run after another: each begins with the files as they came.
  work=${TMPDIR:-/tmp}/fastlaunch-script
  { rm -rf "$work" && cp -R "$here/user" "$work" && cd "$work"; } || refuse "$here/user cannot be copied to $work"
  [ "$FASTLAUNCH_NUM_NODES" = 1 ] || export PET_NNODES=$FASTLAUNCH_NUM_NODES PET_NODE_RANK=$FASTLAUNCH_NODE_RANK \
    PET_MASTER_ADDR=$FASTLAUNCH_MASTER_ADDR PET_MASTER_PORT=$FASTLAUNCH_MASTER_PORT
  # `python` is the one that has torch.
  PATH=$(dirname "$python"):$PATH
  exec "$python" -m fastlaunch_train.script "$@"
fi
# torchrun's own choice, without the five lines in which it says so.
[ "$FASTLAUNCH_NPROC" = 1 ] || export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
[ ! -d "$here/user" ] || cd "$here/user" || refuse "$here/user cannot be entered"
exec "$python" -m fastlaunch_train.process.torchrun "${nodes[@]}" --nproc-per-node="$FASTLAUNCH_NPROC" \
  -m fastlaunch_train "$@"
