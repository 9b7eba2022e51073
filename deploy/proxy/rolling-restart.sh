#!/usr/bin/env bash
# Restarts the replicas of the server one after the other without losing a request that comes through the proxy: each one
# stops, answers what it has accepted, starts again, and is healthy before the next one stops.
#
#   rolling-restart.sh              the same containers again: the same image, the same environment
#   rolling-restart.sh --recreate   new containers, with compose's present image and environment
#
# Uses the compose project of COMPOSE_FILE, COMPOSE_PROJECT_NAME and .env, as docker compose does.
# Exit code 1 if a replica was unhealthy at the start, cut off a request, or did not become healthy; 2 for other arguments.
set -euo pipefail
cd "$(dirname "$0")/../.."
service=server
# Seconds for a replica to become healthy: compose's start_period.
timeout=1800

say() { echo "rolling-restart: $*"; }
about() { docker inspect --format "{{$2}}" "$1"; }
is_healthy() { [[ $(about "$1" .State.Health.Status) == healthy ]]; }

start_again() {
  docker start "$1" >/dev/null
  local deadline=$((SECONDS + timeout))
  until is_healthy "$1"; do
    if ((SECONDS > deadline)); then return 1; fi
    sleep 1
  done
}

# Compose creates the missing one and leaves the others alone, although they have the old image.
make_another() {
  docker rm "$1" >/dev/null &&
    docker compose --progress quiet up --detach --wait --wait-timeout "$timeout" --no-deps --no-recreate \
      --scale "$service=${#replicas[@]}" "$service"
}

case "$*" in
  '') renew=start_again ;;
  --recreate) renew=make_another ;;
  *) sed -n '2,9s/^# \{0,1\}//p' "$0" >&2; exit 2 ;;
esac

# Without compose.proxy.yml (COMPOSE_FILE unset, for example) a new replica has no port for the proxy's checks.
if [[ $renew == make_another ]] && ! docker compose config "$service" | grep 'TRITON_READY_PORT: "\?[0-9]' >/dev/null; then
  say "compose's files give $service no TRITON_READY_PORT, so no proxy would find a new replica; is COMPOSE_FILE set?" >&2
  exit 1
fi
mapfile -t replicas < <(docker compose ps --all --quiet "$service")
if ((${#replicas[@]} < 2)); then
  say "$service has ${#replicas[@]} replica(s); it takes two, so that one can serve while the other starts" >&2
  exit 1
fi
for replica in "${replicas[@]}"; do
  if ! is_healthy "$replica"; then
    say "$(about "$replica" .Name) isn't healthy, so no other one can be spared" >&2
    exit 1
  fi
done

cut_off=0
for replica in "${replicas[@]}"; do
  name=$(about "$replica" .Name)
  # Waits for the container's stop_grace_period; its exit code is 0 if everything accepted was answered.
  docker stop "$replica" >/dev/null
  code=$(about "$replica" .State.ExitCode)
  say "$name has stopped with exit code $code"
  if [[ $code != 0 ]]; then cut_off=1; fi
  if ! "$renew" "$replica"; then
    say "no healthy replica in the place of $name after at most $timeout s; the others were left as they are" >&2
    exit 1
  fi
  say "a healthy replica is in the place of $name"
done
exit "$cut_off"
