#!/usr/bin/env bash
# What srun starts on a node, inside the container where there is one: `node.sh meet`, `node.sh check`,
# `node.sh ranks train.py flags…`, or `node.sh rank COMMAND…`. slurm/lib.sh exports what it reads.
set -euo pipefail

# A rank handles both signals once it trains; before that they would end it, and SLURM_JOB_END_TIME has the time limit.
# USR1 must not end torchrun, and TERM must not make it kill its ranks after 30 s while they save.
ignore_stop_signals() {
    trap '' TERM USR1 USR2
}

# c10d warns in C++: of each host name that does not resolve, and in 30 frames of a store whose process has ended. torch
# raises its errors and logs them at this level.
quiet_c10d() {
    export TORCH_CPP_LOG_LEVEL=${TORCH_CPP_LOG_LEVEL:-ERROR}
}

case $1 in
meet)
    exec python -m launch.rendezvous meet --node "$SLURMD_NODENAME" --nodes "$SHARDRUN_NODES" --hosts "$SHARDRUN_HOSTS" \
        --port "$MASTER_PORT" --token "$SHARDRUN_TOKEN" --timeout-s "$SHARDRUN_TIMEOUT_S"
    ;;
check)
    exec python -m launch.node check "$SLURMD_NODENAME" "$SHARDRUN_RUN" "$SHARDRUN_RANKS_PER_NODE"
    ;;
ranks)
    shift
    ignore_stop_signals
    quiet_c10d
    read -r address interface < <(python -m launch.rendezvous here --towards "$MASTER_ADDR")
    # gloo would use the loopback if the host's name does not resolve
    export GLOO_SOCKET_IFNAME=$interface
    [ "$SHARDRUN_LAUNCHER" = torchrun ] || exec python "$@"
    # shellcheck disable=SC2016  # torchrun inserts the rank: the same prefix as srun --label
    export TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE='${rank}: '
    logs=(--tee=3 --log-dir="$SHARDRUN_RUN/logs/ranks")
    [ -z "${SHARDRUN_DRY_RUN:-}${SHARDRUN_PREFLIGHT:-}" ] || logs=()
    exec python -m launch.node ranks \
        --nnodes="$SLURM_STEP_NUM_NODES" --nproc-per-node="$SHARDRUN_RANKS_PER_NODE" --max-restarts=0 \
        --rdzv-backend=c10d --rdzv-id="$SHARDRUN_TOKEN" --rdzv-endpoint="$MASTER_ADDR:$MASTER_PORT" \
        --rdzv-conf="is_host=$((SLURM_NODEID == 0)),join_timeout=$SHARDRUN_TIMEOUT_S" --local-addr="$address" \
        --signals-to-handle=SIGINT,SIGHUP,SIGQUIT "${logs[@]}" "$@"
    ;;
rank)
    shift
    ignore_stop_signals
    quiet_c10d
    exec "$@"
    ;;
*)
    echo "node.sh $1: neither meet, check, ranks nor rank" >&2
    exit 2
    ;;
esac
