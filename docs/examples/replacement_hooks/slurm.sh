#!/usr/bin/env bash
# For `restart-launch coordinate --replacement-hook` within a job of Slurm: a node from Slurm in the place of HOST.
#
# A job of one node, in the partition and account of this one, runs an agent, and ends with it. AGENT in the environment of
# the coordinator is its command without --coordinator and --node-rank: "restart-launch --nproc-per-node 8 pretrain_gpt.py ...".
# Called as: slurm.sh HOST NUMBER WHY
set -euo pipefail
host=$1 number=$2 why=$3
: "${AGENT:?set it to the command of an agent, without --coordinator and --node-rank}"

job=$(scontrol show job "$SLURM_JOB_ID" --oneliner)
same=()
for key in Partition Account; do
    [[ $job =~ (^|[[:space:]])$key=([^[:space:]]+) && ${BASH_REMATCH[2]} != "(null)" ]] &&
        same+=("--${key,,}=${BASH_REMATCH[2]}")
done
for name in "${!SLURM_@}"; do  # of this job: they would reach into the other
    [[ $name == SLURM_CONF ]] || unset "$name"
done
read -r launcher rest <<<"$AGENT"
printf '%s: asks for a node in the place of %s: %s\n' "$0" "$host" "$why" >&2
exec salloc --nodes=1 --exclude="$host" --job-name="in_place_of_$host" "${same[@]}" \
    srun --ntasks=1 bash -c "exec $launcher --coordinator $(hostname):$COORDINATOR_PORT --node-rank $number $rest"
