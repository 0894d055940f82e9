# shellcheck shell=bash
# Functions of every job script here: the cluster's settings, the rendezvous of the nodes, the ranks, and what follows their end.
# Sourcing this file runs nothing. Slurm's commands are called here alone, outside any container.
#
#   job_begin "$@"    read cluster.env, find Python, check the flags (kept in `flags`), choose the run directory
#   job_run           rendezvous, start the ranks, decide what follows; until done, requeued or failed. Never returns
# and their parts, for a job script of another shape: job_facts, meet, wait_through_signals, judge_and_act, requeue.

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
home=$(dirname "$here")

say() {
    printf '%s slurm: %s\n' "$(date +%H:%M:%S)" "$*"
}

die() {
    say "$*" >&2
    exit 1
}

# ---------------------------------------------------------------- the job's settings

# Sets: job record restart nodes tasks ranks_per_node node_gpus, and exports what Python needs.
job_facts() {
    SRUN_ARGS=() CONTAINER=() again=()
    # sbatch gives a job the variables of the job in which it is called: of a step, of ranks, of an array's task
    unset RANK WORLD_SIZE SLURM_STEP_NUM_TASKS
    unset SLURM_LABELIO # of the user's shell: srun's output is read here
    record=$(scontrol show job -d -o "$SLURM_JOB_ID" 2>/dev/null) || record=
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
    [ "$job" = "$SLURM_JOB_ID" ] || record=$(scontrol show job -d -o "$job" 2>/dev/null) || record=
    restart=$(grep -m 1 -oP ' Restarts=\K\d+' <<<"$record") || restart=${SLURM_RESTART_COUNT:-0}
    export SLURM_RESTART_COUNT=$restart
    mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
    [ ${#nodes[@]} = "$SLURM_JOB_NUM_NODES" ] || die "${#nodes[@]} host names for $SLURM_JOB_NUM_NODES nodes: $SLURM_JOB_NODELIST"
    local end most fewest
    tasks=${SLURM_NTASKS_PER_NODE:-1}
    # the GPUs of this job on each group of equal nodes, fewest first
    mapfile -t gpus < <(grep -oP ' Nodes=\K\S+ CPU_IDs=\S+ Mem=\S+ GRES=\S*' <<<"$record" |
        sed -E 's/ .*gpu:([^:,(]+:)?([0-9]+).*/ \2/; t; s/ .*/ 0/' | sort -k 2n)
    [ ${#gpus[@]} -gt 0 ] || gpus=("${nodes[0]} ${SLURM_GPUS_ON_NODE:-0}")
    most=${gpus[-1]##* } fewest=${gpus[0]##* }
    ranks_per_node=${NPROC_PER_NODE:-$((most > 0 ? most : tasks))}
    [[ $ranks_per_node =~ ^[1-9][0-9]*$ ]] || die "NPROC_PER_NODE=$ranks_per_node is not a number of ranks. HINT: NPROC_PER_NODE=8 sbatch …"
    [ "$most" = 0 ] || [ "$fewest" -ge "$ranks_per_node" ] ||
        die "${#nodes[@]} nodes × $ranks_per_node ranks need $ranks_per_node GPUs a node, but ${gpus[0]% *} has $fewest. HINT: NPROC_PER_NODE=$((fewest > 0 ? fewest : 1)) sbatch …, or --gpus-per-node=$ranks_per_node"
    # each srun names its GPUs: without, it has none with --exclusive, and a task's share with --gpus-per-task
    node_gpus=()
    [ "$most" = 0 ] || node_gpus=("--gres=gpu:$ranks_per_node")
    # srun takes them for its own requests, and sbatch passes on those of the job in which it is called
    unset "${!SLURM_GPU@}" "${!SLURM_MEM@}" "${!SLURM_TRES@}" "${!SLURM_NTASKS@}"
    # a task is a node for sbatch and a rank for LAUNCHER=srun, whose srun may inherit either variable
    unset SLURM_CPUS_PER_TASK SRUN_CPUS_PER_TASK
    local cpus=$((${SLURM_CPUS_ON_NODE:-1} / ranks_per_node))
    [ "$cpus" -gt 0 ] || say "${SLURM_CPUS_ON_NODE:-1} CPUs a node for $ranks_per_node ranks. HINT: sbatch --cpus-per-task=$((4 * ranks_per_node))" >&2
    export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((cpus > 0 ? cpus : 1))}
    # the ranks' deadline, in seconds since 1970: newer Slurm versions set it, and sbatch passes on another job's
    [ -z "$record" ] || unset SLURM_JOB_END_TIME
    if end=$(grep -m 1 -oP ' EndTime=\K\S+' <<<"$record") && end=$(date -d "$end" +%s 2>/dev/null); then
        export SLURM_JOB_END_TIME=$end
    fi
}

find_python() {
    local venv=${VENV:-$home/.venv}
    if [ -n "${VENV:-}" ] || [ -x "$venv/bin/python" ]; then
        export VIRTUAL_ENV=$venv PATH="$venv/bin:$PATH"
    fi
    # an image's python is found in the image
    [ ${#CONTAINER[@]} -gt 0 ] || [[ " ${SRUN_ARGS[*]:-} " == *" --container"* ]] || command -v python >/dev/null || die "no python on $(hostname). HINT: set VENV in $CLUSTER_ENV"
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
        command srun --overlap --nodes=1 --ntasks=1 --nodelist="${nodes[0]}" "${SRUN_ARGS[@]}" "${CONTAINER[@]}" "$@"
    else
        "$@"
    fi
}

# ---------------------------------------------------------------- before the ranks

# Sets flags, dry_run, preflight, and run; prints the job and its nodes, once per start.
job_begin() {
    local word log began=$SECONDS
    trap : TERM
    # `#SBATCH --signal=B:USR1@N` and `scancel --batch` reach this shell alone: srun passes it on to the ranks
    trap 'kill -USR1 $(jobs -p) 2>/dev/null || :' USR1 USR2
    job_facts
    export SHARDRUN_LAUNCHER=${LAUNCHER:-torchrun}
    case $SHARDRUN_LAUNCHER in
    torchrun | srun) ;;
    # the subshell that waits for the driver forwards it, as USR1
    ray) trap 'kill -TERM $(jobs -p) 2>/dev/null || :' TERM ;;
    *) die "LAUNCHER=$LAUNCHER is no launcher. HINT: LAUNCHER=torchrun, srun or ray" ;;
    esac
    flags=() dry_run=() preflight=
    name_in_front "$@"
    for word in "${named[@]}"; do
        case $word in
        --dry-run) dry_run=(--dry-run) ;;
        --preflight) preflight=1 ;;
        *) flags+=("$word") ;;
        esac
    done
    [[ $SHARDRUN_LAUNCHER != ray || " ${SRUN_ARGS[*]} " != *" --container"* ]] ||
        die "SRUN_ARGS has an image, and Ray's driver is no step. HINT: CONTAINER=(…) in $CLUSTER_ENV"
    log=$(grep -m 1 -oP ' StdOut=\K.*?(?= \w+=|$)' <<<"$record") || log=
    run=$(on_head python -m launch.slurm_job begin "${dry_run[@]}" --default-run-dir "runs/$SLURM_JOB_NAME-$job" \
        --log "$log" --idle-gpus "$(idle_gpus)" "${flags[@]}")
    # the judgement starts the same program on the same folder: the ranks leave it the time (fsdp/dist/env.py)
    export SHARDRUN_BEGIN_S=$((SECONDS - began))
    say "job $job ($SLURM_JOB_NAME), start $((restart + 1)): ${#nodes[@]} nodes × $ranks_per_node ranks on ${nodes[*]}; run $run"
}

