#!/bin/bash
# Mounts the volume of the tuner's history; a new one gets a file system first.
set -euo pipefail
device=/dev/sdh
folder=/var/lib/gorgo-tuner
[[ -e $device ]]
mountpoint --quiet "$folder" && exit 0
install -d -m 0700 "$folder"
# 2: nothing is on it. Any other answer than a file system is a fault, and a volume with data is never formatted.
kind=$(blkid --match-tag TYPE --output value "$device") && status=0 || status=$?
if [[ $status -eq 2 ]]; then
  mkfs.xfs -q "$device"
elif [[ $kind != xfs ]]; then
  echo "expected an empty volume or xfs at $device, found $kind" >&2
  exit 1
fi
mount -o noatime,nodev,nosuid,noexec "$device" "$folder"
