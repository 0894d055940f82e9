#!/usr/bin/env bash
# What srun starts on a node, inside the container where there is one: `node.sh meet`, `node.sh check`, `node.sh ray`,
# `node.sh ranks train.py flags…`, or `node.sh rank COMMAND…`. slurm/lib.sh exports what it reads.
set -euo pipefail

# A rank handles both signals once it trains; before that they would end it. USR1 must not end torchrun, and TERM must not
# make it kill its ranks while they save. c10d warns in C++ of names that do not resolve and of a store that has ended.
prepare_ranks() {
    trap '' TERM USR1 USR2
    export TORCH_CPP_LOG_LEVEL=${TORCH_CPP_LOG_LEVEL:-ERROR}
}

# Sets address, this node's on the route to the first one, and gloo's interface.
find_interface() {
    read -r address GLOO_SOCKET_IFNAME < <(python -m launch.node here)
    export GLOO_SOCKET_IFNAME
}

# This node's part of a Ray cluster, until USR2 says that the driver has ended: TERM would drain it.
ray_node() {
    local folder='' ray role=(--address="$MASTER_ADDR:$MASTER_PORT") tries
    if [ "$SLURM_NODEID" = 0 ]; then
        folder=$(mktemp -d "/tmp/ray-${SLURM_JOB_ID}-XXXX")
        role=(--head --port="$MASTER_PORT" --temp-dir="$folder" --include-dashboard=false)
    else
        tries=$((SHARDRUN_TIMEOUT_S * 5))
        until (: <"/dev/tcp/$MASTER_ADDR/$MASTER_PORT") 2>/dev/null || ((tries-- <= 0)); do sleep 0.2; done
    fi
    # as many CPUs as ranks, so that each node gets an equal number of ranks
    ray start --block --node-ip-address="$address" --num-cpus="$SHARDRUN_RANKS_PER_NODE" --disable-usage-stats \
        "${role[@]}" >/dev/null & ray=$!
    trap 'kill -KILL $(cat "/proc/$ray/task/$ray/children") $ray 2>/dev/null || :' USR2
    trap 'kill -TERM $ray 2>/dev/null || :' TERM
    while kill -0 "$ray" 2>/dev/null; do wait "$ray" || :; done
    [ -z "$folder" ] || rm -rf "$folder"
}
command=$1 && shift
case $command in
meet | check) exec python -m launch.node "$command" ;;
rank | ranks) prepare_ranks && find_interface ;;
ray) find_interface && ray_node && exit ;;
*) echo "node.sh $command: neither meet, check, ranks, ray nor rank" >&2 && exit 2 ;;
esac
[ "$command" = ranks ] || exec "$@"
[ "$SHARDRUN_LAUNCHER" = torchrun ] || exec python "$@"
# shellcheck disable=SC2016  # torchrun inserts the rank: the same prefix as srun --label
export TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE='${rank}: '
logs=(--tee=3 --log-dir="$SHARDRUN_RUN/logs/ranks")
[ "$SHARDRUN_MODE" = train ] || logs=()
exec python -m launch.node ranks \
    --nnodes="$SLURM_STEP_NUM_NODES" --nproc-per-node="$SHARDRUN_RANKS_PER_NODE" --max-restarts=0 \
    --rdzv-backend=c10d --rdzv-id="$SHARDRUN_TOKEN" --rdzv-endpoint="$MASTER_ADDR:$MASTER_PORT" \
    --rdzv-conf="is_host=$((SLURM_NODEID == 0)),join_timeout=$SHARDRUN_TIMEOUT_S" --local-addr="$address" \
    --signals-to-handle=SIGINT,SIGHUP,SIGQUIT "${logs[@]}" "$@"
