#!/usr/bin/env bash
# What srun starts on a node: `node.sh hook`, and in the container, where there is one, `run COMMAND…` or a command of
# launch/node.py: `meet`, `ray`, `rank COMMAND…`, `ranks train.py flags…`. slurm/lib.sh exports what it reads.
set -euo pipefail && command=$1 && shift
if [ "$command" = hook ]; then
    set +eu
    # shellcheck source=slurm/cluster.env
    source "$CLUSTER_ENV" >&2
    before_node >&2 || echo "failed $SLURMD_NODENAME"
    exit 0
fi
# A rank handles the signals once it trains; before that they would end it, and torchrun must leave it the time to save.
[[ $command != rank* ]] || trap '' TERM USR1 USR2
if [ -n "${SHARDRUN_CONTAINER:-}" ]; then # its environment may be its own: the job's variables come on its stdin
    declare -a container="($SHARDRUN_CONTAINER)" && export SHARDRUN_CONTAINER=
    mapfile -t names < <(compgen -e | grep -E '^(SLURM|SHARDRUN|MASTER|TORCH|NCCL|GLOO|OMP_|CUDA|RAY_|PYTHON[PSU])')
    exec "${container[@]}" bash -c '. /dev/stdin && exec bash "$@" </dev/null' bash "$0" "$command" "$@" \
        < <(declare -p "${names[@]}")
fi
[ "$command" != run ] || exec "$@"
exec python -m launch.node "$command" "$@"
