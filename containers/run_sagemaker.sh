#!/bin/bash
# The program of every container of a SageMaker training job: finds a Python and becomes the node agent, which does
# the job's runs one after another, each through run_train.sh.
#
# The code lies beside this file, as run_train.sh says; agent and list of runs, which SageMaker has brought, are
# checked by their hashes, FASTLAUNCH_AGENT_SHA256 and FASTLAUNCH_RUNS_SHA256. FASTLAUNCH_SYSTEM_ROOT: where /opt is
# looked for (tests). Exit codes: 127 the image has no Python, 2 something is not whole, else the agent's.
set -u -o pipefail
# As in run_train.sh, and for its reasons: process 1 of a container stays this shell.
if [ $$ = 1 ]; then
  trap 'kill -s TERM "${!-}" 2>/dev/null || exit 143' TERM
  "$BASH" "$0" "$@" &
  while kill -0 $! 2>/dev/null; do wait $!; done
  wait $!
  exit
fi

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
system=${FASTLAUNCH_SYSTEM_ROOT:-}

refuse() { # EXIT-CODE WORDS...: SageMaker shows them as the job's FailureReason
  echo "error: ${*:2}" >&2
  mkdir -p "$system/opt/ml/output" && echo "${*:2}" >"$system/opt/ml/output/failure"
  exit "$1"
}
find_python() {
  local candidate
  for candidate in python "$system/opt/venv/bin/python" "$system/opt/conda/bin/python" python3; do
    candidate=$(type -P "$candidate") &&
      "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 9))' 2>/dev/null && echo "$candidate" && return
  done
  return 1
}

whole() { # SHA256 FILE
  echo "$1  $2" | sha256sum -c --quiet >&2 || refuse 2 "$2 is not what was asked for"
}

[ -f "$here/run_train.sh" ] || refuse 2 "the training code is not whole: $here/run_train.sh is missing"
data=$system/opt/ml/input/data
agent=$data/agent/agent-${FASTLAUNCH_AGENT_SHA256:-}.pyz runs=$data/runs/runs-${FASTLAUNCH_RUNS_SHA256:-}.json
whole "${FASTLAUNCH_AGENT_SHA256:-}" "$agent"
whole "${FASTLAUNCH_RUNS_SHA256:-}" "$runs"
python=$(find_python) || refuse 127 "no Python from 3.9 in this image"
# The code may lie where nothing can be written.
export PYTHONDONTWRITEBYTECODE=1
exec "$python" -I "$agent" sagemaker "$here/run_train.sh" "$runs"
