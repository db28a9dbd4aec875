#!/bin/sh
# The variables of compose.yaml, compose.two.yaml and Containerfile: digests of the images of others, as the registry has them now.
#
#   sh digests.sh > .env      # once, and with each new version; compose reads .env, and refuses to start without it
#
# CONTAINER_ENGINE=podman for another engine.
set -eu
cd "$(dirname "$0")"

digest() {
    "${CONTAINER_ENGINE:-docker}" pull --quiet "$2" >&2
    found=$("${CONTAINER_ENGINE:-docker}" image inspect --format '{{index .RepoDigests 0}}' "$2")
    printf '%s=%s\n' "$1" "${found##*@}"
}

digest BASE_DIGEST "$(sed -n 's/^FROM \(.*\)@.* AS builder$/\1/p' Containerfile)"
digest PROMETHEUS_DIGEST "$(sed -n 's/.* "\(prom.*\)@.*/\1/p' compose.yaml)"
digest GRAFANA_DIGEST "$(sed -n 's/.* "\(grafana.*\)@.*/\1/p' compose.yaml)"
digest NGINX_DIGEST "$(sed -n 's/.* "\(nginx.*\)@.*/\1/p' compose.two.yaml)"
digest VALKEY_DIGEST "$(sed -n 's/.* "\(valkey.*\)@.*/\1/p' compose.two.yaml)"
