#!/usr/bin/env bash
# For somebody with an AWS account, set up by docs/setup.md: what no test here can tell. `make live-check`.
#
# It starts one small machine of EC2 and one of SageMaker, each for minutes: every command says before what it
# can cost at most, refuses more than $LIMIT_USD, and asks. Nothing is left running in the end.
set -euo pipefail
cd "$(dirname "$0")/../.."

LIMIT_USD=${LIMIT_USD:-2}
PYTHON=${PYTHON:-python3}
FASTLAUNCH=${FASTLAUNCH:-fastlaunch}
SMALL=(--workload vit-tiny --recipe bf16 --steps 200 --max-hours 30min --max-cost "$LIMIT_USD")

step() { printf '\n==> %s\n' "$*" >&2; }

step 'what a job would meet, on EC2 and on SageMaker'
"$FASTLAUNCH" doctor --instance g5.xlarge
"$FASTLAUNCH" doctor --instance ml.g5.xlarge

step 'whether EC2 takes the plans of several nodes with EFA (nothing is started)'
"$PYTHON" tests/live/dry_run_plans.py

step 'one run on g5.xlarge'
"$FASTLAUNCH" submit --instance g5.xlarge "${SMALL[@]}"

step 'the same on ml.g5.xlarge'
"$FASTLAUNCH" submit --instance ml.g5.xlarge "${SMALL[@]}"

step 'what they cost, and that nothing is left'
"$FASTLAUNCH" status
"$FASTLAUNCH" reap
