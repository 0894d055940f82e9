# shellcheck shell=bash
# Functions of every job script here: the cluster's settings, the rendezvous of the nodes, the ranks, and what follows
# their end. Sourcing runs nothing. Slurm's commands are called here alone, outside any container; launch/slurm_job.py
# decides on what they print.
#   job_begin "$@"    read cluster.env, find Python, check the flags and the allocation, choose the run directory
#   job_run           rendezvous, start the ranks, decide what follows; until done, requeued or failed. Never returns
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
home=$(dirname "$here")

say() { printf '%s slurm: %s\n' "$(date +%H:%M:%S)" "$*"; }
die() { say "$*" >&2 && exit 1; }

# Sets record, the job's. A controller that many jobs ask at once may not answer the first time.
read_record() {
    local pause printed
    for pause in 0 2 6 12; do
        sleep "$pause"
        printed=$(scontrol show job -d -o "$SHARDRUN_JOB" 2>/dev/null) || continue
        [ -z "$printed" ] || { record=$printed && return; }
    done
    say "scontrol does not answer: this job counts as one that runs and may be requeued" >&2
}

field() { grep -m 1 -oP " $1=\K\S+" <<<"$record"; }

# Sets record, nodes, mode, run, flags, node_gpus and again, exports what Python needs, and prints the job and its nodes.
job_begin() {
    local began=$SECONDS variables venv node restart
    trap : TERM
    # signals to the batch shell alone, which srun passes on to the ranks
    trap 'kill -USR1 $(jobs -p) 2>/dev/null || :' USR1 USR2
    export SHARDRUN_JOB=$SLURM_JOB_ID SHARDRUN_TASKS=${SLURM_NTASKS_PER_NODE:-1} SHARDRUN_GPUS=${SLURM_GPUS_ON_NODE:-0}
    record='' again=() flags=() node_gpus=()
    read_record
    # the last task of an array has the array's own id as SLURM_JOB_ID: only id_task names one job
    ! field ArrayJobId >/dev/null || { SHARDRUN_JOB=${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID && read_record; }
    # sbatch gives a job the variables of the job in which it is called, and srun takes them for its own requests
    unset RANK WORLD_SIZE SLURM_STEP_NUM_TASKS SLURM_LABELIO SLURM_CPUS_PER_TASK SRUN_CPUS_PER_TASK \
        "${!SLURM_GPU@}" "${!SLURM_MEM@}" "${!SLURM_TRES@}" "${!SLURM_NTASKS@}"
    SRUN_ARGS=() CONTAINER=()
    # `module load` and an environment's activation use variables that are not set, and may end with a failure
    set +eu
    # shellcheck source=slurm/cluster.env
    [ ! -e "${CLUSTER_ENV:=$here/cluster.env}" ] || source "$CLUSTER_ENV"
    set -eu
    export NPROC_PER_NODE=${NPROC_PER_NODE:-} OMP_NUM_THREADS=${OMP_NUM_THREADS:-}
    venv=${VENV:-$home/.venv}
    [ ! -x "$venv/bin/python" ] || export VIRTUAL_ENV=$venv PATH="$venv/bin:$PATH"
    # SAFEPATH: a folder called launch or fsdp in the submit directory must not precede ours
    export PYTHONPATH="$home${PYTHONPATH:+:$PYTHONPATH}" PYTHONSAFEPATH=1 PYTHONUNBUFFERED=1
    # sbatch --export=NONE sets it to NONE for the job's sruns too, whose tasks would lack all that is exported here
    export SLURM_EXPORT_ENV=ALL SHARDRUN_LAUNCHER=${LAUNCHER:-torchrun} SHARDRUN_MODE=train
    restart=$(field Restarts) || restart=${SLURM_RESTART_COUNT:-0}
    [ -z "$record" ] || SLURM_JOB_END_TIME=$(date -d "$(field EndTime)" +%s 2>/dev/null) || SLURM_JOB_END_TIME=
    export SLURM_RESTART_COUNT=$restart SLURM_JOB_END_TIME
    # the subshell that waits for Ray's driver forwards it, as USR1
    [ "$SHARDRUN_LAUNCHER" != ray ] || trap 'kill -TERM $(jobs -p) 2>/dev/null || :' TERM
    mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
    node=$(scontrol show node -o "${nodes[0]}") || node=
    # for networks without name resolution, the address that Slurm uses for the first node
    address=$(grep -oP ' NodeAddr=\K\S+' <<<"$node") || address=${nodes[0]}
    variables=$(SHARDRUN_RECORD=$record SHARDRUN_NODE_RECORD=$node on_head python -m launch.slurm_job begin -- "$@")
    # a site's TaskProlog may print lines too
    eval "$(grep -E '^(export [A-Z_]+|[a-z_]+)=' <<<"$variables")"
    run=$SHARDRUN_RUN
    # the judgement takes as long: the ranks leave it the time (fsdp/distributed/env.py)
    export SHARDRUN_BEGIN_S=$((SECONDS - began))
    say "job $SHARDRUN_JOB ($SLURM_JOB_NAME), start $((SLURM_RESTART_COUNT + 1)):" \
        "${#nodes[@]} nodes × $SHARDRUN_RANKS_PER_NODE ranks on ${nodes[*]}; run $run"
}
# A small command on the first node, where this shell runs, inside the container if there is one.
on_head() {
    local via=()
    [ $((${#CONTAINER[@]} + ${#SRUN_ARGS[@]})) = 0 ] || via=(command srun --overlap --nodes=1 --ntasks=1
        --nodelist="${nodes[0]}" "${SRUN_ARGS[@]}" "${CONTAINER[@]}")
    "${via[@]}" "$@"
}
# Sets by_srun: srun on all nodes with this number of tasks each, and these further options.
on_nodes() {
    by_srun=(srun --nodes=${#nodes[@]} --ntasks=$((${#nodes[@]} * $1)) --ntasks-per-node="$1" "${@:2}"
        "${node_gpus[@]}" "${SRUN_ARGS[@]}" "${CONTAINER[@]}")
}
# The nodes connect before training: exports MASTER_ADDR, MASTER_PORT and a token that is new at each start. Nodes that
# never met end the job; nodes that met before have lost one and are requeued.
meet_or_leave() {
    local try=$1 seed said
    SHARDRUN_NODES=$(IFS=, && echo "${nodes[*]}")
    export SHARDRUN_NODES SHARDRUN_HOSTS=${RDZV_HOST:-${nodes[0]},$address} SHARDRUN_TIMEOUT_S=${RDZV_TIMEOUT_S:-60}
    export SHARDRUN_TRY=$try SHARDRUN_TOKEN=$SHARDRUN_JOB-$SLURM_RESTART_COUNT-$try
    seed=$((SLURM_JOB_ID * 31 + SLURM_RESTART_COUNT * 7 + try))
    MASTER_PORT=$(on_head python -m launch.node port "$seed" | grep -xE '[0-9]+')
    on_nodes 1 --kill-on-bad-exit=0
    export MASTER_PORT MASTER_ADDR=
    if said=$("${by_srun[@]}" bash "$here/node.sh" meet) &&
        MASTER_ADDR=$(grep -m 1 -xE '[0-9a-fA-F.:]+(%\S+)?' <<<"$said"); then
        say "all ${#nodes[@]} nodes reach $MASTER_ADDR:$MASTER_PORT" && return
    fi
    rc=1
    [ "$SLURM_RESTART_COUNT$try" != 00 ] || exit 3
    judge_and_act --unmet
}
# Instead of training: print what every node has and the command of the ranks, and run train.py's --dry-run with it.
show_what_would_run() {
    on_nodes 1 --kill-on-bad-exit=0
    "${by_srun[@]}" bash "$here/node.sh" check || die "a node is not ready"
    (start_ranks echo "would run:")
    flags+=(--dry-run)
    (start_ranks) || die "the ranks would not start"
    exit 0
}
# Instead of training: the doctor. Its verdict is the job's exit status, and comes in a file: torchrun has no error then.
examine_nodes() {
    local verdict_file=$run/doctor/verdict
    on_head rm -f "$verdict_file"
    SHARDRUN_LAUNCHER=${SHARDRUN_LAUNCHER/ray/torchrun} && srun_ranks
    "${by_srun[@]}" bash "$here/node.sh" ranks -m fsdp.doctor --dir "$run" --verdict-to "$verdict_file" ||
        say "its ranks ended with $?"
    [ "$(on_head cat "$verdict_file")" = 0 ] ||
        die "not fit to train: $run/doctor/doctor.txt; nodes to exclude: $run/doctor/exclude"
    exit 0
}
# srun runs in the background: a shell runs its traps only after a foreground command has ended. TERM reaches this shell
# too (scancel, preemption); it survives, to decide what follows. Sets rc.
wait_through_signals() {
    local pid=$1
    while rc=0 && { wait "$pid" || rc=$?; } && kill -0 "$pid" 2>/dev/null; do :; done
}
# Sets by_srun: one torchrun per node starts the ranks, or Slurm starts one task per rank.
srun_ranks() {
    local tasks=1 more=(--cpu-bind=none --kill-on-bad-exit=1)
    if [ "$SHARDRUN_LAUNCHER" = srun ]; then
        tasks=$SHARDRUN_RANKS_PER_NODE more+=(--label)
        [ "$tasks" -le "${SLURM_CPUS_ON_NODE:-1}" ] || more+=(--overcommit)
    fi
    on_nodes "$tasks" "${more[@]}"
}
# Replaces the subshell by srun, so that its pid is srun's. With `echo` as an argument it prints the command instead.
start_ranks() {
    [ "$SHARDRUN_LAUNCHER" != ray ] || start_ray "$@"
    srun_ranks
    exec "$@" "${by_srun[@]}" bash "$here/node.sh" ranks "$home/train.py" --run.dir "$run" "${flags[@]}"
}
# A Ray node on every Slurm node and one driver in this shell, all stopped at its end. Runs in a subshell, and ends it.
start_ray() {
    local rc=0 ray_nodes driver command
    command=("${CONTAINER[@]}" python "$home/train.py" --run.dir "$run" --backend ray
        --ray.address "$MASTER_ADDR:$MASTER_PORT"
        --ray.num_workers $((${#nodes[@]} * SHARDRUN_RANKS_PER_NODE)) "${flags[@]}")
    [ "$SHARDRUN_MODE" = train ] || exec "$@" "${command[@]}"
    export RAY_AUTH_MODE=token RAY_AUTH_TOKEN SHARDRUN_RAY_NODES=${#nodes[@]} RAY_USAGE_STATS_ENABLED=0
    export RAY_worker_niceness="${RAY_worker_niceness:-0}" # as srun's ranks; Ray's is 15
    RAY_AUTH_TOKEN=$(od -An -N16 -tx8 /dev/urandom | tr -d ' \n')
    on_nodes 1 --overlap --no-kill --cpu-bind=none --kill-on-bad-exit=0
    "${by_srun[@]}" bash "$here/node.sh" ray & ray_nodes=$!
    "${command[@]}" & driver=$!
    trap 'kill -USR1 $driver 2>/dev/null || :' USR1 && trap 'kill -TERM $driver 2>/dev/null || :' TERM
    wait_through_signals "$driver"
    # USR2 ends the Ray nodes at once, TERM would drain them first
    if kill -USR2 "$ray_nodes" 2>/dev/null; then wait "$ray_nodes" || :; fi
    exit "$rc"
}
# The srun of submitit's job script, in the background as above; its words name the container.
submitit_srun() {
    local rc SRUN_ARGS=() CONTAINER=()
    on_nodes "$SHARDRUN_RANKS_PER_NODE" --cpu-bind=none --kill-on-bad-exit=1
    command "${by_srun[@]}" "$@" & wait_through_signals $!
    return "$rc"
}
# The decision is an exit status, which leaves a container. Returns only if the ranks restart in this allocation.
judge_and_act() {
    local state traps verdict=0
    # scancel sends TERM to every process of the job, also to the command that asks for the job's state
    traps=$(trap -p TERM USR1 USR2)
    trap '' TERM USR1 USR2
    read_record
    # only a running job is requeued: a cancelled job stays cancelled, and Slurm's own requeue is not repeated
    state=$(field JobState) || state=RUNNING
    [ "$state" = RUNNING ] || { say "the job is $state: nothing more to do here" && exit "$rc"; }
    SHARDRUN_RECORD=$record on_head python -m launch.slurm_job judge "$run" --job "$SHARDRUN_JOB" \
        --restart "$SLURM_RESTART_COUNT" --code "$rc" "$@" || verdict=$?
    eval "${traps:-trap - TERM USR1 USR2}"
    [ "$verdict" != 85 ] || requeue
    [ "$verdict" = 86 ] || exit "$verdict"
}
# Slurm ends this shell when it has requeued the job. No exit status does that on a cluster without RequeueExit.
requeue() {
    local second
    for second in {0..60..5}; do
        if scontrol requeue "$SHARDRUN_JOB"; then
            say "requeued $SHARDRUN_JOB"; sleep 60 & wait_through_signals $!
            exit 0
        fi
        [ "$second" -gt 0 ] || say "scontrol does not requeue $SHARDRUN_JOB: tried again for a minute" >&2
        sleep 5
    done
    say "in its place: ${again[*]@Q}"
    SHARDRUN_HOME=$home "${again[@]}" || die "NOT requeued. HINT: ${again[*]@Q}"
    exit 0
}

job_run() {
    local try
    for ((try = 0; ; try++)); do
        meet_or_leave "$try"
        [ "$SHARDRUN_MODE" != dry-run ] || show_what_would_run
        [ "$SHARDRUN_MODE" != preflight ] || examine_nodes
        start_ranks & wait_through_signals $!
        judge_and_act
    done
}
