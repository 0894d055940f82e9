# shellcheck shell=bash
# Functions of every job script here: the cluster's settings, the rendezvous of the nodes, the ranks, and what follows their end.
# Sourcing this file runs nothing. Slurm's commands are called here alone, outside any container.
#
#   job_begin "$@"    read cluster.env, find Python, check the flags (kept in `flags`), choose the run directory
#   job_run           rendezvous, start the ranks, decide what follows; until done, requeued or failed. Never returns
# and their parts, for a job script of another shape: job_facts, meet, wait_through_signals, judge_and_act, requeue.

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
home=$(dirname "$here")
REQUEUE_EXIT=85 # the exit status of launch/slurm_job.py for "requeue"; slurm.conf's RequeueExit may have the same number

say() {
    printf '%s slurm: %s\n' "$(date +%H:%M:%S)" "$*"
}

die() {
    say "$*" >&2
    exit 1
}

# ---------------------------------------------------------------- the job's settings

# Sets: job record restart nodes ranks_per_node node_gpus, and exports what Python needs.
job_facts() {
    SRUN_ARGS=() CONTAINER=()
    # sbatch gives a job the variables of the job in which it is called: of a step, of ranks, of an array's task
    unset RANK WORLD_SIZE SLURM_STEP_NUM_TASKS
    unset SLURM_LABELIO # of the user's shell: srun's output is read here
    record=$(scontrol show job -o "$SLURM_JOB_ID" 2>/dev/null) || record=
    [ -z "$record" ] || [[ $record == *" ArrayJobId="* ]] || unset SLURM_ARRAY_JOB_ID SLURM_ARRAY_TASK_ID
    [[ $record != *" HetJobId="* ]] ||
        die "this job script has the nodes of the first component of a heterogeneous job alone. HINT: sbatch --nodes=2 slurm/fsdp.sbatch, all nodes in one request"
    # `module load` and an environment's activation use variables that are not set, and may end with a failure
    set +eu
    # shellcheck source=slurm/cluster.env
    [ ! -e "${CLUSTER_ENV:=$here/cluster.env}" ] || source "$CLUSTER_ENV"
    set -eu
    find_python
    # SAFEPATH: a folder called launch or fsdp in the submit directory must not precede ours
    export PYTHONPATH="$home${PYTHONPATH:+:$PYTHONPATH}" PYTHONSAFEPATH=1 PYTHONUNBUFFERED=1
    # sbatch --export=NONE sets it to NONE for the job's sruns too, whose tasks would lack all that is exported here
    export SLURM_EXPORT_ENV=ALL
    # the last task of an array has the array's own id as SLURM_JOB_ID: only id_task names one job
    job=${SLURM_ARRAY_JOB_ID:+${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID}
    job=${job:-$SLURM_JOB_ID}
    [ "$job" = "$SLURM_JOB_ID" ] || record=$(scontrol show job -o "$job" 2>/dev/null) || record=
    restart=$(grep -m 1 -oP ' Restarts=\K\d+' <<<"$record") || restart=${SLURM_RESTART_COUNT:-0}
    export SLURM_RESTART_COUNT=$restart
    mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
    [ ${#nodes[@]} = "$SLURM_JOB_NUM_NODES" ] || die "${#nodes[@]} host names for $SLURM_JOB_NUM_NODES nodes: $SLURM_JOB_NODELIST"
    [ "${SLURM_GPUS_ON_NODE:-0}" != 0 ] || unset SLURM_GPUS_ON_NODE
    # NPROC_PER_NODE, else the GPUs that Slurm allocated; without GPUs, sbatch's --ntasks-per-node
    ranks_per_node=${NPROC_PER_NODE:-${SLURM_GPUS_ON_NODE:-${SLURM_NTASKS_PER_NODE:-1}}}
    [[ $ranks_per_node =~ ^[1-9][0-9]*$ ]] || die "NPROC_PER_NODE=$ranks_per_node is not a number of ranks. HINT: NPROC_PER_NODE=8 sbatch …"
    # each srun here starts one task a node, which needs all of the node's GPUs. A step of a job with --gpus-per-task has
    # sbatch's share of a task even where these variables are unset, unless it requests the node's number
    node_gpus=()
    [[ "${SLURM_GPUS_PER_TASK:-} ${SLURM_TRES_PER_TASK:-}" != *[1-9]* ]] ||
        node_gpus=(${SLURM_GPUS_ON_NODE:+"--gpus-per-node=$SLURM_GPUS_ON_NODE"})
    unset SLURM_GPUS_PER_TASK SLURM_TRES_PER_TASK
    # a task is a node for sbatch and a rank for LAUNCHER=srun, whose srun may inherit either variable
    unset SLURM_CPUS_PER_TASK SRUN_CPUS_PER_TASK
    local cpus=$((${SLURM_CPUS_ON_NODE:-1} / ranks_per_node))
    [ "$cpus" -gt 0 ] || say "${SLURM_CPUS_ON_NODE:-1} CPUs a node for $ranks_per_node ranks. HINT: sbatch --cpus-per-task=$((4 * ranks_per_node))" >&2
    export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((cpus > 0 ? cpus : 1))}
    export_end_time
}

find_python() {
    local venv=${VENV:-$home/.venv}
    if [ -n "${VENV:-}" ] || [ -x "$venv/bin/python" ]; then
        export VIRTUAL_ENV=$venv PATH="$venv/bin:$PATH"
    fi
    # an image's python is found in the image
    [ ${#CONTAINER[@]} -gt 0 ] || [[ " ${SRUN_ARGS[*]:-} " == *" --container"* ]] || command -v python >/dev/null || die "no python on $(hostname). HINT: set VENV in $CLUSTER_ENV"
}

# Seconds since 1970, for the ranks' deadline; newer Slurm versions set it. Unset if the job has no time limit.
export_end_time() {
    local text
    [ -z "${SLURM_JOB_END_TIME:-}" ] || return 0
    text=$(squeue -h -j "$job" -o %e 2>/dev/null) || text=
    # date takes an empty text for today's midnight
    if [ -n "$text" ] && text=$(date -d "$text" +%s 2>/dev/null); then
        export SLURM_JOB_END_TIME=$text
    fi
}

# The job's record. A controller that many jobs ask at once may not answer the first time; empty after 20 s.
job_record() {
    local pause record
    for pause in 0 2 6 12; do
        sleep "$pause"
        # not in a pipe: grep would end before scontrol has written a long record, which would count as a failure
        if record=$(scontrol show job -o "$job" 2>/dev/null) && [ -n "$record" ]; then
            printf '%s\n' "$record"
            return
        fi
    done
}

# A small command on the first node, where this shell runs, inside the container if there is one.
on_head() {
    if [ ${#CONTAINER[@]} -gt 0 ] || [ ${#SRUN_ARGS[@]} -gt 0 ]; then
        srun --overlap --nodes=1 --ntasks=1 --nodelist="${nodes[0]}" "${SRUN_ARGS[@]}" "${CONTAINER[@]}" "$@"
    else
        "$@"
    fi
}

# ---------------------------------------------------------------- before the ranks

# Sets flags, dry_run, preflight, run and run_folder; prints the job and its nodes, once per start.
job_begin() {
    local word log places
    trap : TERM USR1
    job_facts
    export SHARDRUN_LAUNCHER=${LAUNCHER:-torchrun}
    [[ $SHARDRUN_LAUNCHER =~ ^(torchrun|srun)$ ]] || die "LAUNCHER=$LAUNCHER is neither. HINT: LAUNCHER=srun, or torchrun"
    flags=() dry_run=() preflight=
    name_in_front "$@"
    for word in "${named[@]}"; do
        case $word in
        --dry-run) dry_run=(--dry-run) ;;
        --preflight) preflight=1 ;;
        *) flags+=("$word") ;;
        esac
    done
    log=$(grep -m 1 -oP ' StdOut=\K.*?(?= \w+=|$)' <<<"$record") || log=
    places=$(on_head python -m launch.slurm_job begin "${dry_run[@]}" --default-run-dir "runs/$SLURM_JOB_NAME-$job" \
        --log "$log" "${flags[@]}")
    # a URL has a second line: its folder on each node, where the ranks' logs are
    run=${places%%$'\n'*} run_folder=${places##*$'\n'}
    say "job $job ($SLURM_JOB_NAME), start $((restart + 1)): ${#nodes[@]} nodes × $ranks_per_node ranks on ${nodes[*]}; run $run"
    warn_of_unused_gpus
}

warn_of_unused_gpus() {
    local gpus
    [ -z "${SLURM_GPUS_ON_NODE:-}" ] || return 0
    gpus=$(scontrol show node -o "${nodes[0]}" | grep -oP ' Gres=\S*?\bgpu:([^\s:,(]+:)?\K\d+' | head -n 1) || return 0
    say "${nodes[0]} has $gpus GPUs, and the job requests none. HINT: sbatch --gpus-per-node=$gpus, before the file" >&2
}

# Sets named: words in front without dashes, a strategy's and a recipe's name, become their flags.
name_in_front() {
    local recipes
    named=()
    while [ $# -gt 0 ] && [[ $1 != -* ]]; do
        case $1 in
        ddp | fsdp | hsdp) named+=(--mesh.strategy "$1") ;;
        *.toml) named+=(--config "$1") ;;
        *)
            recipes=$(cd "$home/recipes" && printf '%s ' *.toml)
            [ -e "$home/recipes/$1.toml" ] ||
                die "$1 is not a strategy (ddp, fsdp, hsdp) or a recipe (${recipes//.toml/}). HINT: sbatch slurm/fsdp.sbatch ddp"
            named+=(--config "$home/recipes/$1.toml")
            ;;
        esac
        shift
    done
    named+=("$@")
}

# The nodes connect before training: sets and exports MASTER_ADDR, MASTER_PORT and a token that is new at each start.
meet() {
    local try=$1 names said
    names=$(printf ',%s' "${nodes[@]}")
    export SHARDRUN_NODES=${names#,} SHARDRUN_RANKS_PER_NODE=$ranks_per_node SHARDRUN_RUN=$run_folder
    export SHARDRUN_HOSTS=${RDZV_HOST:-$(head_addresses)} SHARDRUN_TIMEOUT_S=${RDZV_TIMEOUT_S:-60}
    export SHARDRUN_TOKEN=$job-$restart-$try SHARDRUN_TRY=$try
    MASTER_PORT=$(on_head python -m launch.rendezvous port --seed $((SLURM_JOB_ID * 31 + restart * 7 + try))) || return
    export MASTER_PORT
    said=$(each_node bash "$here/node.sh" meet) || return
    # the numeric address alone: a site's TaskProlog may print lines too
    MASTER_ADDR=$(grep -m 1 -xE '[0-9a-fA-F.:]+(%\S+)?' <<<"$said") || { say "no address in: $said" >&2; return 1; }
    export MASTER_ADDR
    say "all ${#nodes[@]} nodes reach $MASTER_ADDR:$MASTER_PORT"
}

# Nodes that never met are a configuration error and end the job; nodes that met before have lost one and are requeued.
meet_or_leave() {
    meet "$1" && return
    rc=1
    [ "$restart" != 0 ] || [ "$1" != 0 ] || exit 3
    judge_and_act --unmet
}

# The first node's name and, for networks without name resolution, the address that Slurm uses for it.
head_addresses() {
    local address
    address=$(scontrol show node -o "${nodes[0]}" | grep -oP ' NodeAddr=\K\S+') || address=${nodes[0]}
    [ "$address" = "${nodes[0]}" ] && echo "$address" || echo "${nodes[0]},$address"
}

each_node() {
    srun --nodes=${#nodes[@]} --ntasks=${#nodes[@]} --ntasks-per-node=1 --kill-on-bad-exit=0 \
        "${node_gpus[@]}" "${SRUN_ARGS[@]}" "${CONTAINER[@]}" "$@"
}

# Instead of training: print what every node has and the command of the ranks, and run train.py's --dry-run with it.
show_what_would_run() {
    each_node bash "$here/node.sh" check || die "a node is not ready"
    (start_ranks echo "would run:")
    flags+=(--dry-run)
    export SHARDRUN_DRY_RUN=1
    (start_ranks) || die "the ranks would not start"
    exit 0
}

# Instead of training: measure each rank's device, links and storage, and list the nodes to exclude. The verdict is the job's
# exit status; it comes in a file, so that torchrun ends without an error of its own.
examine_nodes() {
    local verdict_file=$run_folder/doctor/verdict
    export SHARDRUN_PREFLIGHT=1
    srun_ranks
    on_head rm -f "$verdict_file"
    "${by_srun[@]}" bash "$here/node.sh" ranks -m fsdp.doctor --dir "$run_folder" --verdict-to "$verdict_file" || say "its ranks ended with $?"
    [ "$(on_head cat "$verdict_file")" = 0 ] || die "not fit to train: $run_folder/doctor/doctor.txt; nodes to exclude: $run_folder/doctor/exclude"
    exit 0
}

# ---------------------------------------------------------------- the ranks, and after them

# srun runs in the background: a shell runs its traps only after a foreground command has ended.
# TERM reaches this shell too (scancel, preemption); it survives, to decide what follows. Sets rc.
wait_through_signals() {
    local pid=$1
    while :; do
        rc=0
        wait "$pid" || rc=$?
        kill -0 "$pid" 2>/dev/null || break
    done
}

# One torchrun per node starts the ranks, or Slurm starts one task per rank. Sets by_srun.
srun_ranks() {
    local tasks_per_node=1 more=()
    if [ "$SHARDRUN_LAUNCHER" = srun ]; then
        tasks_per_node=$ranks_per_node more=(--label)
        [ "$ranks_per_node" -le "${SLURM_CPUS_ON_NODE:-1}" ] || more+=(--overcommit)
    fi
    by_srun=(srun --nodes=${#nodes[@]} --ntasks=$((${#nodes[@]} * tasks_per_node)) --ntasks-per-node="$tasks_per_node"
        --cpu-bind=none --kill-on-bad-exit=1 "${more[@]}" "${node_gpus[@]}" "${SRUN_ARGS[@]}" "${CONTAINER[@]}")
}

# Replaces the subshell by srun, so that its pid is srun's. With `echo` as an argument it prints the command instead.
start_ranks() {
    srun_ranks
    exec "$@" "${by_srun[@]}" bash "$here/node.sh" ranks "$home/train.py" --run.dir "$run" "${flags[@]}"
}

# The decision is an exit status, which leaves a container. Returns only if the ranks restart in this allocation.
judge_and_act() {
    local state record traps verdict=0 bounds=()
    # scancel sends TERM to every process of the job: the command that asks for the job's state must not end by it
    traps=$(trap -p TERM USR1)
    trap '' TERM USR1
    record=$(job_record) || record=
    if [ -n "$record" ]; then
        state=$(grep -m 1 -oP ' JobState=\K\S+' <<<"$record") || state=UNKNOWN
        # only a running job is requeued: a cancelled job stays cancelled, and Slurm's own requeue is not repeated
        [ "$state" = RUNNING ] || { say "the job is $state: nothing more to do here"; exit "$rc"; }
        [[ $record == *" Requeue=1"* ]] || bounds=(--no-requeue)
    else
        say "scontrol does not answer: this job is judged as one that runs and may be requeued"
    fi
    on_head python -m launch.slurm_job judge "$run" --job "$job" --restart "$restart" --code "$rc" "${bounds[@]}" "$@" ||
        verdict=$?
    eval "${traps:-trap - TERM USR1}"
    case $verdict in
    "$REQUEUE_EXIT") requeue ;;
    86) return ;;
    *) exit "$verdict" ;;
    esac
}

# Slurm ends this shell when it has requeued the job; if scontrol fails, the exit code requests the requeue.
requeue() {
    say "requeue $job"
    scontrol requeue "$job" || exit "$REQUEUE_EXIT"
    sleep 60 &
    wait_through_signals $!
    exit 0
}

job_run() {
    local try=0
    while :; do
        meet_or_leave "$try"
        [ ${#dry_run[@]} = 0 ] || show_what_would_run
        [ -z "$preflight" ] || examine_nodes
        start_ranks &
        wait_through_signals $!
        judge_and_act
        try=$((try + 1))
    done
}
