#!/usr/bin/env bash
# What srun starts on a node: `node.sh hook NAME`, and in the container, where there is one, `run COMMAND…` or a command
# of launch/node.py: `meet`, `ray`, `rank COMMAND…`, `ranks train.py flags…`. slurm/lib.sh exports what it reads.
set -euo pipefail && command=$1 && shift
if [ "$command" = hook ]; then # a function of cluster.env in a shell of its own, ended at its time limit
    rc=0 && timeout -k 5 "$HOOK_TIMEOUT_S" bash -c "source ${CLUSTER_ENV@Q}; $1" >&2 || rc=$?
    [ "$rc" != 124 ] || rc="124: not done within HOOK_TIMEOUT_S=$HOOK_TIMEOUT_S seconds"
    [ "$rc" = 0 ] || { echo "failed $SLURMD_NODENAME" && echo "$SLURMD_NODENAME: $1 ended with $rc" >&2; }
    exit 0
fi
# A rank handles the signals once it trains; before that they would end it, and torchrun must leave it the time to save.
[[ $command != rank* ]] || trap '' TERM USR1 USR2
if [ -n "${SHARDRUN_CONTAINER:-}" ]; then # its environment and folder may be its own: the job's come on stdin
    declare -a container="($SHARDRUN_CONTAINER)" && export SHARDRUN_CONTAINER=
    mapfile -t names < <(compgen -e | grep -E '^(SLURM|SHARDRUN|MASTER|TORCH|NCCL|GLOO|OMP_|CUDA|RAY_|PYTHON[PSU])')
    exec "${container[@]}" bash -c '. /dev/stdin && exec bash "$@" </dev/null' bash "$0" "$command" "$@" \
        < <(declare -p "${names[@]}" && echo "cd ${PWD@Q}")
fi
hash python 2>/dev/null || { echo "no python. HINT: VENV, module load or CONTAINER in slurm/cluster.env" >&2 && exit 127; }
[ "$command" != run ] || exec "$@"
exec python -m launch.node "$command" "$@"
