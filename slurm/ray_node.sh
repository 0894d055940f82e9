#!/usr/bin/env bash
# What slurm/ray.sbatch starts on every node, inside the container where there is one: this node's part of the Ray cluster.
set -euo pipefail

read -r address interface < <(python -m launch.rendezvous here --towards "$MASTER_ADDR")
# gloo would use the loopback if the host's name does not resolve
export GLOO_SOCKET_IFNAME=$interface

if [ "$SHARDRUN_IS_HEAD" = 1 ]; then
    # it contains sockets, whose paths have at most 107 characters
    folder=$(mktemp -d "/tmp/ray-${SLURM_JOB_ID}-XXXX")
    place=(--head --port="$MASTER_PORT" --temp-dir="$folder" --include-dashboard=false)
else
    place=(--address="$MASTER_ADDR:$MASTER_PORT")
    for ((tries = SHARDRUN_TIMEOUT_S * 5; tries > 0; tries--)); do
        (: <"/dev/tcp/$MASTER_ADDR/$MASTER_PORT") 2>/dev/null && break
        sleep 0.2
    done
fi
# as many CPUs as ranks, so that each node gets an equal number of ranks
ray start --block --node-ip-address="$address" --num-cpus="$SHARDRUN_RANKS_PER_NODE" --disable-usage-stats "${place[@]}" \
    >/dev/null &
ray=$!

# Called when the driver has ended: kill what `ray start` has started. Its files are removed below.
end_of_job() {
    local children
    read -ra children <"/proc/$ray/task/$ray/children" || :
    kill -KILL "${children[@]}" "$ray" 2>/dev/null || :
}
trap end_of_job USR2
trap 'kill -TERM $ray 2>/dev/null || :' TERM
while kill -0 "$ray" 2>/dev/null; do
    wait "$ray" || :
done
[ -z "${folder:-}" ] || rm -rf "$folder"
