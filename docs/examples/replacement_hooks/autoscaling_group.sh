#!/usr/bin/env bash
# For `restart-launch coordinate --replacement-hook`: an instance of the same EC2 auto scaling group in the place of HOST.
#
# The instance of HOST is terminated without lowering the group's capacity, so that the group starts another. Its launch
# template must start the agent, with a free --node-rank: restart-launch --coordinator ADDRESS:PORT --node-rank N ...
# Needs the AWS CLI, and a role that may ec2:DescribeInstances and autoscaling:TerminateInstanceInAutoScalingGroup.
# Called as: autoscaling_group.sh HOST NUMBER WHY
set -euo pipefail
host=$1 why=$3

if [[ ${host%%.*} == "$(hostname -s)" ]]; then
    printf '%s: %s is the host of the coordinator, which would end with it\n' "$0" "$host" >&2
    exit 1
fi

instance=$(aws ec2 describe-instances --output text --query 'Reservations[].Instances[].InstanceId' \
    --filters "Name=private-dns-name,Values=$host,$host.*" Name=instance-state-name,Values=pending,running,stopping,stopped)
if [[ ! $instance =~ ^i-[0-9a-f]+$ ]]; then
    printf '%s: %s: one instance should have this private DNS name; found: %s\n' "$0" "$host" "${instance:-none}" >&2
    exit 1
fi
printf '%s: terminates %s (%s): %s\n' "$0" "$instance" "$host" "$why" >&2
aws autoscaling terminate-instance-in-auto-scaling-group --instance-id "$instance" --no-should-decrement-desired-capacity
