#!/usr/bin/env bash
# Sets the size of an autoscaling group to gorgo_replicas_wanted, registers its instances at the router, and removes
# those that leave. Needs curl, jq and the AWS CLI, and in its environment GROUP, REGION, MODEL, PORT and
# GORGO_ADMIN_TOKEN. Without a number, or without an answer, it changes nothing. `--once` does so once.
set -euo pipefail

ADMIN=${ADMIN:-http://127.0.0.1:9090}
INTERVAL_S=${INTERVAL_S:-15}

admin() { # METHOD PATH [JSON]
  curl --silent --show-error --fail --max-time 10 --request "$1" "$ADMIN$2" \
    --header "Authorization: Bearer $GORGO_ADMIN_TOKEN" ${3:+--header "content-type: application/json" --data "$3"}
}

wanted() { # the number, or nothing
  admin GET /admin/status | jq --raw-output --arg region "$REGION" --arg model "$MODEL" \
    '.scaling[] | select(.region == $region and (.model // "none") == $model) | .wanted'
}

members() { # of the group: state, id, address
  aws autoscaling describe-auto-scaling-groups --auto-scaling-group-names "$GROUP" \
    --query 'AutoScalingGroups[0].Instances[].[LifecycleState,InstanceId]' --output text |
    while read -r state id; do
      [ -n "$id" ] || continue
      address=$(aws ec2 describe-instances --instance-ids "$id" \
        --query 'Reservations[0].Instances[0].PrivateIpAddress' --output text)
      echo "$state $id $address"
    done
}

follow() {
  local number known state id address
  number=$(wanted)
  if [ -n "$number" ]; then
    aws autoscaling set-desired-capacity --auto-scaling-group-name "$GROUP" --desired-capacity "$number"
  fi
  known=$(admin GET /admin/fleet | jq --raw-output '.replicas[] | select(.registered) | .name')
  members | while read -r state id address; do
    case $state in
    InService)
      # Registered once its engine answers: loading a model takes longer than an instance's start.
      if ! grep --quiet --line-regexp "$id" <<<"$known" &&
        curl --silent --fail --max-time 5 --output /dev/null "http://$address:$PORT/v1/models"; then
        admin POST /admin/replicas "{\"name\": \"$id\", \"region\": \"$REGION\", \"url\": \"http://$address:$PORT\"}" >/dev/null
      fi
      ;;
    Terminating:Wait)
      if grep --quiet --line-regexp "$id" <<<"$known"; then
        admin DELETE "/admin/replicas/$id" >/dev/null # drained, then removed
      elif [ "$(curl --silent --max-time 5 "http://$address:$PORT/metrics" | awk '/num_running_reqs|num_requests_running/ {n += $NF} END {print n + 0}')" = 0 ]; then
        aws autoscaling complete-lifecycle-action --auto-scaling-group-name "$GROUP" --lifecycle-hook-name drain \
          --instance-id "$id" --lifecycle-action-result CONTINUE
      fi
      ;;
    esac
  done
}

if [ "${1:-}" = --once ]; then
  follow
else
  while true; do
    follow || true
    sleep "$INTERVAL_S"
  done
fi
