# shellcheck shell=bash
# Functions of every job script here. Slurm's commands are called here alone, outside any container; launch/slurm_job.py
# decides on what they print. Sourcing runs nothing.
#   job_begin "$@"    read cluster.env, find Python, check the flags and the allocation, choose the run directory
#   job_run           hooks, rendezvous, ranks, and what follows them; until done, requeued or failed. Never returns
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
home=$(dirname "$here")
say() { printf '%s slurm: %s\n' "$(date +%H:%M:%S)" "$*"; }
field() { grep -m 1 -oP " $1=\K\S+" <<<"$record"; }
comment() { scontrol update JobId="$SHARDRUN_JOB" Comment="$*" >/dev/null 2>&1 || :; } # for squeue
# Sets record, the job's. A controller that many jobs ask at once may not answer the first time.
read_record() {
    for pause in 0 2 6 12; do
        sleep "$pause"
        printed=$(scontrol show job -d -o "$SHARDRUN_JOB" 2>/dev/null) && [ -n "$printed" ] && record=$printed && return
    done
    say "scontrol does not answer: this job counts as one that runs and may be requeued" >&2
}
# Sets what launch.slurm_job assigns: run, program, node_gpus, again, left_out and exported variables.
job_begin() {
    local began=$SECONDS venv && trap : TERM
    trap 'kill -USR1 $(jobs -p) 2>/dev/null || :' USR1 USR2 # to the batch shell alone: srun passes them on
    export SHARDRUN_JOB=$SLURM_JOB_ID SHARDRUN_TASKS=${SLURM_NTASKS_PER_NODE:-1} SHARDRUN_GPUS=${SLURM_GPUS_ON_NODE:-0}
    record='' left_out='' again=() program=() node_gpus=() SRUN_ARGS=() CONTAINER=() TORCHRUN_ARGS=()
    read_record
    # the last task of an array has the array's own id as SLURM_JOB_ID: only id_task names one job
    ! field ArrayJobId >/dev/null || { SHARDRUN_JOB=${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID && read_record; }
    # sbatch gives a job the variables of the job in which it is called, and srun takes them for its own requests
    unset RANK WORLD_SIZE SLURM_STEP_NUM_TASKS SLURM_LABELIO SLURM_CPUS_PER_TASK SRUN_CPUS_PER_TASK \
        "${!SLURM_GPU@}" "${!SLURM_MEM@}" "${!SLURM_TRES@}" "${!SLURM_NTASKS@}"
    # `module load` and an environment's activation use variables that are not set, and may end with a failure
    set +eu && export CLUSTER_ENV=${CLUSTER_ENV:-$here/cluster.env} && { bash -n "$CLUSTER_ENV" || exit 2; }
    # shellcheck source=slurm/cluster.env
    source "$CLUSTER_ENV"
    set -eu && venv=${VENV:-$home/.venv}
    if [ -x "$venv/bin/python" ]; then export VIRTUAL_ENV=$venv PATH="$venv/bin:$PATH"
    elif [ -n "${VENV:-}" ]; then say "VENV=$VENV has no bin/python" >&2 && exit 2; fi
    # SAFEPATH: a folder called launch or fsdp in the submit directory must not precede ours
    export PYTHONPATH="$home${PYTHONPATH:+:$PYTHONPATH}" PYTHONSAFEPATH=1 PYTHONUNBUFFERED=1
    # sbatch --export=NONE sets it to NONE for the job's sruns too, whose tasks would lack all that is exported here
    export SLURM_EXPORT_ENV=ALL SHARDRUN_LAUNCHER=${LAUNCHER:-torchrun} SHARDRUN_MODE=train SLURM_RESTART_COUNT
    export NPROC_PER_NODE=${NPROC_PER_NODE:-} OMP_NUM_THREADS=${OMP_NUM_THREADS:-} RDZV_HOST=${RDZV_HOST:-}
    export SHARDRUN_CONTAINER=${CONTAINER[*]@Q} SHARDRUN_TORCHRUN_ARGS=${TORCHRUN_ARGS[*]@Q} MASTER_ADDR=''
    export HOOK_TIMEOUT_S=${HOOK_TIMEOUT_S:-1800} SLURMD_NODENAME=${SLURMD_NODENAME:-$(hostname)}
    export SHARDRUN_NODES SHARDRUN_NODE_RECORD='' SHARDRUN_TIMEOUT_S=${RDZV_TIMEOUT_S:-60} SLURM_JOB_END_TIME
    SLURM_RESTART_COUNT=$(field Restarts || echo "${SLURM_RESTART_COUNT:-0}")
    [ -z "$record" ] || SLURM_JOB_END_TIME=$(date -d "$(field EndTime)" +%s 2>/dev/null) || SLURM_JOB_END_TIME=
    # the subshell that waits for Ray's driver forwards it, as USR1
    [ "$SHARDRUN_LAUNCHER" != ray ] || trap 'kill -TERM $(jobs -p) 2>/dev/null || :' TERM
    mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
    SHARDRUN_NODES=${nodes[*]} SHARDRUN_NODE_RECORD=$(scontrol show node -o "${nodes[0]}" || :)
    ask begin -- "$@"
    # the judgement takes as long: the ranks leave it the time (fsdp/distributed/env.py)
    export SHARDRUN_BEGIN_S=$((SECONDS - began)) run=$SHARDRUN_RUN
}
on_head() { # a small command on the first node, where this shell runs, in the container if there is one
    local via=(command srun --overlap --nodes=1 --ntasks=1 --nodelist="${nodes[0]}" "${SRUN_ARGS[@]}")
    [ ${#SRUN_ARGS[@]} -gt 0 ] || via=()
    "${via[@]}" bash "$here/node.sh" run "$@"
}
# launch.slurm_job's assignments are evaluated, its other lines printed; its exit status leaves a container too.
ask() {
    local said status=0 assigned='^(export [A-Z_]+|[a-z_]+)='
    said=$(SHARDRUN_RECORD=$record on_head python -m launch.slurm_job "$@") || status=$?
    eval "$(grep -E "$assigned" <<<"$said")"
    if said=$(grep -vE "$assigned|^$" <<<"$said"); then say "$said" && comment "${said##*$'\n'}"; fi
    return "$status"
}
on_nodes() { # sets by_srun: srun on all nodes with this number of tasks each, and these further options
    by_srun=(srun --nodes=${#nodes[@]} --ntasks=$((${#nodes[@]} * $1)) --ntasks-per-node="$1" "${@:2}"
        "${node_gpus[@]}" "${SRUN_ARGS[@]}")
}
# A command of node.sh on every node: sets said, rc, and failed, the nodes of its lines `failed NODE`.
try_nodes() {
    [ "$1" != hook ] || { local SRUN_ARGS=() && say "$2 on each node, for $HOOK_TIMEOUT_S s at most"; } # in no container
    on_nodes 1 --kill-on-bad-exit=0
    rc=0 && said=$("${by_srun[@]}" bash "$here/node.sh" "$@") || rc=$?
    failed=$(grep -oP '^failed \K.*' <<<"$said" | paste -sd,) || :
}
meet_or_leave() { # the hooks; then the nodes connect. Sets MASTER_ADDR. Nodes that never met end the job
    local said failed='' what=before_node
    rc=0
    ! declare -F before_job >/dev/null || [ -z "$(bash "$here/node.sh" hook before_job)" ] || exit 1
    if declare -F before_node >/dev/null; then try_nodes hook before_node; fi
    if [ "$rc$failed" = 0 ]; then
        what='the rendezvous' && try_nodes meet
        if MASTER_ADDR=$(grep -m 1 -xE '[0-9a-fA-F.:]+(%\S+)?' <<<"$said") && [ "$rc" = 0 ]; then
            say "all ${#nodes[@]} nodes reach $MASTER_ADDR:$MASTER_PORT" && return
        fi
        [ "$SLURM_RESTART_COUNT$SHARDRUN_TRY" != 00 ] || exit 3
    fi
    rc=1 && judge_and_act --unmet "$what failed${failed:+ on $failed}" --failed "$failed"
}
srun_ranks() { # sets by_srun: one torchrun per node starts the ranks, or Slurm starts one task per rank
    local tasks=1 more=(--cpu-bind=none --kill-on-bad-exit=1)
    [ "$SHARDRUN_LAUNCHER" != srun ] || { tasks=$SHARDRUN_RANKS_PER_NODE && more+=(--label); }
    [ "$tasks" -le "${SLURM_CPUS_ON_NODE:-1}" ] || more+=(--overcommit)
    on_nodes "$tasks" "${more[@]}"
}
# Replaces the subshell by srun, so that its pid is srun's. With `echo` as an argument it prints the command instead.
start_ranks() {
    [ "$SHARDRUN_LAUNCHER" != ray ] || start_ray "$@"
    srun_ranks
    exec "$@" "${by_srun[@]}" bash "$here/node.sh" ranks "${program[@]}"
}
# A Ray node on every Slurm node and one driver in this shell, all stopped at its end. Runs in a subshell, and ends it.
start_ray() {
    local command=(bash "$here/node.sh" run python "${program[@]}" --ray.address "$MASTER_ADDR:$MASTER_PORT")
    [ "$SHARDRUN_MODE" = train ] || exec "$@" "${command[@]}"
    RAY_AUTH_TOKEN=$(od -An -N16 -tx8 /dev/urandom | tr -d ' \n')
    export RAY_AUTH_MODE=token RAY_AUTH_TOKEN SHARDRUN_RAY_NODES=${#nodes[@]} RAY_USAGE_STATS_ENABLED=0
    export RAY_worker_niceness="${RAY_worker_niceness:-0}" # as srun's ranks; Ray's is 15
    on_nodes 1 --overlap --no-kill --cpu-bind=none --kill-on-bad-exit=0
    "${by_srun[@]}" bash "$here/node.sh" ray & ray_nodes=$!
    "${command[@]}" & driver=$!
    trap 'kill -USR1 $driver 2>/dev/null || :' USR1 && trap 'kill -TERM $driver 2>/dev/null || :' TERM
    wait_through_signals "$driver"
    # USR2 ends the Ray nodes at once, TERM would drain them first
    if kill -USR2 "$ray_nodes" 2>/dev/null; then wait "$ray_nodes" || :; fi
    exit "$rc"
}
# srun runs in the background: a shell runs its traps only after a foreground command has ended. TERM reaches this shell
# too (scancel, preemption); it survives, to decide what follows. Sets rc.
wait_through_signals() {
    while rc=0 && { wait "$1" || rc=$?; } && kill -0 "$1" 2>/dev/null; do :; done
}
judge_and_act() { # returns only if the ranks restart in this allocation
    local traps verdict=0
    # scancel sends TERM to every process of the job, also to the commands that ask for its state
    traps=$(trap -p TERM USR1 USR2) && trap '' TERM USR1 USR2
    read_record
    # only a running job is requeued: a cancelled job stays cancelled, and Slurm's own requeue is not repeated
    state=$(field JobState) || state=RUNNING
    [ "$state" = RUNNING ] || { say "the job is $state: nothing more to do here" && exit "$rc"; }
    ask judge "$run" --job "$SHARDRUN_JOB" --restart "$SLURM_RESTART_COUNT" --code "$rc" "$@" || verdict=$?
    eval "${traps:-trap - TERM USR1 USR2}"
    [ "$verdict" != 85 ] || requeue
    [ "$verdict" = 86 ] || exit "$verdict"
}
# No exit status requeues on a cluster without RequeueExit. With the requeue Slurm sends TERM to all processes of the job.
requeue() {
    trap '' TERM
    # a job that leaves out too many nodes would wait for ever
    [ -z "$left_out" ] || [ "$(sinfo -h -N -p "$SLURM_JOB_PARTITION" -o %N | sort -u |
        grep -vcxFf <(scontrol show hostnames "$left_out"))" -ge ${#nodes[@]} ] ||
        { say "not left out, for there are too few other nodes: $left_out" && left_out=; }
    for second in {0..60..5}; do
        if scontrol requeue "$SHARDRUN_JOB"; then
            [ -z "$left_out" ] || scontrol update JobId="$SHARDRUN_JOB" ExcNodeList="$left_out" || left_out+=": refused"
            say "requeued $SHARDRUN_JOB${left_out:+, without $left_out}" && exit
        fi
        [ "$second" -gt 0 ] || say "scontrol does not requeue $SHARDRUN_JOB: tried again for a minute" >&2
        sleep 5
    done
    again=("${again[0]}" ${left_out:+--exclude="$left_out"} "${again[@]:1}")
    say "in its place: ${again[*]@Q}"
    SHARDRUN_HOME=$home "${again[@]}" && exit
    say "NOT requeued. HINT: ${again[*]@Q}" >&2 && exit 1
}
show_progress() {
    trap '' TERM USR1 USR2
    while step=$(tail -qn 1 "$run/metrics.jsonl" 2>/dev/null | grep -oP '"step": ?\K\d+') || :; do
        comment "start $((SLURM_RESTART_COUNT + 1)), step ${step:-0} of $SHARDRUN_STEPS"
        read -rt "${COMMENT_S:-60}" <> <(:) || : # waits without a process
    done
}
job_run() {
    while :; do
        meet_or_leave
        [ "$SHARDRUN_MODE" != dry-run ] || (start_ranks echo "would run:")
        show_progress & progress=$! && disown # no line of its end in the log
        start_ranks & wait_through_signals $!
        kill -KILL "$progress"
        judge_and_act
    done
}