# The GPUs of the first node, if this job has none.
idle_gpus() {
    [ ${#node_gpus[@]} -gt 0 ] || scontrol show node -o "${nodes[0]}" | grep -m 1 -oP ' Gres=\S*?\bgpu:([^\s:,(]+:)?\K\d+' || :
}

# Sets named: words in front without dashes, a strategy's and a recipe's name, become their flags.
name_in_front() {
    named=()
    while [ $# -gt 0 ] && [[ $1 != -* ]]; do
        case $1 in
        ddp | fsdp | hsdp) named+=(--mesh.strategy "$1") ;;
        *.toml) named+=(--config "$1") ;;
        *)
            [ -e "$home/recipes/$1.toml" ] ||
                die "$1 is not a strategy (ddp, fsdp, hsdp) or a recipe ($(cd "$home/recipes" && echo *.toml)). HINT: sbatch slurm/fsdp.sbatch ddp"
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
    export SHARDRUN_NODES=${names#,} SHARDRUN_RANKS_PER_NODE=$ranks_per_node SHARDRUN_RUN=$run
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

# Sets by_srun: srun on all nodes with this number of tasks each, and these further options.
on_nodes() {
    by_srun=(srun --nodes=${#nodes[@]} --ntasks=$((${#nodes[@]} * $1)) --ntasks-per-node="$1" "${@:2}"
        "${node_gpus[@]}" "${SRUN_ARGS[@]}" "${CONTAINER[@]}")
}

each_node() {
    on_nodes 1 --kill-on-bad-exit=0
    "${by_srun[@]}" "$@"
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
    local verdict_file=$run/doctor/verdict
    export SHARDRUN_PREFLIGHT=1 SHARDRUN_LAUNCHER=${SHARDRUN_LAUNCHER/ray/torchrun}
    srun_ranks
    on_head rm -f "$verdict_file"
    "${by_srun[@]}" bash "$here/node.sh" ranks -m fsdp.doctor --dir "$run" --verdict-to "$verdict_file" || say "its ranks ended with $?"
    [ "$(on_head cat "$verdict_file")" = 0 ] || die "not fit to train: $run/doctor/doctor.txt; nodes to exclude: $run/doctor/exclude"
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
    local tasks_per_node=1 more=(--cpu-bind=none --kill-on-bad-exit=1)
    if [ "$SHARDRUN_LAUNCHER" = srun ]; then
        tasks_per_node=$ranks_per_node more+=(--label)
        [ "$ranks_per_node" -le "${SLURM_CPUS_ON_NODE:-1}" ] || more+=(--overcommit)
    fi
    on_nodes "$tasks_per_node" "${more[@]}"
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
    command=("${CONTAINER[@]}" python "$home/train.py" --run.dir "$run" --backend ray --ray.address "$MASTER_ADDR:$MASTER_PORT"
        --ray.num_workers $((${#nodes[@]} * ranks_per_node)) "${flags[@]}")
    [ $(($# + ${#dry_run[@]})) = 0 ] || exec "$@" "${command[@]}"
    export RAY_AUTH_MODE=token RAY_AUTH_TOKEN SHARDRUN_RAY_NODES=${#nodes[@]} RAY_USAGE_STATS_ENABLED=0
    export RAY_worker_niceness="${RAY_worker_niceness:-0}" # as srun's ranks; Ray's is 15
    RAY_AUTH_TOKEN=$(head -c 16 /dev/urandom | od -An -tx1 | tr -d ' \n')
    on_nodes 1 --overlap --no-kill --cpu-bind=none --kill-on-bad-exit=0
    "${by_srun[@]}" bash "$here/node.sh" ray &
    ray_nodes=$!
    "${command[@]}" &
    driver=$!
    trap 'kill -USR1 $driver 2>/dev/null || :' USR1
    trap 'kill -TERM $driver 2>/dev/null || :' TERM
    wait_through_signals "$driver"
    # the driver has ended: USR2 ends the Ray nodes at once, TERM would drain them first
    kill -USR2 "$ray_nodes" 2>/dev/null || :
    wait "$ray_nodes" || :
    exit "$rc"
}

# The srun of submitit's job script, in the background as above; its words name the container.
submitit_srun() {
    local rc SRUN_ARGS=() CONTAINER=()
    on_nodes "$tasks" --cpu-bind=none --kill-on-bad-exit=1
    command "${by_srun[@]}" "$@" &
    wait_through_signals $!
    return "$rc"
}

# The decision is an exit status, which leaves a container. Returns only if the ranks restart in this allocation.
judge_and_act() {
    local state record traps verdict=0 bounds=()
    # scancel sends TERM to every process of the job: the command that asks for the job's state must not end by it
    traps=$(trap -p TERM USR1 USR2)
    trap '' TERM USR1 USR2
    record=$(job_record) || record=
    if [ -n "$record" ]; then
        state=$(grep -m 1 -oP ' JobState=\K\S+' <<<"$record") || state=UNKNOWN
        # only a running job is requeued: a cancelled job stays cancelled, and Slurm's own requeue is not repeated
        [ "$state" = RUNNING ] || { say "the job is $state: nothing more to do here"; exit "$rc"; }
        [[ $record == *" Requeue=1"*" BatchFlag=1"* ]] || bounds=(--no-requeue)
    else
        say "scontrol does not answer: this job is judged as one that runs and may be requeued"
    fi
    on_head python -m launch.slurm_job judge "$run" --job "$job" --restart "$restart" --code "$rc" "${bounds[@]}" "$@" ||
        verdict=$?
    eval "${traps:-trap - TERM USR1 USR2}"
    case $verdict in
    85) requeue ;;
    86) return ;;
    *) exit "$verdict" ;;
    esac
}

# Slurm ends this shell when it has requeued the job. No exit status does that on a cluster without RequeueExit.
requeue() {
    local second
    for second in {0..60..5}; do
        if scontrol requeue "$job"; then
            say "requeued $job"
            sleep 60 &
            wait_through_signals $!
            exit 0
        fi
        [ "$second" -gt 0 ] || say "scontrol does not requeue $job: tried again for a minute" >&2
        sleep 5
    done
    [ ${#again[@]} -gt 0 ] || die "NOT requeued. HINT: the same command with --run.dir $run continues"
    say "in its place: ${again[*]@Q}"
    SHARDRUN_HOME=$home "${again[@]}" || die "NOT requeued. HINT: ${again[*]@Q}"
    exit 0
}

# Sets again: the command that continues this run in a new job with the same request.
new_job() {
    local option value script
    again=(sbatch --dependency="afterany:$job" --nodes=${#nodes[@]} --ntasks-per-node="$tasks" "${node_gpus[@]}")
    [ "$SHARDRUN_LAUNCHER" = torchrun ] || again+=("--export=ALL,LAUNCHER=$SHARDRUN_LAUNCHER")
    for option in partition=Partition account=Account qos=QOS time=TimeLimit cpus-per-task=CPUs/Task mem=MinMemoryNode \
        mem-per-cpu=MinMemoryCPU constraint=Features reservation=Reservation; do
        value=$(grep -m 1 -oP " ${option#*=}=\K\S+" <<<"$record") || continue
        [[ $value =~ ^(0|\(null\))$ ]] || again+=("--${option%%=*}=$value")
    done
    script=$(grep -m 1 -oP ' Command=\K\S+' <<<"$record") || script=
    [ -e "$script" ] || script=$here/fsdp.sbatch
    again+=("$script" --run.dir "$run" "${flags[@]}")
}

job_run() {
    local try=0
    new_job
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
