#!/usr/bin/env bash
# What srun starts on a node, inside the container where there is one: `node.sh meet`, `node.sh check`,
# `node.sh ranks train.py flags…`, or `node.sh rank COMMAND…`. slurm/lib.sh exports what it reads.
set -euo pipefail

# A rank hears both signals itself, once it trains; before, they would end it, and the job's end time is known to it anyway.
# torchrun must not die of USR1, nor end its ranks 30 s after TERM while they save.
leave_signals_to_the_ranks() {
    trap '' TERM USR1 USR2
}

case $1 in
meet)
    exec python -m launch.rendezvous meet --node "$SLURMD_NODENAME" --nodes "$SHARDRUN_NODES" --hosts "$SHARDRUN_HOSTS" \
        --port "$MASTER_PORT" --token "$SHARDRUN_TOKEN" --timeout-s "$SHARDRUN_TIMEOUT_S" \
        --gpus "${SLURM_GPUS_ON_NODE:--1}" --ranks "$SHARDRUN_RANKS_PER_NODE"
    ;;
check)
    exec python -m launch.check_node --node "$SLURMD_NODENAME" --run "$SHARDRUN_RUN" --ranks "$SHARDRUN_RANKS_PER_NODE"
    ;;
ranks)
    shift
    leave_signals_to_the_ranks
    read -r address interface < <(python -m launch.rendezvous here --towards "$MASTER_ADDR")
    # where the host's name does not resolve, gloo would take the loopback
    export GLOO_SOCKET_IFNAME=${GLOO_SOCKET_IFNAME:-$interface}
    [ "$SHARDRUN_LAUNCHER" = torchrun ] || exec python "$@"
    # shellcheck disable=SC2016  # torchrun fills in the rank: labels as srun --label has them
    export TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE='${rank}: '
    logs=(--tee=3 --log-dir="$SHARDRUN_RUN/logs/ranks")
    [ -z "${SHARDRUN_DRY_RUN:-}${SHARDRUN_PREFLIGHT:-}" ] || logs=()
    exec python -m launch.agent \
        --nnodes="$SLURM_STEP_NUM_NODES" --nproc-per-node="$SHARDRUN_RANKS_PER_NODE" --max-restarts=0 \
        --rdzv-backend=c10d --rdzv-id="$SHARDRUN_TOKEN" --rdzv-endpoint="$MASTER_ADDR:$MASTER_PORT" \
        --rdzv-conf="is_host=$((SLURM_NODEID == 0)),join_timeout=$SHARDRUN_TIMEOUT_S" --local-addr="$address" \
        --signals-to-handle=SIGINT,SIGHUP,SIGQUIT "${logs[@]}" "$@"
    ;;
rank)
    shift
    leave_signals_to_the_ranks
    exec "$@"
    ;;
*)
    echo "node.sh $1: neither meet, check, ranks nor rank" >&2
    exit 2
    ;;
esac
