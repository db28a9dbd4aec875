#!/bin/bash
# Takes the address of this machine's replicas once their engines answer: from a machine that it replaces, if there is one.
set -euo pipefail
address=$1
shift
for port in "$@"; do
  until curl --silent --fail --max-time 5 --output /dev/null "http://127.0.0.1:$port/health"; do sleep 5; done
done
metadata() {
  curl --silent --fail --max-time 5 --header "x-aws-ec2-metadata-token: $token" "http://169.254.169.254/latest/$1"
}
token=$(curl --silent --fail --max-time 5 --request PUT --header 'x-aws-ec2-metadata-token-ttl-seconds: 60' http://169.254.169.254/latest/api/token)
mac=$(metadata meta-data/mac)
interface=$(metadata "meta-data/network/interfaces/macs/$mac/interface-id")
region=$(metadata meta-data/placement/region)
aws ec2 assign-private-ip-addresses --region "$region" --network-interface-id "$interface" --private-ip-addresses "$address" --allow-reassignment
device=$(ip -oneline link | awk -v mac="$mac" -F ': ' '$0 ~ mac { print $2; exit }')
ip address replace "$address/32" dev "$device"
