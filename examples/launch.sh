#!/usr/bin/env bash
# Starts SGLang with packed decode steps. Needs SGLang, this package, and a model that SGLang can load.
#
#     examples/launch.sh name MODEL [OPTIONS]      --attention-backend prefixpack
#     examples/launch.sh wrap MODEL [OPTIONS]      your backend's name stays; OPTIONS may hold --attention-backend fa3
#     examples/launch.sh rollout MODEL [OPTIONS]   for rollouts with refills: wrap mode, mixed chunks
set -euo pipefail
way=${1:?name, wrap or rollout} model=${2:?a model folder or name}
shift 2
case $way in
name)
    exec python -m sglang.launch_server --model-path "$model" --attention-backend prefixpack --enable-metrics "$@"
    ;;
wrap)
    export PREFIXPACK_WRAP=1
    exec python -m sglang.launch_server --model-path "$model" --enable-metrics "$@"
    ;;
rollout)
    export PREFIXPACK_WRAP=1
    exec python -m sglang.launch_server --model-path "$model" --enable-metrics --enable-mixed-chunk "$@"
    ;;
*)
    echo "unknown: $way; expected name, wrap or rollout" >&2
    exit 2
    ;;
esac
